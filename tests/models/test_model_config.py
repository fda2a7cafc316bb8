"""read_model_config: against transformers' own reading of the same configurations, and everything that it must refuse."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.errors import ModelError
from octavo.models.config import ModelConfig, read_model_config

sys.path.insert(0, str(Path(__file__).parent.parent / "weights"))
from gguf_samples import tiny_metadata, tiny_tensors, write_gguf

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
}
MISTRAL = LLAMA | {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
QWEN3 = LLAMA | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
ABSENT = object()


def write(folder: Path, config: dict[str, Any] | str, generation: Any = None, **changes: Any) -> Path:
    if isinstance(config, dict):
        config = json.dumps({k: v for k, v in (config | changes).items() if v is not ABSENT})
    (folder / "config.json").write_text(config)
    if generation is not None:
        (folder / "generation_config.json").write_text(generation if isinstance(generation, str) else json.dumps(generation))
    return folder


def read(folder: Path, config: dict[str, Any] | str = LLAMA, generation: Any = None, **changes: Any) -> ModelConfig:
    return read_model_config(write(folder, config, generation, **changes), "dummy")


def refused(folder: Path, *args: Any, **changes: Any) -> str:
    with pytest.raises(ModelError) as caught:
        read(folder, *args, **changes)
    return str(caught.value)


# ---------------------------------------------------------------------------------------------------------------------
# What is read


def test_plain_llama(tmp_path):
    config = read(tmp_path)
    assert (config.architecture, config.model_type, config.weights_format, config.path) == (
        "LlamaForCausalLM",
        "llama",
        "dummy",
        str(tmp_path),
    )
    assert (config.vocab_size, config.hidden_size, config.intermediate_size, config.num_layers) == (128, 64, 96, 4)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.max_position) == (4, 2, 16, 512)
    assert (config.norm_eps, config.hidden_act, config.tie_word_embeddings, config.dtype) == (1e-5, "silu", False, "bfloat16")
    assert (config.rope.theta, config.rope.kind, config.rope.rotary_dim, config.rope.parameters) == (500000.0, "default", 16, {})
    assert (config.attention_bias, config.attention_out_bias, config.mlp_bias, config.qk_norm) == (False,) * 4
    assert (config.sliding_window, config.sliding_window_layers) == (None, None)
    assert (config.bos_token_id, config.eos_token_ids, config.generation_defaults) == (1, (2,), {})
    assert config.raw["max_position_embeddings"] == 512


@pytest.mark.parametrize(
    ("config", "changes", "expected"),
    [
        (LLAMA, {"num_key_value_heads": ABSENT}, {"num_kv_heads": 4}),
        (LLAMA, {"num_key_value_heads": None}, {"num_kv_heads": 4}),
        (LLAMA, {"head_dim": 32}, {"head_dim": 32}),
        (LLAMA, {"head_dim": 24, "hidden_size": 66}, {"head_dim": 24}),
        (LLAMA, {"tie_word_embeddings": True}, {"tie_word_embeddings": True}),
        (LLAMA, {"attention_bias": True}, {"attention_bias": True, "attention_out_bias": True, "mlp_bias": False}),
        (LLAMA, {"mlp_bias": True}, {"attention_bias": False, "mlp_bias": True}),
        (LLAMA, {"hidden_act": "swish"}, {"hidden_act": "silu"}),
        (LLAMA, {"hidden_act": "gelu_pytorch_tanh"}, {"hidden_act": "gelu_pytorch_tanh"}),
        (LLAMA, {"torch_dtype": "half"}, {"dtype": "float16"}),
        (LLAMA, {"torch_dtype": ABSENT, "dtype": "torch.float32"}, {"dtype": "float32"}),
        (LLAMA, {"torch_dtype": ABSENT}, {"dtype": "bfloat16"}),
        (LLAMA, {"bos_token_id": ABSENT}, {"bos_token_id": None}),
        (LLAMA, {"eos_token_id": None}, {"eos_token_ids": ()}),
        (LLAMA, {"eos_token_id": [5, 2, 5, -1, 128]}, {"eos_token_ids": (5, 2)}),
        (LLAMA, {"sliding_window": 16}, {"sliding_window": None}),
        (LLAMA, {"num_local_experts": 1, "quantization_config": None, "attn_logit_softcapping": None}, {"num_layers": 4}),
        (MISTRAL, {"max_position_embeddings": 32768}, {"sliding_window": 4096, "sliding_window_layers": None}),
        (MISTRAL, {}, {"sliding_window": None}),  # 4096 is more than the context
        (MISTRAL, {"sliding_window": None}, {"sliding_window": None}),
        (MISTRAL, {"sliding_window": 64}, {"sliding_window": 64, "sliding_window_layers": None}),
        (MISTRAL, {"sliding_window": 512}, {"sliding_window": None}),
        (
            MISTRAL,
            {"sliding_window": 64, "layer_types": ["full_attention", "sliding_attention"] * 2},
            {"sliding_window": 64, "sliding_window_layers": (1, 3)},
        ),
        (MISTRAL, {"sliding_window": 64, "layer_types": ["full_attention"] * 4}, {"sliding_window": None}),
        (QWEN2, {}, {"attention_bias": True, "attention_out_bias": False, "mlp_bias": False, "qk_norm": False, "sliding_window": None}),
        (QWEN2, {"use_sliding_window": False, "sliding_window": 64, "max_window_layers": 2}, {"sliding_window": None}),
        (
            QWEN2,
            {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1},
            {"sliding_window": 64, "sliding_window_layers": (1, 2, 3)},
        ),
        (
            QWEN2,
            {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0},
            {"sliding_window": 64, "sliding_window_layers": None},
        ),
        (
            QWEN2,
            {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 9},
            {"sliding_window": None, "sliding_window_layers": None},
        ),
        (
            QWEN2,
            {
                "use_sliding_window": True,
                "sliding_window": 64,
                "max_window_layers": 0,
                "layer_types": ["sliding_attention"] + ["full_attention"] * 3,
            },
            {"sliding_window": 64, "sliding_window_layers": (0,)},
        ),
        (QWEN3, {}, {"head_dim": 128, "qk_norm": True, "attention_bias": False, "attention_out_bias": False}),
        (QWEN3, {"head_dim": 16, "attention_bias": True}, {"head_dim": 16, "attention_bias": True, "attention_out_bias": True}),
    ],
)
def test_variants(tmp_path, config, changes, expected):
    got = read(tmp_path, config, **changes)
    assert {name: getattr(got, name) for name in expected} == expected


def test_generation_config(tmp_path):
    generation = {
        "eos_token_id": [7, 2],
        "temperature": 0.6,
        "top_p": 1,
        "top_k": 20,
        "min_p": None,
        "repetition_penalty": 1.05,
        "do_sample": True,
        "max_length": 100,
    }
    config = read(tmp_path, LLAMA, generation, eos_token_id=[2, 9])
    assert config.eos_token_ids == (7, 2, 9)
    assert config.generation_defaults == {"temperature": 0.6, "top_p": 1.0, "top_k": 20, "repetition_penalty": 1.05}


def test_dtype_of_the_files_when_the_configuration_has_none(tmp_path):
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    save_file({"w": torch.ones(2, 2, dtype=torch.float16)}, tmp_path / "model.safetensors")
    config = read_model_config(write(tmp_path, LLAMA, torch_dtype=ABSENT))
    assert (config.dtype, config.weights_format) == ("float16", "safetensors")


# ---------------------------------------------------------------------------------------------------------------------
# Rotary embedding

FACTORS = [1.0 + i / 8 for i in range(8)]


@pytest.mark.parametrize(
    ("scaling", "max_position", "parameters"),
    [
        ({"type": "linear", "factor": 4}, 2048, {"factor": 4.0}),
        ({"type": "linear", "factor": 4, "original_max_position_embeddings": 128}, 512, {"factor": 4.0}),
        ({"type": "dynamic", "factor": 2.0}, 1024, {"factor": 2.0, "original_max_position_embeddings": 512}),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 128,
            },
            512,
            {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 128},
        ),
        ({"type": "yarn", "factor": 4.0}, 2048, {"factor": 4.0, "original_max_position_embeddings": 512}),
        (
            {
                "type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 128,
                "beta_fast": 16,
                "mscale": 1,
                "truncate": False,
                "finetuned": True,
            },
            512,
            {"factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 16.0, "mscale": 1.0, "truncate": False},
        ),
        (
            {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 128},
            512,
            {"factor": 4.0, "original_max_position_embeddings": 128},
        ),
        (
            {"type": "su", "short_factor": FACTORS, "long_factor": [2] * 8, "original_max_position_embeddings": 64},
            512,
            {"factor": 8.0, "original_max_position_embeddings": 64, "short_factor": FACTORS, "long_factor": [2.0] * 8},
        ),
        ({"rope_type": "default"}, 512, {}),
        (None, 512, {}),
    ],
)
@pytest.mark.parametrize("style", ["old", "new"])
def test_rope_kinds_in_both_spellings(tmp_path, scaling, max_position, parameters, style):
    if style == "old":
        config = read(tmp_path, rope_scaling=scaling)
    else:
        renamed = {("rope_type" if k == "type" else k): v for k, v in (scaling or {}).items()}
        config = read(tmp_path, rope_theta=ABSENT, rope_parameters={"rope_theta": 500000.0} | renamed)
    kind = (scaling or {}).get("type") or (scaling or {}).get("rope_type", "default")
    assert config.rope.kind == {"su": "longrope"}.get(kind, kind)
    assert config.rope.theta == 500000.0
    assert config.max_position == max_position
    assert config.rope.parameters == parameters


def test_rope_details(tmp_path):
    assert read(tmp_path, rope_theta=ABSENT).rope.theta == 10000.0
    assert read(tmp_path, partial_rotary_factor=0.5).rope.rotary_dim == 8
    assert read(tmp_path, rope_parameters={"rope_theta": 7.0, "partial_rotary_factor": 0.25}).rope.rotary_dim == 4
    outer = read(
        tmp_path, original_max_position_embeddings=64, rope_scaling={"type": "longrope", "short_factor": FACTORS, "long_factor": FACTORS}
    )
    assert outer.rope.parameters["original_max_position_embeddings"] == 64
    assert outer.rope.parameters["factor"] == 8.0
    assert outer.max_position == 512


# ---------------------------------------------------------------------------------------------------------------------
# transformers as the truth


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("Llama", {}),
        ("Llama", {"attention_bias": True, "tie_word_embeddings": True, "head_dim": 32}),
        (
            "Llama",
            {
                "rope_parameters": {
                    "rope_type": "llama3",
                    "rope_theta": 5e5,
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 128,
                }
            },
        ),
        ("Mistral", {"sliding_window": 100}),
        ("Mistral", {"sliding_window": None}),
        ("Qwen2", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 512}}),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 50, "max_window_layers": 2}),
        ("Qwen3", {"eos_token_id": [1, 5]}),
    ],
)
def test_saved_by_transformers(tmp_path, family, changes):
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 100, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4}
    more = {"num_key_value_heads": 2, "max_position_embeddings": 512, "architectures": [f"{family}ForCausalLM"]}
    theirs = getattr(transformers, f"{family}Config")(**sizes | more | changes)
    theirs.save_pretrained(tmp_path)
    ours = read_model_config(tmp_path, "dummy")
    assert (ours.num_heads, ours.num_kv_heads, ours.vocab_size) == (4, 2, 100)
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 16)
    assert ours.norm_eps == theirs.rms_norm_eps
    assert ours.hidden_act == theirs.hidden_act
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.bos_token_id == theirs.bos_token_id
    eos = theirs.eos_token_id
    assert list(ours.eos_token_ids) == ([] if eos is None else eos if isinstance(eos, list) else [eos])
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"]
    assert ours.rope.kind == theirs.rope_parameters["rope_type"]
    assert {k: theirs.rope_parameters[k] for k in ours.rope.parameters} == ours.rope.parameters
    assert ours.sliding_window == getattr(theirs, "sliding_window", None)
    if family.startswith("Qwen"):
        sliding = tuple(i for i, kind in enumerate(theirs.layer_types) if kind == "sliding_attention")
        assert (ours.sliding_window_layers or ()) == sliding


# ---------------------------------------------------------------------------------------------------------------------
# What is refused


@pytest.mark.parametrize(
    "field", ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"]
)
@pytest.mark.parametrize("value", [ABSENT, None, 0, -3, 2.5, "64", True, [64]])
def test_sizes_must_be_positive_integers(tmp_path, field, value):
    message = refused(tmp_path, **{field: value})
    assert f"{tmp_path / 'config.json'}: field {field!r}" in message
    assert ("is missing" if value in (ABSENT, None) else "must be an integer of at least 1") in message


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"architectures": ABSENT},
            ("'architectures' is missing", "LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM"),
        ),
        ({"architectures": "LlamaForCausalLM"}, ("'architectures'", "list of strings")),
        ({"architectures": ["GPT2LMHeadModel"]}, ("GPT2LMHeadModel is not supported", "Supported: LlamaForCausalLM")),
        ({"architectures": ["LlavaForConditionalGeneration"], "text_config": {}}, ("other modalities", "LlavaForConditionalGeneration")),
        ({"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8}, ("mixture of experts", "Qwen3MoeForCausalLM")),
        ({"num_local_experts": 8}, ("'num_local_experts'", "mixtures of experts")),
        ({"hidden_act": "relu2"}, ("'hidden_act'", "'relu2'", "supported: silu")),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, ("'quantization_config'", "'awq'", "not supported")),
        ({"quantization_config": "awq"}, ("'quantization_config'", "object")),
        ({"torch_dtype": "float64"}, ("'torch_dtype'", "float64", "bfloat16")),
        ({"num_attention_heads": 5, "num_key_value_heads": 5}, ("'hidden_size' is 64", "num_attention_heads 5")),
        ({"num_key_value_heads": 3}, ("'num_key_value_heads' is 3", "does not divide num_attention_heads 4")),
        ({"rms_norm_eps": "small"}, ("'rms_norm_eps'", "number")),
        ({"rms_norm_eps": 0}, ("'rms_norm_eps'", "greater than 0")),
        ({"attention_bias": "yes"}, ("'attention_bias'", "true or false")),
        ({"eos_token_id": "</s>"}, ("'eos_token_id'", "token id")),
        ({"eos_token_id": [2, True]}, ("'eos_token_id'", "token id")),
        ({"bos_token_id": 1.5}, ("'bos_token_id'",)),
        ({"rope_theta": math.inf}, ("'rope_theta'", "number")),
        (
            {"rope_scaling": {"type": "mrope", "mrope_section": [1]}},
            ("'mrope'", "supported: default, linear, dynamic, llama3, yarn, longrope"),
        ),
        ({"rope_scaling": {"type": "default", "mrope_section": [1]}}, ("'mrope_section'", "not supported")),
        ({"rope_scaling": {"type": "linear"}}, ("rope_scaling: field 'factor' is missing",)),
        ({"rope_scaling": {"type": "linear", "factor": -1}}, ("'factor'", "greater than 0")),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, ("'low_freq_factor' is missing",)),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": FACTORS}},
            ("'short_factor'", "list of 8 positive numbers"),
        ),
        ({"rope_scaling": [1]}, ("'rope_scaling'", "object")),
        ({"rope_parameters": {"full_attention": {}, "sliding_attention": {}}}, ("'rope_parameters'", "per kind of layer")),
        ({"partial_rotary_factor": 0.2}, ("'partial_rotary_factor'", "rotates 3 of 16")),
        ({"partial_rotary_factor": 2}, ("'partial_rotary_factor'", "rotates 32 of 16")),
        ({"final_logit_softcapping": 30.0}, ("'final_logit_softcapping' is 30.0",)),
        ({"auto_map": {"AutoModelForCausalLM": "modeling_x.X"}}, ("'auto_map'", "never runs")),
    ],
)
def test_unsupported_or_malformed_settings_are_named(tmp_path, changes, words):
    message = refused(tmp_path, **changes)
    assert str(tmp_path / "config.json") in message
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("config", "changes", "words"),
    [
        (MISTRAL, {"attention_bias": True}, "'attention_bias'"),
        (MISTRAL, {"sliding_window": 0}, "'sliding_window' must be an integer of at least 1"),
        (MISTRAL, {"layer_types": ["sliding_attention"]}, "'layer_types' has 1 entries for 4 layers"),
        (
            QWEN2,
            {"use_sliding_window": True, "layer_types": ["linear_attention"] * 4},
            "'layer_types' holds linear_attention; supported: full_attention, sliding_attention",
        ),
        (LLAMA, {"layer_types": ["sliding_attention"] * 4}, "'sliding_window' is missing"),
    ],
)
def test_family_refusals(tmp_path, config, changes, words):
    assert words in refused(tmp_path, config, **changes)


@pytest.mark.parametrize("content", ["", "{", "nul", '{"a": 1,}', "\x00", "[" * 100_000])
def test_malformed_json_names_the_file(tmp_path, content):
    assert str(tmp_path / "config.json") in refused(tmp_path, content)
    message = refused(tmp_path, LLAMA, content)
    assert str(tmp_path / "generation_config.json") in message


@pytest.mark.parametrize(("content", "kind"), [("[]", "a list"), ("3", "a number"), ("null", "null"), ('"x"', "a string")])
def test_json_must_be_an_object(tmp_path, content, kind):
    assert f"must hold a JSON object, not {kind}" in refused(tmp_path, content)


@pytest.mark.parametrize(("field", "value"), [("temperature", "hot"), ("top_k", 2.5), ("top_k", -1), ("eos_token_id", {}), ("top_p", [1])])
def test_bad_generation_config_is_named(tmp_path, field, value):
    message = refused(tmp_path, LLAMA, {field: value})
    assert "generation_config.json" in message
    assert repr(field) in message


def test_paths(tmp_path):
    with pytest.raises(ModelError, match="does not exist"):
        read_model_config(tmp_path / "nothing")
    with pytest.raises(ModelError, match="it is empty"):
        read_model_config(tmp_path)
    write(tmp_path, LLAMA)
    with pytest.raises(ModelError, match=r"no weights .* it holds config\.json"):
        read_model_config(tmp_path)
    with pytest.raises(ModelError, match="not a .gguf file"):
        read_model_config(tmp_path / "config.json")
    (tmp_path / "config.json").rename(tmp_path / "conf.json")
    (tmp_path / "model.safetensors").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"has no config\.json"):
        read_model_config(tmp_path)


# ---------------------------------------------------------------------------------------------------------------------
# GGUF


def gguf(
    folder: Path, architecture: str = "llama", *, tensors: Any = None, tokens: Any = (), drop: tuple[str, ...] = (), **more: Any
) -> ModelConfig:
    metadata = {k: v for k, v in tiny_metadata(**more).items() if k not in drop}
    tensors = tiny_tensors(architecture, np.random.default_rng(0)) if tensors is None else tensors
    return read_model_config(write_gguf(folder / "m.gguf", architecture, metadata, tensors, tokens=tokens))


@pytest.mark.parametrize(
    ("architecture", "name"), [("llama", "LlamaForCausalLM"), ("qwen2", "Qwen2ForCausalLM"), ("qwen3", "Qwen3ForCausalLM")]
)
def test_gguf_architectures(tmp_path, architecture, name):
    config = gguf(tmp_path, architecture)
    assert (config.architecture, config.model_type, config.weights_format) == (name, architecture, "gguf")
    assert (config.vocab_size, config.hidden_size, config.intermediate_size, config.num_layers) == (32, 64, 96, 2)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.max_position) == (4, 2, 16, 128)
    assert config.attention_bias == (architecture == "qwen2")
    assert config.qk_norm == (architecture == "qwen3")
    assert (config.attention_out_bias, config.mlp_bias, config.tie_word_embeddings, config.dtype) == (False, False, False, "bfloat16")
    assert (config.rope.kind, config.rope.theta, config.rope.rotary_dim) == ("default", 10000.0, 16)
    assert read_model_config(tmp_path).path == str(tmp_path / "m.gguf")  # a folder with just that file
    assert read_model_config(tmp_path / "m.gguf", "dummy").weights_format == "dummy"
    with pytest.raises(ModelError, match="--load-format safetensors"):
        read_model_config(tmp_path / "m.gguf", "safetensors")


@pytest.mark.parametrize("type_name", ["F32", "F16", "BF16"])
def test_gguf_dtype_and_ties(tmp_path, type_name):
    dtype = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}[type_name]
    config = gguf(tmp_path, tensors={"token_embd.weight": (np.ones((40, 64)), type_name), "output_norm.weight": (np.ones(64), "F32")})
    assert (config.dtype, config.tie_word_embeddings, config.vocab_size) == (dtype, True, 40)


@pytest.mark.parametrize(
    ("more", "kind", "max_position", "parameters"),
    [
        ({".rope.scaling.type": "none"}, "default", 128, {}),
        ({".rope.scaling.type": "linear", ".rope.scaling.factor": 4.0}, "linear", 512, {"factor": 4.0}),
        ({".rope.scaling.factor": 4.0}, "linear", 512, {"factor": 4.0}),
        ({".rope.scaling.factor": 1.0}, "default", 128, {}),
        ({".rope.scale_linear": 2.0}, "linear", 256, {"factor": 2.0}),
        (
            {
                ".rope.scaling.type": "yarn",
                ".rope.scaling.factor": 4.0,
                ".rope.scaling.original_context_length": 32,
                ".rope.scaling.yarn_beta_fast": 16.0,
            },
            "yarn",
            128,
            {"factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 16.0},
        ),
    ],
)
def test_gguf_rope_scaling(tmp_path, more, kind, max_position, parameters):
    config = gguf(tmp_path, **more)
    assert (config.rope.kind, config.max_position, config.rope.parameters) == (kind, max_position, parameters)


def test_gguf_rope_frequencies_of_llama3(tmp_path):
    """The tensor's divisors, as a longrope table, are the frequencies that transformers computes for kind llama3."""
    transformers = pytest.importorskip("transformers")
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    llama3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 128}
    theirs = transformers.LlamaConfig(**sizes, rope_parameters=llama3 | {"original_max_position_embeddings": 32})
    wanted, _ = ROPE_INIT_FUNCTIONS["llama3"](theirs, None)
    plain = 1.0 / 10000.0 ** (torch.arange(0, 16, 2) / 16)
    tensors = {"rope_freqs.weight": ((plain / wanted).numpy(), "F32"), "token_embd.weight": (np.ones((32, 64)), "F32")}
    config = gguf(tmp_path, tensors=tensors)
    assert (config.rope.kind, config.max_position) == ("longrope", 128)
    ours = transformers.LlamaConfig(
        **sizes, rope_parameters={"rope_type": "longrope", "rope_theta": config.rope.theta, **config.rope.parameters}
    )
    for length in (16, 4096):
        got, attention_factor = ROPE_INIT_FUNCTIONS["longrope"](ours, None, seq_len=length)
        assert attention_factor == 1.0
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=0)


