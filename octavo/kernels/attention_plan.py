"""Task lists of a step's attention, made on the device and shared by all layers.

Decode: a *pair* is one sequence and one KV head; it reads a run of tiles of ``block_n`` tokens. The pairs stand in a row, all
heads of sequence 0 first, and every program takes a contiguous run of about equally many tiles:

    pairs:     | seq 0 head 0 | seq 0 head 1 | ... | seq 1 head 0 | seq 1 head 1 | ...
    programs:  |---- program 0 ----|---- program 1 ----|---- program 2 ----| ...

*What is added up in which order depends on a sequence's length only:* its tiles form chunks, each chunk gives a partial result,
and these are folded from the first to the last. A program that holds a pair from end to end folds in registers. Programs are
cut between chunks only, so where a cut falls changes who folds, and never what comes out. Where whole pairs are about as even,
there are no cuts at all.

Extend: a tile is ``BLOCK_Q`` query tokens of a sequence; tiles with the longest context come first (LPT), so that the
last programs to finish are short ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from octavo.kernels.sizes import next_power_of_2
from octavo.kernels.triton.launch import launch

ALIGN = 128  # chunks and windows start at multiples of this many tokens; decode tiles divide it
MAX_CHUNKS = 128
FIELDS = 4  # of a sequence: row, end, tokens a chunk; of a program: pair, token, tiles, owner


@triton.jit
def _cut(program, programs, tiles, ends, chunk_tiles, begin, whole, seq, num_seqs, KV_HEADS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Where ``program`` starts: (pair, token, tile counted over all pairs, that of its pair's start)."""
    all_tiles = tl.sum(tiles, axis=0).to(tl.int64) * KV_HEADS
    pairs = num_seqs * KV_HEADS
    pair = program.to(tl.int64) * pairs // programs
    target = program.to(tl.int64) * all_tiles // programs
    done = ends.to(tl.int64) * KV_HEADS <= target
    current = tl.sum(tl.where(done & (seq < num_seqs), 1, 0), axis=0)
    current = tl.where(whole, (pair // KV_HEADS).to(tl.int32), current)
    here = seq == current
    before = tl.sum(tl.where(seq < current, tiles, 0), axis=0).to(tl.int64) * KV_HEADS
    mine = tl.maximum(tl.sum(tl.where(here, tiles, 0), axis=0), 1)
    step = tl.maximum(tl.sum(tl.where(here, chunk_tiles, 0), axis=0), 1)
    rest = (target - before).to(tl.int32)
    head = tl.where(whole, (pair % KV_HEADS).to(tl.int32), rest // mine)
    into = tl.where(whole, 0, (rest % mine + step - 1) // step * step)
    past = into >= mine
    into = tl.where(past, 0, into)
    head = tl.where(past, head + 1, head)
    pair_start = before + head * mine
    wrapped = head >= KV_HEADS
    head = tl.where(wrapped, 0, head)
    current = tl.where(wrapped, current + 1, current)
    token = tl.sum(tl.where(seq == current, begin, 0), axis=0) + into * BLOCK_N
    return current * KV_HEADS + head, token, pair_start + into, pair_start


# Values and alignments that change from step to step must not make new variants: each costs a compilation while users wait.
@triton.jit(do_not_specialize=["seq_lens", "row_index", "num_seqs", "window", "min_tiles", "seam"])
def _decode_plan_kernel(
    seq_lens, row_index, seqs, starts, num_seqs, window, min_tiles, seam,
    KV_HEADS: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK_S: tl.constexpr, ROWS: tl.constexpr, WINDOWED: tl.constexpr,
    MIN_CHUNK: tl.constexpr, MAX_CHUNKS: tl.constexpr, BLOCK_N: tl.constexpr, ALIGN: tl.constexpr, FIELDS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program p writes sequence p's fields and attention program p's."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    pid = tl.program_id(0)
    seq = tl.arange(0, BLOCK_S)
    real = seq < num_seqs
    length = tl.load(seq_lens + seq, mask=real, other=0)
    visible = tl.zeros_like(length)
    if WINDOWED:
        visible = tl.maximum(length - window, 0)
    begin = visible // ALIGN * ALIGN
    span = length - begin
    tiles = tl.where(real, tl.maximum((span + BLOCK_N - 1) // BLOCK_N, 1), 0)  # padding has one, whose result is zero
    wanted = tl.maximum(tl.minimum(span // MIN_CHUNK, MAX_CHUNKS), 1)
    chunk = tl.maximum(((span + wanted - 1) // wanted + ALIGN - 1) // ALIGN * ALIGN, ALIGN)

    if pid <= num_seqs:  # one past the last is empty: programs look one sequence ahead
        mine = seq == pid
        row = 0
        if pid < num_seqs:
            row = pid
            if ROWS:
                row = tl.load(row_index + pid).to(tl.int32)
        place = seqs + pid * FIELDS
        tl.store(place, row)
        tl.store(place + 1, tl.sum(tl.where(mine, length, 0), axis=0))
        tl.store(place + 2, tl.maximum(tl.sum(tl.where(mine, chunk, 0), axis=0), 1))

    if pid <= PROGRAMS:  # one past the last is empty: programs look where the next one starts
        all_tiles = tl.sum(tiles, axis=0).to(tl.int64) * KV_HEADS
        programs = tl.minimum((all_tiles + min_tiles - 1) // min_tiles, PROGRAMS)
        pairs = num_seqs * KV_HEADS
        uncut = (pairs + PROGRAMS - 1) // PROGRAMS * tl.max(tiles, axis=0)
        whole = uncut <= (all_tiles + programs - 1) // programs + seam
        programs = tl.where(whole, PROGRAMS, programs)
        ends = tl.cumsum(tiles, axis=0)
        last = tl.minimum((pid + 1).to(tl.int64), programs)
        first = tl.minimum(pid.to(tl.int64), programs)
        at, token, start, pair_start = _cut(first, programs, tiles, ends, chunk // BLOCK_N, begin, whole, seq, num_seqs, KV_HEADS, BLOCK_N)
        _, _, end, _ = _cut(last, programs, tiles, ends, chunk // BLOCK_N, begin, whole, seq, num_seqs, KV_HEADS, BLOCK_N)
        owner = ((pair_start + 1) * programs - 1) // all_tiles  # the last program whose run starts at the pair's start or before
        place = starts + pid * FIELDS
        tl.store(place, at)
        tl.store(place + 1, token)
        tl.store(place + 2, (end - start).to(tl.int32))
        tl.store(place + 3, owner.to(tl.int32))


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
    """seqs int32 [capacity + 2, 4], starts int32 [programs + 1, 4]: FIELDS says what. Its numbers must be those of the kernel that runs it.

    block_n: tokens a tile. max_chunks: at most so many chunks a sequence, which its partial results must have room for.
    """

    seqs: torch.Tensor
    starts: torch.Tensor
    programs: int
    block_n: int
    min_chunk: int
    max_chunks: int

    @property
    def capacity(self) -> int:
        """Sequences."""
        return self.seqs.shape[0] - 2


def make_decode_plan(
    max_seqs: int, programs: int, device: torch.device, *, block_n: int = 64, min_chunk: int = 256, max_chunks: int = 32
) -> DecodePlan:
    """Buffers for ``max_seqs`` sequences. Results depend on block_n, min_chunk and max_chunks (in the last bits), not on programs."""
    if ALIGN % block_n:
        raise ValueError(f"block_n {block_n} does not divide {ALIGN}.")
    seqs = torch.zeros(max_seqs + 2, FIELDS, dtype=torch.int32, device=device)
    starts = torch.zeros(programs + 1, FIELDS, dtype=torch.int32, device=device)
    return DecodePlan(seqs, starts, programs, block_n, min_chunk, max_chunks)


def plan_decode(
    plan: DecodePlan,
    seq_lens: torch.Tensor,
    num_seqs: int,
    num_kv_heads: int,
    *,
    window: int | None = None,
    row_index: torch.Tensor | None = None,
    min_tiles: int = 4,
    seam: int = 4,
    pdl: bool = False,
) -> None:
    """Fill ``plan`` for the first ``num_seqs`` of seq_lens (int32 [S]; 0 is padding, whose result is zero). One launch.

    row_index: [S], the row of the block table of each sequence; None: its own index.
    min_tiles: what a program should have at least, if there is a cut; seam: what a cut costs, in tiles.
    """
    if num_seqs > plan.capacity:
        raise ValueError(f"An attention plan for {plan.capacity} sequences can't hold {num_seqs}; make a larger workspace.")
    launch(
        _decode_plan_kernel, (max(num_seqs, plan.programs) + 1,),
        (seq_lens, row_index, plan.seqs, plan.starts, num_seqs, window or 0, min_tiles, seam),
        KV_HEADS=num_kv_heads, PROGRAMS=plan.programs, BLOCK_S=_block_s(num_seqs),
        ROWS=row_index is not None, WINDOWED=window is not None,
        MIN_CHUNK=plan.min_chunk, MAX_CHUNKS=plan.max_chunks, BLOCK_N=plan.block_n, ALIGN=ALIGN, FIELDS=FIELDS, PDL=pdl,
        num_warps=4, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip


def _block_s(num_seqs: int) -> int:
    """Lanes for a vector of sequences, in few sizes, as each is a variant to compile."""
    return 256 if num_seqs <= 256 else next_power_of_2(max(num_seqs, 1024))


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
