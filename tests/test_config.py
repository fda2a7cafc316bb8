"""The configuration's checks that the command line's parser does not make: keyword arguments of ``LLM``."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.config import EngineConfig
from octavo.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("max_model_len", "2048", "max_model_len must be an integer, got '2048'"),
        ("max_model_len", 2048.0, "max_model_len must be an integer"),
        ("max_num_seqs", True, "max_num_seqs must be an integer, got True"),
        ("max_num_seqs", "many", "max_num_seqs must be an integer, got 'many'"),
        ("block_size", None, "block_size must be an integer, got None"),
        ("kv_cache_memory", "much", "kv_cache_memory: 'much' is not a number with an optional suffix such as 512M"),
        ("kv_cache_memory", "0.3", "kv_cache_memory: '0.3' is not a whole number"),
        ("kv_cache_memory", "0G", "--kv-cache-memory must be at least 1"),
        ("kv_cache_memory", 2.5, "kv_cache_memory must be an integer"),
        ("gpu_memory_utilization", "0.9", "gpu_memory_utilization must be a number"),
        ("enable_prefix_caching", 1, "enable_prefix_caching must be True or False"),
        ("model", 5, "model must be a string"),
        ("dtype", None, "dtype must be a string"),
        ("swap_space", float("nan"), "--swap-space must be"),
        ("max_model_length", 5, "Did you mean 'max_model_len'"),
        ("gpu_memory_utilisation", 0.5, "Did you mean 'gpu_memory_utilization'"),
        ("kv_cache_memory_bytes", 2**30, "Did you mean 'kv_cache_memory'"),
        ("xyzzy", 1, r"Unknown option 'xyzzy'\.$"),
        ("enable_lora", False, "'enable_lora' is an option of vLLM that Octavo does not have. Serve a merged checkpoint instead."),
        ("moe_backend", "x", "'moe_backend' is an option of vLLM that Octavo does not have. Leave it out."),
        ("override_attention_dtype", "x", "does not have. Use dtype.$"),  # as arguments are written here
        ("performance_mode", "x", "Use itl_slo_ms and max_num_seqs.$"),
        ("cuda_graph_sizes", [1], "enforce_eager turns graphs off"),
        ("uvicorn_log_level", "x", "Use --log-level.$"),  # no argument
        ("ctx_size", 5, "Unknown option 'ctx_size'; write max_model_len.$"),
        ("served_model_name", "m", "'served_model_name' is an option of the server"),
    ],
)
def test_refused(name: str, value: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        EngineConfig.from_kwargs(**{name: value})


@pytest.mark.parametrize(("size", "value"), [("256M", 2**28), ("2GiB", 2**31), ("1.5k", 1500), ("4096", 4096), (4096, 4096)])
def test_sizes_may_be_written_as_on_the_command_line(size: str | int, value: int) -> None:
    assert EngineConfig.from_kwargs(kv_cache_memory=size).kv_cache_memory == value


@pytest.mark.parametrize(("backend", "device"), [("flash", "cpu"), ("triton", "cpu"), ("cpu", "cuda")])
def test_a_backend_that_the_device_can_not_have(backend: str, device: str) -> None:
    with pytest.raises(ConfigError, match=f"--attention-backend {backend} can't run on --device {device}; use .*reference"):
        EngineConfig(attention_backend=backend, device=device)
    assert EngineConfig(attention_backend=backend).attention_backend == backend  # the device is not known yet


def test_an_integer_is_a_number() -> None:
    assert EngineConfig(swap_space=2, gpu_memory_utilization=1).swap_space == 2
    assert EngineConfig(swap_space="auto").swap_space is EngineConfig().swap_space is None  # type: ignore[arg-type]


def test_a_token_budget_that_cannot_hold_a_whole_prompt_is_refused_rather_than_raised() -> None:
    config = EngineConfig(max_num_batched_tokens=512, max_num_seqs=4, enable_chunked_prefill=False)
    assert config.token_budget(508, "cpu") == 512
    with pytest.raises(ConfigError, match="at least 1004 without chunked prefill"):
        config.token_budget(1000, "cpu")
    assert EngineConfig(max_num_seqs=4, enable_chunked_prefill=False).token_budget(10000, "cpu") == 10004
