"""Gated activations: SwiGLU and GeGLU (Shazeer 2020, arXiv:2002.05202)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from octavo.kernels.silu_and_mul import GELU, GELU_TANH, SILU
from octavo.kernels.sizes import cdiv, next_power_of_2
from octavo.kernels.triton.launch import launch, pdl_options, release, wait


@triton.jit
def silu(x):
    """x * sigmoid(x) in float32. exp of a large -x is inf, and the quotient then 0: right at both ends."""
    return x / (1.0 + tl.exp(-x))


@triton.jit
def activate(x, KIND: tl.constexpr):
    """KIND: 0 SiLU, 1 GELU's tanh approximation, 2 GELU. x in float32."""
    if KIND == 0:
        return silu(x)
    elif KIND == 1:
        # 0.5 x (1 + tanh(z)) = x sigmoid(2z), z = sqrt(2/pi) (x + 0.044715 x^3)
        twice = 1.5957691216057308 * (x + 0.044715 * x * x * x)
        return x / (1.0 + tl.exp(-twice))
    else:
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def _act_and_mul_kernel(x_ptr, out_ptr, x_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, USE_PDL: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    release(USE_PDL)
    wait(USE_PDL)
    gate = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0)
    up = tl.load(x_ptr + row * x_stride + WIDTH + columns, mask=inside, other=0.0)
    kind = gate.dtype
    active = activate(gate.to(tl.float32), KIND).to(kind).to(tl.float32)
    tl.store(out_ptr + row * WIDTH + columns, (active * up.to(tl.float32)).to(kind), mask=inside)


def _act_and_mul(x: torch.Tensor, kind: int) -> torch.Tensor:
    width = x.shape[-1] // 2
    if x.shape[-1] % 2:
        raise ValueError(f"The last dimension holds gate and up, so it must be even; got {x.shape[-1]}.")
    out = torch.empty(*x.shape[:-1], width, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    flat = x if x.dim() == 2 else x.reshape(-1, 2 * width)
    flat = flat if flat.stride(1) == 1 else flat.contiguous()
    rows, result = flat.shape[0], out if out.dim() == 2 else out.view(-1, width)
    block = min(next_power_of_2(width), 1024)
    columns = cdiv(width, block)
    for start in range(0, rows, 65535):  # the grid's second dimension ends there
        part = min(65535, rows - start)
        launch(
            _act_and_mul_kernel, (columns, part),
            (flat[start:], result[start:], flat.stride(0)) if start else (flat, result, flat.stride(0)),
            WIDTH=width, BLOCK=block, KIND=kind, num_warps=max(1, min(4, block // 256)), **pdl_options(x),
        )  # fmt: skip
    return out


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """x [..., 2 * n], gate half first -> silu(gate) * up [..., n], rounded to x's dtype after each of the two steps."""
    return _act_and_mul(x, SILU)


def gelu_and_mul(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """x [..., 2 * n], gate half first -> gelu(gate) * up [..., n]; approximate "none" or "tanh", ValueError otherwise."""
    if approximate not in ("none", "tanh"):
        raise ValueError(f"gelu_and_mul: approximate must be 'none' or 'tanh', got {approximate!r}.")
    return _act_and_mul(x, GELU_TANH if approximate == "tanh" else GELU)
