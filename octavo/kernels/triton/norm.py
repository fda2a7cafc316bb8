"""RMSNorm with the residual addition fused in (Zhang and Sennrich 2019, arXiv:1910.07467)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from octavo.kernels.rms_norm import rms_norm_reference
from octavo.kernels.sizes import next_power_of_2
from octavo.kernels.triton.launch import launch, pdl_options, release, wait

MAX_WIDTH = 65536  # one program holds a row


@triton.jit
def _rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, total_ptr, eps, x_stride, residual_stride,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, HAS_RESIDUAL: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    release(USE_PDL)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0)  # constant, so before the wait
    wait(USE_PDL)
    x = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0)
    kind = x.dtype
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + row * residual_stride + columns, mask=inside, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(kind)
        tl.store(total_ptr + row * WIDTH + columns, x, mask=inside)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / WIDTH + eps)
    normed = (wide * scale).to(kind).to(tl.float32)
    tl.store(out_ptr + row * WIDTH + columns, (normed * weight.to(tl.float32)).to(kind), mask=inside)


def _warps(width: int) -> int:
    """8 elements a thread: one access of 16 bytes. Not by the number of rows, so that a row's sum keeps its order."""
    return max(1, min(16, next_power_of_2(width) // 256))


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """x, residual [..., width], weight [width] -> (norm(x + residual) * weight, x + residual), both new, in x's dtype.

    Without a residual the second result is x itself. Statistics in float32; sum, norm and product are rounded to x's dtype
    one after another. One program a row, the same for any number of rows: a row's result does not depend on the others.
    ValueError for shapes that don't fit.
    """
    width = x.shape[-1]
    if weight.shape != (width,) or (residual is not None and residual.shape != x.shape):
        raise ValueError(f"rms_norm: x {tuple(x.shape)}, weight {tuple(weight.shape)} and residual do not fit together.")
    if width > MAX_WIDTH or (residual is not None and residual.dtype != x.dtype):
        return rms_norm_reference(x, weight, eps, residual)
    flat = _rows(x, width)
    rows = flat.shape[0]
    out = x.new_empty(x.shape)
    total = x if residual is None else x.new_empty(x.shape)
    if rows == 0:
        return out, total
    other = flat if residual is None else _rows(residual, width)
    launch(
        _rms_norm_kernel, (rows,),
        (flat, other, weight if weight.is_contiguous() else weight.contiguous(), out, total, eps, flat.stride(0), other.stride(0)),
        WIDTH=width, BLOCK=next_power_of_2(width), HAS_RESIDUAL=residual is not None,
        num_warps=_warps(width), **pdl_options(x),
    )  # fmt: skip
    return out, total


def _rows(x: torch.Tensor, width: int) -> torch.Tensor:
    """x as [rows, width] whose rows are contiguous; a copy only where it must be."""
    flat = x if x.dim() == 2 else x.reshape(-1, width)
    return flat if flat.stride(1) == 1 or width == 1 else flat.contiguous()
