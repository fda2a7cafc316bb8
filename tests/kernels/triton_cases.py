"""Where Triton tests run: on a CUDA GPU, or in Triton's interpreter, which has to be on before triton is imported.

Tests that take ``device`` are skipped in a plain process; ``test_triton_interpreter.py`` runs them in one of their own.
"""

from __future__ import annotations

import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HAS_GPU = torch.cuda.is_available() and not INTERPRETED
DEVICE = "cuda" if HAS_GPU else "cpu"

needs_triton = pytest.mark.skipif(not (INTERPRETED or HAS_GPU), reason="needs a GPU, or TRITON_INTERPRET=1 (test_triton_interpreter.py)")
needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA GPU")


def gpu(function):
    """A test at real sizes, for a GPU only."""
    return pytest.mark.gpu(needs_gpu(function))


def rand(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0, seed: int | None = None) -> torch.Tensor:
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).to(dtype).to(DEVICE)


def close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """||actual - expected|| / ||expected|| <= tolerance; NaN never passes."""
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    a, e = actual.double(), expected.double()
    error = ((a - e).norm() / e.norm().clamp_min(1e-30)).item()
    assert error <= tolerance, f"relative error {error:.2e} > {tolerance:.0e}"
