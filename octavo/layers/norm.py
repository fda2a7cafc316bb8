"""Normalisation."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from octavo.layers import ops
from octavo.layers.slots import WeightSlot, empty_parameter, whole


class RMSNorm(nn.Module):
    """Root-mean-square norm with the residual addition fused in (Zhang and Sennrich, 2019).

    The statistics are taken in float32; the result is cast back to x's dtype before the weight is applied.
    """

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.weight = empty_parameter(size, dtype=dtype)

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """x, residual [T, size] -> (norm(x + residual) * weight, x + residual). Without a residual, x takes its place."""
        return ops.rms_norm(x, self.weight, self.eps, residual)

    def weight_slots(self, prefix: str) -> Iterator[tuple[str, WeightSlot]]:
        yield f"{prefix}.weight", whole(self.weight)
