from __future__ import annotations

import pytest
import torch

from octavo.attention.base import AttentionLayerSpec, ForwardContext
from octavo.attention.cpu import CpuAttention
from octavo.attention.selector import select_backend
from octavo.errors import ConfigError
from tests.kernels.attention_cases import make_layer, make_metadata, rope_table

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 3e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def slow_backend() -> CpuAttention:
    """The same backend as on a machine without a compiler."""
    backend = CpuAttention()
    backend._kernels = None
    return backend


def full_layer(dtype: torch.dtype, **options: object) -> AttentionLayerSpec:
    g = torch.Generator().manual_seed(0)
    weights = {name: (1 + torch.randn(64, generator=g) / 10).to(dtype) for name in ("q_norm", "k_norm")}
    return make_layer(6, 2, 64, rope_cos_sin=rope_table(512, 64), **weights, **options)


class Run:
    """Steps of some sequences through one layer, each sequence's blocks interleaved with the others'."""

    def __init__(self, backend: object, layer: AttentionLayerSpec, lengths: list[int], dtype: torch.dtype) -> None:
        g = torch.Generator().manual_seed(1)
        self.backend, self.layer = backend, layer
        self.tokens = [torch.randn(n, 10 * 64, generator=g).to(dtype) for n in lengths]
        self.tables = [list(range(s, 40 * len(lengths), len(lengths))) for s in range(len(lengths))]
        self.cache = backend.make_kv_cache(40 * len(lengths), 16, 2, 64, dtype, CPU)  # type: ignore[attr-defined]
        self.out = [torch.full((n, 6 * 64), float("nan"), dtype=dtype) for n in lengths]
        self.done = [0] * len(lengths)

    def step(self, counts: dict[int, int]) -> None:
        order = sorted(counts, key=lambda s: counts[s] != 1)
        lengths = [self.done[s] + counts[s] for s in order]
        metadata = make_metadata(lengths, [counts[s] for s in order], 16, [self.tables[s] for s in order])
        qkv = torch.cat([self.tokens[s][self.done[s] : self.done[s] + counts[s]] for s in order])
        self.backend.prepare(metadata)  # type: ignore[attr-defined]
        out = self.backend.forward(qkv, self.layer, self.cache, ForwardContext(metadata, self.backend, [self.cache]))  # type: ignore[attr-defined]
        for s, part in zip(order, out.split([counts[s] for s in order]), strict=True):
            self.out[s][self.done[s] : self.done[s] + counts[s]] = part
            self.done[s] += counts[s]


LENGTHS = [75, 130, 20]


def run_at_once(backend: object, layer: AttentionLayerSpec, dtype: torch.dtype) -> list[torch.Tensor]:
    run = Run(backend, layer, LENGTHS, dtype)
    for s, n in enumerate(LENGTHS):
        run.step({s: n})
    return run.out


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("options", [{}, {"sliding_window": 40}, {"logit_soft_cap": 8.0}, {"rope_interleaved": True}])
def test_agrees_with_torch(dtype: torch.dtype, options: dict) -> None:
    layer = full_layer(dtype, **options)
    for found, expected in zip(run_at_once(CpuAttention(), layer, dtype), run_at_once(slow_backend(), layer, dtype), strict=True):
        torch.testing.assert_close(found.float(), expected.float(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_agrees_with_the_reference_backend(dtype: torch.dtype) -> None:
    reference = pytest.importorskip("octavo.attention.reference").ReferenceAttention()
    layer = full_layer(dtype, sliding_window=50)
    for found, expected in zip(run_at_once(CpuAttention(), layer, dtype), run_at_once(reference, layer, dtype), strict=True):
        torch.testing.assert_close(found.float(), expected.float(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("seed", range(5))
def test_same_bits_however_the_steps_are_cut(dtype: torch.dtype, seed: int) -> None:
    """Random mixes of chunks and decodes of three sequences against each sequence's prompt run whole and alone."""
    backend = CpuAttention()
    if backend._kernels is None:
        pytest.skip("no C compiler here")
    layer = full_layer(dtype)
    expected = run_at_once(backend, layer, dtype)
    run, g = Run(backend, layer, LENGTHS, dtype), torch.Generator().manual_seed(seed)
    while any(done < n for done, n in zip(run.done, LENGTHS, strict=True)):
        counts = {}
        for s, n in enumerate(LENGTHS):
            count = min(n - run.done[s], (0, 1, 1, 5, 30)[int(torch.randint(5, (1,), generator=g))])
            if count:
                counts[s] = count
        if counts:
            run.step(counts)
    for found, whole in zip(run.out, expected, strict=True):
        assert torch.equal(found, whole)


def test_layers_of_one_step_share_a_plan_where_they_can() -> None:
    backend = CpuAttention()
    if backend._kernels is None:
        pytest.skip("no C compiler here")
    layers = [make_layer(6, 2, 64), make_layer(6, 2, 64), make_layer(6, 2, 64, sliding_window=8)]
    metadata = make_metadata([30, 40], [1, 1], 16, [[0, 1], [2, 3, 4]])
    caches = [backend.make_kv_cache(5, 16, 2, 64, torch.float32, CPU) for _ in layers]
    for _ in range(2):
        metadata.extra.clear()
        for layer, cache in zip(layers, caches, strict=True):
            backend.forward(torch.randn(2, 640), layer, cache, ForwardContext(metadata, backend, caches))
        assert len(metadata.extra["cpu"].plans) == 2
    assert len(backend._layers) == 3
    other = backend.make_kv_cache(5, 16, 2, 64, torch.float32, CPU)  # a new cache must not be written through old pointers
    backend.forward(torch.ones(2, 640), layers[0], other, ForwardContext(metadata, backend, caches))
    assert other[0].abs().sum() > 0


def test_padding_and_other_memory_layouts() -> None:
    for backend in (CpuAttention(), slow_backend()):
        metadata = make_metadata([3], [1], 16, [[0]])
        cache = backend.make_kv_cache(1, 16, 2, 64, torch.float32, CPU)
        qkv = torch.randn(640, 4).t()
        out = backend.forward(qkv.clone(), make_layer(6, 2), cache, ForwardContext(metadata, backend, [cache]))
        again = backend.forward(qkv.contiguous(), make_layer(6, 2), cache, ForwardContext(metadata, backend, [cache]))
        assert out.shape == (4, 384)
        assert torch.equal(out, again) and (out[1:] == 0).all() and (out[0] != 0).any()


def test_cache_counts_blocks_first() -> None:
    for dtype in TOLERANCE:
        cache = CpuAttention().make_kv_cache(7, 16, 2, 64, dtype, CPU)
        assert all(part.shape[0] == 7 and (part == 0).all() for part in cache)
        assert sum(part.nbytes for part in cache) == 7 * 16 * 2 * 2 * 64 * dtype.itemsize


def test_selector() -> None:
    assert select_backend(CPU).name == "cpu"
    assert select_backend("cpu", "cpu").name == "cpu"
    with pytest.raises(ConfigError, match="cpu, reference"):
        select_backend(CPU, "flash")
    with pytest.raises(ConfigError, match="triton, flash, reference"):
        select_backend("cuda:0", "cpu")
    with pytest.raises(ConfigError, match="--device cpu"):
        select_backend("mps")
    with pytest.raises(ConfigError, match="Unknown attention backend"):
        select_backend(CPU, "flashy")
