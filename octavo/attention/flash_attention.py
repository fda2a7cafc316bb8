"""Attention through FlashAttention 3 on Hopper GPUs.

It shares the Triton backend's cache layout and fused KV write, and differs in who attends: FA3 for prompts, where its
warp-specialized kernel is far ahead; for decodes whichever ``decode`` names. What the wheel doesn't hold (soft caps, some
head sizes, float32, 8-bit caches) runs in Triton, per layer.

FA3's decode kernel alone was measured 1 to 20% faster than Triton's, but it takes no part in dependent launches, and whole steps
were not faster with it, so decodes stay with Triton by default. FA3 also chooses its splits by the load of the whole batch, so the
same sequence's last bits may differ between batches; Triton's decode keeps them equal. Prompts are never split.
"""

from __future__ import annotations

from typing import Any, Literal

import torch

from octavo.attention.base import AttentionLayerSpec, AttentionMetadata
from octavo.attention.triton import EXTRA, TritonAttention
from octavo.errors import ConfigError
from octavo.kernels.attention_plan import DecodePlan
from octavo.kernels.flash_attention_3 import available, covers, flash_attention_3, library, make_schedule
from octavo.kernels.new_tokens import NewTokens

__all__ = ["FlashAttention", "available"]


class FlashAttention(TritonAttention):
    """AttentionBackend: FA3 for prompts and, with decode="fa3", for decodes; Triton for the rest. ConfigError without the wheel."""

    name = "flash_attention"

    def __init__(self, decode: Literal["triton", "fa3"] = "triton", **options: Any) -> None:
        """``options`` as TritonAttention takes them."""
        super().__init__(**options)
        self._fa3_decodes = decode == "fa3"
        try:
            library()
        except ImportError as error:
            advice = "Install tokenspeed-fa3, or use --attention-backend triton."
            raise ConfigError(f"FlashAttention 3 can't be loaded ({error}). {advice}") from error

    def plan_decode(self, layer: AttentionLayerSpec, cache: torch.Tensor, m: AttentionMetadata) -> Any:
        """A Triton plan, or FA3's schedule (int32 tensor) where FA3 decodes; made once a step for layers of a shape."""
        if not (self._fa3_decodes and covers(layer.head_dim, cache.dtype, layer.logit_soft_cap)):
            return super().plan_decode(layer, cache, m)
        tasks = m.extra[EXTRA]
        key = ("fa3", layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.sliding_window)
        if key not in tasks:
            tasks[key] = make_schedule(m.seq_lens[: m.num_decodes], cache, m.block_tables, layer.num_heads, layer.sliding_window)
        return tasks[key]

    def decode(
        self, qkv: torch.Tensor, layer: AttentionLayerSpec, cache: torch.Tensor, m: AttentionMetadata, plan: Any, out: torch.Tensor,
        new: NewTokens | None = None, fresh: bool = False,
    ) -> None:  # fmt: skip
        """See TritonAttention."""
        if isinstance(plan, DecodePlan):
            super().decode(qkv, layer, cache, m, plan, out, new, fresh)
            return
        n, tasks = m.num_decodes, m.extra[EXTRA]
        if "fa3 decodes" not in tasks:
            tasks["fa3 decodes"] = self._seqs(m, 0, n)
        self._attend(qkv, layer, cache, out, 0, n, schedule=plan, **tasks["fa3 decodes"])
        # padding: nothing says what FA3 leaves in the rows of empty sequences
        out[:n].masked_fill_((m.seq_lens[:n] == 0).unsqueeze(1), 0.0)

    def extend(self, qkv: torch.Tensor, layer: AttentionLayerSpec, cache: torch.Tensor, m: AttentionMetadata, out: torch.Tensor) -> None:
        """See TritonAttention."""
        if not covers(layer.head_dim, qkv.dtype, layer.logit_soft_cap) or cache.dtype != qkv.dtype:
            super().extend(qkv, layer, cache, m, out)
            return
        tasks, first = m.extra[EXTRA], m.num_decodes
        if "fa3 prompts" not in tasks:  # once a step: making a view takes the host as long as a launch
            starts = m.query_start[first:] - m.query_start[first] if first else m.query_start
            tasks["fa3 prompts"] = self._seqs(m, first, m.num_seqs) | {"query_start": starts, "max_query_len": m.max_query_len}
        seqs = tasks["fa3 prompts"]
        key = ("fa3 prompts", layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.sliding_window)
        if key not in tasks:
            chunks = {name: seqs[name] for name in ("query_start", "max_query_len")}
            tasks[key] = make_schedule(seqs["seq_lens"], cache, m.block_tables, layer.num_heads, layer.sliding_window, **chunks)
        self._attend(qkv, layer, cache, out, first, m.num_tokens, schedule=tasks[key], **seqs)

    @staticmethod
    def _seqs(m: AttentionMetadata, first: int, last: int) -> dict[str, Any]:
        """Sequences ``first`` to ``last`` as ``flash_attention_3`` takes them."""
        index = m.extra.get("row_index")
        tables = m.block_tables[first:last] if index is None else m.block_tables
        rows = None if index is None else index[first:last].to(torch.int32)
        return {"seq_lens": m.seq_lens[first:last], "block_tables": tables, "row_index": rows}

    @staticmethod
    def _attend(
        qkv: torch.Tensor, layer: AttentionLayerSpec, cache: torch.Tensor, out: torch.Tensor, first: int, last: int, **options: Any
    ) -> None:
        """Tokens ``first`` to ``last``."""
        flash_attention_3(
            qkv, cache, out, first, last, num_heads=layer.num_heads, scale=layer.scale, window=layer.sliding_window, **options
        )  # fmt: skip
