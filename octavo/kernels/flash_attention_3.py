"""FlashAttention 3 (Shah et al. 2024, arXiv:2407.08608) on the paged cache, from the wheel tokenspeed-fa3. Hopper GPUs only."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

HEAD_DIMS = (64, 128, 192, 256)
DTYPES = (torch.bfloat16, torch.float16)
MAX_SPLITS = 32  # of a decode: bounds the partial results that a CUDA graph holds


def available(device: torch.device | None = None) -> bool:
    """Is the wheel there, and the device a Hopper GPU? Loads no library."""
    if find_spec("flash_attn_3") is None or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability(device) == (9, 0)


def covers(head_dim: int, dtype: torch.dtype, soft_cap: float | None) -> bool:
    """Can FA3, as the wheel is built, run such a layer? Soft caps are compiled out."""
    return dtype in DTYPES and head_dim in HEAD_DIMS and soft_cap is None


@cache
def library() -> Any:
    """The operators; ImportError without the wheel."""
    import_module("flash_attn_3._C")  # registers torch.ops.flash_attn_3
    return torch.ops.flash_attn_3


def _window(window: int | None) -> tuple[int, int]:
    """FA3's (left, right): how many tokens before and after its own a token sees; -1 is no bound."""
    return (-1, -1) if window is None else (window - 1, 0)


def _splits(query_start: torch.Tensor | None) -> int:
    """Chunks are never split along the context: a token's bits would depend on what else the step holds."""
    return MAX_SPLITS if query_start is None else 1


def make_schedule(
    seq_lens: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    num_heads: int,
    window: int | None = None,
    query_start: torch.Tensor | None = None,
    max_query_len: int = 1,
) -> torch.Tensor:
    """int32 scheduler metadata for a step's S = len(seq_lens) sequences, made on the device; shared by its layers.

    ``query_start``, ``max_query_len``: as ``flash_attention_3`` takes them.
    """
    left, right = _window(window)
    return library().get_scheduler_metadata(
        batch_size=seq_lens.shape[0],
        max_seqlen_q=max_query_len,
        max_seqlen_k=block_tables.shape[1] * kv_cache.shape[3],  # as fwd takes it from the page table: both must decide alike
        num_heads=num_heads,
        num_heads_k=kv_cache.shape[2],
        headdim=kv_cache.shape[4],
        headdim_v=kv_cache.shape[4],
        qkv_dtype=kv_cache.dtype,
        seqused_k=seq_lens,
        cu_seqlens_q=query_start,
        page_size=kv_cache.shape[3],
        is_causal=True,
        window_size_left=left,
        window_size_right=right,
        num_splits=_splits(query_start),
    )


def flash_attention_3(
    qkv: torch.Tensor,
    kv_cache: torch.Tensor,
    out: torch.Tensor,
    first: int,
    last: int,
    *,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    num_heads: int,
    scale: float,
    window: int | None = None,
    row_index: torch.Tensor | None = None,
    schedule: torch.Tensor | None = None,
    query_start: torch.Tensor | None = None,
    max_query_len: int | None = None,
) -> None:
    """Attention of the queries in rows ``first`` to ``last`` of qkv, into the same rows of ``out``.

    qkv, out:     [>= last, >= num_heads * head_dim], heads first in a row, elements of a row side by side
    kv_cache:     [num_blocks, 2, num_kv_heads, block_size, head_dim]
    block_tables: int32 [S, max_blocks]; with row_index (int32 [S]) the table of all rows
    query_start:  int32 [S + 1] with max_query_len, a chunk per sequence, never split along the context; None: last - first = S
                  and each sequence has one query token, split as ``schedule`` says
    schedule:     by ``make_schedule``; None: made here, which takes a launch a layer
    """
    dim = kv_cache.shape[4]
    q, o = (
        x.as_strided((last - first, num_heads, dim), (x.stride(0), dim, 1), x.storage_offset() + first * x.stride(0)) for x in (qkv, out)
    )
    if query_start is None:
        q, o = q.unsqueeze(1), o.unsqueeze(1)
    left, right = _window(window)
    keys, values = kv_cache.transpose(2, 3).unbind(1)  # [num_blocks, block_size, kv_heads, head_dim]
    library().fwd(
        q,
        keys,
        values,
        out=o,
        cu_seqlens_q=query_start,
        seqused_k=seq_lens,
        max_seqlen_q=max_query_len,
        page_table=block_tables,
        kv_batch_idx=row_index,
        softmax_scale=scale,
        is_causal=True,
        window_size_left=left,
        window_size_right=right,
        scheduler_metadata=schedule,
        num_splits=_splits(query_start),
    )
