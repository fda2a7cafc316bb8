"""Attention of many new tokens per sequence over the paged KV cache: causal over what was cached and what is new.

FlashAttention-2 (Dao 2023, arXiv:2307.08691) on paged K and V. The query heads that share a KV head stand in one tile,
row r being token r // group and head r % group, so short chunks fill their tiles too. K tiles start at multiples of
BLOCK_N from token 0, so how a prompt is cut into chunks changes no token's order of summation.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from octavo.kernels.decode_attention import LOG2_E, _block_ids, soft_capped
from octavo.kernels.sizes import next_power_of_2
from octavo.kernels.triton.launch import launch


@dataclass(frozen=True, slots=True)
class ExtendConfig:
    """block_m: rows (query tokens x heads of a group) a tile; block_n: cached tokens a tile."""

    block_m: int = 128
    block_n: int = 64
    num_warps: int = 8
    num_stages: int = 3

    def block_q(self, group: int) -> int:
        """Query tokens a tile."""
        return max(1, self.block_m // group)


def extend_config(head_dim: int, group: int, dtype: torch.dtype) -> ExtendConfig:
    """The launch parameters for a head size, query heads per KV head and query type."""
    rows = next_power_of_2(group)
    if dtype.itemsize > 2:  # no tensor cores: what counts is that the tiles stay in registers
        return ExtendConfig(block_m=max(32, rows), block_n=32 if head_dim <= 128 else 16, num_warps=8, num_stages=2)
    if head_dim > 128:
        return ExtendConfig(block_m=max(128, rows), block_n=64, num_warps=8, num_stages=2)
    return ExtendConfig(block_m=max(128, rows))


@triton.jit
def _step(
    acc, m, total, ids, q_tile, k_head, table, start, end, position,
    kv_stride_block, kv_stride_side, kv_stride_token, scale, factor, window, soft_cap,
    MASKED: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, LOG2_E: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of K and V. MASKED: some row may not see some of its tokens, or the tile passes the sequence's end.

    A tile is masked in one cut of a prompt and not in another, so what both kinds round must be the same: products and sums are fused
    by hand, since a compiler would fuse them here and not there.
    """
    d = tl.arange(0, DIM_PAD)
    tokens = start + tl.arange(0, BLOCK_N)
    at = k_head + ids * kv_stride_block + (tokens % BLOCK_SIZE) * kv_stride_token
    at = at[:, None] + d[None, :]
    ids = _block_ids(table, start + BLOCK_N, end, BLOCK_SIZE, BLOCK_N)
    compute = q_tile.dtype
    if MASKED:
        kept = (tokens < end)[:, None] & (d < DIM)[None, :]
        k = tl.load(at, mask=kept, other=0.0).to(compute)
        v = tl.load(at + kv_stride_side, mask=kept, other=0.0).to(compute)
    elif DIM != DIM_PAD:
        kept = tl.broadcast_to((d < DIM)[None, :], [BLOCK_N, DIM_PAD])
        k = tl.load(at, mask=kept, other=0.0).to(compute)
        v = tl.load(at + kv_stride_side, mask=kept, other=0.0).to(compute)
    else:
        k = tl.load(at).to(compute)
        v = tl.load(at + kv_stride_side).to(compute)
    s = tl.dot(q_tile, tl.trans(k), input_precision=PRECISION)
    if CAPPED:
        s = soft_capped(s * scale, soft_cap, LOG2_E)
    if MASKED:
        seen = tokens[None, :] <= position[:, None]
        if WINDOWED:
            seen = seen & (tokens[None, :] > position[:, None] - window)
        s = tl.where(seen, s, float("-inf"))
    m_new = tl.maximum(m, tl.max(s, axis=1))
    p = tl.exp2(tl.fma(s, factor, (-m_new * factor)[:, None]))
    shrink = tl.exp2((m - m_new) * factor)
    total = tl.fma(total, shrink, tl.sum(p, axis=1))
    acc = acc * shrink[:, None]
    acc = tl.dot(p.to(compute), v, acc, input_precision=PRECISION)
    return acc, m_new, total, ids


