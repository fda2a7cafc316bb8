"""Attention of one new token per sequence over the paged KV cache, split along the context (FlashDecoding, Dao et al. 2023).

A fixed number of programs walks the plan of ``attention_plan``: each one loop over the tiles of its run, whatever sequences and
heads they belong to, so that the loads of the next tiles are under way also where a sequence ends. A pair (sequence, KV head)
that is cut between programs leaves partial results in a workspace, and the program that brings the last of them folds them all,
in the order of the chunks. So who folds is a matter of timing, and what comes out is not.

Given ``NewTokens``, it does ``write_kv``'s work too, before its loop: a program makes the query heads of its pairs, and K and V of the
new token of each pair that ends in its run. Nobody else reads that token, as it stands in the pair's last tile; and the loop is the same.
Query heads wait in ``out`` meanwhile, where a pair's result comes when all programs that read them have told that they are done.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from octavo.kernels.attention_plan import ALIGN, FIELDS, DecodePlan
from octavo.kernels.decode_config import DecodeConfig, decode_config
from octavo.kernels.new_tokens import NewTokens, make_heads, new_arguments, new_constants, which_heads
from octavo.kernels.sizes import next_power_of_2
from octavo.kernels.triton.launch import launch, prefetch_lines

LOG2_E = 1.4426950408889634
WORKSPACE_BYTES = 64 << 20  # about, for partial results


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


def max_chunks(num_heads: int, num_kv_heads: int, head_dim: int, multiprocessors: int) -> int:
    """Chunks of the longest sequences: a power of two, enough for one sequence to occupy the device, if the workspace stays small.

    Results depend on it, so it must not depend on the batch.
    """
    enough = max(1, 2 * multiprocessors // num_kv_heads)
    slot = num_heads // num_kv_heads * (head_dim + 2) * 4
    affordable = max(8, WORKSPACE_BYTES // (3 * multiprocessors * slot))
    return 1 << (min(128, max(8, enough), affordable).bit_length() - 1)


@dataclass(slots=True)
class DecodeWorkspace:
    """What pairs that are cut leave for the fold. At most one pair that begins in a program's run is cut: it owns that program's slots.

    acc: float32 [programs * max_chunks, group, head_dim], unnormalized
    ml:  float32 [programs * max_chunks, 2, group]: largest score and sum
    arrived: int32 [programs], chunks that are there; zero between launches
    """

    acc: torch.Tensor
    ml: torch.Tensor
    arrived: torch.Tensor


def make_decode_workspace(plan: DecodePlan, num_heads: int, num_kv_heads: int, head_dim: int) -> DecodeWorkspace:
    """For ``plan``, and for plans that have no more programs times chunks."""
    slots, device = plan.programs * plan.max_chunks, plan.seqs.device
    group = num_heads // num_kv_heads
    acc = torch.empty(slots * group * head_dim, dtype=torch.float32, device=device)
    ml = torch.empty(slots * group * 2, dtype=torch.float32, device=device)
    return DecodeWorkspace(acc, ml, torch.zeros(plan.programs, dtype=torch.int32, device=device))


@triton.jit
def soft_capped(scores, cap, LOG2_E: tl.constexpr):
    """cap * tanh(scores / cap); exp2 may overflow to infinity, where tanh is 1."""
    return cap - 2.0 * cap / (tl.exp2(scores * (2.0 * LOG2_E / cap)) + 1.0)


@triton.jit
def _block_ids(table, pos, end, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Block ids of the BLOCK_N tokens from ``pos``: one id where a tile never crosses a block, else one a token.

    As they are loaded: only loads are carried into the next turn of a loop without waiting for them.
    """
    if BLOCK_SIZE % BLOCK_N == 0:
        return tl.load(table + pos // BLOCK_SIZE, mask=pos < end, other=0)
    else:
        n = tl.arange(0, BLOCK_N)
        return tl.load(table + pos // BLOCK_SIZE + n // BLOCK_SIZE, mask=n < end - pos, other=0)


@triton.jit
def _tile_at(kv, ids, pos, head, KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
             BLOCK_N: tl.constexpr):  # fmt: skip
    """[BLOCK_N, DIM_PAD]: where a tile's K is in a contiguous [blocks, 2, KV_HEADS, BLOCK_SIZE, DIM].

    All but the block ids is the same for every tile, which leaves one instruction a row.
    """
    n = tl.arange(0, BLOCK_N)
    inner = (n % BLOCK_SIZE)[:, None] * DIM + tl.arange(0, DIM_PAD)[None, :]
    block = ids.to(tl.uint32).to(tl.int64) * (2 * KV_HEADS * BLOCK_SIZE * DIM)
    base = kv + head * (BLOCK_SIZE * DIM)
    if BLOCK_SIZE % BLOCK_N == 0:
        return base + block + pos % BLOCK_SIZE * DIM + inner
    else:
        return base + block[:, None] + inner


@triton.jit
def _fold(top, sums, out, m, total, acc, factor):
    """(top, sums, out) with a chunk's (m, total, acc) added. Rounded alike wherever it is called."""
    highest = tl.maximum(top, m)
    old = tl.exp2((top - highest) * factor)
    new = tl.exp2((m - highest) * factor)
    sums = tl.fma(sums, old, total * new)
    return highest, sums, tl.fma(out, tl.broadcast_to(old[:, None], out.shape), acc * new[:, None])


@triton.jit
def _first_token(length, window, WINDOWED: tl.constexpr, ALIGN: tl.constexpr):
    """Where the tiles of a sequence begin."""
    if WINDOWED:
        return tl.maximum(length - window, 0) // ALIGN * ALIGN
    else:
        return length * 0


@triton.jit(do_not_specialize=["positions", "slots", "fresh"])
def _decode_kernel(
    q, q_stride, out, out_stride, kv, tables, table_stride, seqs, starts, acc_buffer, ml_buffer, arrived,
    scale, factor, soft_cap, v_scale, window,
    positions, slots, cos_sin, q_norm, k_norm, angles_stride, eps, k_inverse, v_inverse, fresh,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_DOT: tl.constexpr, GROUP_PAD: tl.constexpr,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, ALIGN: tl.constexpr,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr, MAX_CHUNKS: tl.constexpr, PREFETCH: tl.constexpr,
    FIELDS: tl.constexpr, LOG2_E: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
    FUSED: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr, REST: tl.constexpr, REST_PAD: tl.constexpr,
    ROPE: tl.constexpr, INTERLEAVED: tl.constexpr, Q_NORM: tl.constexpr, K_NORM: tl.constexpr, FP8: tl.constexpr, FP8_LIMIT: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    if FUSED and PDL:
        if fresh != 0:  # the kernel before this one is the plan's
            tl.extra.cuda.gdc_wait()
    # What the plan wrote can be read before the wait: the kernel before this one has waited for the plan.
    run = starts + pid * FIELDS
    first_pair = tl.load(run)
    start = tl.load(run + 1)
    tiles = tl.load(run + 2)
    owner = tl.load(run + 3)
    fields = seqs + first_pair // KV_HEADS * FIELDS
    row = tl.load(fields)
    end = tl.load(fields + 1)
    chunk = tl.load(fields + 2)
    fields = seqs + (first_pair + 1) // KV_HEADS * FIELDS
    ahead_row = tl.load(fields)
    ahead_end = tl.load(fields + 1)
    begin = _first_token(end, window, WINDOWED, ALIGN)
    table = tables + row.to(tl.int64) * table_stride
    ids = _block_ids(table, start, tl.where(tiles > 0, end, 0), BLOCK_SIZE, BLOCK_N)

    in_dim = tl.arange(0, DIM_PAD) < DIM
    n = tl.arange(0, BLOCK_N)
    compute = q.dtype.element_ty
    if PDL:
        if PREFETCH > 0:
            _prefetch(kv, first_pair % KV_HEADS, table, start, end, tiles, KV_HEADS, DIM, BLOCK_SIZE, BLOCK_N, PREFETCH)
    if FUSED:
        stop = tl.load(run + FIELDS)
        stop_at = tl.load(run + FIELDS + 1)
        stop_begin = _first_token(tl.load(seqs + stop // KV_HEADS * FIELDS + 1), window, WINDOWED, ALIGN)
        kv_pairs = tl.where(tiles > 0, stop - first_pair, 0)  # that end here
        q_pairs = tl.where((tiles > 0) & (stop_at != stop_begin), kv_pairs + 1, kv_pairs)
        heads_here = kv_pairs * (GROUP + 2) + (q_pairs - kv_pairs) * GROUP
        of_pair, of_head, to_slot, cos, sin, w_a, w_b, w_c = which_heads(
            0, first_pair, q_pairs, kv_pairs, positions, slots, cos_sin, angles_stride, q_norm, k_norm,
            KV_HEADS, GROUP, ROWS, DIM, HALF, HALF_PAD, REST, REST_PAD, ROPE, INTERLEAVED, Q_NORM, K_NORM,
        )  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if FUSED:
        make_heads(
            of_pair, of_head, to_slot, cos, sin, w_a, w_b, w_c, q, q_stride, out, out_stride, kv, eps, k_inverse, v_inverse,
            KV_HEADS, GROUP, DIM, HALF, HALF_PAD, REST, REST_PAD, BLOCK_SIZE, ROPE, INTERLEAVED, Q_NORM, K_NORM, FP8, FP8_LIMIT,
        )  # fmt: skip
        for block in tl.range(1, (heads_here + ROWS - 1) // ROWS, num_stages=1):
            of_pair, of_head, to_slot, cos, sin, w_a, w_b, w_c = which_heads(
                block, first_pair, q_pairs, kv_pairs, positions, slots, cos_sin, angles_stride, q_norm, k_norm,
                KV_HEADS, GROUP, ROWS, DIM, HALF, HALF_PAD, REST, REST_PAD, ROPE, INTERLEAVED, Q_NORM, K_NORM,
            )  # fmt: skip
            make_heads(
                of_pair, of_head, to_slot, cos, sin, w_a, w_b, w_c, q, q_stride, out, out_stride, kv, eps, k_inverse, v_inverse,
                KV_HEADS, GROUP, DIM, HALF, HALF_PAD, REST, REST_PAD, BLOCK_SIZE, ROPE, INTERLEAVED, Q_NORM, K_NORM, FP8, FP8_LIMIT,
            )  # fmt: skip
        tl.debug_barrier()  # all threads have stored before one of them loads
        heads, heads_stride = out, out_stride
    else:
        heads, heads_stride = q, q_stride

    acc = tl.zeros([GROUP_DOT, DIM_PAD], tl.float32)
    total = tl.zeros([GROUP_DOT, BLOCK_N], tl.float32)  # summed up at the end of a chunk
    m = tl.full([GROUP_DOT], -1e30, tl.float32)  # finite, so that a tile without a visible token changes nothing
    sums = tl.zeros([GROUP_DOT], tl.float32)
    top, folded = m, acc

    tail = start != begin  # the run begins inside a pair
    pair, pos = first_pair, start
    boundary = start + chunk  # where the chunk ends, unless the sequence does before
    q_next = _query(heads, heads_stride, pair, tiles > 0, KV_HEADS, GROUP, GROUP_DOT, DIM, DIM_PAD)
    for _ in range(tiles):
        at = _tile_at(kv, ids, pos, pair % KV_HEADS, KV_HEADS, DIM, DIM_PAD, BLOCK_SIZE, BLOCK_N)
        kept = (n < end - pos)[:, None] & in_dim[None, :]
        k = tl.load(at, mask=kept, other=0.0).to(compute)
        v = tl.load(at + KV_HEADS * BLOCK_SIZE * DIM, mask=kept, other=0.0).to(compute)
        q_tile = q_next

        # Where the next tile is. Its block ids are fetched now, so that its loads of K don't wait for them; so is its query, and
        # what is to be known of the sequence after it.
        after = pos + BLOCK_N
        ends = after >= end
        next_pair = tl.where(ends, pair + 1, pair)
        next_row = tl.where(ends, ahead_row, row)
        next_end = tl.where(ends, ahead_end, end)
        next_begin = _first_token(next_end, window, WINDOWED, ALIGN)
        next_pos = tl.where(ends, next_begin, after)
        ids = _block_ids(tables + next_row.to(tl.int64) * table_stride, next_pos, next_end, BLOCK_SIZE, BLOCK_N)
        q_next = _query(heads, heads_stride, next_pair, next_pos < next_end, KV_HEADS, GROUP, GROUP_DOT, DIM, DIM_PAD)
        fields = seqs + (next_pair + 1) // KV_HEADS * FIELDS
        ahead_row = tl.load(fields)
        ahead_end = tl.load(fields + 1)

        shown = n < end - pos
        if WINDOWED:
            shown &= n >= end - window - pos
        s = tl.dot(q_tile, tl.trans(k), input_precision=PRECISION)
        if CAPPED:
            s = soft_capped(s * scale, soft_cap, LOG2_E)
        s = tl.where(shown[None, :], s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, axis=1))
        p = tl.exp2(s * factor - (m_new * factor)[:, None])
        shrink = tl.exp2((m - m_new) * factor)[:, None]
        total = total * shrink + p
        acc = tl.dot(p.to(compute), v, acc * shrink, input_precision=PRECISION)
        m = m_new

        if ends | (after >= boundary):
            # Zero, but the compiler can't know: else it would keep the stores' addresses in registers all through the loop.
            zero = tl.multiple_of(tl.minimum(pos, 0), 16)
            chunk_sum = tl.sum(total, axis=1)
            if tail & (pair == first_pair):
                slot = owner * MAX_CHUNKS + (pos - begin) // chunk
                _put(acc_buffer, ml_buffer, slot, m, chunk_sum, acc, zero, GROUP, GROUP_DOT, DIM, DIM_PAD)
            else:
                top, sums, folded = _fold(top, sums, folded, m, chunk_sum, acc, factor)
                if ends:
                    result = folded * (v_scale / tl.where(sums > 0, sums, 1.0))[:, None]  # padding has no tokens: zero
                    there = out + (pair // KV_HEADS).to(tl.int64) * out_stride + pair % KV_HEADS * (GROUP * DIM) + zero
                    place, in_group = _group_places(zero, GROUP, GROUP_DOT, DIM, DIM_PAD)
                    tl.store(there + place, result.to(out.dtype.element_ty), mask=in_group)
            boundary += tl.load(seqs + pair // KV_HEADS * FIELDS + 2)
            if ends:
                boundary = next_begin + tl.load(seqs + next_pair // KV_HEADS * FIELDS + 2)
                top = tl.full([GROUP_DOT], -1e30, tl.float32)
                sums = tl.zeros([GROUP_DOT], tl.float32)
                folded = tl.zeros_like(folded)
            m = tl.full([GROUP_DOT], -1e30, tl.float32)
            total = tl.zeros_like(total)
            acc = tl.zeros_like(acc)
        pair, pos, row, end = next_pair, next_pos, next_row, next_end

    # The run's ends may lie inside pairs: the first was begun by another program, the last will be ended by another.
    last_begin = _first_token(end, window, WINDOWED, ALIGN)
    same = pair == first_pair
    owns = (pos != last_begin) & (tiles > 0) & ((pair != first_pair) | (start == begin))
    if owns:
        _put(acc_buffer, ml_buffer, pid * MAX_CHUNKS, top, sums, folded, 0, GROUP, GROUP_DOT, DIM, DIM_PAD)
    if tail & (tiles > 0):
        whole_end = tl.load(seqs + first_pair // KV_HEADS * FIELDS + 1)
        upto = tl.where(same, pos, whole_end)
        _arrive(
            out, out_stride, acc_buffer, ml_buffer, arrived, starts, owner, (upto - start + chunk - 1) // chunk,
            (whole_end - begin + chunk - 1) // chunk, first_pair, begin, chunk, factor, v_scale,
            KV_HEADS, GROUP, GROUP_PAD, DIM, DIM_PAD, MAX_CHUNKS, FIELDS,
        )  # fmt: skip
    if owns:
        last_chunk = tl.load(seqs + pair // KV_HEADS * FIELDS + 2)
        _arrive(
            out, out_stride, acc_buffer, ml_buffer, arrived, starts, pid, (pos - last_begin) // last_chunk,
            (end - last_begin + last_chunk - 1) // last_chunk, pair, last_begin, last_chunk, factor, v_scale,
            KV_HEADS, GROUP, GROUP_PAD, DIM, DIM_PAD, MAX_CHUNKS, FIELDS,
        )  # fmt: skip


@triton.jit
def _query(q, q_stride, pair, real, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_DOT: tl.constexpr, DIM: tl.constexpr,
           DIM_PAD: tl.constexpr):  # fmt: skip
    """[GROUP_DOT, DIM_PAD]: the query heads of a pair, zero past them, and all zero if the pair isn't ``real``."""
    d = tl.arange(0, DIM_PAD)[None, :]
    g = tl.arange(0, GROUP_DOT)[:, None]
    at = q + (pair // KV_HEADS).to(tl.int64) * q_stride + pair % KV_HEADS * (GROUP * DIM)
    return tl.load(at + g * DIM + d, mask=(g < tl.where(real, GROUP, 0)) & (d < DIM), other=0.0)


@triton.jit
def _group_places(zero, GROUP: tl.constexpr, GROUP_DOT: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr):
    """(offsets, mask) of an accumulator's elements in a contiguous [GROUP, DIM]."""
    d = tl.arange(0, DIM_PAD)[None, :] + zero
    g = tl.arange(0, GROUP_DOT)[:, None]
    return g * DIM + d, (g < GROUP) & (d < DIM)


@triton.jit
def _prefetch(
    kv, head, table, start, end, tiles, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    PREFETCH: tl.constexpr,
):  # fmt: skip
    """Ask for the 128-byte lines of the first tiles' K and V. L2 is where all writes meet, so nothing stale comes of it."""
    LINE: tl.constexpr = 1024 // kv.dtype.element_ty.primitive_bitwidth
    LINES: tl.constexpr = (DIM + LINE - 1) // LINE
    LINES_PAD: tl.constexpr = triton.next_power_of_2(LINES)
    line = tl.arange(0, LINES_PAD)
    tokens = start + tl.arange(0, BLOCK_N * PREFETCH)
    wanted = (tokens < end) & (tokens < start + tiles * BLOCK_N)
    ids = tl.load(table + tokens // BLOCK_SIZE, mask=wanted, other=0).to(tl.int64)
    # What is not wanted repeats the first line.
    at = ids * (2 * KV_HEADS * BLOCK_SIZE * DIM) + tl.where(wanted, tokens % BLOCK_SIZE, 0) * DIM
    lines = kv + head * (BLOCK_SIZE * DIM) + at[:, None] + tl.where(line < LINES, line, 0)[None, :] * LINE
    prefetch_lines(lines.to(tl.int64), True)
    prefetch_lines((lines + KV_HEADS * BLOCK_SIZE * DIM).to(tl.int64), True)


@triton.jit
def _put(
    acc_buffer, ml_buffer, slot, m, total, acc, zero,
    GROUP: tl.constexpr, GROUP_DOT: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
):  # fmt: skip
    """Leave a partial result in a slot."""
    slot = slot.to(tl.int64)
    place, in_group = _group_places(zero, GROUP, GROUP_DOT, DIM, DIM_PAD)
    tl.store(acc_buffer + slot * (GROUP * DIM) + place, acc, mask=in_group)
    g = tl.arange(0, GROUP_DOT) + zero
    tl.store(ml_buffer + slot * (2 * GROUP) + g, m, mask=g < GROUP)
    tl.store(ml_buffer + slot * (2 * GROUP) + GROUP + g, total, mask=g < GROUP)


@triton.jit
def _arrive(
    out, out_stride, acc_buffer, ml_buffer, arrived, starts, owner, stored, chunks, pair, begin, chunk, factor, v_scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    MAX_CHUNKS: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    """Tell that ``stored`` of a pair's chunks are there; if they are the last, fold all.

    Slot 0 holds what the owner folded: the chunks up to where the next program begins. Every other chunk has its own.
    """
    tl.debug_barrier()  # all threads have stored before one of them tells
    before = tl.atomic_add(arrived + owner, stored, sem="acq_rel", scope="gpu")
    if before == chunks - stored:
        tl.store(arrived + owner, 0)
        given = (tl.load(starts + (owner + 1) * FIELDS + 1) - begin) // chunk
        d = tl.arange(0, DIM_PAD)
        g = tl.arange(0, GROUP_PAD)
        inner = g[:, None] * DIM + d[None, :]
        in_group = (g < GROUP)[:, None] & (d < DIM)[None, :]
        base = owner.to(tl.int64) * MAX_CHUNKS
        top, sums, folded = _take(acc_buffer, ml_buffer, base, given > 0, GROUP, GROUP_PAD, DIM, DIM_PAD)
        for i in range(given, chunks, 4):
            # the loads first, so that they are under way together
            m0, t0, a0 = _take(acc_buffer, ml_buffer, base + i, i < chunks, GROUP, GROUP_PAD, DIM, DIM_PAD)
            m1, t1, a1 = _take(acc_buffer, ml_buffer, base + i + 1, i + 1 < chunks, GROUP, GROUP_PAD, DIM, DIM_PAD)
            m2, t2, a2 = _take(acc_buffer, ml_buffer, base + i + 2, i + 2 < chunks, GROUP, GROUP_PAD, DIM, DIM_PAD)
            m3, t3, a3 = _take(acc_buffer, ml_buffer, base + i + 3, i + 3 < chunks, GROUP, GROUP_PAD, DIM, DIM_PAD)
            top, sums, folded = _fold(top, sums, folded, m0, t0, a0, factor)
            top, sums, folded = _fold(top, sums, folded, m1, t1, a1, factor)
            top, sums, folded = _fold(top, sums, folded, m2, t2, a2, factor)
            top, sums, folded = _fold(top, sums, folded, m3, t3, a3, factor)
        result = folded * (v_scale / tl.where(sums > 0, sums, 1.0))[:, None]
        there = out + (pair // KV_HEADS).to(tl.int64) * out_stride + (pair % KV_HEADS) * (GROUP * DIM)
        tl.store(there + inner, result.to(out.dtype.element_ty), mask=in_group)


@triton.jit
def _take(acc_buffer, ml_buffer, slot, real, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr):
    """A slot's partial result; of one that isn't ``real``, what changes nothing when it is folded in."""
    d = tl.arange(0, DIM_PAD)[None, :]
    g = tl.arange(0, GROUP_PAD)
    group = tl.where(real, GROUP, 0)
    ml = ml_buffer + slot * (2 * GROUP) + g
    m = tl.load(ml, mask=g < group, other=-1e30, cache_modifier=".cg")
    total = tl.load(ml + GROUP, mask=g < group, other=0.0, cache_modifier=".cg")
    acc = acc_buffer + slot * (GROUP * DIM) + g[:, None] * DIM + d
    return m, total, tl.load(acc, mask=(g < group)[:, None] & (d < DIM), other=0.0, cache_modifier=".cg")


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
    compile_only: bool = False,
    new: NewTokens | None = None,
    fresh_plan: bool = False,
) -> None:
    """Row s of out [>= S, num_heads * head_dim] = attention of q's row s over the plan's sequence s. One launch.

    q:            [>= S, >= num_heads * head_dim], heads first in a row (qkv as ``write_kv`` leaves it)
    kv_cache:     [num_blocks, 2, num_kv_heads, block_size, head_dim], contiguous
    block_tables: int32 [rows, max_blocks], indexed by the plan's rows
    plan:         by ``plan_decode`` with the same window and KV heads; rows of padding (length 0) become zero
    pdl:          launch as a programmatic dependent; the kernel before must have waited for the plan before it released this one
    compile_only: fill Triton's cache on disk, and launch nothing
    new:          q is qkv as it came, [>= S, (num_heads + 2 * KV heads) * head_dim], and stays so; the new tokens' K and V, which the
                  cache lacks, are written by this launch. Row s is sequence s's. Bits as with ``write_kv`` before.
    fresh_plan:   with ``new`` and ``pdl``: the kernel before may be the plan's own
    Results depend on the sequence alone, bit for bit, never on the batch around it.
    """
    kv_heads, block_size, dim = kv_cache.shape[2:]
    group = num_heads // kv_heads
    config = config or decode_config(dim, group, kv_cache.dtype)
    if config.block_n != plan.block_n:
        raise ValueError(f"The plan has tiles of {plan.block_n} tokens, the configuration of {config.block_n}.")
    if not kv_cache.is_contiguous():
        raise ValueError(f"decode_attention takes a contiguous KV cache; got strides {kv_cache.stride()}.")
    if new is not None and out.dtype != q.dtype:
        raise ValueError(f"decode_attention makes query heads in out; got {out.dtype} for q of {q.dtype}.")
    dim_pad, group_pad = next_power_of_2(dim), next_power_of_2(group)
    scale *= k_scale
    arguments = (
        q, q.stride(0), out, out.stride(0), kv_cache, block_tables, block_tables.stride(0), plan.seqs, plan.starts,
        workspace.acc, workspace.ml, workspace.arrived,
        # exp2 takes scores times ``factor``; what is capped has met its scale before
        scale, LOG2_E if soft_cap is not None else scale * LOG2_E, soft_cap or 0.0, v_scale, window or 0,
        *new_arguments(new, k_scale, v_scale, fresh_plan),
    )  # fmt: skip
    keywords = dict(
        KV_HEADS=kv_heads, GROUP=group, GROUP_DOT=max(16, group_pad), GROUP_PAD=group_pad,
        DIM=dim, DIM_PAD=dim_pad, BLOCK_SIZE=block_size, BLOCK_N=config.block_n, ALIGN=ALIGN,
        WINDOWED=window is not None, CAPPED=soft_cap is not None, MAX_CHUNKS=plan.max_chunks,
        PREFETCH=config.prefetch if pdl else 0, FIELDS=FIELDS, LOG2_E=LOG2_E,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32", PDL=pdl,
        **new_constants(new, dim, config, kv_cache.dtype),
        **config.options(), **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
    if compile_only:
        _decode_kernel.warmup(*arguments, grid=(plan.programs,), **keywords)
    else:
        launch(_decode_kernel, (plan.programs,), arguments, **keywords)
