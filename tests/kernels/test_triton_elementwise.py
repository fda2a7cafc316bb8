"""RMSNorm and gated activations in Triton, against torch."""

from __future__ import annotations

import pytest
import torch

from octavo.kernels.gelu_and_mul import gelu_and_mul_reference
from octavo.kernels.silu_and_mul import silu_and_mul_reference
from tests.kernels.triton_cases import DEVICE, INTERPRETED, close, gpu, needs_triton, rand

pytestmark = needs_triton
TYPES = [torch.float32, torch.bfloat16, torch.float16]
# the interpreter cuts bfloat16 off where a GPU rounds to nearest
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 1.5e-2 if INTERPRETED else 4e-3, torch.float16: 5e-4}


def check_norm(rows: int, width: int, dtype: torch.dtype, residual: bool) -> None:
    from octavo.kernels.triton.norm import rms_norm, rms_norm_reference

    x, weight = rand(rows, width, dtype=dtype), rand(width, dtype=dtype)
    other = rand(rows, width, dtype=dtype) if residual else None
    out, total = rms_norm(x, weight, 1e-5, other)
    expected, expected_total = rms_norm_reference(x, weight, 1e-5, other)
    close(out, expected, TOLERANCE[dtype])
    if INTERPRETED and dtype == torch.bfloat16:
        close(total, expected_total, 1e-2)
    else:
        assert torch.equal(total, expected_total)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize(("rows", "width"), [(1, 1024), (3, 576), (2, 1), (5, 1000)])
def test_norm(rows: int, width: int, dtype: torch.dtype, residual: bool) -> None:
    check_norm(rows, width, dtype, residual)


def test_norm_takes_views_and_nothing() -> None:
    from octavo.kernels.triton.norm import rms_norm, rms_norm_reference

    wide, weight = rand(4, 200), rand(64)
    x = wide[:, 100:164]
    out, total = rms_norm(x, weight, 1e-6, wide[:, :64])
    expected, expected_total = rms_norm_reference(x, weight, 1e-6, wide[:, :64])
    close(out, expected, 1e-6)
    assert torch.equal(total, expected_total)
    transposed = rand(64, 3).t()
    close(rms_norm(transposed, weight, 1e-6)[0], rms_norm_reference(transposed, weight, 1e-6)[0], 1e-6)
    assert rms_norm(rand(2, 3, 64), weight, 1e-6)[0].shape == (2, 3, 64)
    assert rms_norm(torch.empty(0, 64, device=DEVICE), weight, 1e-6)[0].shape == (0, 64)
    with pytest.raises(ValueError, match="fit"):
        rms_norm(x, rand(63), 1e-6)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 3072), (3, 7), (2, 1500)])
def test_gated_activations(rows: int, width: int, dtype: torch.dtype) -> None:
    from octavo.kernels.triton import activation as act

    x = rand(rows, 2 * width, dtype=dtype, scale=4)
    close(act.silu_and_mul(x), silu_and_mul_reference(x), TOLERANCE[dtype])
    for approximate in ("none", "tanh"):
        close(act.gelu_and_mul(x, approximate), gelu_and_mul_reference(x, approximate), TOLERANCE[dtype])


def test_gated_activations_at_the_ends_and_edges() -> None:
    from octavo.kernels.triton import activation as act

    x = torch.tensor([[-200.0, 200.0, 0.0, 1.0, 2.0, 3.0]], device=DEVICE)
    torch.testing.assert_close(act.silu_and_mul(x), silu_and_mul_reference(x))
    torch.testing.assert_close(act.gelu_and_mul(x, "tanh"), gelu_and_mul_reference(x, "tanh"))
    assert act.silu_and_mul(torch.empty(0, 6, device=DEVICE)).shape == (0, 3)
    assert act.silu_and_mul(rand(2, 3, 8)).shape == (2, 3, 4)
    with pytest.raises(ValueError, match="even"):
        act.silu_and_mul(rand(2, 7))
    with pytest.raises(ValueError, match="approximate"):
        act.gelu_and_mul(rand(2, 8), "fast")


@gpu
@pytest.mark.parametrize(("rows", "width"), [(1, 1024), (1, 4096), (8, 16384), (256, 4096), (16384, 1024), (8192, 4096)])
def test_elementwise_at_real_sizes(rows: int, width: int) -> None:
    from octavo.kernels.triton import activation as act

    for residual in (False, True):
        check_norm(rows, width, torch.bfloat16, residual)
    x = rand(rows, 2 * width, dtype=torch.bfloat16)
    close(act.silu_and_mul(x), silu_and_mul_reference(x), 4e-3)


@gpu
def test_a_row_does_not_depend_on_the_batch() -> None:
    from octavo.kernels.triton.norm import rms_norm

    x, weight = rand(2000, 4096, dtype=torch.bfloat16), rand(4096, dtype=torch.bfloat16)
    whole = rms_norm(x, weight, 1e-6)[0]
    for rows in (1, 7, 300):
        assert torch.equal(rms_norm(x[:rows], weight, 1e-6)[0], whole[:rows])
