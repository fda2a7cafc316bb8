"""config.json (+ generation_config.json) → ModelConfig."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.errors import ModelError
from octavo.models.config import ModelConfig
from octavo.models.config_bert import ENCODERS, read_encoder_config
from octavo.models.config_fields import Fields, read_json_object
from octavo.models.config_rope import read_rope
from octavo.models.pooling import read_pooling
from octavo.weights.files import describe_folder, stored_dtype

HIDDEN_ACTS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_pytorch_tanh"}
DTYPES = {"float32": "float32", "float": "float32", "float16": "float16", "half": "float16", "bfloat16": "bfloat16"}
_SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_EXPERT_FIELDS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts")
# Settings of relatives that share these class names; ignoring one would give wrong tokens without a word.
_FOREIGN_SETTINGS = (
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "logits_scaling",
    "attention_multiplier",
    "embedding_multiplier",
    "residual_multiplier",
    "clip_qkv",
    "no_rope_layers",
    "use_mrope",
    "alibi",
)


@dataclass(frozen=True)
class Family:
    """What an architecture fixes or adds beside the shared fields; the defaults are transformers' for absent fields."""

    model_type: str
    biases: Callable[[Fields], dict[str, bool]]
    sliding_window: Callable[[Fields, int], tuple[int | None, tuple[int, ...] | None]]
    qk_norm: bool = False
    head_dim: int | None = None  # None: hidden_size / num_heads


def _llama_biases(config: Fields) -> dict[str, bool]:
    attention = config.boolean("attention_bias", False)
    return {"attention_bias": attention, "attention_out_bias": attention, "mlp_bias": config.boolean("mlp_bias", False)}


def _qwen3_biases(config: Fields) -> dict[str, bool]:
    attention = config.boolean("attention_bias", False)
    return {"attention_bias": attention, "attention_out_bias": attention}


def _no_biases(config: Fields) -> dict[str, bool]:
    for name in ("attention_bias", "mlp_bias"):
        if config.boolean(name, False):
            raise config.error(name, "is true, which this architecture does not have")
    return {}


def _qkv_bias(config: Fields) -> dict[str, bool]:
    return {"attention_bias": True}


def _no_sliding_window(config: Fields, num_layers: int) -> tuple[int | None, tuple[int, ...] | None]:
    """Llama ignores ``sliding_window`` (conversions from Mistral carry it along), as transformers does; ``layer_types`` it means."""
    layers = _layers_of_types(config, num_layers)
    return (config.integer("sliding_window"), layers) if layers else (None, None)


def _mistral_sliding_window(config: Fields, num_layers: int) -> tuple[int | None, tuple[int, ...] | None]:
    """Every layer slides. An absent field means 4096, null means none: v0.1 relies on the first, v0.2 on the second."""
    if "sliding_window" in config.values and not config.has("sliding_window"):
        return None, None
    layers = _layers_of_types(config, num_layers)
    return (None, None) if layers == () else (config.integer("sliding_window", 4096), layers)


def _qwen_sliding_window(config: Fields, num_layers: int) -> tuple[int | None, tuple[int, ...] | None]:
    """Off unless ``use_sliding_window``; then the layers from ``max_window_layers`` on slide, or those of ``layer_types``."""
    if not config.boolean("use_sliding_window", False) or ("sliding_window" in config.values and not config.has("sliding_window")):
        return None, None
    layers = _layers_of_types(config, num_layers)
    if layers is None:
        layers = tuple(range(min(config.integer("max_window_layers", 28, minimum=0), num_layers), num_layers))
    return (config.integer("sliding_window", 4096), layers) if layers else (None, None)


def _layers_of_types(config: Fields, num_layers: int) -> tuple[int, ...] | None:
    """Indices of the sliding layers that ``layer_types`` names; None when the field is absent."""
    types = config.strings("layer_types")
    if types is None:
        return None
    unknown = sorted(set(types) - {"full_attention", "sliding_attention"})
    if unknown:
        raise config.error("layer_types", f"holds {', '.join(unknown)}; supported: full_attention, sliding_attention")
    if len(types) != num_layers:
        raise config.error("layer_types", f"has {len(types)} entries for {num_layers} layers")
    return tuple(i for i, kind in enumerate(types) if kind == "sliding_attention")


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family("llama", _llama_biases, _no_sliding_window),
    "MistralForCausalLM": Family("mistral", _no_biases, _mistral_sliding_window),
    "Qwen2ForCausalLM": Family("qwen2", _qkv_bias, _qwen_sliding_window),
    "Qwen3ForCausalLM": Family("qwen3", _qwen3_biases, _qwen_sliding_window, qk_norm=True, head_dim=128),
}

# Decoders whose checkpoints hold no output head: embedding models. They are built with the embeddings as their head.
HEADLESS = {name.replace("ForCausalLM", "Model"): name for name in FAMILIES}
_SUPPORTED = (*FAMILIES, *HEADLESS, *ENCODERS)


