"""Sizes of the KV cache, and what is said when it doesn't fit."""

from __future__ import annotations

import re
from random import Random
from typing import Any

import pytest
import torch

from octavo.config import EngineConfig
from octavo.errors import OutOfMemoryError
from octavo.executor.memory import CPU_DEFAULT_KV_BYTES, KvBudget, Room, available_memory, check_fits, explained, kv_block_bytes, kv_budget
from octavo.models.config import ModelConfig, RopeConfig
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


def test_a_cache_that_is_too_small_does_not_tell_that_memory_is(model: Any) -> None:
    config = EngineConfig(kv_cache_memory=1024)
    with pytest.raises(OutOfMemoryError, match="give more with --kv-cache-memory, at least 1M\\.$"):
        check_fits(config, model, max_model_len=128, dtype_bytes=4, room=Room(10**12, 10**12, on_cpu=True))


def test_available_memory_is_a_sane_number() -> None:
    assert 2**20 < available_memory() < 2**50


# -- before anything is loaded ----------------------------------------------------------------------------------------------

QWEN3_8B = ModelConfig(
    path="memory", weights_format="dummy", architecture="Qwen3ForCausalLM", model_type="qwen3", vocab_size=151936, hidden_size=4096,
    intermediate_size=12288, num_layers=36, num_heads=32, num_kv_heads=8, head_dim=128, max_position=40960, norm_eps=1e-6,
    hidden_act="silu", rope=RopeConfig(rotary_dim=128), tie_word_embeddings=False, qk_norm=True,
)  # fmt: skip


def check(room: Room, max_model_len: int = 40960, model: ModelConfig = QWEN3_8B, **options: Any) -> str:
    """What is said; "" if it fits."""
    try:
        check_fits(EngineConfig(**options), model, max_model_len=max_model_len, dtype_bytes=2, room=room)
    except OutOfMemoryError as error:
        return str(error)
    return ""


def gpu(total: float, used: float = 0.4) -> Room:
    return Room(int(total * 2**30), int((total - used) * 2**30))


FLAGS = "gpu-memory-utilization|max-model-len|max-num-seqs|max-num-batched-tokens|kv-cache-memory|num-gpu-blocks-override"
ADVICE = re.compile(rf"--({FLAGS}) (\d+(?:\.\d+)?)(M?)")


def advised(text: str) -> list[dict[str, Any]]:
    """The settings that a message names as its remedies: one set each, or a single one together."""
    tail = re.split(r"would fit: |is available[.,]|leaves (?:nothing|[\d.]+ .iB)\. ", text)[-1]
    found = [
        {name.replace("-", "_"): float(number) if "." in number else int(number) * (2**20 if unit else 1)}
        for name, number, unit in ADVICE.findall(tail)
    ]
    if "Together" in text:
        return [{k: v for d in found for k, v in d.items()}]
    return [found[0], {k: v for d in found[1:] for k, v in d.items()}] if "together" in text else found


@pytest.mark.parametrize("room", [gpu(139.8), gpu(79.3), gpu(31.5), gpu(24.0), gpu(139.8, 100.0)])
def test_what_fits_is_not_refused(room: Room) -> None:
    assert check(room, 4096) == ""


