"""The one place where layers meet kernels: each operation goes to the fastest kernel of the device that its input is on.

Layers call ``ops.<operation>`` and know nothing of devices. Triton is imported when the first CUDA tensor comes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from octavo.kernels import gelu_and_mul as _gelu
from octavo.kernels import packed_linear as _packed
from octavo.kernels import rms_norm as _norm
from octavo.kernels import silu_and_mul as _silu


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """x, residual [T, H] -> (norm(x + residual) * weight, x + residual); without a residual the second is x itself."""
    if x.is_cuda:
        from octavo.kernels.triton.norm import rms_norm as kernel

        return kernel(x, weight, eps, residual)
    return _norm.rms_norm(x, weight, eps, residual)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """x [T, 2I], gate half first -> silu(gate) * up, [T, I]."""
    if x.is_cuda:
        from octavo.kernels.triton.activation import silu_and_mul as kernel

        return kernel(x)
    return _silu.silu_and_mul(x)


def gelu_and_mul(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """x [T, 2I], gate half first -> gelu(gate) * up, [T, I]; ``approximate``: none or tanh."""
    if x.is_cuda:
        from octavo.kernels.triton.activation import gelu_and_mul as kernel

        return kernel(x, approximate)
    return _gelu.gelu_and_mul(x, approximate)


def embedding(token_ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """token_ids int64 [T], weight [vocab, H] -> [T, H]."""
    if weight.is_cuda:
        from octavo.kernels.triton.embedding import embedding as kernel

        return kernel(token_ids, weight)
    return F.embedding(token_ids, weight)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, gated: bool = False) -> torch.Tensor:
    """x [T, K], weight [N, K] -> x W^T + b [T, N], or silu(first half) * second half [T, N / 2] if ``gated``."""
    if x.is_cuda:
        from octavo.kernels.triton.linear import linear as kernel

        return kernel(x, weight, bias, gated=gated)
    y = F.linear(x, weight, bias)
    return silu_and_mul(y) if gated else y


def norm_linear(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    *,
    gated: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(``linear`` of RMSNorm(x + residual), x + residual): one kernel where that was measured to be faster."""
    if x.is_cuda:
        from octavo.kernels.triton.linear import norm_linear as kernel

        return kernel(x, norm_weight, eps, weight, bias, residual, gated=gated)
    normed, total = rms_norm(x, norm_weight, eps, residual)
    return linear(normed, weight, bias, gated=gated), total


def prepack_linear(weight: torch.Tensor) -> Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor] | None:
    """weight [out, in] -> a function (x [T, in], bias | None) -> [T, out] that holds its own packed copy; None: keep the weight."""
    return None if weight.is_cuda else _packed.prepack_linear(weight)
