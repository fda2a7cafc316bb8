"""Attention of one new token per sequence over the paged KV cache, split along the context (FlashDecoding, Dao et al. 2023).

A fixed number of programs walks the plan of ``attention_plan``. A split of a sequence that has several leaves (acc, m, l) in
a workspace; the program that finishes a sequence's last outstanding split merges them all, in the order of the splits. So
who merges is a matter of timing, and what comes out is not.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from octavo.kernels.attention_plan import ALIGN, MAX_SPLITS, UNIT_FIELDS, DecodePlan
from octavo.kernels.triton.launch import launch

LOG2_E = 1.4426950408889634


def attention_reference(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    length: int,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> torch.Tensor:
    """One sequence's last Q tokens: q [Q, heads, dim] over its ``length`` cached tokens -> float32 [Q, heads, dim]."""
    blocks = kv_cache[block_table[: -(-length // kv_cache.shape[3])].long()].float()
    k, v = (blocks[:, side].transpose(1, 2).flatten(0, 1)[:length] for side in (0, 1))
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k * k_scale, v * v_scale))
    scores = torch.einsum("qhd,khd->hqk", q.float(), k) * scale
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    key = torch.arange(length, device=q.device)
    query = key[length - q.shape[0] :, None]
    seen = key <= query
    if window is not None:
        seen &= key > query - window
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, float("-inf")).softmax(-1), v)


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """block_n: tokens a tile, a divisor of ALIGN. programs_per_sm: how many fit one multiprocessor beside each other."""

    block_n: int = 64
    num_warps: int = 4
    num_stages: int = 3
    programs_per_sm: int = 3
    min_split: int = 256


def decode_config(head_dim: int, group: int, dtype: torch.dtype) -> DecodeConfig:
    """The launch parameters for a head size, query heads per KV head and cache type, from ``bench.attention --tune``."""
    wide = triton.next_power_of_2(head_dim) * dtype.itemsize  # bytes of a token's K
    fit = 2 if group > 16 else 3
    if wide > 512:
        return DecodeConfig(block_n=32, num_stages=2, programs_per_sm=2)
    if wide > 256:
        return DecodeConfig(block_n=32, num_stages=3, programs_per_sm=fit)
    if wide <= 128 and dtype.itemsize > 1:
        return DecodeConfig(block_n=128, num_stages=3, programs_per_sm=fit)
    if dtype.itemsize == 1:  # the conversion takes registers
        return DecodeConfig(num_stages=4, programs_per_sm=2)
    return DecodeConfig(programs_per_sm=fit)


@dataclass(slots=True)
class DecodeWorkspace:
    """What splits leave for the merge.

    acc: float32 [units * KV heads, group, head_dim], unnormalized
    ml:  float32 [units * KV heads, 2, group]: running maximum (base 2) and sum
    arrived: int32 [sequences * KV heads], zero between launches
    """

    acc: torch.Tensor
    ml: torch.Tensor
    arrived: torch.Tensor


def make_decode_workspace(
    capacity: int, max_seqs: int, num_heads: int, num_kv_heads: int, head_dim: int, device: torch.device
) -> DecodeWorkspace:
    """For plans of ``capacity`` units a KV head and at most ``max_seqs`` sequences."""
    acc = torch.empty(capacity * num_heads * head_dim, dtype=torch.float32, device=device)
    ml = torch.empty(capacity * num_heads * 2, dtype=torch.float32, device=device)
    return DecodeWorkspace(acc, ml, torch.zeros(max_seqs * num_kv_heads, dtype=torch.int32, device=device))


@triton.jit
def soft_capped(scores, cap, LOG2_E: tl.constexpr):
    """cap * tanh(scores / cap); exp2 may overflow to infinity, where tanh is 1."""
    return cap - 2.0 * cap / (tl.exp2(scores * (2.0 * LOG2_E / cap)) + 1.0)


