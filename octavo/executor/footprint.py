"""What serving a model takes, part by part, computed from its configuration alone: before anything is loaded.

Weights and KV cache are exact. The rest counts the tensors that are known to exist at the worst moment of the heaviest step,
so a shortage that it finds is one; what the step really takes is measured later (``profile.py``).
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.config import EngineConfig
from octavo.executor.step_sizes import GRAPH_PROMPT_TOKENS
from octavo.models.config import ModelConfig

MIB = 2**20
LOGITS_CHUNK = 256  # prompt positions whose logits exist at the same time, for prompt_logprobs
# What the driver takes for captured steps, some 6 MiB each: this share of the GPU's memory, up to a bound.
GRAPH_SHARE, MOST_GRAPHS = 128, 1024 * MIB
SLACK = 256 * MIB  # allocator fragmentation and libraries' workspaces made later
CPU_SLACK = 64 * MIB
SWAP_STAGING = {"cuda": 64 * MIB, "cpu": 8 * MIB}
LOGPROBS_ELEMENTS = 2**24  # logits that log-probabilities are computed of at a time
_LOGPROBS_BYTES = 24  # beside each of them
LINEAR_BYTES = {"fp8": 1.0, "int8": 1.0, "int4": 0.5625, "awq": 0.5625, "gptq": 0.5625}  # a weight of a quantized linear layer
_LEAST_LINEAR_BYTES = 0.5  # of a checkpoint whose scheme isn't in that table


def graph_bytes(total: int) -> int:
    """What is left for the driver's part of captured steps, of a GPU with ``total`` bytes."""
    return min(total // GRAPH_SHARE, MOST_GRAPHS)


def staging_bytes(block_bytes: int, device_type: str) -> int:
    """What swapped blocks pass through on the device: at least one block."""
    return max(SWAP_STAGING[device_type] // block_bytes, 1) * block_bytes


@dataclass(frozen=True)
class Footprint:
    """Bytes by use, on one rank.

    ``step``: activations of one step at the token budget, or its logits and sampling, whichever is more, and what sampling
    keeps. ``graphs``: private memory of captured steps. ``kv``: the smallest KV cache that serves, or the one asked for.
    """

    weights: int
    step: int
    graphs: int
    slack: int
    kv: int

    @property
    def fixed(self) -> int:
        """Everything but the KV cache."""
        return self.weights + self.step + self.graphs + self.slack

    @property
    def total(self) -> int:
        return self.fixed + self.kv


@dataclass(frozen=True)
class Sizes:
    """The model's widths on one of ``ranks`` ranks: heads * head_dim of queries and of keys, MLP, vocabulary."""

    query: int
    kv: int
    mlp: int
    vocab: int

    @classmethod
    def of(cls, model: ModelConfig, ranks: int = 1) -> Sizes:
        return cls(
            query=-(-model.num_heads // ranks) * model.head_dim,
            kv=max(1, model.num_kv_heads // ranks) * model.head_dim,
            mlp=-(-model.intermediate_size // ranks),
            vocab=-(-model.vocab_size // ranks),
        )


def linear_bytes(config: EngineConfig, model: ModelConfig, dtype_bytes: int) -> float:
    """Bytes of one weight of a linear layer; the least possible where a checkpoint's scheme isn't known here."""
    if config.quantization not in (None, "none"):
        return LINEAR_BYTES.get(config.quantization, _LEAST_LINEAR_BYTES)
    scheme = model.raw.get("quantization_config") if isinstance(model.raw, dict) else None
    if isinstance(scheme, dict) and config.load_format != "dummy":
        return LINEAR_BYTES.get(str(scheme.get("quant_method")), _LEAST_LINEAR_BYTES)
    return dtype_bytes


def weight_bytes(
    model: ModelConfig, dtype_bytes: int, *, max_model_len: int, linear: float | None = None, ranks: int = 1, packed_head: bool = False
) -> int:
    """Bytes of the model's parameters and RoPE table on one rank.

    ``linear``: bytes of a linear layer's weight (None: dtype_bytes). ``packed_head``: tied embeddings are there twice, as a table
    and rearranged for the head (CPU).
    """
    sizes, hidden = Sizes.of(model, ranks), model.hidden_size
    products = hidden * (2 * sizes.query + 2 * sizes.kv + 3 * sizes.mlp)
    vectors = 2 * hidden + (2 * model.head_dim if model.qk_norm else 0)
    vectors += (sizes.query + 2 * sizes.kv) * model.attention_bias + hidden * model.attention_out_bias
    vectors += (2 * sizes.mlp + hidden) * model.mlp_bias
    tables = 1 if model.tie_word_embeddings and not packed_head else 2
    plain = model.num_layers * vectors + tables * sizes.vocab * hidden + hidden
    in_linears = int(model.num_layers * products * (dtype_bytes if linear is None else linear))
    return in_linears + plain * dtype_bytes + 4 * max_model_len * model.rope.rotary_dim


def activation_bytes(model: ModelConfig, tokens: int, dtype_bytes: int, ranks: int = 1) -> int:
    """What a layer has in memory at its worst moment: in the MLP, or between the KV write and the attention's product."""
    sizes = Sizes.of(model, ranks)
    widest = max(3 * sizes.mlp, 2 * sizes.query + 2 * sizes.kv)
    return tokens * (dtype_bytes * (4 * model.hidden_size + widest) + 32)  # 32: ids, positions, slots


def sampling_bytes(model: ModelConfig, rows: int, tokens: int, max_model_len: int, dtype_bytes: int) -> tuple[int, int]:
    """(for the moment, kept) with ``rows`` rows that use every option; ``tokens`` of hidden states are still there."""
    logits = rows * model.vocab_size
    scratch = min(logits, LOGPROBS_ELEMENTS) * _LOGPROBS_BYTES
    penalties = rows * max_model_len * 32  # ids, old and new logits and counts of the tokens that a row's penalties touch
    hidden = tokens * model.hidden_size * dtype_bytes
    drawn = logits * (dtype_bytes + 8) + max(scratch, penalties)  # float32, and as they were before penalties
    scored = LOGITS_CHUNK * model.vocab_size * (dtype_bytes + 4) + scratch
    allowed = logits // 8  # a bit a token
    return hidden + max(drawn, scored) + allowed, 4 * rows * (model.vocab_size + max_model_len) + allowed


def footprint(
    config: EngineConfig,
    model: ModelConfig,
    *,
    max_model_len: int,
    dtype_bytes: int,
    on_cpu: bool,
    ranks: int = 1,
) -> Footprint:
    """What ``config`` needs to serve sequences of ``max_model_len`` tokens."""
    rows = config.rows
    tokens = config.token_budget(max_model_len, "cpu" if on_cpu else "cuda")
    if on_cpu:  # nothing is set aside there for options that few requests use
        moment, kept = rows * model.vocab_size * (dtype_bytes + 4), 0
    else:
        moment, kept = sampling_bytes(model, rows, tokens, max_model_len, dtype_bytes)
    step = max(activation_bytes(model, tokens, dtype_bytes, ranks), moment) + kept
    graphs = 0
    if not on_cpu and not config.enforce_eager:
        logits = rows * model.vocab_size * (dtype_bytes + 8)  # as the head makes them, in float32, and where graphs leave them
        graphs = activation_bytes(model, GRAPH_PROMPT_TOKENS + rows, dtype_bytes, ranks) + logits
    block = kv_block_bytes(model, config.block_size, dtype_bytes, max(1, model.num_kv_heads // ranks))
    staging = staging_bytes(block, "cuda") if config.swap_space and not on_cpu else 0  # auto may come to nothing
    return Footprint(
        weights=weight_bytes(
            model,
            dtype_bytes,
            max_model_len=max_model_len,
            linear=linear_bytes(config, model, dtype_bytes),
            ranks=ranks,
            packed_head=on_cpu,
        ),
        step=step,
        graphs=graphs,
        slack=(CPU_SLACK if on_cpu else SLACK) + staging,
        kv=kv_bytes_needed(config, max_model_len, block),
    )


def kv_block_bytes(model: ModelConfig, block_size: int, dtype_bytes: int, num_kv_heads: int | None = None) -> int:
    """Bytes of one block: K and V of ``block_size`` tokens in every layer, on one rank."""
    heads = model.num_kv_heads if num_kv_heads is None else num_kv_heads
    return 2 * model.num_layers * heads * model.head_dim * block_size * dtype_bytes


def kv_bytes_needed(config: EngineConfig, max_model_len: int, block_bytes: int) -> int:
    """Bytes of the KV cache that was asked for, else of one sequence of ``max_model_len``: less than that serves nobody."""
    if config.num_gpu_blocks_override is not None:
        return config.num_gpu_blocks_override * block_bytes
    one = -(-max_model_len // config.block_size) * block_bytes
    return max(one, config.kv_cache_memory or 0)
