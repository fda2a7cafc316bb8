"""RMSNorm with the residual addition fused in (Zhang and Sennrich 2019, arXiv:1910.07467)."""

from __future__ import annotations

import torch

from octavo.kernels.cpu.library import TYPE_CODES, library


def rms_norm_reference(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``rms_norm``."""
    if residual is not None:
        x = x + residual
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed.to(x.dtype) * weight).to(x.dtype), x


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """x, residual [..., width], weight [width] -> (norm(x + residual) * weight, x + residual), both new and in x's dtype.

    Without a residual the second result is x itself. Statistics are taken in float32; sum, norm and product are rounded to
    x's dtype one after another, as in transformers' LlamaRMSNorm. A row's result does not depend on the other rows.
    """
    kind = TYPE_CODES.get(x.dtype)
    if x.is_cpu and kind is not None and weight.dtype == x.dtype and (kernels := library()) is not None:
        width = x.shape[-1]
        if weight.shape != (width,) or (residual is not None and residual.shape != x.shape):
            raise ValueError(f"rms_norm: x {tuple(x.shape)}, weight {tuple(weight.shape)} and residual do not fit together.")
        if residual is not None and residual.dtype != x.dtype:
            return rms_norm_reference(x, weight, eps, residual)
        if not x.is_contiguous():
            x = x.contiguous()
        out = torch.empty_like(x)
        total, residual_at, total_at = x, None, None
        if residual is not None:
            residual = residual.contiguous()
            total = torch.empty_like(x)
            residual_at, total_at = residual.data_ptr(), total.data_ptr()
        rows = x.numel() // width if width else 0
        kernels.rms_norm(  # type: ignore[attr-defined]
            x.data_ptr(), weight.contiguous().data_ptr(), residual_at, out.data_ptr(), total_at,
            rows, width, width, eps, kind, torch.get_num_threads(),
        )  # fmt: skip
        return out, total
    return rms_norm_reference(x, weight, eps, residual)