@triton.jit
def _block_ids(table, token, end, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Block ids of the BLOCK_N tokens from ``token``: one id where a tile never crosses a block, else one a token."""
    if BLOCK_SIZE % BLOCK_N == 0:
        return tl.load(table + token // BLOCK_SIZE, mask=token < end, other=0).to(tl.int64)
    else:
        tokens = token + tl.arange(0, BLOCK_N)
        return tl.load(table + tokens // BLOCK_SIZE, mask=tokens < end, other=0).to(tl.int64)


@triton.jit
def _decode_kernel(
    q, q_stride, out, out_stride, kv, kv_stride_block, kv_stride_side, kv_stride_head, kv_stride_token,
    tables, table_stride, units, starts, acc_buffer, ml_buffer, arrived,
    scale, soft_cap, v_scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_DOT: tl.constexpr, GROUP_PAD: tl.constexpr,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr, PROGRAMS: tl.constexpr, MAX_SPLITS: tl.constexpr, MERGE: tl.constexpr,
    FIELDS: tl.constexpr, LOG2_E: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    pid = tl.program_id(0)
    per_head = tl.load(starts + PROGRAMS + 1)
    first = tl.load(starts + pid)
    last = tl.load(starts + pid + 1)

    d = tl.arange(0, DIM_PAD)
    in_dim = d < DIM
    g = tl.arange(0, GROUP_DOT)
    in_group = (g < GROUP)[:, None] & in_dim[None, :]
    n = tl.arange(0, BLOCK_N)
    compute = q.dtype.element_ty

    for u in range(first, last):
        head = u // per_head
        e = u - head * per_head
        unit = units + e * FIELDS
        seq = tl.load(unit)
        row = tl.load(unit + 1).to(tl.int64)
        begin = tl.load(unit + 2)
        end = tl.load(unit + 3)
        visible = tl.load(unit + 4)
        split = tl.load(unit + 5)
        splits = tl.load(unit + 6)

        table = tables + row * table_stride
        heads = head * GROUP + g
        q_tile = tl.load(q + seq.to(tl.int64) * q_stride + heads[:, None] * DIM + d[None, :], mask=in_group, other=0.0)
        k_head = kv + head * kv_stride_head
        m = tl.full([GROUP_DOT], -1e30, tl.float32)  # finite, so that a tile without a visible token changes nothing
        total = tl.zeros([GROUP_DOT], tl.float32)
        acc = tl.zeros([GROUP_DOT, DIM_PAD], tl.float32)
        ids = _block_ids(table, begin, end, BLOCK_SIZE, BLOCK_N)
        for start in range(begin, end, BLOCK_N):
            tokens = start + n
            inside = tokens < end
            at = k_head + ids * kv_stride_block + (tokens % BLOCK_SIZE) * kv_stride_token
            at = at[:, None] + d[None, :]
            # Fetched a tile ahead, so that the loads of K don't wait for it.
            ids = _block_ids(table, start + BLOCK_N, end, BLOCK_SIZE, BLOCK_N)
            kept = inside[:, None] & in_dim[None, :]
            k = tl.load(at, mask=kept, other=0.0).to(compute)
            v = tl.load(at + kv_stride_side, mask=kept, other=0.0).to(compute)
            s = tl.dot(q_tile, tl.trans(k), input_precision=PRECISION) * scale
            if CAPPED:
                s = soft_capped(s, soft_cap, LOG2_E)
            s = s * LOG2_E
            if WINDOWED:
                inside = inside & (tokens >= visible)
            s = tl.where(inside[None, :], s, float("-inf"))
            m_new = tl.maximum(m, tl.max(s, axis=1))
            p = tl.exp2(s - m_new[:, None])
            shrink = tl.exp2(m - m_new)
            total = total * shrink + tl.sum(p, axis=1)
            acc = acc * shrink[:, None]
            acc = tl.dot(p.to(compute), v, acc, input_precision=PRECISION)
            m = m_new

        if splits == 1:
            result = acc * (v_scale / tl.where(total > 0, total, 1.0))[:, None]  # padding has no tokens: zero
            place = out + seq.to(tl.int64) * out_stride + heads[:, None] * DIM + d[None, :]
            tl.store(place, result.to(out.dtype.element_ty), mask=in_group)
        else:
            slot = (e * KV_HEADS + head).to(tl.int64)
            tl.store(acc_buffer + slot * (GROUP * DIM) + g[:, None] * DIM + d[None, :], acc, mask=in_group)
            tl.store(ml_buffer + slot * (2 * GROUP) + g, m, mask=g < GROUP)
            tl.store(ml_buffer + slot * (2 * GROUP) + GROUP + g, total, mask=g < GROUP)
            tl.debug_barrier()  # all threads have stored before one of them tells
            counter = arrived + seq * KV_HEADS + head
            before = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
            if before == splits - 1:
                tl.store(counter, 0)
                _merge(
                    out + seq.to(tl.int64) * out_stride + head * GROUP * DIM, acc_buffer, ml_buffer, e - split, head, splits, v_scale,
                    KV_HEADS, GROUP, GROUP_PAD, DIM, DIM_PAD, MAX_SPLITS, MERGE,
                )  # fmt: skip


@triton.jit
def _merge(
    out, acc_buffer, ml_buffer, base, head, splits, v_scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    MAX_SPLITS: tl.constexpr, MERGE: tl.constexpr,
):  # fmt: skip
    """Merge ``splits`` partial results, MERGE at a time, always in the same order."""
    d = tl.arange(0, DIM_PAD)
    g = tl.arange(0, GROUP_PAD)
    every = tl.arange(0, MAX_SPLITS)
    ml = ml_buffer + ((base + every) * KV_HEADS + head).to(tl.int64)[:, None] * (2 * GROUP) + g[None, :]
    real = (every < splits)[:, None] & (g < GROUP)[None, :]
    top = tl.max(tl.load(ml, mask=real, other=float("-inf"), cache_modifier=".cg"), axis=0)
    top = tl.where(g < GROUP, top, 0.0)
    total = tl.zeros([GROUP_PAD], tl.float32)
    acc = tl.zeros([GROUP_PAD, DIM_PAD], tl.float32)
    inner = g[:, None] * DIM + d[None, :]
    in_group = (g < GROUP)[:, None] & (d < DIM)[None, :]
    for start in range(0, splits, MERGE):
        split = start + tl.arange(0, MERGE)
        slot = ((base + split) * KV_HEADS + head).to(tl.int64)
        kept = (split < splits)[:, None] & (g < GROUP)[None, :]
        some = ml_buffer + slot[:, None] * (2 * GROUP) + g[None, :]
        m = tl.load(some, mask=kept, other=float("-inf"), cache_modifier=".cg")
        sums = tl.load(some + GROUP, mask=kept, other=0.0, cache_modifier=".cg")
        part = tl.load(
            acc_buffer + slot[:, None, None] * (GROUP * DIM) + inner[None, :, :],
            mask=(split < splits)[:, None, None] & in_group[None, :, :], other=0.0, cache_modifier=".cg",
        )  # fmt: skip
        weight = tl.exp2(m - top[None, :])
        total += tl.sum(weight * sums, axis=0)
        acc += tl.sum(part * weight[:, :, None], axis=0)
    result = acc * (v_scale / tl.where(total > 0, total, 1.0))[:, None]
    tl.store(out + inner, result.to(out.dtype.element_ty), mask=in_group)


def decode_attention(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    plan: DecodePlan,
    workspace: DecodeWorkspace,
    out: torch.Tensor,
    *,
    num_heads: int,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    config: DecodeConfig | None = None,
    pdl: bool = False,
) -> None:
    """Row s of out [>= S, num_heads * head_dim] = attention of q's row s over the plan's sequence s. One launch.

    q:            [>= S, >= num_heads * head_dim], heads first in a row (qkv as ``write_kv`` leaves it)
    kv_cache:     [num_blocks, 2, num_kv_heads, block_size, head_dim]
    block_tables: int32 [rows, max_blocks], indexed by the plan's rows
    plan:         by ``plan_decode`` with the same window and KV heads; rows of padding (length 0) become zero
    Results depend on the sequence alone, bit for bit, never on the batch around it.
    """
    kv_heads, block_size, dim = kv_cache.shape[2:]
    group = num_heads // kv_heads
    config = config or decode_config(dim, group, kv_cache.dtype)
    if ALIGN % config.block_n:
        raise ValueError(f"block_n {config.block_n} does not divide {ALIGN}.")
    dim_pad, group_pad = triton.next_power_of_2(dim), triton.next_power_of_2(group)
    launch(
        _decode_kernel, (plan.programs,),
        (q, q.stride(0), out, out.stride(0), kv_cache, *kv_cache.stride()[:4],
        block_tables, block_tables.stride(0), plan.units, plan.starts, workspace.acc, workspace.ml, workspace.arrived,
        scale * k_scale, soft_cap or 0.0, v_scale),
        KV_HEADS=kv_heads, GROUP=group, GROUP_DOT=max(16, group_pad), GROUP_PAD=group_pad,
        DIM=dim, DIM_PAD=dim_pad, BLOCK_SIZE=block_size, BLOCK_N=config.block_n,
        WINDOWED=window is not None, CAPPED=soft_cap is not None, PROGRAMS=plan.programs, MAX_SPLITS=MAX_SPLITS,
        MERGE=max(1, min(16, 8192 // (group_pad * dim_pad))), FIELDS=UNIT_FIELDS, LOG2_E=LOG2_E,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32", PDL=pdl,
        num_warps=config.num_warps, num_stages=config.num_stages, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
