"""Arithmetic of grids and blocks for the host. Triton has the same functions, for kernels too, and each call of them takes 4 µs here."""

from __future__ import annotations


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least ``n``; 1 for less than 1."""
    return 1 << (n - 1).bit_length() if n > 1 else 1
