"""SiLU-gated product (SwiGLU, Shazeer 2020, arXiv:2002.05202)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from octavo.kernels.cpu.library import TYPE_CODES, library

SILU, GELU_TANH, GELU = 0, 1, 2  # as activation.c numbers them


def silu_and_mul_reference(x: torch.Tensor) -> torch.Tensor:
    """See ``silu_and_mul``."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """x [..., 2 * n], gate half first -> silu(gate) * up [..., n], rounded to x's dtype after each of the two steps."""
    out = act_and_mul_cpu(x, SILU)
    return silu_and_mul_reference(x) if out is None else out


def act_and_mul_cpu(x: torch.Tensor, kind: int) -> torch.Tensor | None:
    """The C kernel's result, or None where it can't be used. ValueError for an odd width."""
    code = TYPE_CODES.get(x.dtype)
    if not x.is_cpu or code is None or (kernels := library()) is None:
        return None
    *outer, width = x.shape
    if width % 2:
        raise ValueError(f"The last dimension holds gate and up, so it must be even; got {width}.")
    x = x.contiguous()
    out = x.new_empty(*outer, width // 2)
    kernels.act_and_mul(x.data_ptr(), out.data_ptr(), x.numel() // width if width else 0, width // 2, kind, code, torch.get_num_threads())  # type: ignore[attr-defined]
    return out
