"""Loading is strict, reports everything at once and by name, and cuts every model over ranks without changing its logits."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest
import torch

from octavo.errors import ConfigError, ModelError
from octavo.models.loader import load_model
from octavo.models.registry import SUPPORTED_ARCHITECTURES, model_class

from ..layers.fake_group import run_ranks
from .helpers import PagedRunner, checkpoint, load_like, model_config, tiny_transformers_model

TOKENS = torch.randint(0, 131, (20,), generator=torch.Generator().manual_seed(8)).tolist()


@pytest.fixture(scope="module")
def llama():
    return tiny_transformers_model("Llama", num_hidden_layers=2)


def load(hf_model, weights, **kwargs):
    return load_model(model_config(hf_model.config), dtype=torch.float32, device="cpu", weights=weights, **kwargs)


def test_every_misfit_is_named(llama) -> None:
    tensors = checkpoint(llama)
    for layer in range(2):
        for part in "qkvo":
            del tensors[f"model.layers.{layer}.self_attn.{part}_proj.weight"]
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(64)
    tensors["model.norm.weight"] = torch.zeros(63)
    items = [*tensors.items(), ("lm_head.weight", tensors["lm_head.weight"])]
    with pytest.raises(ModelError) as error:
        load(llama, items)
    message = str(error.value)
    assert "8 missing: model.layers.0.self_attn.q_proj.weight, " in message
    assert "and 3 more" in message
    assert "1 not part of the model: model.layers.0.self_attn.q_proj.bias" in message
    assert "1 there more than once: lm_head.weight" in message
    assert "1 of another shape: model.norm.weight is [63] and should be [64]" in message


def test_what_may_be_skipped(llama) -> None:
    load(llama, [*checkpoint(llama).items(), ("model.layers.0.self_attn.rotary_emb.inv_freq", torch.ones(8))])
    tied = tiny_transformers_model("Llama", num_hidden_layers=1, tie_word_embeddings=True)
    load(tied, [*checkpoint(tied).items(), ("lm_head.weight", torch.ones(131, 64))])


def test_the_head_of_an_untied_model_is_needed(llama) -> None:
    tensors = checkpoint(llama)
    del tensors["lm_head.weight"]
    with pytest.raises(ModelError, match="1 missing: lm_head.weight"):
        load(llama, tensors.items())


def test_progress_grows_to_one(llama) -> None:
    seen: list[float] = []
    load(llama, checkpoint(llama).items(), progress=seen.append)
    assert len(seen) > 5
    assert seen == sorted(seen)
    assert seen[-1] == 1.0 > seen[-2]


def test_the_loaded_model(llama) -> None:
    model = load(llama, checkpoint(llama).items())
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    layers = model.attention_layers
    assert [layer.layer_index for layer in layers] == [0, 1]
    assert layers[0].rope_cos_sin is layers[1].rope_cos_sin
    assert layers[0].rope_cos_sin.shape == (128, 16)
    assert load(llama, checkpoint(llama).items(), max_model_len=50).attention_layers[0].rope_cos_sin.shape == (50, 16)


def test_windows_by_layer() -> None:
    qwen = tiny_transformers_model("Qwen2", use_sliding_window=True, sliding_window=7, max_window_layers=2)
    assert [layer.sliding_window for layer in load_like(qwen).attention_layers] == [None, None, 7]
    # a window that nothing served can outgrow is none
    assert [layer.sliding_window for layer in load_like(qwen, max_position=7).attention_layers] == [None] * 3


@pytest.mark.parametrize(("family", "size"), [("Llama", 2), ("Llama", 4), ("Qwen2", 2), ("Qwen3", 4)])
@pytest.mark.parametrize("tied", [False, True])
def test_logits_do_not_depend_on_the_number_of_ranks(family: str, size: int, tied: bool) -> None:
    """2 KV heads over 4 ranks are replicated; 131 vocabulary rows over 4 ranks are padded."""
    hf_model = tiny_transformers_model(family, num_hidden_layers=2, tie_word_embeddings=tied)
    expected = PagedRunner(load_like(hf_model)).step([("s", TOKENS)])[0]
    for logits in run_ranks(size, lambda group: PagedRunner(load_like(hf_model, group=group)).step([("s", TOKENS)])[0]):
        assert logits.shape == expected.shape
        assert (logits - expected).abs().max() / expected.abs().max() < 1e-5


def test_a_group_that_does_not_fit(llama) -> None:
    with pytest.raises(ConfigError, match="4 attention heads and 2 KV heads are not divisible by the parallel size 3"):
        run_ranks(3, lambda group: load_like(llama, group=group))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "ParrotForCausalLM"}, "'ParrotForCausalLM' is not supported. Supported are: LlamaForCausalLM, Mistral"),
        ({"hidden_act": "relu2"}, "'relu2' is not supported"),
        ({"num_kv_heads": 3}, "4 attention heads can't share 3 KV heads"),
        ({"num_layers": 0}, "num_layers = 0"),
    ],
)
def test_unsupported_configurations(llama, changes: dict, message: str) -> None:
    config = dataclasses.replace(model_config(llama.config), **changes)
    with pytest.raises(ModelError, match=message):
        load_model(config, dtype=torch.float32, device="cpu", weights=[])


def test_every_registered_architecture_exists() -> None:
    for architecture in SUPPORTED_ARCHITECTURES:
        assert model_class(architecture).__name__ == architecture


def test_registry_needs_no_torch() -> None:
    code = "import sys, octavo.models.registry; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