def read_json_config(folder: str, weights_format: str) -> ModelConfig:
    """Read a folder's configuration.

    Raises:
        ModelError: no config.json; bad JSON; a field that is missing or of the wrong type; anything unsupported.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ModelError(f"{folder} has no config.json: {describe_folder(folder)}.")
    raw = read_json_object(path)
    config = Fields(raw, str(path))
    named = _architecture(config)
    _refuse_unsupported(config)
    if named in ENCODERS:
        return read_encoder_config(config, named, folder, weights_format, _dtype(config, folder))
    architecture = HEADLESS.get(named, named)
    family = FAMILIES[architecture]

    num_layers = config.integer("num_hidden_layers")
    hidden_size = config.integer("hidden_size")
    num_heads = config.integer("num_attention_heads")
    num_kv_heads = config.integer("num_key_value_heads", num_heads)
    check_heads(config, num_heads, num_kv_heads)
    head_dim = _head_dim(config, family, hidden_size, num_heads)
    rope, max_position = read_rope(config, head_dim=head_dim, max_position=config.integer("max_position_embeddings"))
    window, window_layers = effective_window(*family.sliding_window(config, num_layers), num_layers, max_position)
    vocab_size = config.integer("vocab_size")
    eos_token_ids, generation_defaults = _generation(Path(folder), config, vocab_size)

    return ModelConfig(
        path=folder,
        weights_format=weights_format,
        architecture=architecture,
        model_type=config.text("model_type", family.model_type),
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position=max_position,
        norm_eps=config.number("rms_norm_eps", 1e-6, above=0),
        hidden_act=_hidden_act(config),
        rope=rope,
        tie_word_embeddings=named in HEADLESS or config.boolean("tie_word_embeddings", False),
        headless=named in HEADLESS,
        pooling=read_pooling(folder),
        **family.biases(config),
        qk_norm=family.qk_norm,
        sliding_window=window,
        sliding_window_layers=window_layers,
        dtype=_dtype(config, folder),
        bos_token_id=next(iter(config.token_ids("bos_token_id")), None),
        eos_token_ids=eos_token_ids,
        generation_defaults=generation_defaults,
        raw=raw,
    )


def _architecture(config: Fields) -> str:
    names = config.strings("architectures")
    if not names:
        raise config.error("architectures", f"is missing; supported: {', '.join(_SUPPORTED)}")
    if (name := next((n for n in names if n in _SUPPORTED), None)) is not None:
        return name
    why = ""
    if any(config.has(key) for key in ("text_config", "vision_config", "audio_config", "thinker_config")):
        why = " It wraps a language model together with other modalities, which is not supported."
    elif any(config.has(key) for key in _EXPERT_FIELDS):
        why = " It is a mixture of experts, which is not supported."
    raise ModelError(f"{config.where}: architecture {', '.join(names)} is not supported.{why} Supported: {', '.join(_SUPPORTED)}.")


def _refuse_unsupported(config: Fields) -> None:
    quantization = config.object("quantization_config") or config.object("compression_config")
    if quantization is not None and quantization.values:
        method = quantization.text("quant_method", "unknown")
        raise config.error(
            "quantization_config",
            f"asks for quantization method {method!r}, which is not supported yet; use the unquantized model, or a GGUF file of it",
        )
    for name in _EXPERT_FIELDS:
        if config.has(name) and config.values[name] not in (0, 1):
            raise config.error(name, f"is {config.values[name]!r}: mixtures of experts are not supported; dense models are")
    for name in _FOREIGN_SETTINGS:
        if config.values.get(name) not in (None, False, 1.0, 1, []):
            raise config.error(name, f"is {config.values[name]!r}, which is not supported; leave out or null is")
    code = config.object("auto_map")
    if code is not None and code.has("AutoModelForCausalLM"):
        raise config.error(
            "auto_map", "points to model code inside the checkpoint, which Octavo never runs; only the built-in architectures are supported"
        )


def check_heads(config: Fields, num_heads: int, num_kv_heads: int) -> None:
    if num_heads % num_kv_heads:
        raise config.error("num_key_value_heads", f"is {num_kv_heads}, which does not divide num_attention_heads {num_heads}")


def _head_dim(config: Fields, family: Family, hidden_size: int, num_heads: int) -> int:
    if config.has("head_dim") or family.head_dim:
        return config.integer("head_dim", family.head_dim)
    if hidden_size % num_heads:
        raise config.error(
            "hidden_size", f"is {hidden_size}, which num_attention_heads {num_heads} does not divide (and there is no head_dim)"
        )
    return hidden_size // num_heads


def effective_window(
    window: int | None, layers: tuple[int, ...] | None, num_layers: int, max_position: int
) -> tuple[int | None, tuple[int, ...] | None]:
    """Drop a window that no context reaches; all layers listed is the same as None."""
    if window is None or window >= max_position:
        return None, None
    return window, None if layers is not None and len(layers) == num_layers else layers


def _hidden_act(config: Fields) -> str:
    name = config.text("hidden_act", "silu")
    if name not in HIDDEN_ACTS:
        raise config.error("hidden_act", f"is {name!r}, which is not supported; supported: {', '.join(HIDDEN_ACTS)}")
    return HIDDEN_ACTS[name]


def _dtype(config: Fields, folder: str) -> str:
    """``dtype`` (transformers 5) or ``torch_dtype``; without either, what the weight files hold."""
    field = "dtype" if config.has("dtype") else "torch_dtype"
    stored = "bfloat16" if config.has(field) else stored_dtype(folder) or "bfloat16"
    name = config.text(field, stored).removeprefix("torch.")
    if name not in DTYPES:
        raise config.error(field, f"is {name!r}, which is not supported; supported: {', '.join(DTYPES)}")
    return DTYPES[name]


def _generation(folder: Path, config: Fields, vocab_size: int) -> tuple[tuple[int, ...], dict[str, Any]]:
    """(EOS ids of both files, generation_config.json's first; sampling defaults under ``SamplingParams``' names).

    Ids outside of the vocabulary (placeholders such as -1) can never be drawn and are left out.
    """
    path = folder / "generation_config.json"
    generation = Fields(read_json_object(path) if path.is_file() else {}, str(path))
    ids = generation.token_ids("eos_token_id") + config.token_ids("eos_token_id")
    defaults: dict[str, Any] = {}
    for name in _SAMPLING_DEFAULTS:
        if generation.has(name):
            defaults[name] = generation.integer(name, minimum=0) if name == "top_k" else generation.number(name)
    return tuple(dict.fromkeys(i for i in ids if 0 <= i < vocab_size)), defaults
