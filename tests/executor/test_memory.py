"""Sizes of the KV cache, and what is said when it doesn't fit."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.config import EngineConfig
from octavo.errors import OutOfMemoryError
from octavo.executor.memory import CPU_DEFAULT_KV_BYTES, KvBudget, available_memory, kv_block_bytes, kv_budget
from tests.models.helpers import model_config, tiny_transformers_model

BLOCK = 2 * 3 * 2 * 16 * 16 * 4  # K and V, layers, KV heads, head size, tokens, bytes


@pytest.fixture(scope="module")
def model() -> Any:
    return model_config(tiny_transformers_model("Llama").config)


def budget(model: Any, free_bytes: int, on_cpu: bool = True, max_model_len: int = 128, **options: Any) -> KvBudget:
    config = EngineConfig(**options)
    return kv_budget(config, model, max_model_len=max_model_len, dtype_bytes=4, free_bytes=free_bytes, on_cpu=on_cpu)


def test_sizes(model: Any) -> None:
    assert kv_block_bytes(model, 16, 4) == BLOCK
    assert kv_block_bytes(model, 16, 4, num_kv_heads=1) == BLOCK // 2
    assert budget(model, 10**9, kv_cache_memory=BLOCK * 20 + 5).num_blocks == 20
    assert budget(model, 100 * BLOCK).num_blocks == 40  # a share of what is free
    assert budget(model, 10**12).num_blocks == CPU_DEFAULT_KV_BYTES // BLOCK
    assert budget(model, 100 * BLOCK, on_cpu=False).num_blocks == 100
    assert budget(model, 10**9, num_gpu_blocks_override=3).num_blocks == 3


@pytest.mark.parametrize(
    ("free", "options", "match"),
    [
        (10**9, {"kv_cache_memory": 1024}, "needs 96.0 KiB.*kv-cache-memory leaves 1.0 KiB, short by 95.0 KiB.*Free memory"),
        (10**9, {"kv_cache_memory": BLOCK * 7}, "Use --max-model-len 112 or less"),
        (10**6, {"kv_cache_memory": 2**31}, "asks for 2.00 GiB, but only 976.6 KiB.*at most 0M"),
        (10 * BLOCK, {}, "the free memory leaves"),
        (BLOCK * 7, {"device": "cuda"}, "raise --gpu-memory-utilization"),
        (-5, {"device": "cuda"}, "raise --gpu-memory-utilization"),
        (10 * BLOCK, {"num_gpu_blocks_override": 11}, "at most 10 blocks"),
        (-5, {"num_gpu_blocks_override": 11}, "at most 0 blocks"),
    ],
)
def test_too_little(model: Any, free: int, options: dict[str, Any], match: str) -> None:
    with pytest.raises(OutOfMemoryError, match=match):
        budget(model, free, on_cpu=options.get("device") != "cuda", **options)


def test_available_memory_is_a_sane_number() -> None:
    assert 2**20 < available_memory() < 2**50