@pytest.mark.parametrize(
    ("room", "options", "says"),
    [
        (gpu(23.6), {}, ["short", "15.28 GiB for weights", "sequence of 40960 tokens", "0.9 of this GPU's 23.60 GiB", "--max-model-len"]),
        (gpu(139.8, 118.0), {}, ["118.00 GiB is in use already", "leaves 7.82 GiB", "would fit if the other processes ended"]),
        (gpu(139.8, 130.0), {}, ["which leaves nothing"]),
        (gpu(139.8), {"gpu_memory_utilization": 0.15}, ["one of these would fit: --gpu-memory-utilization 0.17; --max-model-len 24160"]),
        (gpu(139.8), {"gpu_memory_utilization": 0.99, "max_num_seqs": 60000}, ["--max-num-seqs"]),
        (gpu(139.8), {"max_num_batched_tokens": 2 * 10**6}, ["--max-num-batched-tokens"]),
        (gpu(139.8), {"kv_cache_memory": 2**37}, ["128.00 GiB for the KV cache of --kv-cache-memory", "--kv-cache-memory"]),
        (gpu(139.8), {"kv_cache_memory": 2**20}, ["one such sequence needs 5.62 GiB", "at least 5760M"]),
        (gpu(139.8), {"num_gpu_blocks_override": 10**6}, ["the 1000000 KV blocks of", "--num-gpu-blocks-override"]),
        (gpu(20.0), {}, ["--max-model-len 2768 would fit. Or, for longer sequences, together: --max-num-seqs 16"]),
        (gpu(19.0), {}, ["Together these would fit", "--gpu-memory-utilization 0.95", "--max-num-seqs 16", "--max-model-len"]),
        (gpu(15.7), {}, ["The weights alone", "a smaller model"]),
        (gpu(16.9), {}, ["No flags would make it fit"]),
        (Room(2**36, 2**34, on_cpu=True), {}, ["into memory", "16.00 GiB of memory is available", "--kv-cache-memory"]),
        (Room(2**36, 25 * 2**30, on_cpu=True), {}, ["takes 40% of what the rest leaves", "--max-model-len", "--kv-cache-memory 5760M"]),
        (Room(2**36, 2**36, on_cpu=True), {}, ["--kv-cache-memory 5760M"]),  # more than is taken unless told
        (Room(2**36, 10 * 2**30, on_cpu=True), {}, ["The weights alone"]),
    ],
)  # fmt: skip
def test_what_does_not_fit(room: Room, options: dict[str, Any], says: list[str]) -> None:
    text = check(room, **options)
    for words in says:
        assert words in text, text
    assert "quantization" not in text  # not supported yet


@pytest.mark.parametrize("on_cpu", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_what_is_advised_fits(seed: int, on_cpu: bool) -> None:
    """Each remedy alone is accepted by the same check, and a little more of it is not promised for nothing."""
    random = Random(seed)
    size = random.uniform(16, 40)
    room = Room(int(size * 2**30), int((size - random.choice([0.4, 3.0])) * 2**30), on_cpu)
    options: dict[str, Any] = {"max_num_seqs": random.choice([8, 256, 1024]), "max_num_batched_tokens": random.choice([None, 2048, 65536])}
    options |= random.choice([{}, {"kv_cache_memory": random.randrange(6, 30) * 2**30}, {"num_gpu_blocks_override": 8000}])
    if not on_cpu:
        options["gpu_memory_utilization"] = random.choice([0.5, 0.8, 0.9])
    text = check(room, **options)
    for change in advised(text):
        length = change.pop("max_model_len", 40960)
        together = {"kv_cache_memory": None, "num_gpu_blocks_override": None} if "Together" in text else {}
        assert check(room, length, **options | together | change) == "", (text, change)


def test_quantization_is_named_once_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineConfig, "__post_init__", lambda self: None)
    assert "--quantization fp8" in check(gpu(18.0), 4096)


def test_others_are_only_blamed_when_they_hold_much() -> None:
    assert "other processes" not in check(gpu(16.0, 0.6))


# -- running out later ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of\nlots of text"),
        RuntimeError("CUDA error: out of memory\nCompile with TORCH_USE_CUDA_DSA"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to"),
        MemoryError(),
    ],
)
def test_running_out_is_explained(error: Exception) -> None:
    with pytest.raises(OutOfMemoryError) as caught, explained("while the weights were loaded", lambda: "1 GiB is free."):
        raise error
    text = str(caught.value)
    assert text.startswith("Memory ran out while the weights were loaded. 1 GiB is free. Lower --max-num-seqs")
    assert "\n" not in text and "capacity" not in text and caught.value.__cause__ is None and caught.value.__suppress_context__


def test_other_errors_pass() -> None:
    with pytest.raises(RuntimeError, match="shapes"), explained("while"):
        raise RuntimeError("shapes")
    own = OutOfMemoryError("mine")
    with pytest.raises(OutOfMemoryError) as caught, explained("while"):
        raise own
    assert caught.value is own


def test_the_share_that_would_hold_the_cache() -> None:
    options: dict[str, Any] = {"max_model_len": 40960, "dtype_bytes": 2, "on_cpu": False}
    with pytest.raises(OutOfMemoryError, match=r"raise --gpu-memory-utilization to 0.94\."):
        kv_budget(EngineConfig(), QWEN3_8B, free_bytes=5 * 2**30, total_bytes=20 * 2**30, **options)
    with pytest.raises(OutOfMemoryError, match="lower --max-num-seqs"):
        kv_budget(EngineConfig(), QWEN3_8B, free_bytes=2**30, total_bytes=20 * 2**30, **options)