def test_gguf_longrope_and_sliding_window(tmp_path):
    factors = np.linspace(1, 2, 8)
    tensors = {
        "rope_factors_short.weight": (factors, "F32"),
        "rope_factors_long.weight": (factors * 2, "F32"),
        "token_embd.weight": (np.ones((32, 64)), "F32"),
    }
    config = gguf(
        tmp_path,
        tensors=tensors,
        **{".rope.scaling.original_context_length": 32, ".rope.scaling.attn_factor": 1.25, ".attention.sliding_window": 64},
    )
    assert config.rope.kind == "longrope"
    assert config.rope.parameters["attention_factor"] == 1.25
    assert config.rope.parameters["long_factor"] == pytest.approx(factors * 2)
    assert (config.max_position, config.sliding_window, config.sliding_window_layers) == (128, 64, None)


TOKENS = [("a", 1), ("<|endoftext|>", 3), ("<|im_end|>", 3), ("<|eot_id|>", 1), ("<|end|>", 4), ("b", 1)]


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"tokenizer.ggml.eos_token_id": 1}, (1,)),
        ({"tokenizer.ggml.eos_token_id": 1, "tokenizer.ggml.eot_token_id": 3, "tokenizer.ggml.eom_token_id": 5}, (1, 3, 5)),
        ({"tokenizer.ggml.eos_token_id": 1, "tokenizer.chat_template": "{{ x }}"}, (1, 2)),  # only those of type CONTROL
        ({"tokenizer.ggml.eos_token_id": 2, "tokenizer.chat_template": "{{ x }}"}, (2,)),
        ({"tokenizer.ggml.eos_token_id": 4_000_000_000}, ()),
        ({}, ()),
    ],
)
def test_gguf_end_tokens(tmp_path, more, expected):
    config = gguf(tmp_path, tokens=TOKENS, **more)
    assert config.eos_token_ids == expected
    assert "tokenizer.ggml.tokens" not in config.raw or len(TOKENS) <= 64


