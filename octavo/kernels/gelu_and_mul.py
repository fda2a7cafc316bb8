"""GELU-gated product (GEGLU, Shazeer 2020, arXiv:2002.05202)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from octavo.kernels.silu_and_mul import GELU, GELU_TANH, act_and_mul_cpu


def gelu_and_mul_reference(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """See ``gelu_and_mul``."""
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate=approximate) * up


def gelu_and_mul(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """x [..., 2 * n], gate half first -> gelu(gate) * up [..., n]; ``approximate`` is none or tanh, ValueError otherwise."""
    if approximate not in ("none", "tanh"):
        raise ValueError(f"approximate must be none or tanh; got {approximate!r}.")
    out = act_and_mul_cpu(x, GELU_TANH if approximate == "tanh" else GELU)
    return gelu_and_mul_reference(x, approximate) if out is None else out
