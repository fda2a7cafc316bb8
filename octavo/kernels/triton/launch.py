"""Launching kernels: cheaply, and before the one before has ended.

*Cheaply*: ``launch`` remembers what Triton compiled for a kind of arguments, and calls that. Triton's own way costs the host 30 to
60 µs a launch, several times what most kernels of a step take.

*Programmatic dependent launch*: a kernel may start while the one before it still runs.

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

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

_enabled = True
_remembers = True  # off where launches are noted instead of made
_skips = False
_known: dict[tuple[Any, ...], tuple[Callable[..., Any], Any, Any, tuple[Any, ...]]] = {}


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


def remember_launches(enabled: bool) -> None:
    """Off: every launch goes through Triton's front door, where it can be watched."""
    global _remembers
    _remembers = enabled


@contextmanager
def skipped_launches() -> Iterator[None]:
    """Meanwhile nothing is launched, and so nothing compiled: for a trial of what a step allocates. Outputs hold anything."""
    global _skips
    _skips = True
    try:
        yield
    finally:
        _skips = False


def skipping() -> bool:
    return _skips


def launch(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], **keywords: Any) -> None:
    """``kernel[grid](*args, **keywords)``, on the current stream of the first argument's device.

    args: tensors, integers, floats or None, for the kernel's first parameters, in order; the first is a tensor.
    keywords: all of its constexpr parameters, and Triton's options (num_warps, num_stages, launch_pdl); in the same order in
        every launch of a kernel.
    The key holds what Triton compiles for: types, whether addresses and integers are divisible by 16, integers that are 1.
    """
    if _skips:
        return
    first = args[0]
    if not (_remembers and first.is_cuda):
        kernel[grid](*args, **keywords)
        return
    device = first.get_device()
    kinds: list[Any] = [id(kernel), device]
    values: list[Any] = []
    for arg in args:
        if arg.__class__ is int:
            values.append(arg)
            kinds.append((1 if arg == 1 else 2 if arg & 15 else 3) if -0x80000000 <= arg <= 0x7FFFFFFF else (4 if arg & 15 else 5))
        elif isinstance(arg, torch.Tensor):
            address = arg.data_ptr()
            values.append(address)
            kinds.append(arg.dtype if address & 15 == 0 else (arg.dtype,))
        else:
            values.append(arg)
            kinds.append(arg.__class__)
    key = (*kinds, *keywords.values())
    found = _known.get(key)
    if found is None:
        compiled = kernel[grid](*args, **keywords)
        constants = tuple(keywords[parameter.name] for parameter in kernel.params[len(args) :])
        _known[key] = (compiled.run, compiled.function, compiled.packed_metadata, constants)
        return
    run, function, metadata, constants = found
    x, y, z = (*grid, 1, 1)[:3]
    run(x, y, z, torch._C._cuda_getCurrentRawStream(device), function, metadata, None, None, None, *values, *constants)
