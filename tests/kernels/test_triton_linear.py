"""Small-M linear layers in Triton, against torch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.kernels.triton_cases import DEVICE, INTERPRETED, close, gpu, needs_triton, rand

pytestmark = needs_triton
TOLERANCE = {torch.bfloat16: 3e-2 if INTERPRETED else 5e-3, torch.float16: 2e-3}


def check(config, rows: int, n: int, k: int, dtype: torch.dtype = torch.float16, gated: bool = False, bias: bool = False) -> None:
    from octavo.kernels.triton.linear import linear_reference, run

    weight_rows = 2 * n if gated else n
    x, weight = rand(rows, k, dtype=dtype), rand(weight_rows, k, dtype=dtype, scale=k**-0.5)
    offset = rand(weight_rows, dtype=dtype) if bias else None
    assert config.problem(rows, weight_rows, k) is None
    y, _ = run(config, x, weight, offset, gated=gated)
    if DEVICE == "cpu":
        x, weight, offset = x.float(), weight.float(), None if offset is None else offset.float()
    close(y, linear_reference(x, weight, offset, gated=gated).to(dtype), TOLERANCE[dtype])


def gemv(**options: int):
    from octavo.kernels.triton.linear import LinearConfig

    return LinearConfig("gemv", **{"block_n": 4, "block_k": 128, "num_warps": 4} | options)


def dot(**options: int):
    from octavo.kernels.triton.linear import LinearConfig

    return LinearConfig("dot", **{"block_n": 16, "block_k": 64, "num_warps": 4, "num_stages": 3, "prefetch": 64} | options)


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("split", [1, 2])
@pytest.mark.parametrize(("n", "k"), [(32, 256), (13, 520)])
def test_gemv(rows: int, gated: bool, split: int, n: int, k: int) -> None:
    check(gemv(split_k=split), rows, n, k, gated=gated, bias=rows % 2 == 0)


@pytest.mark.parametrize("rows", [1, 5, 16, 33])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("split", [1, 2])
@pytest.mark.parametrize(("n", "k"), [(32, 256), (13, 200)])
def test_dot(rows: int, gated: bool, split: int, n: int, k: int) -> None:
    check(dot(split_k=split), rows, n, k, gated=gated, bias=rows % 2 == 1)


def test_bfloat16() -> None:
    check(gemv(), 2, 32, 256, torch.bfloat16)
    if not INTERPRETED:  # whose tl.dot takes bfloat16's bits for integers
        check(dot(block_n=64), 7, 64, 256, torch.bfloat16, gated=True)


@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("split", [1, 2])
def test_norm_inside(rows: int, residual: bool, split: int) -> None:
    from octavo.kernels.triton.linear import linear_reference, run
    from octavo.kernels.triton.norm import rms_norm_reference

    n, k, dtype = 12, 328, torch.float16
    x, norm_weight, weight = rand(rows, k, dtype=dtype), rand(k, dtype=dtype), rand(2 * n, k, dtype=dtype, scale=0.05)
    other = rand(rows, k, dtype=dtype) if residual else None
    before = x.clone()
    y, total = run(gemv(split_k=split), x, weight, gated=True, norm=(norm_weight, 1e-5), residual=other)
    normed, expected_total = rms_norm_reference(x, norm_weight, 1e-5, other)
    close(y, linear_reference(normed.float(), weight.float(), gated=True).to(dtype), 2e-3)
    assert torch.equal(total, expected_total) and torch.equal(x, before)


@pytest.mark.parametrize("family", [gemv, dot])
def test_a_row_does_not_depend_on_the_others(family) -> None:
    """Same block shapes, same row: the same bits, for any number of rows that the kernel was compiled for."""
    from octavo.kernels.triton.linear import run

    x, weight = rand(4, 256, dtype=torch.float16), rand(32, 256, dtype=torch.float16)
    whole = run(family(split_k=2), x, weight)[0]
    for rows in (1, 2, 3):
        assert torch.equal(run(family(split_k=2), x[4 - rows :], weight)[0], whole[4 - rows :])


def test_float32_results_are_rounded_first() -> None:
    from octavo.kernels.triton.linear import run

    x, weight = rand(1, 128, dtype=torch.float16), rand(8, 128, dtype=torch.float16)
    for config in (gemv(), dot()):
        wide = run(config, x, weight, out_dtype=torch.float32)[0]
        assert wide.dtype == torch.float32 and torch.equal(wide, run(config, x, weight)[0].float())


def test_counters_are_zero_again() -> None:
    from octavo.kernels.triton.linear import run, workspace

    x, weight = rand(2, 256, dtype=torch.float16), rand(32, 256, dtype=torch.float16)
    for config in (gemv(split_k=2), dot(split_k=2)):
        run(config, x, weight)
        assert not workspace(x.device).counters.any()


def test_the_heuristic_can_run_what_it_chooses() -> None:
    from octavo.kernels.triton.linear import BUCKETS, heuristic

    for rows in BUCKETS:
        for weight_rows, k in [(1024, 1024), (6144, 1024), (1, 8), (151936, 1024), (4096, 14336), (8192, 28672), (64, 65536)]:
            config = heuristic(rows, weight_rows, k)
            assert config.problem(rows, weight_rows, k) is None, (rows, weight_rows, k, config)


def test_the_table_is_read(tmp_path: Path) -> None:
    from octavo.kernels.triton.linear import LinearConfig, load_table

    good = {"weight_rows": 64, "k": 256, "gated": True, "m": 1, "kernel": "gemv", "block_n": 4, "block_k": 128, "us": 1.0}
    bad = good | {"m": 8}  # gemv takes 4 rows at most
    path = tmp_path / "table.json"
    path.write_text(json.dumps({"device": "x", "entries": [good, bad]}))
    assert load_table(path) == {(64, 256, True, 1): LinearConfig("gemv", 4, 128)}
    assert load_table(tmp_path / "none.json") == {}


def test_what_does_not_fit_is_refused_or_left_to_torch() -> None:
    from octavo.kernels.triton.linear import linear, norm_linear

    x, weight = rand(3, 2, 10), rand(6, 10)
    torch.testing.assert_close(linear(x, weight), torch.nn.functional.linear(x, weight))
    assert linear(x, weight, gated=True).shape == (3, 2, 3)
    y, total = norm_linear(x[0], rand(10), 1e-5, weight, residual=x[1])
    assert y.shape == (2, 6) and torch.equal(total, x[0] + x[1])
    with pytest.raises(ValueError, match="features"):
        linear(rand(2, 9), weight)


REAL = [
    (4096, 1024, False), (1024, 2048, False), (3072, 1024, True), (1024, 3072, False),
    (6144, 4096, False), (12288, 4096, True), (4096, 12288, False)
]  # fmt: skip


@gpu
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 8, 16, 31, 64])
@pytest.mark.parametrize(("n", "k", "gated"), REAL)
def test_linear_at_real_sizes(rows: int, n: int, k: int, gated: bool) -> None:
    from octavo.kernels.triton import linear as module

    dtype = torch.bfloat16
    x, weight, bias = rand(rows, k, dtype=dtype), rand(n * (1 + gated), k, dtype=dtype, scale=k**-0.5), rand(n * (1 + gated), dtype=dtype)
    expected = module.linear_reference(x.double(), weight.double(), bias.double(), gated=gated).to(dtype)
    for config in {module.choose(rows, weight.shape[0], k, gated), module.heuristic(module.bucket_of(rows), weight.shape[0], k)}:
        if config.kernel != "torch":
            for _ in range(3):
                close(module.run(config, x, weight, bias, gated=gated)[0], expected, 6e-3)
    norm_weight, residual = rand(k, dtype=dtype), rand(rows, k, dtype=dtype)
    y, total = module.norm_linear(x, norm_weight, 1e-6, weight, bias, residual, gated=gated)
    normed, expected_total = module.rms_norm_reference(x, norm_weight, 1e-6, residual)
    close(y, module.linear_reference(normed.double(), weight.double(), bias.double(), gated=gated).to(dtype), 6e-3)
    assert torch.equal(total, expected_total)


@gpu
def test_a_chain_in_a_graph_gives_what_it_gives_outside() -> None:
    """Dependent launch must not let a kernel read what the one before it has not written yet."""
    from octavo.kernels.triton import linear as module
    from octavo.kernels.triton.launch import enable_pdl

    dtype, k = torch.bfloat16, 1024
    layers = [(rand(2 * k, k, dtype=dtype, scale=0.03), rand(k, k, dtype=dtype, scale=0.03), rand(k, dtype=dtype)) for _ in range(24)]

    def chain(x: torch.Tensor) -> torch.Tensor:
        residual = torch.zeros_like(x)
        for gate_up, down, norm in layers:
            y, residual = module.norm_linear(x, norm, 1e-6, gate_up, None, residual, gated=True)
            x = module.linear(y, down)
        return x + residual

    for rows in (1, 4, 16):
        x = rand(rows, k, dtype=dtype)
        enable_pdl(False)
        expected = chain(x)
        enable_pdl(True)
        assert torch.equal(chain(x), expected)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = chain(x)
        for _ in range(20):
            out.zero_()
            graph.replay()
            assert torch.equal(out, expected)
