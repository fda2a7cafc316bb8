"""GGUF metadata → ModelConfig. Key names: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md"""

from __future__ import annotations

from typing import Any

from octavo.errors import ModelError
from octavo.models.config import ModelConfig, RopeConfig
from octavo.models.config_fields import Fields
from octavo.models.config_json import check_heads, effective_window
from octavo.models.config_rope import DEFAULT_THETA, read_rope
from octavo.weights.gguf_file import GgufFile

# GGUF's architecture → ours. Mistral models are architecture llama there.
GGUF_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_CONTROL = 3  # token type of tokens that are never text
_END_OF_TURN = frozenset(["<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|end_of_turn|>"])
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_FOREIGN_SETTINGS = (
    "logit_scale",
    "embedding_scale",
    "residual_scale",
    "attention.scale",
    "attention.clamp_kqv",
    "attention.max_alibi_bias",
)


def read_gguf_config(path: str, weights_format: str) -> ModelConfig:
    """Read a GGUF file's configuration.

    Raises:
        ModelError: a file that cannot be read; a key that is missing or of the wrong type; anything unsupported.
    """
    file = GgufFile(path)
    general = Fields(file, path)
    name = general.text("general.architecture")
    if name not in GGUF_ARCHITECTURES:
        raise ModelError(f"{path}: GGUF architecture {name!r} is not supported. Supported: {', '.join(GGUF_ARCHITECTURES)}.")
    prefix = name + "."
    config = Fields({key.removeprefix(prefix): file[key] for key in file if key.startswith(prefix)}, f"{path}, {name}.*")
    _refuse_unsupported(config)

    num_layers = config.integer("block_count")
    hidden_size = config.integer("embedding_length")
    num_heads = _same_everywhere(config, "attention.head_count")
    num_kv_heads = _same_everywhere(config, "attention.head_count_kv", num_heads)
    check_heads(config, num_heads, num_kv_heads)
    head_dim = _head_dim(config, hidden_size, num_heads)
    rope, max_position = _rope(file, config, head_dim)
    window = config.integer("attention.sliding_window", 0, minimum=0) or None
    sliding_window, _ = effective_window(window, None, num_layers, max_position)
    vocab_size = _vocab_size(file, config)

    return ModelConfig(
        path=file.path,
        weights_format=weights_format,
        architecture=GGUF_ARCHITECTURES[name],
        model_type=name,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=_same_everywhere(config, "feed_forward_length"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position=max_position,
        norm_eps=config.number("attention.layer_norm_rms_epsilon", above=0),
        hidden_act="silu",
        rope=rope,
        tie_word_embeddings="output.weight" not in file.tensors,
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        attention_out_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_up.bias" in file.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
        sliding_window=sliding_window,
        dtype=_dtype(file),
        bos_token_id=_token_id(general, "tokenizer.ggml.bos_token_id"),
        eos_token_ids=_eos_token_ids(file, general, vocab_size),
        generation_defaults=_generation_defaults(general),
        raw=file.small_metadata(),
    )


def _refuse_unsupported(config: Fields) -> None:
    if config.integer("expert_count", 0, minimum=0) > 1:
        raise config.error("expert_count", f"is {config.values['expert_count']}: mixtures of experts are not supported; dense models are")
    for name in _FOREIGN_SETTINGS:
        if config.values.get(name) not in (None, 0, 1):
            raise config.error(name, f"is {config.values[name]!r}, which is not supported")


def _same_everywhere(config: Fields, name: str, default: int | None = None) -> int:
    """A size that GGUF may give per layer; layers must agree."""
    value = config.values.get(name)
    if isinstance(value, list):
        if len(set(value)) != 1:
            raise config.error(name, "differs between layers, which is not supported")
        return Fields({name: value[0]}, config.where).integer(name)
    return config.integer(name, default)


def _head_dim(config: Fields, hidden_size: int, num_heads: int) -> int:
    if not config.has("attention.key_length"):
        if hidden_size % num_heads:
            raise config.error("embedding_length", f"is {hidden_size}, which attention.head_count {num_heads} does not divide")
        return hidden_size // num_heads
    head_dim = config.integer("attention.key_length")
    if config.integer("attention.value_length", head_dim) != head_dim:
        raise config.error("attention.value_length", f"differs from attention.key_length {head_dim}, which is not supported")
    return head_dim


def _rope(file: GgufFile, config: Fields, head_dim: int) -> tuple[RopeConfig, int]:
    """Translate to the names that Hugging Face's configurations use, and read them as such.

    Llama 3's scaling has been turned into numbers by the converter: tensor ``rope_freqs.weight`` holds a divisor for
    every frequency. LongRoPE is just that (one set of divisors up to the trained length and one beyond), so such a
    file becomes kind longrope with both sets equal and an attention factor of 1: the same table, exactly.
    """
    max_position = config.integer("context_length")
    section: dict[str, Any] = {"rope_theta": config.number("rope.freq_base", DEFAULT_THETA, above=0)}
    section["partial_rotary_factor"] = config.integer("rope.dimension_count", head_dim) / head_dim
    kind, factor = _scaling(config)
    frequencies = file.read_float32("rope_freqs.weight")
    short, long = file.read_float32("rope_factors_short.weight"), file.read_float32("rope_factors_long.weight")
    if frequencies is not None:
        if kind not in ("none", "llama3"):
            raise config.error("rope.scaling.type", f"is {kind!r} beside a tensor rope_freqs.weight, which is not supported")
        section |= {
            "rope_type": "longrope",
            "short_factor": frequencies,
            "long_factor": frequencies,
            "factor": 1.0,
            "attention_factor": 1.0,
        }
    elif short is not None and long is not None:
        section |= {"rope_type": "longrope", "short_factor": short, "long_factor": long}
        section |= _renamed(config, {"attn_factor": "attention_factor", "original_context_length": "original_max_position_embeddings"})
    elif kind != "none":
        section |= {"rope_type": kind, "factor": factor}
        section |= _renamed(config, {"original_context_length": "original_max_position_embeddings"})
    if kind == "yarn":
        section |= _renamed(config, {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"})
        for name in ("attn_factor", "yarn_attn_factor", "yarn_ext_factor"):
            if config.number(f"rope.scaling.{name}", 1.0) != 1:
                raise config.error(f"rope.scaling.{name}", f"is {config.values[f'rope.scaling.{name}']!r}; for yarn, 1 is supported")
    return read_rope(Fields({"rope_parameters": section}, config.where), head_dim=head_dim, max_position=max_position)


def _scaling(config: Fields) -> tuple[str, float]:
    """(kind, factor). As in llama.cpp: a factor without a kind means linear, and files of 2023 call it scale_linear."""
    factor = config.number("rope.scaling.factor", config.number("rope.scale_linear", 1.0), above=0)
    kind = config.text("rope.scaling.type", "linear" if factor != 1 else "none")
    return ("none", 1.0) if kind == "linear" and factor == 1 else (kind, factor)


def _renamed(config: Fields, names: dict[str, str]) -> dict[str, Any]:
    """The ``rope.scaling.*`` values that are present, under Hugging Face's names."""
    return {name: config.values[f"rope.scaling.{key}"] for key, name in names.items() if config.has(f"rope.scaling.{key}")}


def _vocab_size(file: GgufFile, config: Fields) -> int:
    """Rows of the embedding: metadata may leave out padding rows, or be absent."""
    embedding = file.tensors.get("token_embd.weight")
    if embedding is not None:
        return embedding.shape[0]
    return config.integer("vocab_size", file.array_length("tokenizer.ggml.tokens"))


def _dtype(file: GgufFile) -> str:
    """The embedding's type for unquantized files; bfloat16 for quantized ones, whose originals nearly all had it."""
    kinds = {t.type_name for t in file.tensors.values() if len(t.shape) > 1}
    return _DTYPES[kinds.pop()] if len(kinds) == 1 and kinds <= _DTYPES.keys() else "bfloat16"


def _token_id(general: Fields, key: str) -> int | None:
    return general.integer(key, minimum=0) if general.has(key) else None


def _eos_token_ids(file: GgufFile, general: Fields, vocab_size: int) -> tuple[int, ...]:
    """The file's end token, its end-of-turn and end-of-message tokens, and, in chat models, control tokens that end a turn.

    The last are needed because many files name only ``<|endoftext|>`` as their end although the template ends turns
    with ``<|im_end|>``.
    """
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = [i for key in keys if (i := _token_id(general, f"tokenizer.ggml.{key}")) is not None]
    tokens, types = file.get("tokenizer.ggml.tokens"), file.get("tokenizer.ggml.token_type")
    if tokens and types and general.has("tokenizer.chat_template"):
        ids += [i for i, (token, kind) in enumerate(zip(tokens, types)) if kind == _CONTROL and token in _END_OF_TURN]
    return tuple(dict.fromkeys(i for i in ids if i < vocab_size))


def _generation_defaults(general: Fields) -> dict[str, Any]:
    """``general.sampling.*``, which newer converters copy out of generation_config.json."""
    names = {"temp": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p", "penalty_repeat": "repetition_penalty"}
    defaults: dict[str, Any] = {}
    for key, name in names.items():
        field = f"general.sampling.{key}"
        if general.has(field):
            defaults[name] = general.integer(field, minimum=0) if name == "top_k" else general.number(field)
    return defaults
