"""The small interface that every attention backend implements.

A step's tokens are flat: [T] tokens of S sequences, one after another. Sequence s runs the tokens
``query_start[s] : query_start[s+1]``, which stand at the end of its ``seq_lens[s]`` tokens:

    |<------------------ seq_lens[s] ------------------>|
    |<-- computed (in blocks) -->|<-- run in this step ->|

K and V of the run tokens are written to the sequence's blocks before they are attended to, so attention reads
everything through the block table. It is causal by position.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch


@dataclass(slots=True)
class AttentionMetadata:
    """Where every token of a step lives; made once a step, read by every layer.

    positions:    int64 [T]    position of each token in its sequence
    slots:        int64 [T]    where its K and V go: block_id * block_size + offset; -1 writes nothing (padding)
    query_start:  int32 [S+1]  prefix sums of tokens run per sequence
    seq_lens:     int32 [S]    tokens of each sequence after this step
    block_tables: int32 [S, max_blocks]  block ids in token order; entries past the length are undefined
    The first ``num_decodes`` sequences run exactly one token.
    ``extra`` is the backend's own (task lists, scheduler metadata).
    """

    num_tokens: int
    num_seqs: int
    num_decodes: int
    max_query_len: int
    max_seq_len: int
    block_size: int
    positions: torch.Tensor
    slots: torch.Tensor
    query_start: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class ForwardContext:
    """Passed down through a model's forward pass. ``kv_caches[i]`` is what the backend's ``make_kv_cache`` made."""

    attention: AttentionMetadata
    backend: AttentionBackend
    kv_caches: list[Any]


@dataclass(slots=True)
class AttentionLayerSpec:
    """One attention layer as a backend sees it; head counts are this rank's.

    ``rope_cos_sin``: float32 [max_position, rotary_dim]: cos in the first half of the columns, sin in the second;
    None for no rotation. ``rope_interleaved`` False: NeoX halves (x[:d/2], x[d/2:]).
    ``q_norm`` / ``k_norm``: RMSNorm weights [head_dim] applied per head before RoPE (Qwen3), or None.
    ``sliding_window`` w: a token at position p attends to positions p-w+1 .. p.
    """

    layer_index: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rope_cos_sin: torch.Tensor | None = None
    rope_interleaved: bool = False
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    norm_eps: float = 1e-6
    sliding_window: int | None = None
    logit_soft_cap: float | None = None


class AttentionBackend(Protocol):
    """Writes and reads the paged KV cache."""

    name: str

    def make_kv_cache(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> Any:
        """One layer's cache, zeroed. A tensor, or tuple of tensors, whose dimension 0 counts blocks."""
        ...

    def prepare(self, metadata: AttentionMetadata) -> None:
        """Once a step, before the first layer: fill ``metadata.extra``."""
        ...

    def forward(self, qkv: torch.Tensor, layer: AttentionLayerSpec, kv_cache: Any, context: ForwardContext) -> torch.Tensor:
        """QK-norm and RoPE, write K and V, attend.

        qkv: [T, (num_heads + 2 * num_kv_heads) * head_dim], q then k then v; may be overwritten.
        Returns [T, num_heads * head_dim] in qkv's dtype.
        """
        ...
