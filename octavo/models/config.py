"""A model's configuration, read from config.json or GGUF metadata into one typed form. Never imports torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.errors import ModelError

if TYPE_CHECKING:
    from octavo.models.pooling import PoolingConfig


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding.

    ``kind``: default, linear, dynamic, llama3, yarn, longrope. ``parameters`` are the checkpoint's own, under the names
    that Hugging Face's configurations use (factor, low_freq_factor, original_max_position_embeddings …).
    """

    theta: float = 10000.0
    kind: str = "default"
    rotary_dim: int = 0  # set to head_dim (times partial_rotary_factor) by the reader
    parameters: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What the engine and the front end know of a model before its weights are read."""

    path: str  # folder or .gguf file
    weights_format: str  # safetensors, gguf, dummy
    architecture: str  # e.g. LlamaForCausalLM
    model_type: str  # e.g. llama
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int  # longest context that the checkpoint supports, rope scaling counted
    norm_eps: float
    hidden_act: str
    rope: RopeConfig
    tie_word_embeddings: bool
    attention_bias: bool = False  # on q, k, v
    attention_out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    sliding_window_layers: tuple[int, ...] | None = None  # None: every layer, if sliding_window is set
    dtype: str = "bfloat16"  # the checkpoint's own
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    generation_defaults: dict[str, Any] = field(default_factory=dict)  # temperature, top_p, top_k, repetition_penalty …
    encoder: bool = False  # attends both ways and generates nothing: run for its hidden states, without a KV cache
    headless: bool = False  # a decoder whose checkpoint has no output head
    position_offset: int = 0  # of an encoder's first position in its table
    type_vocab_size: int = 0
    pooling: PoolingConfig | None = None  # what the model's files say of embeddings
    raw: dict[str, Any] = field(default_factory=dict)  # config.json, or GGUF metadata without the token lists


def read_model_config(path: str | Path, load_format: str = "auto") -> ModelConfig:
    """Read the configuration of a model folder or .gguf file.

    A folder is read by its config.json and generation_config.json when it holds safetensors, and by the metadata of
    its GGUF file when it holds one of those only (``ModelConfig.path`` is then that file). ``load_format`` as in
    ``ModelOptions``: ``dummy`` needs no weights.

    Raises:
        ModelError: something is missing (named), malformed (file and field named), or unsupported (with what is
            supported).
    """
    from octavo.models.config_gguf import read_gguf_config
    from octavo.models.config_json import read_json_config
    from octavo.weights.files import find_weights

    path = Path(path)
    if path.is_dir():
        if load_format == "dummy" and (path / "config.json").is_file():
            return read_json_config(str(path), "dummy")
        found, weights_format = find_weights(path, "gguf" if load_format == "dummy" else load_format)
        if weights_format == "safetensors":
            return read_json_config(found, weights_format)
        return read_gguf_config(found, "dummy" if load_format == "dummy" else "gguf")
    if not path.is_file():
        raise ModelError(f"{path} does not exist; a model is a folder with config.json and weights, or a .gguf file.")
    if path.suffix.lower() != ".gguf":
        raise ModelError(f"{path} is not a .gguf file; for other formats pass the folder that holds config.json and the weights.")
    if load_format == "safetensors":
        raise ModelError(f"{path} is a GGUF file, but --load-format safetensors was asked for; use auto or gguf.")
    return read_gguf_config(str(path), "dummy" if load_format == "dummy" else "gguf")