def test_gguf_sampling_defaults(tmp_path):
    config = gguf(tmp_path, **{"general.sampling.temp": 0.5, "general.sampling.top_k": 20, "tokenizer.ggml.bos_token_id": 3})
    assert config.generation_defaults == {"temperature": 0.5, "top_k": 20}
    assert config.bos_token_id == 3


@pytest.mark.parametrize(
    ("architecture", "more", "words"),
    [
        ("gemma2", {}, ("'gemma2' is not supported", "Supported: llama, qwen2, qwen3")),
        ("llama", {".expert_count": 8}, ("'expert_count'", "mixtures of experts")),
        ("llama", {".attention.value_length": 8}, ("'attention.value_length'", "16")),
        ("llama", {".attention.head_count_kv": [2, 1]}, ("'attention.head_count_kv'", "differs between layers")),
        ("llama", {".attention.head_count_kv": 3}, ("does not divide",)),
        ("llama", {".rope.scaling.type": "spiral", ".rope.scaling.factor": 2.0}, ("'spiral'", "supported: default, linear")),
        (
            "llama",
            {".rope.scaling.type": "yarn", ".rope.scaling.factor": 2.0, ".rope.scaling.attn_factor": 0.5},
            ("'rope.scaling.attn_factor'",),
        ),
        ("llama", {".logit_scale": 0.5}, ("'logit_scale'",)),
        ("llama", {".block_count": "two"}, ("'block_count'", "integer")),
    ],
)
def test_gguf_refusals(tmp_path, architecture, more, words):
    with pytest.raises(ModelError) as caught:
        gguf(tmp_path, architecture, tensors={"token_embd.weight": (np.ones((32, 64)), "F32")}, **more)
    for word in ("m.gguf", *words):
        assert word in str(caught.value)


@pytest.mark.parametrize("key", [".block_count", ".context_length", ".embedding_length", ".feed_forward_length", ".attention.head_count"])
def test_gguf_missing_keys_are_named(tmp_path, key):
    with pytest.raises(ModelError, match=f"{key[1:]}' is missing"):
        gguf(tmp_path, drop=(key,))


def test_gguf_sizes_given_per_layer(tmp_path):
    config = gguf(tmp_path, **{".attention.head_count_kv": [2, 2], ".feed_forward_length": [96, 96]})
    assert (config.num_kv_heads, config.intermediate_size) == (2, 96)
