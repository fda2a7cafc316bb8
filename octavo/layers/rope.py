"""Tables of rotary position embedding (Su et al., RoFormer, 2021) and of its context-stretching variants.

A model makes one table and all its layers share it. The angles are computed as the reference implementations do, in
float32 (position * inverse frequency, then cos and sin), so that tables agree with theirs bit for bit.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from octavo.errors import ModelError

if TYPE_CHECKING:
    from octavo.models.config import RopeConfig

_CHUNK = 8192  # positions whose angles are held at a time


def make_rope_table(rope: RopeConfig, max_position: int) -> torch.Tensor:
    """float32 [max_position, rotary_dim] on the CPU: cos in the first half of the columns, sin in the second.

    The variant's attention scaling is multiplied in. Two variants depend on the length served: ``dynamic`` stretches its base
    for sequences of ``max_position`` tokens, and ``longrope`` takes its long factors if ``max_position`` is past the original
    context. Both are chosen once, for the table's length, and not per sequence: a cached key must keep its rotation.
    Raises ModelError for an unknown kind or a missing parameter.
    """
    inverse, scaling = inverse_frequencies(rope, max_position)
    half = inverse.numel()
    table = torch.empty(max_position, 2 * half, dtype=torch.float32, device="cpu")
    for start in range(0, max_position, _CHUNK):
        rows = table[start : start + _CHUNK]
        angles = torch.outer(torch.arange(start, start + rows.shape[0], dtype=torch.float32, device="cpu"), inverse)
        torch.cos(angles, out=rows[:, :half])
        torch.sin(angles, out=rows[:, half:])
    return table if scaling == 1.0 else table.mul_(scaling)


def inverse_frequencies(rope: RopeConfig, max_position: int) -> tuple[torch.Tensor, float]:
    """(float32 [rotary_dim / 2], attention scaling of cos and sin) for tables of ``max_position`` positions."""
    if rope.rotary_dim <= 0 or rope.rotary_dim % 2:
        raise ModelError(f"RoPE needs an even, positive rotary dimension; the model's configuration gives {rope.rotary_dim}.")
    if rope.kind not in _KINDS:
        raise ModelError(f"The RoPE type {rope.kind!r} is not supported; supported are {', '.join(_KINDS)}.")
    return _KINDS[rope.kind](rope, max_position)


def _need(rope: RopeConfig, name: str) -> Any:
    value = rope.parameters.get(name)
    if value is None:
        raise ModelError(f"RoPE of type {rope.kind!r} needs {name!r} in the model's rope parameters; it is missing.")
    return value


def _powers(base: float, dim: int) -> torch.Tensor:
    """base^(2i / dim): the wavelengths over 2 pi."""
    return base ** (torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim)


def _default(rope: RopeConfig, max_position: int) -> tuple[torch.Tensor, float]:
    return 1.0 / _powers(rope.theta, rope.rotary_dim), 1.0


def _linear(rope: RopeConfig, max_position: int) -> tuple[torch.Tensor, float]:
    """Position interpolation (Chen et al., 2023)."""
    return _default(rope, max_position)[0] / _need(rope, "factor"), 1.0


def _dynamic(rope: RopeConfig, max_position: int) -> tuple[torch.Tensor, float]:
    """NTK-aware scaling of the base, growing with the length past the original context."""
    dim, factor, original = rope.rotary_dim, _need(rope, "factor"), _need(rope, "original_max_position_embeddings")
    stretch = factor * max(max_position, original) / original - (factor - 1)
    return 1.0 / _powers(rope.theta * stretch ** (dim / (dim - 2)), dim), 1.0


def _llama3(rope: RopeConfig, max_position: int) -> tuple[torch.Tensor, float]:
    """Llama 3.1: long wavelengths are interpolated, short ones kept, those between blended."""
    factor, original = _need(rope, "factor"), _need(rope, "original_max_position_embeddings")
    low, high = _need(rope, "low_freq_factor"), _need(rope, "high_freq_factor")
    inverse = _default(rope, max_position)[0]
    wavelength = 2 * math.pi / inverse
    smooth = (original / wavelength - low) / (high - low)
    blended = (1 - smooth) * inverse / factor + smooth * inverse
    between = (wavelength >= original / high) & (wavelength <= original / low)
    scaled = torch.where(wavelength > original / low, inverse / factor, inverse)
    return torch.where(between, blended, scaled), 1.0


def _yarn(rope: RopeConfig, max_position: int) -> tuple[torch.Tensor, float]:
    """YaRN (Peng et al., 2023): interpolate by parts, with a ramp over the dimensions, and a softmax temperature."""
    p, dim, theta = rope.parameters, rope.rotary_dim, rope.theta
    factor, original = _need(rope, "factor"), _need(rope, "original_max_position_embeddings")

    def dimension(rotations: float) -> float:  # which dimension turns that often within the original context
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(p.get("beta_fast") or 32), dimension(p.get("beta_slow") or 1)
    if p.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32, device="cpu") - low) / (high - low)).clamp(0, 1)
    keep = 1 - ramp
    powers = _powers(theta, dim)
    return 1.0 / (factor * powers) * (1 - keep) + 1.0 / powers * keep, _yarn_scaling(p, factor)


def _yarn_scaling(parameters: dict[str, Any], factor: float) -> float:
    def magnitude(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if (given := parameters.get("attention_factor")) is not None:
        return float(given)
    mscale, mscale_all_dim = parameters.get("mscale"), parameters.get("mscale_all_dim")
    return magnitude(mscale) / magnitude(mscale_all_dim) if mscale and mscale_all_dim else magnitude(1.0)


def _longrope(rope: RopeConfig, max_position: int) -> tuple[torch.Tensor, float]:
    """LongRoPE (Ding et al., 2024): a searched divisor per dimension, one set within the original context, one past it."""
    original = _need(rope, "original_max_position_embeddings")
    name = "long_factor" if max_position > original else "short_factor"
    divisors = torch.tensor(_need(rope, name), dtype=torch.float32, device="cpu")
    if divisors.numel() != rope.rotary_dim // 2:
        raise ModelError(
            f"RoPE's {name!r} has {divisors.numel()} entries; a rotary dimension of {rope.rotary_dim} needs {rope.rotary_dim // 2}."
        )
    scaling = rope.parameters.get("attention_factor")
    if scaling is None:
        factor = _need(rope, "factor")
        scaling = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return 1.0 / (divisors * _powers(rope.theta, rope.rotary_dim)), float(scaling)


_KINDS = {"default": _default, "linear": _linear, "dynamic": _dynamic, "llama3": _llama3, "yarn": _yarn, "longrope": _longrope}
