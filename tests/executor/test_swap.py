"""Swap space: how much memory it takes, what it says when that is too much, and that blocks arrive whole."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from octavo.config import EngineConfig
from octavo.errors import ConfigError, OutOfMemoryError
from octavo.executor import swap
from octavo.executor.footprint import MIB, footprint, staging_bytes
from octavo.executor.swap import GIB, WORD, HostMemory, SwapSetup, SwapSpace, num_swap_blocks
from octavo.kernels.kv_cache import make_kv_cache
from tests.models.helpers import model_config, tiny_transformers_model

CPU = torch.device("cpu")
BLOCK = 2 * MIB


def blocks_of(swap_space: float | None, device_type: str = "cuda", available: int = 64 * GIB, rows: int = 256, length: int = 8192) -> int:
    config = EngineConfig(swap_space=swap_space, max_num_seqs=rows)
    return num_swap_blocks(config, BLOCK, length, device_type, available)


def test_how_much() -> None:
    assert blocks_of(2) == 1024 and blocks_of(0) == 0 and blocks_of(0.003) == 1
    assert blocks_of(2, "cpu") == 1024
    assert blocks_of(1000, available=2000 * GIB, rows=4, length=4096) == 4 * 256, "more would never be used"


def test_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    assert blocks_of(None) == 0
    monkeypatch.setitem(swap.AUTO_GIB, "cuda", 4.0)
    assert blocks_of(None) == 2048
    assert blocks_of(None, available=8 * GIB) == 1024, "a quarter of what there is"
    assert blocks_of(None, available=MIB) == blocks_of(None, available=-5) == 0
    assert blocks_of(None, "cpu") == 0


def test_too_much_says_what_fits() -> None:
    with pytest.raises(OutOfMemoryError, match=r"--swap-space 12 asks for 12\.00 GiB .* only 10\.00 GiB is available\. Ask for at most 9,"):
        blocks_of(12, available=10 * GIB)
    assert blocks_of(9, available=10 * GIB) == 4608
    with pytest.raises(OutOfMemoryError, match="at most 0,"):
        blocks_of(1, available=-3)
    with pytest.raises(ConfigError, match="--swap-space 0.001 .* less than one block: 16 tokens take 2.0 MiB"):
        blocks_of(0.001)


ON_GPU = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")])


@pytest.mark.parametrize("where", ["cpu", ON_GPU])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("staged", [1, 3, 50])
def test_blocks_arrive_whole(dtype: torch.dtype, staged: int, where: str) -> None:
    """Against the slow truth: a block is what all its tensors hold at its index."""
    rng = random.Random(staged)
    device_type = torch.device(where)
    caches: list[Any] = [make_kv_cache(20, 8, 2, 8, dtype, device_type) for _ in range(3)]
    caches.append(torch.zeros(20, 2, 8, 1, 16, dtype=dtype, device=device_type))
    tensors = [t for cache in caches for t in (cache if isinstance(cache, tuple) else (cache,))]
    for tensor in tensors:
        tensor.copy_(torch.randn(tensor.shape))
    before = [t.clone() for t in tensors]
    block_bytes = sum(t[0].nbytes for t in tensors)
    memory = HostMemory(30 * block_bytes, device_type)
    assert memory.words.is_pinned() == (where == "cuda")
    space = SwapSpace(memory, torch.empty(staged, block_bytes // 8, dtype=WORD, device=device_type), caches)
    assert space.num_blocks == 30 and space.block_s > 0
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True)), "measuring leaves the caches as they were"

    device: list[int | None] = list(range(20))  # what each block holds: the number of the block that it was first in
    host: list[int | None] = [None] * 30
    for _ in range(50):
        outs = list(zip(rng.choices(range(20), k=9), rng.sample(range(30), 9), strict=True))  # a block may go out twice
        for block, place in outs:
            host[place] = device[block]
        filled = [place for place in range(30) if host[place] is not None]
        ins = list(zip(rng.sample(filled, k=6), rng.sample(range(20), 6), strict=True))
        for place, block in ins:
            device[block] = host[place]
        if where == "cuda":  # PyTorch raises where an operation would make the host wait
            torch.cuda.set_sync_debug_mode("error")
        try:
            space.move(outs, ins)
        finally:
            if where == "cuda":
                torch.cuda.set_sync_debug_mode("default")
        for tensor, first in zip(tensors, before, strict=True):
            assert torch.equal(tensor, first[torch.tensor(device)])
    words = memory.words
    del memory, space
    assert not words.is_pinned(), "whoever makes an engine after this one may get the same memory"


def test_a_block_of_another_size_is_refused() -> None:
    with pytest.raises(RuntimeError, match="256 bytes, and 128 were planned"):
        SwapSpace(HostMemory(1280, CPU), torch.empty(2, 16, dtype=WORD), [torch.zeros(4, 2, 8, 1, 4)])


def test_the_steps_of_a_start(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caches = [torch.zeros(4, 2, 8, 1, 4)]
    off = SwapSetup(EngineConfig(swap_space=0), 256, 64, CPU)
    off.take(GIB)
    assert off.finish(caches) is None
    setup = SwapSetup(EngineConfig(swap_space=100 * 256 / GIB, block_size=8), 256, 64, CPU)
    setup.take(GIB)
    space = setup.finish(caches)
    assert space is not None and space.num_blocks == 100

    def refuse(*_: Any) -> None:
        raise OutOfMemoryError("no")

    monkeypatch.setattr(swap, "HostMemory", refuse)
    setup.take(GIB)
    with pytest.raises(OutOfMemoryError):
        setup.finish(caches)
    monkeypatch.setitem(swap.AUTO_GIB, "cpu", 1.0)
    auto = SwapSetup(EngineConfig(), 256, 64, CPU)
    auto.take(GIB)
    assert auto.finish(caches) is None, "nobody asked for it, so it is no error"
    assert "recomputed, not swapped out: no" in caplog.text


def test_the_staging_buffer_is_counted() -> None:
    model = model_config(tiny_transformers_model("Llama").config)

    def slack(swap_space: float | None, on_cpu: bool) -> int:
        return footprint(EngineConfig(swap_space=swap_space), model, max_model_len=64, dtype_bytes=2, on_cpu=on_cpu).slack

    assert slack(None, False) == slack(0, False) and slack(2, True) == slack(0, True)
    assert 63 * MIB < slack(2, False) - slack(0, False) <= 64 * MIB
    assert staging_bytes(100 * MIB, "cuda") == 100 * MIB, "at least a block"
