"""Sizes computed from a configuration, against models that are really built."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from octavo.config import EngineConfig
from octavo.distributed.group import Group
from octavo.executor import footprint as sizes
from octavo.executor import model_runner
from octavo.layers.parallel import local_heads
from octavo.models.decoder import Build
from octavo.models.registry import SUPPORTED_ARCHITECTURES, model_class
from octavo.quantization.unquantized import UnquantizedScheme
from tests.models.helpers import model_config, tiny_transformers_model

FAMILIES = {"LlamaForCausalLM": "Llama", "MistralForCausalLM": "Mistral", "Qwen2ForCausalLM": "Qwen2", "Qwen3ForCausalLM": "Qwen3"}


def test_every_architecture_is_measured_here() -> None:
    assert set(FAMILIES) == set(SUPPORTED_ARCHITECTURES)


@pytest.mark.parametrize("family", FAMILIES.values())
@pytest.mark.parametrize(
    "changes",
    [{}, {"tie_word_embeddings": True}, {"attention_bias": True}, {"mlp_bias": True, "num_key_value_heads": 1}, {"vocab_size": 130}],
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_weights(family: str, changes: dict[str, Any], ranks: int) -> None:
    config = model_config(tiny_transformers_model(family, **changes).config)
    if ranks > 1 and config.vocab_size % 2 == 0 and config.num_kv_heads == 1:
        pytest.skip("nothing new")
    group = Group(0, ranks) if ranks > 1 else Group.single()
    with torch.device("meta"):
        model = model_class(config.architecture)(Build(config, group, UnquantizedScheme(), torch.bfloat16, 100))
    parameters = sum(p.nbytes for p in model.parameters())
    table = model.attention_layers[0].rope_cos_sin
    assert sizes.weight_bytes(config, 2, max_model_len=100, ranks=ranks) == parameters + table.nbytes
    heads = local_heads(config.num_heads, config.num_kv_heads, ranks)
    assert (sizes.Sizes.of(config, ranks).query, sizes.Sizes.of(config, ranks).kv) == tuple(n * config.head_dim for n in heads)


def test_a_packed_head_is_there_twice() -> None:
    config = model_config(tiny_transformers_model("Llama", tie_word_embeddings=True).config)
    more = sizes.weight_bytes(config, 4, max_model_len=9, packed_head=True) - sizes.weight_bytes(config, 4, max_model_len=9)
    assert more == 131 * 64 * 4


def test_shared_constants() -> None:
    assert sizes.LOGITS_CHUNK == model_runner.LOGITS_CHUNK


def test_quantized_checkpoints_are_not_counted_in_full() -> None:
    plain = model_config(tiny_transformers_model("Llama").config)

    def of(method: str, **options: Any) -> float:
        checkpoint = dataclasses.replace(plain, raw={"quantization_config": {"quant_method": method}})
        return sizes.linear_bytes(EngineConfig(**options), checkpoint, 2)

    assert (of("fp8"), of("gptq"), of("new"), of("fp8", load_format="dummy")) == (1.0, 0.5625, 0.5, 2)
    assert sizes.linear_bytes(EngineConfig(), plain, 2) == 2
    full, half = (sizes.weight_bytes(plain, 2, max_model_len=9, linear=n) for n in (2, 1))
    assert full - half == 3 * 64 * (64 + 64 + 64 + 3 * 96)


@pytest.mark.parametrize("field", ["max_num_seqs", "max_num_batched_tokens", "max_model_len"])
def test_more_of_everything_needs_more(field: str) -> None:
    """What the search for advice relies on."""
    model = model_config(tiny_transformers_model("Qwen3").config)
    totals = []
    for value in (256, 300, 1000, 5000, 100_000):
        options: dict[str, Any] = {"max_num_seqs": 16} | ({} if field == "max_model_len" else {field: value})
        length = value if field == "max_model_len" else 64
        for on_cpu in (False, True):
            found = sizes.footprint(EngineConfig(**options), model, max_model_len=length, dtype_bytes=2, on_cpu=on_cpu)
            totals.append((on_cpu, found.total))
    for on_cpu in (False, True):
        mine = [total for where, total in totals if where == on_cpu]
        assert mine == sorted(mine) and mine[0] < mine[-1]
