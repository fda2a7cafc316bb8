"""Programmatic dependent launch: a kernel may start while the one before it still runs.

A stream runs kernels one after another, and on small steps the gaps between them cost more than the kernels. With
programmatic dependent launch (CUDA, sm_90 on; the PTX instructions ``griddepcontrol``) the next kernel's programs are
placed on the chip as soon as every program of this one has called ``release`` (or ended), and do what does not depend on
it, such as loading weights, until they call ``wait``.

What a kernel of the chain must keep:

- ``wait`` comes before the first access to anything that an earlier kernel wrote, and before the first store: an earlier
  kernel may still be reading what the store would overwrite.
- Every program waits, or ends without having written anything. ``wait`` returns when the kernel before has ended, and that
  one ended after *its* wait; so one kernel that skips the wait would break the order for all that follow it.
- Only what never changes while the stream runs (weights) is touched before ``wait``.

Kernels without these calls, torch's for example, take part unharmed: they start when everything before them has ended.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

_enabled = True


@triton.jit
def wait(USE_PDL: tl.constexpr):
    """Wait until the kernel before has ended and its writes can be seen."""
    if USE_PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def release(USE_PDL: tl.constexpr):
    """Let the next kernel's programs start when all programs of this one have come here. Says nothing about memory."""
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def prefetch_lines(pointers, USE_PDL: tl.constexpr):
    """Ask for the 128-byte lines at ``pointers`` (int64 addresses, any shape) to be brought into L2; nothing waits for them."""
    if USE_PDL:
        tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1)


def enable_pdl(enabled: bool) -> None:
    """Switch dependent launch off or on for launches to come: for measuring what it brings."""
    global _enabled
    _enabled = enabled


@cache
def _supported(device_index: int) -> bool:
    if torch.version.cuda is None or torch.cuda.get_device_capability(device_index) < (9, 0):
        return False
    try:
        from triton.backends.nvidia.compiler import CUDAOptions
    except ImportError:
        return False
    calls = getattr(tl.extra, "cuda", None)
    return "launch_pdl" in CUDAOptions.__dataclass_fields__ and hasattr(calls, "gdc_wait") and hasattr(calls, "gdc_launch_dependents")


def pdl_options(tensor: torch.Tensor) -> dict[str, Any]:
    """Keyword arguments for the launch of a kernel that has a ``USE_PDL`` constexpr, on the tensor's device."""
    if _enabled and tensor.is_cuda and _supported(tensor.get_device()):
        return {"USE_PDL": True, "launch_pdl": True}
    return {"USE_PDL": False}
