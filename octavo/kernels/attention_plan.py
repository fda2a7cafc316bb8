"""Task lists of a step's attention, made on the device and shared by all layers.

Decode: every sequence's visible tokens are cut into splits, and a unit of work is one split of one KV head. *Where a
sequence is cut depends on its own length only*, so its partial results are the same, and are merged in the same order,
whatever else is in the batch. The programs then take contiguous runs of units that weigh about the same:

    units of KV head 0: | seq 0: split 0, 1, 2 | seq 1: split 0 | seq 2: ... | then the same for KV head 1 ...
    programs:           |--- program 0 ---|--- program 1 ---|--- ...

Extend: a tile is ``BLOCK_Q`` query tokens of a sequence; tiles with the longest context come first (LPT), so that the
last programs to finish are short ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from octavo.kernels.triton.launch import launch

ALIGN = 128  # splits and windows start at multiples of this many tokens; decode tiles divide it
MAX_SPLITS = 128
UNIT_FIELDS = 8  # seq, row, begin, end, first visible, split, splits, unused


@triton.jit
def _splits(span, limit, MIN_SPLIT: tl.constexpr, ALIGN: tl.constexpr):
    """(number of splits, tokens per split) for ``span`` tokens in at most ``limit`` splits."""
    wanted = tl.maximum(tl.minimum((span + MIN_SPLIT - 1) // MIN_SPLIT, limit), 1)
    size = (span + wanted - 1) // wanted
    size = tl.maximum((size + ALIGN - 1) // ALIGN * ALIGN, ALIGN)
    return tl.maximum((span + size - 1) // size, 1), size


# Values and alignments that change from step to step must not make new variants: each costs a compilation while users wait.
@triton.jit(do_not_specialize=["seq_lens", "row_index", "num_seqs", "capacity", "window"])
def _decode_plan_kernel(
    seq_lens, row_index, units, starts, num_seqs, capacity, window,
    KV_HEADS: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK_S: tl.constexpr, ROWS: tl.constexpr,
    WINDOWED: tl.constexpr, MIN_SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr, HALVINGS: tl.constexpr,
    ALIGN: tl.constexpr, OVERHEAD: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    """Program p writes sequence p's units and where attention's program p starts."""
    pid = tl.program_id(0)
    seq = tl.arange(0, BLOCK_S)
    real = seq < num_seqs
    length = tl.load(seq_lens + seq, mask=real, other=0)
    visible = tl.zeros_like(length)
    if WINDOWED:
        visible = tl.maximum(length - window, 0)
    begin = visible // ALIGN * ALIGN
    span = length - begin

    # The partial results must fit their buffer. They do, unless very many long sequences share their blocks: then cut less.
    limit = MAX_SPLITS
    for k in tl.static_range(HALVINGS):
        fewer, _ = _splits(span, MAX_SPLITS >> k, MIN_SPLIT, ALIGN)
        limit = tl.where(tl.sum(tl.where(real, fewer, 0), axis=0) > capacity, MAX_SPLITS >> (k + 1), limit)
    count, size = _splits(span, limit, MIN_SPLIT, ALIGN)
    count = tl.where(real, count, 0)
    total = tl.sum(count, axis=0)

    if pid < num_seqs:
        mine = seq == pid
        first = tl.sum(tl.where(seq < pid, count, 0), axis=0)
        my_count = tl.sum(tl.where(mine, count, 0), axis=0)
        my_size = tl.sum(tl.where(mine, size, 0), axis=0)
        my_begin = tl.sum(tl.where(mine, begin, 0), axis=0)
        my_length = tl.sum(tl.where(mine, length, 0), axis=0)
        my_visible = tl.sum(tl.where(mine, visible, 0), axis=0)
        row = pid
        if ROWS:
            row = tl.load(row_index + pid).to(tl.int32)
        split = tl.arange(0, MAX_SPLITS)
        keep = split < my_count
        unit = units + (first + split) * FIELDS
        start = my_begin + split * my_size
        tl.store(unit, tl.zeros_like(split) + pid, mask=keep)
        tl.store(unit + 1, tl.zeros_like(split) + row, mask=keep)
        tl.store(unit + 2, start, mask=keep)
        tl.store(unit + 3, tl.minimum(start + my_size, my_length), mask=keep)
        tl.store(unit + 4, tl.zeros_like(split) + my_visible, mask=keep)
        tl.store(unit + 5, split, mask=keep)
        tl.store(unit + 6, tl.zeros_like(split) + my_count, mask=keep)

    if pid <= PROGRAMS:
        weight = tl.where(real, span + OVERHEAD * count, 0)
        ends = tl.cumsum(weight, axis=0)
        one_head = tl.sum(weight, axis=0)
        if total * KV_HEADS <= PROGRAMS:
            at = tl.minimum(pid, total * KV_HEADS)
        else:
            target = pid.to(tl.int64) * one_head * KV_HEADS // PROGRAMS
            head = (target // one_head).to(tl.int32)
            rest = (target - head.to(tl.int64) * one_head).to(tl.int32)
            done = real & (ends <= rest)
            current = tl.sum(done.to(tl.int32), axis=0)
            here = seq == current
            size_here = tl.sum(tl.where(here, size, 0), axis=0)
            count_here = tl.sum(tl.where(here, count, 0), axis=0)
            into = rest - tl.sum(tl.where(done, weight, 0), axis=0)
            step = size_here + OVERHEAD
            past = tl.minimum((into + step - 1) // step, count_here)
            at = head * total + tl.sum(tl.where(done, count, 0), axis=0) + past
        tl.store(starts + pid, at)
        if pid == PROGRAMS:
            tl.store(starts + PROGRAMS + 1, total)


@triton.jit(do_not_specialize=["query_start", "seq_lens", "first_seq", "num_seqs"])
def _extend_plan_kernel(
    query_start, seq_lens, tiles, first_seq, num_seqs,
    BLOCK_Q: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Program j places tile j at its rank by context length; programs past the last tile write -1 behind them all."""
    j = tl.program_id(0)
    i = tl.arange(0, BLOCK_S)
    real = first_seq + i < num_seqs
    begin = tl.load(query_start + first_seq + i, mask=real, other=0)
    count = tl.load(query_start + first_seq + i + 1, mask=real, other=0) - begin
    context = tl.load(seq_lens + first_seq + i, mask=real, other=0) - count
    number = tl.where(real, (count + BLOCK_Q - 1) // BLOCK_Q, 0)
    ends = tl.cumsum(number, axis=0)
    total = tl.sum(number, axis=0)
    if j >= total:
        tl.store(tiles + 2 * j, -1)
    else:
        mine = tl.sum((real & (ends <= j)).to(tl.int32), axis=0)
        tile = j - tl.sum(tl.where(i < mine, number, 0), axis=0)
        key = tl.sum(tl.where(i == mine, context, 0), axis=0) + (tile + 1) * BLOCK_Q
        # a sequence's keys are context + BLOCK_Q, context + 2 BLOCK_Q, ...: how many of them are <= key, and is one equal?
        ahead = key - context
        shorter = tl.minimum(tl.maximum(ahead, 0) // BLOCK_Q, number)
        equal = (ahead % BLOCK_Q == 0) & (ahead >= BLOCK_Q) & (ahead // BLOCK_Q <= number) & (i < mine)
        rank = tl.sum(tl.where(real, number - shorter + equal.to(tl.int32), 0), axis=0)
        tl.store(tiles + 2 * rank, first_seq + mine)
        tl.store(tiles + 2 * rank + 1, tile)


@dataclass(slots=True)
class DecodePlan:
    """units int32 [capacity, 8] (see the kernel), starts int32 [programs + 2]: first unit of each program, total, units a head."""

    units: torch.Tensor
    starts: torch.Tensor
    programs: int

    @property
    def capacity(self) -> int:
        return self.units.shape[0]


def make_decode_plan(capacity: int, programs: int, device: torch.device) -> DecodePlan:
    """Buffers for ``capacity`` units a KV head; at least as many as there are sequences."""
    units = torch.zeros(capacity, UNIT_FIELDS, dtype=torch.int32, device=device)
    return DecodePlan(units, torch.zeros(programs + 2, dtype=torch.int32, device=device), programs)


def plan_decode(
    plan: DecodePlan,
    seq_lens: torch.Tensor,
    num_seqs: int,
    num_kv_heads: int,
    *,
    window: int | None = None,
    row_index: torch.Tensor | None = None,
    min_split: int = 256,
) -> None:
    """Fill ``plan`` for the first ``num_seqs`` of seq_lens (int32 [S]; 0 is padding, whose result is zero). One launch.

    row_index: [S], the row of the block table of each sequence; None: its own index.
    """
    if num_seqs > plan.capacity:
        raise ValueError(f"An attention plan of {plan.capacity} units can't hold {num_seqs} sequences; make a larger workspace.")
    launch(
        _decode_plan_kernel, (max(num_seqs, plan.programs + 1),),
        (seq_lens, row_index, plan.units, plan.starts, num_seqs, plan.capacity, window or 0),
        KV_HEADS=num_kv_heads, PROGRAMS=plan.programs, BLOCK_S=_block_s(num_seqs),
        ROWS=row_index is not None, WINDOWED=window is not None,
        MIN_SPLIT=min_split, MAX_SPLITS=MAX_SPLITS, HALVINGS=MAX_SPLITS.bit_length() - 1,
        ALIGN=ALIGN, OVERHEAD=64, FIELDS=UNIT_FIELDS, num_warps=4,
    )  # fmt: skip


def _block_s(num_seqs: int) -> int:
    """Lanes for a vector of sequences, in few sizes, as each is a variant to compile."""
    return 256 if num_seqs <= 256 else triton.next_power_of_2(max(num_seqs, 1024))


def plan_extend(
    query_start: torch.Tensor, seq_lens: torch.Tensor, first_seq: int, num_seqs: int, num_tokens: int, block_q: int
) -> torch.Tensor:
    """int32 [tiles, 2]: (sequence, its tile of ``block_q`` query tokens) of sequences first_seq .. num_seqs - 1; -1 past the end.

    ``num_tokens``: tokens of these sequences, for the number of tiles, which the host can only bound.
    """
    bound = num_tokens // block_q + (num_seqs - first_seq)
    tiles = torch.empty(bound, 2, dtype=torch.int32, device=seq_lens.device)
    launch(
        _extend_plan_kernel, (bound,),
        (query_start, seq_lens, tiles, first_seq, num_seqs),
        BLOCK_Q=block_q, BLOCK_S=_block_s(num_seqs - first_seq), num_warps=4,
    )  # fmt: skip
    return tiles
