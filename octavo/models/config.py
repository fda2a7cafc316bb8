"""A model's configuration, read from config.json or GGUF metadata into one typed form. Never imports torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


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
    raw: dict[str, Any] = field(default_factory=dict)  # config.json, or GGUF metadata without the token lists
