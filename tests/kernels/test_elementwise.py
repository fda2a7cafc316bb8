from __future__ import annotations

import pytest
import torch

from octavo.kernels.cpu.library import library
from octavo.kernels.gelu_and_mul import gelu_and_mul, gelu_and_mul_reference
from octavo.kernels.kv_cache import make_kv_cache
from octavo.kernels.rms_norm import rms_norm, rms_norm_reference
from octavo.kernels.rope_and_write_kv import rope_and_write_kv, rope_and_write_kv_reference
from octavo.kernels.silu_and_mul import silu_and_mul, silu_and_mul_reference
from tests.kernels.attention_cases import make_layer, make_metadata, rope_table

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
STEP = {torch.float32: 4e-6, torch.bfloat16: 2**-7, torch.float16: 2**-9}  # about two roundings, relative

needs_kernels = pytest.mark.skipif(library() is None, reason="no C compiler here")


def close(found: torch.Tensor, expected: torch.Tensor, slack: float = 1) -> None:
    assert found.dtype == expected.dtype and found.shape == expected.shape
    step = STEP[found.dtype]
    torch.testing.assert_close(found.float(), expected.float(), atol=slack * step / 2, rtol=step, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 7, 64, 576, 1003])
@pytest.mark.parametrize("rows", [0, 1, 5, 200])
def test_rms_norm(dtype: torch.dtype, width: int, rows: int) -> None:
    g = torch.Generator().manual_seed(width)
    x, residual = (torch.randn(rows, width, generator=g).to(dtype) * 3 for _ in range(2))
    weight = torch.randn(width, generator=g).to(dtype)
    before = x.clone(), residual.clone()
    out, same = rms_norm(x, weight, 1e-5)
    assert same is x
    close(out, rms_norm_reference(x, weight, 1e-5)[0])
    out, total = rms_norm(x, weight, 1e-5, residual)
    expected, expected_total = rms_norm_reference(x, weight, 1e-5, residual)
    assert torch.equal(total, expected_total)
    close(out, expected)
    assert torch.equal(x, before[0]) and torch.equal(residual, before[1])


def test_rms_norm_rows_do_not_depend_on_each_other() -> None:
    x, weight = torch.randn(300, 576, generator=torch.Generator().manual_seed(0)), torch.ones(576)
    together = rms_norm(x, weight, 1e-5)[0]
    assert all(torch.equal(rms_norm(x[i : i + 1], weight, 1e-5)[0][0], together[i]) for i in range(0, 300, 17))


def test_rms_norm_takes_other_layouts() -> None:
    x = torch.randn(6, 5, 32).transpose(0, 1)
    close(rms_norm(x, torch.ones(32), 1e-6)[0], rms_norm_reference(x, torch.ones(32), 1e-6)[0])
    close(rms_norm(x.bfloat16(), torch.ones(32), 1e-6)[0], rms_norm_reference(x.bfloat16(), torch.ones(32), 1e-6)[0])
    if library() is not None:
        with pytest.raises(ValueError, match="fit"):
            rms_norm(x, torch.ones(31), 1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 2), (3, 66), (40, 3072), (2, 3, 34), (0, 8)])
def test_gated_activations(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 4).to(dtype)
    wide = x.double()
    close(silu_and_mul(x), silu_and_mul_reference(wide).to(dtype))
    for approximate in ("none", "tanh"):
        # torch's own float32 result loses digits to cancellation where gelu is nearly 0
        close(gelu_and_mul(x, approximate), gelu_and_mul_reference(wide, approximate).to(dtype), slack=4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_activations_at_the_extremes(dtype: torch.dtype) -> None:
    gate = torch.tensor([0.0, -0.0, 88.0, -88.0, 1000.0, -1000.0, float("inf"), float("nan"), 1e-7, -1e-7, -20.0]).to(dtype)
    x = torch.cat((gate, torch.ones_like(gate)))[None]
    close(silu_and_mul(x), silu_and_mul_reference(x))
    x[0, 6] = 3  # torch's gelu makes NaN of infinity
    close(gelu_and_mul(x), gelu_and_mul_reference(x))
    close(gelu_and_mul(x, "tanh"), gelu_and_mul_reference(x, "tanh"))


def test_bad_activation_input_is_refused() -> None:
    with pytest.raises(ValueError, match="none or tanh"):
        gelu_and_mul(torch.ones(1, 4), "erf")
    if library() is not None:
        with pytest.raises(ValueError, match="even"):
            silu_and_mul(torch.ones(1, 3))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim,rotary", [(64, 64), (64, 32), (80, 80), (80, 20), (128, 128), (96, 0), (24, 24)])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("norm", [False, True])
def test_rope_and_write_kv(dtype: torch.dtype, head_dim: int, rotary: int, interleaved: bool, norm: bool) -> None:
    g = torch.Generator().manual_seed(rotary)
    weights = [torch.randn(head_dim, generator=g).to(dtype) if norm else None for _ in range(2)]
    layer = make_layer(
        6,
        2,
        head_dim,
        rope_cos_sin=rope_table(64, rotary) if rotary else None,
        rope_interleaved=interleaved,
        q_norm=weights[0],
        k_norm=weights[1],
    )
    metadata = make_metadata([33, 7, 20], [1, 7, 11], 8, [[9, 1, 4, 6, 2], [8], [3, 0, 7]])
    metadata.slots[2] = -1
    qkv = torch.randn(19, 10 * head_dim, generator=g).to(dtype)
    results = []
    for function in (rope_and_write_kv, rope_and_write_kv_reference):
        cache = make_kv_cache(10, 8, 2, head_dim, dtype, torch.device("cpu"))
        for part in cache:
            part.fill_(77)
        given = qkv.clone()
        function(given, layer, cache, metadata)
        results.append((given, *cache))
    for found, expected in zip(*results, strict=True):
        close(found, expected)
    assert torch.equal(results[0][0][:, -2 * head_dim :], qkv[:, -2 * head_dim :])
    assert (results[0][2] == 77).sum() == (results[1][2] == 77).sum() > 0


@needs_kernels
def test_slots_and_positions_out_of_range_are_refused() -> None:
    layer = make_layer(2, 1, 16, rope_cos_sin=rope_table(8, 16))
    cache = make_kv_cache(2, 8, 1, 16, torch.float32, torch.device("cpu"))
    for slot, position, word in ((16, 0, "slot"), (-2, 0, "slot"), (0, 8, "position"), (0, -1, "position")):
        metadata = make_metadata([1], [1], 8, [[0]])
        metadata.slots[0], metadata.positions[0] = slot, position
        with pytest.raises(IndexError, match=word):
            rope_and_write_kv(torch.ones(1, 64), layer, cache, metadata)
