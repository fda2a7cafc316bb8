"""Attention through FlashAttention 3 (Shah et al. 2024, arXiv:2407.08608), from the wheel tokenspeed-fa3, on Hopper GPUs.

It shares the Triton backend's cache layout and fused KV write, and differs in who attends: FA3 for prompts, where its
warp-specialized kernel is far ahead; for decodes whichever ``decode`` names. What the wheel doesn't hold (soft caps, head
sizes outside ``HEAD_DIMS``, float32) runs in Triton, per layer.

FA3 chooses its splits of a decode by the load of the whole batch, so with decode="fa3" the same sequence's last bits may
differ between batches; Triton's decode keeps them equal. Prompts are never split.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal

import torch

from octavo.attention.base import AttentionLayerSpec, AttentionMetadata
from octavo.attention.triton import EXTRA, TritonAttention
from octavo.errors import ConfigError
from octavo.kernels.attention_plan import DecodePlan

HEAD_DIMS = (64, 128, 192, 256)
DTYPES = (torch.bfloat16, torch.float16)
MAX_SPLITS = 32  # of a decode: bounds the partial results that a CUDA graph holds


def available(device: torch.device | None = None) -> bool:
    """Is the wheel there, and the device a Hopper GPU? Loads no library."""
    if find_spec("flash_attn_3") is None or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability(device) == (9, 0)


def choose(device: torch.device | None = None) -> str:
    """The backend to take where none is named: FA3 for its prompts if it is there, with Triton's decodes; else Triton."""
    return "flash_attention" if available(device) else "triton"


@cache
def _library() -> Any:
    try:
        import_module("flash_attn_3._C")  # registers torch.ops.flash_attn_3
    except ImportError as error:
        advice = "Install tokenspeed-fa3, or use --attention-backend triton."
        raise ConfigError(f"FlashAttention 3 can't be loaded ({error}). {advice}") from error
    return torch.ops.flash_attn_3


class FlashAttention(TritonAttention):
    """AttentionBackend: FA3 for prompts and, with decode="fa3", for decodes; Triton for the rest. ConfigError without the wheel."""

    name = "flash_attention"

    def __init__(self, decode: Literal["triton", "fa3"] = "triton", **options: Any) -> None:
        """``options`` as TritonAttention takes them."""
        super().__init__(**options)
        self._fa3 = _library()
        self._fa3_decodes = decode == "fa3"

    def plan_decode(self, layer: AttentionLayerSpec, cache: torch.Tensor, m: AttentionMetadata) -> Any:
        """A Triton plan, or FA3's scheduler metadata (int32 tensor) where FA3 decodes; made once a step for layers of a shape."""
        if not (self._fa3_decodes and _covers(layer, cache.dtype)):
            return super().plan_decode(layer, cache, m)
        tasks = m.extra[EXTRA]
        key = ("fa3", layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.sliding_window)
        if key not in tasks:
            left, right = _window(layer)
            tasks[key] = self._fa3.get_scheduler_metadata(
                batch_size=m.num_decodes,
                max_seqlen_q=1,
                max_seqlen_k=m.block_tables.shape[1] * cache.shape[3],  # as fwd takes it from the page table: both must decide alike
                num_heads=layer.num_heads,
                num_heads_k=layer.num_kv_heads,
                headdim=layer.head_dim,
                headdim_v=layer.head_dim,
                qkv_dtype=cache.dtype,
                seqused_k=m.seq_lens[: m.num_decodes],
                page_size=cache.shape[3],
                is_causal=True,
                window_size_left=left,
                window_size_right=right,
                num_splits=MAX_SPLITS,
            )
        return tasks[key]

    def decode(
        self, qkv: torch.Tensor, layer: AttentionLayerSpec, cache: torch.Tensor, m: AttentionMetadata, plan: Any, out: torch.Tensor
    ) -> None:
        """See TritonAttention."""
        if isinstance(plan, DecodePlan):
            super().decode(qkv, layer, cache, m, plan, out)
            return
        n = m.num_decodes
        self._attend(qkv[:n], layer, cache, m, slice(0, n), out[:n], scheduler_metadata=plan, num_splits=MAX_SPLITS)
        # padding: nothing says what FA3 leaves in the rows of empty sequences
        out[:n].masked_fill_((m.seq_lens[:n] == 0).unsqueeze(1), 0.0)

    def extend(self, qkv: torch.Tensor, layer: AttentionLayerSpec, cache: torch.Tensor, m: AttentionMetadata, out: torch.Tensor) -> None:
        """See TritonAttention."""
        if not _covers(layer, qkv.dtype) or cache.dtype != qkv.dtype:
            super().extend(qkv, layer, cache, m, out)
            return
        first, last = m.num_decodes, m.num_tokens
        tasks = m.extra[EXTRA]
        if "fa3 starts" not in tasks:
            tasks["fa3 starts"] = m.query_start[first:] - m.query_start[first] if first else m.query_start
        self._attend(
            qkv[first:last], layer, cache, m, slice(first, m.num_seqs), out[first:last],
            cu_seqlens_q=tasks["fa3 starts"], max_seqlen_q=m.max_query_len, num_splits=1,
        )  # fmt: skip

    def _attend(
        self, qkv: torch.Tensor, layer: AttentionLayerSpec, cache: torch.Tensor, m: AttentionMetadata, seqs: slice, out: torch.Tensor,
        **options: Any,
    ) -> None:  # fmt: skip
        """FA3's ``fwd`` for sequences ``seqs`` into ``out``; without cu_seqlens_q each has one query token."""
        q, o = (x[:, : layer.num_heads * layer.head_dim].unflatten(1, (layer.num_heads, layer.head_dim)) for x in (qkv, out))
        if "cu_seqlens_q" not in options:
            q, o = q.unsqueeze(1), o.unsqueeze(1)
        left, right = _window(layer)
        rows = self._rows(m)
        self._fa3.fwd(
            q,
            cache[:, 0].transpose(1, 2),  # [num_blocks, block_size, kv_heads, head_dim]
            cache[:, 1].transpose(1, 2),
            out=o,
            seqused_k=m.seq_lens[seqs],
            page_table=m.block_tables[seqs] if rows is None else m.block_tables,
            kv_batch_idx=None if rows is None else rows[seqs],
            softmax_scale=layer.scale,
            is_causal=True,
            window_size_left=left,
            window_size_right=right,
            **options,
        )

    def _rows(self, m: AttentionMetadata) -> torch.Tensor | None:
        """int32 rows of the block table, converted once a step; None if the table has a row per sequence."""
        if (index := m.extra.get("row_index")) is None:
            return None
        tasks = m.extra[EXTRA]
        if "fa3 rows" not in tasks:
            tasks["fa3 rows"] = index.to(torch.int32)
        return tasks["fa3 rows"]


def _window(layer: AttentionLayerSpec) -> tuple[int, int]:
    """FA3's (left, right): how many tokens before and after its own a token sees; -1 is no bound."""
    return (-1, -1) if layer.sliding_window is None else (layer.sliding_window - 1, 0)


def _covers(layer: AttentionLayerSpec, dtype: torch.dtype) -> bool:
    """Can FA3, as the wheel is built, run this layer?"""
    return dtype in DTYPES and layer.head_dim in HEAD_DIMS and layer.logit_soft_cap is None
