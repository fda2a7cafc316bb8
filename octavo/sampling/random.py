"""A row's random stream: a function of (seed, position) alone, with no state to keep, copy or restore.

SplitMix64 (Steele, Lea, Flood: "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014; the finalizer is David
Stafford's variant 13) is counter-based: output number i of the generator with state s is ``mix64(s + i * GOLDEN)``.
The state is the mixed seed, so that seeds 1, 2, 3 … do not give shifted copies of one stream. Everything is 64-bit
integer arithmetic that wraps around, which torch's int64 does on every device.
"""

from __future__ import annotations

import torch

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_M1 = 0xBF58476D1CE4E5B9
_M2 = 0x94D049BB133111EB
DRAWS_PER_POSITION = 16  # a position owns this many numbers; sampling uses number 0


def _signed(value: int) -> int:
    """The int64 with the same 64 bits."""
    value &= _MASK
    return value - 2**64 if value >= 2**63 else value


def mix64_int(value: int) -> int:
    """The finalizer on a Python integer: 0 .. 2**64 - 1 to the same range, one to one."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * _M1) & _MASK
    value = ((value ^ (value >> 27)) * _M2) & _MASK
    return value ^ (value >> 31)


def row_key(seed: int) -> int:
    """The generator state of a seed (any integer; taken modulo 2**64), as a signed 64-bit integer."""
    return _signed(mix64_int(seed + _GOLDEN))


def _shift(value: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift; torch's is arithmetic."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def mix64(value: torch.Tensor) -> torch.Tensor:
    """The finalizer on int64 tensors, any shape and device."""
    value = (value ^ _shift(value, 30)) * _signed(_M1)
    value = (value ^ _shift(value, 27)) * _signed(_M2)
    return value ^ _shift(value, 31)


def uniforms(keys: torch.Tensor, positions: torch.Tensor, draw: int = 0) -> torch.Tensor:
    """One number in [0, 1) per entry: float64 [R], multiples of 2**-53.

    keys: int64 [R] from ``row_key``; positions: int64 [R], index in the sequence of the token to draw;
    draw: which of the position's ``DRAWS_PER_POSITION`` numbers (speculative verification needs several).
    """
    counter = positions * DRAWS_PER_POSITION + (draw + 1)
    bits = _shift(mix64(keys + counter * _signed(_GOLDEN)), 11)
    return bits.to(torch.float64) * 2.0**-53