@triton.jit(do_not_specialize=["row_index", "query_start", "seq_lens", "window"])
def _extend_kernel(
    q, q_stride, out, out_stride, kv, kv_stride_block, kv_stride_side, kv_stride_head, kv_stride_token,
    tables, table_stride, row_index, query_start, seq_lens, tiles,
    scale, factor, window, soft_cap, v_scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr, ROWS: tl.constexpr, LOG2_E: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0) // KV_HEADS
    head = tl.program_id(0) % KV_HEADS
    seq = tl.load(tiles + 2 * tile)
    if seq >= 0:
        first_query = tl.load(query_start + seq)
        count = tl.load(query_start + seq + 1) - first_query
        context = tl.load(seq_lens + seq) - count
        row = seq.to(tl.int64)
        if ROWS:
            row = tl.load(row_index + seq).to(tl.int64)
        table = tables + row * table_stride
        first = tl.load(tiles + 2 * tile + 1) * BLOCK_Q  # of this sequence's new tokens

        r = tl.arange(0, BLOCK_M)
        d = tl.arange(0, DIM_PAD)
        query = first + r // GROUP
        place = (first_query + query).to(tl.int64)
        column = (head * GROUP + r % GROUP) * DIM
        kept = ((r < BLOCK_Q * GROUP) & (query < count))[:, None] & (d < DIM)[None, :]
        q_tile = tl.load(q + (place * q_stride + column)[:, None] + d[None, :], mask=kept, other=0.0)
        position = context + query

        m = tl.full([BLOCK_M], -1e30, tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, DIM_PAD], tl.float32)
        k_head = kv + head * kv_stride_head
        end = tl.minimum(context + first + BLOCK_Q, context + count)  # past the last token that any row sees
        # |<- begin ... whole: every row sees every token ->|<- whole ... end: masked ->|
        begin = 0
        whole = (context + first + 1) // BLOCK_N * BLOCK_N
        if WINDOWED:
            begin = tl.maximum(context + first - window + 1, 0) // BLOCK_N * BLOCK_N
            whole = begin
        ids = _block_ids(table, begin, end, BLOCK_SIZE, BLOCK_N)
        for start in range(begin, whole, BLOCK_N):
            acc, m, total, ids = _step(
                acc, m, total, ids, q_tile, k_head, table, start, end, position,
                kv_stride_block, kv_stride_side, kv_stride_token, scale, factor, window, soft_cap,
                False, WINDOWED, CAPPED, DIM, DIM_PAD, BLOCK_SIZE, BLOCK_N, LOG2_E, PRECISION,
            )  # fmt: skip
        for start in range(whole, end, BLOCK_N):
            acc, m, total, ids = _step(
                acc, m, total, ids, q_tile, k_head, table, start, end, position,
                kv_stride_block, kv_stride_side, kv_stride_token, scale, factor, window, soft_cap,
                True, WINDOWED, CAPPED, DIM, DIM_PAD, BLOCK_SIZE, BLOCK_N, LOG2_E, PRECISION,
            )  # fmt: skip
        result = acc * (v_scale / tl.where(total > 0, total, 1.0))[:, None]
        tl.store(out + (place * out_stride + column)[:, None] + d[None, :], result.to(out.dtype.element_ty), mask=kept)


def extend_attention(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    tiles: torch.Tensor,
    out: torch.Tensor,
    *,
    num_heads: int,
    scale: float,
    row_index: torch.Tensor | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    config: ExtendConfig | None = None,
) -> None:
    """Rows query_start[s] : query_start[s + 1] of out = attention of those rows of q, for the sequences of ``tiles``. One launch.

    q:      [T, >= num_heads * head_dim], heads first in a row (qkv as ``write_kv`` leaves it)
    tiles:  by ``plan_extend`` with ``config.block_q(group)``
    Other arguments as in ``decode_attention``; row_index [S] names each sequence's row of block_tables.
    """
    kv_heads, block_size, dim = kv_cache.shape[2:]
    group = num_heads // kv_heads
    config = config or extend_config(dim, group, q.dtype)
    natural = scale * k_scale
    launch(
        _extend_kernel, (tiles.shape[0] * kv_heads,),
        (q, q.stride(0), out, out.stride(0), kv_cache, *kv_cache.stride()[:4],
        block_tables, block_tables.stride(0), row_index, query_start, seq_lens, tiles,
        natural, LOG2_E if soft_cap is not None else natural * LOG2_E, window or 0, soft_cap or 0.0, v_scale),
        KV_HEADS=kv_heads, GROUP=group, DIM=dim, DIM_PAD=next_power_of_2(dim),
        BLOCK_SIZE=block_size, BLOCK_M=config.block_m, BLOCK_Q=config.block_q(group), BLOCK_N=config.block_n,
        WINDOWED=window is not None, CAPPED=soft_cap is not None, ROWS=row_index is not None, LOG2_E=LOG2_E,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
