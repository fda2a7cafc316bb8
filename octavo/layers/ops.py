"""The one place where layers meet kernels: each operation is the dispatching function of ``kernels/``, or plain torch.

Layers call ``ops.<operation>`` and know nothing of devices.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F


def _rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    if residual is not None:
        x = x + residual
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return normed.to(x.dtype) * weight, x


def _silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def _gelu_and_mul(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate=approximate) * up


def _prepack_linear(weight: torch.Tensor) -> Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor] | None:
    return None


def _resolve(name: str, fallback: Callable[..., Any], module: str | None = None) -> Callable[..., Any]:
    module = f"octavo.kernels.{module or name}"
    # find_spec first: an ImportError inside a kernel must surface, not turn into the slow path
    return getattr(import_module(module), name) if find_spec(module) else fallback


# rms_norm(x [T, H], weight [H], eps, residual [T, H] | None) -> (normed, new residual): new residual = x + residual, or x itself
rms_norm = _resolve("rms_norm", _rms_norm)
# x [T, 2I], gate half first -> [T, I]
silu_and_mul = _resolve("silu_and_mul", _silu_and_mul)
gelu_and_mul = _resolve("gelu_and_mul", _gelu_and_mul)
# weight [out, in] -> a function (x [T, in], bias | None) -> [T, out] that holds its own packed copy, or None to keep the weight
prepack_linear = _resolve("prepack_linear", _prepack_linear, "packed_linear")
