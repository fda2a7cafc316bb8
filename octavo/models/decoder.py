"""The decoder that most dense models share: pre-norm layers of attention and a gated MLP.

    embed -> [norm -> qkv -> attention -> o -> norm -> gate/up -> act -> down] * layers -> norm
             ╰ every norm also adds what came before it to the residual stream ╯

A model file states only how its family differs. What a checkpoint may vary (biases, QK-norm, tied embeddings, sliding
windows, RoPE) is in its ModelConfig and handled here. Module names follow the checkpoints', so that weights find their places.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from octavo.attention.base import AttentionLayerSpec, ForwardContext
from octavo.distributed.group import Group
from octavo.errors import ModelError
from octavo.layers.activation import gated_activation
from octavo.layers.attention import Attention
from octavo.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from octavo.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from octavo.layers.norm import RMSNorm
from octavo.layers.rope import make_rope_table
from octavo.models.config import ModelConfig
from octavo.quantization.base import LinearScheme


@dataclass(frozen=True)
class Build:
    """What every module of a model is built with. Modules come to life on the current default device (torch.device context).

    ``max_model_len`` is the longest sequence served, and so the RoPE table's length.
    """

    config: ModelConfig
    group: Group
    scheme: LinearScheme
    dtype: torch.dtype
    max_model_len: int


class SelfAttention(nn.Module):
    """norm -> qkv -> (QK-norm, RoPE, KV write, attention) in the backend -> o."""

    def __init__(self, build: Build, layer_index: int, rope_table: torch.Tensor | None) -> None:
        super().__init__()
        config = build.config
        common = {"group": build.group, "scheme": build.scheme, "dtype": build.dtype}
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size, config.head_dim, config.num_heads, config.num_kv_heads, bias=config.attention_bias, **common
        )
        self.o_proj = RowParallelLinear(config.num_heads * config.head_dim, config.hidden_size, bias=config.attention_out_bias, **common)
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.norm_eps, build.dtype)
            self.k_norm = RMSNorm(config.head_dim, config.norm_eps, build.dtype)
        self.attn = Attention(
            AttentionLayerSpec(
                layer_index=layer_index,
                num_heads=self.qkv_proj.num_heads,
                num_kv_heads=self.qkv_proj.num_kv_heads,
                head_dim=config.head_dim,
                scale=config.head_dim**-0.5,
                rope_cos_sin=rope_table,
                q_norm=self.q_norm.weight.data if config.qk_norm else None,
                k_norm=self.k_norm.weight.data if config.qk_norm else None,
                norm_eps=config.norm_eps,
                sliding_window=layer_window(build, layer_index),
            )
        )

    def forward(
        self, norm: RMSNorm, x: torch.Tensor, residual: torch.Tensor | None, context: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        qkv, residual = self.qkv_proj.after_norm(norm, x, residual)
        return self.o_proj(self.attn(qkv, context)), residual


class GatedMLP(nn.Module):
    """norm -> down(act(gate(x)) * up(x)), gate and up in one product."""

    def __init__(self, build: Build) -> None:
        super().__init__()
        config = build.config
        common = {"bias": config.mlp_bias, "group": build.group, "scheme": build.scheme, "dtype": build.dtype}
        width = config.intermediate_size
        self.gate_up_proj = MergedColumnParallelLinear(config.hidden_size, {"gate_proj": width, "up_proj": width}, **common)
        self.down_proj = RowParallelLinear(width, config.hidden_size, **common)
        self.act = gated_activation(config.hidden_act)

    def forward(self, norm: RMSNorm, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        activated, residual = self.gate_up_proj.after_norm(norm, x, residual, gated=self.act)
        return self.down_proj(activated), residual


class DecoderLayer(nn.Module):
    """x, residual [T, H] -> the same; the residual stream is x + residual (x alone before the first layer)."""

    def __init__(self, build: Build, layer_index: int, rope_table: torch.Tensor | None) -> None:
        super().__init__()
        config = build.config
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps, build.dtype)
        self.self_attn = SelfAttention(build, layer_index, rope_table)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps, build.dtype)
        self.mlp = GatedMLP(build)

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None, context: ForwardContext) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = self.self_attn(self.input_layernorm, x, residual, context)
        return self.mlp(self.post_attention_layernorm, x, residual)


class Decoder(nn.Module):
    """token_ids int64 [T] -> hidden [T, H] after the last norm."""

    layer_class: type[DecoderLayer] = DecoderLayer

    def __init__(self, build: Build) -> None:
        super().__init__()
        config = build.config
        table = make_rope_table(config.rope, build.max_model_len).to(torch.get_default_device())
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, group=build.group, dtype=build.dtype)
        self.layers = nn.ModuleList(self.layer_class(build, i, table) for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, build.dtype)

    def forward(self, token_ids: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        x, residual = self.embed_tokens(token_ids), None
        for layer in self.layers:
            x, residual = layer(x, residual, context)
        return self.norm(x, residual)[0]


class DecoderForCausalLM(nn.Module):
    """A decoder with an output head: the interface that the model runner uses.

    ``ignored_weights``: endings of checkpoint names that carry nothing to load. They are skipped; any other name that has no
    place in the model is an error.
    """

    decoder_class: type[Decoder] = Decoder
    ignored_weights: tuple[str, ...] = (".rotary_emb.inv_freq",)

    def __init__(self, build: Build) -> None:
        super().__init__()
        config = build.config
        self.config = config
        self.model = self.decoder_class(build)
        self.lm_head = ParallelLMHead(
            config.vocab_size,
            config.hidden_size,
            group=build.group,
            scheme=build.scheme,
            dtype=build.dtype,
            tied=self.model.embed_tokens if config.tie_word_embeddings else None,
        )
        if config.tie_word_embeddings:
            self.ignored_weights = (*self.ignored_weights, "lm_head.weight")

    @staticmethod
    def checkpoint_name(name: str) -> str:
        """Embedding models are often stored without their head, and then without the prefix too."""
        return f"model.{name}" if name.startswith(("layers.", "embed_tokens.", "norm.")) else name

    def forward(self, token_ids: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """token_ids int64 [T] -> hidden [T, H], after the last norm."""
        return self.model(token_ids, context)

    def compute_logits(self, hidden: torch.Tensor, *, raw: bool = False) -> torch.Tensor:
        """hidden [R, H] -> float32 [R, vocab_size], whole on every rank; ``raw``: the same values in the model's own type."""
        return self.lm_head(hidden, raw=raw)

    @property
    def attention_layers(self) -> list[AttentionLayerSpec]:
        """One spec per attention layer; position = ``layer_index`` = index of the KV cache."""
        return [module.spec for module in self.modules() if isinstance(module, Attention)]


def layer_window(build: Build, layer_index: int) -> int | None:
    """The layer's sliding window, or None where it attends to everything that can be served."""
    config = build.config
    window, layers = config.sliding_window, config.sliding_window_layers
    if window is None or window >= build.max_model_len or (layers is not None and layer_index not in layers):
        return None
    return window


def check_config(config: ModelConfig) -> None:
    """ModelError for dimensions that no decoder can have; what only parallelism forbids is found where layers are cut."""
    for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim"):
        if getattr(config, name) < 1:
            raise ModelError(f"The model's configuration gives {name} = {getattr(config, name)}; it must be at least 1.")
    if config.num_heads % config.num_kv_heads:
        raise ModelError(f"{config.num_heads} attention heads can't share {config.num_kv_heads} KV heads evenly.")
    if config.rope.rotary_dim > config.head_dim:
        raise ModelError(f"RoPE's rotary dimension {config.rope.rotary_dim} is larger than the head dimension {config.head_dim}.")
