"""Logits → tokens on the device: greedy, temperature, and min_p / top_k / top_p without a sort. No host sync, fixed grid.

Two launches. ``_scan_kernel`` reads all logits once, several programs a row: per block the best token, the best token with
Gumbel noise, and what bounds the truncation's search. ``_choose_kernel``, one program a row, combines the blocks; for rows
that truncate it gathers the few tokens that can be kept (the k-th largest of 64-token peaks bounds the k-th largest token
from below; less than (1 - top_p) of the mass lies under another bound), finds the threshold among them, and draws. Rows
whose candidates are too many (a flat distribution) search the whole vocabulary instead, in the same way.

The draw is the Gumbel-max trick (Gumbel 1954; Maddison et al. 2014, arXiv:1411.0030): the argmax of logit / temperature +
noise is distributed as softmax(logits / temperature), and restricted to the kept tokens as the truncated one. Noise is a
function of (row key, position, token id) alone, so batching, rows and graphs don't change what a seed gives. A row's masses
are added in an order that depends on its own logits only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from octavo.kernels.sizes import cdiv, next_power_of_2
from octavo.kernels.triton import draw
from octavo.kernels.triton.draw import from_order_bits, gumbel, kth_largest, order_bits, search, stream_state, totals, weight_of
from octavo.kernels.triton.launch import launch, pdl_options, release, skipping, wait

COLUMNS = 5  # of a row of packed parameters: temperature, top_p, min_p (float64 bits), top_k, key (int64)
PEAK = 64  # tokens to a peak
BLOCK = 4096  # tokens to a program of the scan
CANDIDATES = 4096  # gathered per row at most
PASS = 2048  # of them looked at at a time
GREEDY, PLAIN, TRUNCATED = 0, 1, 2  # what the rows of a launch may do; each includes those before it

_PEAK = tl.constexpr(PEAK)
_COLUMNS = tl.constexpr(COLUMNS)
_MANY = tl.constexpr(draw.MANY)
_LOWEST = tl.constexpr(draw.LOWEST)


@triton.jit
def _token_keys(value, token):
    """int64 keys whose largest is the first token in the order of tokens."""
    return (order_bits(value).to(tl.int64) << 32) | (0x7FFFFFFF - token).to(tl.int64)


@triton.jit
def _first_best(score, token):
    """(largest score, the smallest token that has it) of tiles [N]."""
    best = tl.max(score, axis=0)
    return best, tl.min(tl.where(score == best, token, 0x7FFFFFFF), axis=0)


@triton.jit
def _row_parameters(packed_ptr, rows_ptr, positions_ptr, index, HAS_ROWS: tl.constexpr):
    """(temperature float32, top_p, min_p float64, top_k int64, stream state uint64) of the index-th row of the step."""
    row = index.to(tl.int64)
    if HAS_ROWS:
        row = tl.load(rows_ptr + index)
    base = packed_ptr + row * _COLUMNS
    temperature = tl.load(base).to(tl.float64, bitcast=True).to(tl.float32)
    top_p = tl.load(base + 1).to(tl.float64, bitcast=True)
    min_p = tl.load(base + 2).to(tl.float64, bitcast=True)
    top_k = tl.load(base + 3)
    state = stream_state(tl.load(base + 4), tl.load(positions_ptr + index))
    return temperature, top_p, min_p, top_k, state


@triton.jit
def _truncates(temperature, top_p, min_p, top_k, VOCAB: tl.constexpr):
    cut = (top_p < 1.0) | (min_p > 0.0) | ((top_k < VOCAB) & (top_k > 0))
    return cut & (temperature > 0.0)


@triton.jit
def _scan_kernel(
    logits_ptr, logits_stride, packed_ptr, rows_ptr, positions_ptr, best_ptr, bad_ptr, score_ptr, token_ptr, mass_ptr, peaks_ptr,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, PEAKS: tl.constexpr, MODE: tl.constexpr, HAS_ROWS: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Grid (blocks, rows). Per row and block: best int64 key; bad int32, whether NaN or +inf was seen; score float32 and token
    int32 of the best with noise, relative to the block's largest; mass float64 and peaks float32 for the truncation."""
    block = tl.program_id(0)
    row = tl.program_id(1)
    place = row * tl.num_programs(0) + block
    SUBS: tl.constexpr = BLOCK // _PEAK
    token = block * BLOCK + tl.arange(0, SUBS)[:, None] * _PEAK + tl.arange(0, _PEAK)[None, :]
    release(USE_PDL)
    wait(USE_PDL)
    value = tl.load(logits_ptr + row.to(tl.int64) * logits_stride + token, mask=token < VOCAB, other=float("-inf")).to(tl.float32)
    size = tl.abs(value)
    finite = tl.where(size < float("inf"), value, float("-inf"))  # NaN compares false
    keys = tl.max(_token_keys(finite, token), axis=1)
    best = tl.max(keys, axis=0)
    tl.store(best_ptr + place, best)
    if MODE >= 1:
        wrong = tl.where(size < float("inf"), 0, tl.where(value == float("-inf"), 0, 1))
        tl.store(bad_ptr + place, tl.max(tl.max(wrong, axis=1), axis=0))
        temperature, top_p, min_p, top_k, state = _row_parameters(packed_ptr, rows_ptr, positions_ptr, row, HAS_ROWS)
        top = from_order_bits((best >> 32).to(tl.int32))
        exists = finite > float("-inf")
        if _truncates(temperature, top_p, min_p, top_k, VOCAB):
            if MODE >= 2:
                peak = block * SUBS + tl.arange(0, SUBS)
                tl.store(peaks_ptr + row * PEAKS + peak, tl.max(finite, axis=1), mask=peak < PEAKS)
                weight = tl.where(exists, weight_of(finite, top, temperature), 0.0)
                tl.store(mass_ptr + place, tl.sum(tl.sum(weight.to(tl.float64), axis=1), axis=0))
        else:
            if temperature > 0.0:
                score = tl.where(exists, (finite - top) / temperature + gumbel(state, token), float("-inf"))
                highest = tl.max(tl.max(score, axis=1), axis=0)
                first = tl.min(tl.min(tl.where(score == highest, token, 0x7FFFFFFF), axis=1), axis=0)
                tl.store(score_ptr + place, highest)
                tl.store(token_ptr + place, first)


@triton.jit
def _gather(
    logits_row, peaks_row, list_row, values_row, ids_row, bound,
    VOCAB: tl.constexpr, PEAKS: tl.constexpr, PEAKS_PADDED: tl.constexpr, BLOCK: tl.constexpr, CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Write the tokens whose logit is >= bound, in order of ids, to values and ids, as far as they have room.

    Returns how many; where that is more than CANDIDATES, it is a lower bound. Only runs of tokens whose peak reaches the bound
    are read; ``list_row`` is scratch for which they are.
    """
    peak = tl.arange(0, PEAKS_PADDED)
    high = (tl.load(peaks_row + peak, mask=peak < PEAKS, other=float("-inf")) >= bound) & (peak < PEAKS)
    number = high.to(tl.int32)
    runs = tl.sum(number, axis=0)
    tl.store(list_row + tl.cumsum(number, axis=0) - number, peak, mask=high)
    tl.debug_barrier()  # other threads of this program read the list
    SUBS: tl.constexpr = BLOCK // _PEAK
    count = tl.where(runs > CANDIDATES, runs, 0)  # each has a token that reaches the bound
    start = tl.full([], 0, tl.int32)
    while (start < runs) & (count <= CANDIDATES):
        entry = start + tl.arange(0, SUBS)
        run = tl.load(list_row + entry, mask=entry < runs, other=PEAKS)
        token = run[:, None] * _PEAK + tl.arange(0, _PEAK)[None, :]
        value = tl.load(logits_row + token, mask=token < VOCAB, other=float("-inf"))
        taken = (token < VOCAB) & (value >= bound)
        inside = taken.to(tl.int32)
        per_run = tl.sum(inside, axis=1)
        place = count + (tl.cumsum(per_run, axis=0) - per_run)[:, None] + tl.cumsum(inside, axis=1) - inside
        fits = taken & (place < CANDIDATES)
        tl.store(values_row + place, value, mask=fits)
        tl.store(ids_row + place, token, mask=fits)
        count += tl.sum(per_run, axis=0)
        start += SUBS
    return count


@triton.jit
def _bound(
    peaks_row, top, mass, temperature, top_p, min_p, top_k,
    VOCAB: tl.constexpr, PEAKS: tl.constexpr, PEAKS_PADDED: tl.constexpr,
):  # fmt: skip
    """A logit below which nothing is kept, and nothing is needed to know what is."""
    bound = tl.full([], float("-inf"), tl.float32)
    if (top_k < VOCAB) & (top_k > 0):
        if top_k <= PEAKS:
            peak = tl.arange(0, PEAKS_PADDED)
            bits = order_bits(tl.load(peaks_row + peak, mask=peak < PEAKS, other=float("-inf")))
            bound = from_order_bits(kth_largest(bits, top_k, order_bits(top)))
    span = tl.full([], float("-inf"), tl.float32)
    if min_p > 0.0:
        span = temperature * tl.log(min_p.to(tl.float32))
    else:
        if ((top_k >= VOCAB) | (top_k <= 0)) & (top_p < 1.0):
            # VOCAB tokens, each with less than this weight, are less than (1 - top_p) of the mass
            span = temperature * tl.log(((1.0 - top_p) * mass / VOCAB).to(tl.float32))
    # a little lower, for what rounding does to weights near the bound
    return tl.maximum(bound, top + span - 1e-5 * tl.abs(span) - 1e-6 * tl.abs(top))


@triton.jit
def _threshold(
    values, count, top, mass, temperature, top_p, min_p, top_k, VOCAB: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """(threshold as order_bits int64, how many of the tokens equal to it are kept); all above it are."""
    number, sum_all = totals(values, count, top, temperature, min_p, BLOCK)
    limit = tl.where((top_k > 0) & (top_k < VOCAB), top_k, VOCAB).to(tl.int32)
    high = order_bits(top).to(tl.int64) + 1
    threshold = tl.full([], _LOWEST, tl.int64)
    above = tl.full([], 0, tl.int32)
    mass_above = tl.full([], 0.0, tl.float64)
    ties = tl.full([], _MANY, tl.int32)
    total = sum_all
    low = threshold
    low_count = number
    low_mass = sum_all
    tie_weight = tl.full([], 0.0, tl.float64)
    if limit < number:
        threshold, above, mass_above = search(
            values, count, low, number, sum_all, high, limit, total, top, temperature, min_p, False, BLOCK
        )
        ties = limit - above
        tie_weight = weight_of(from_order_bits(threshold.to(tl.int32)), top, temperature).to(tl.float64)
        total = mass_above + ties.to(tl.float64) * tie_weight
        low = threshold + 1
        low_count = above
        low_mass = mass_above
    else:
        if min_p <= 0.0:
            if limit >= VOCAB:
                total = mass  # of the whole vocabulary: what was gathered may lack the tail
    if top_p < 1.0:
        target = tl.maximum(top_p * total, 1e-30)
        room = ties
        if (limit >= number) | (mass_above >= target):
            # what is >= low reaches the target, rounding apart: the threshold is higher than top_k's
            threshold, above, mass_above = search(
                values, count, low, low_count, low_mass, high, -1, target, top, temperature, min_p, True, BLOCK
            )
            tie_weight = weight_of(from_order_bits(threshold.to(tl.int32)), top, temperature).to(tl.float64)
            room = tl.full([], _MANY, tl.int32)
        needed = tl.ceil((target - mass_above) / tl.maximum(tie_weight, 1e-300))
        ties = tl.minimum(room, tl.maximum(tl.minimum(needed, 1.0 * _MANY), 0.0).to(tl.int32))
    return threshold, ties


@triton.jit
def _draw_kept(
    values, ids_row, gathered, count, threshold, ties, top, temperature, min_p, state, fallback, BLOCK: tl.constexpr,
):  # fmt: skip
    """The best kept token with noise; tokens that tie at the threshold are kept in order of ids."""
    best = tl.full([], float("-inf"), tl.float32)
    chosen = fallback
    seen = tl.full([], 0, tl.int32)
    for start in range(0, count, BLOCK):
        place = start + tl.arange(0, BLOCK)
        value = tl.load(values + place, mask=place < count, other=float("-inf"))
        token = place
        if gathered:
            token = tl.load(ids_row + place, mask=place < count, other=0)
        weight = weight_of(value, top, temperature).to(tl.float64)
        inside = (place < count) & (weight >= min_p) & (value > float("-inf"))
        bits = order_bits(value).to(tl.int64)
        tied = (inside & (bits == threshold)).to(tl.int32)
        rank = seen + tl.cumsum(tied, axis=0) - tied
        kept = inside & ((bits > threshold) | ((bits == threshold) & (rank < ties)))
        seen += tl.sum(tied, axis=0)
        score, first = _first_best(tl.where(kept, (value - top) / temperature + gumbel(state, token), float("-inf")), token)
        chosen = tl.where(score > best, first, chosen)
        best = tl.maximum(best, score)
    return chosen


@triton.jit
def _choose_kernel(
    logits_ptr, logits_stride, packed_ptr, rows_ptr, positions_ptr, best_ptr, bad_ptr, score_ptr, token_ptr, mass_ptr, peaks_ptr,
    list_ptr, values_ptr, ids_ptr, out_ptr,
    VOCAB: tl.constexpr, BLOCKS: tl.constexpr, BLOCKS_PADDED: tl.constexpr, PEAKS: tl.constexpr, PEAKS_PADDED: tl.constexpr,
    CANDIDATES: tl.constexpr, BLOCK: tl.constexpr, PASS: tl.constexpr, MODE: tl.constexpr, HAS_ROWS: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Grid (rows,): blocks → out int64 [R]."""
    row = tl.program_id(0)
    block = tl.arange(0, BLOCKS_PADDED)
    inside = block < BLOCKS
    release(USE_PDL)
    wait(USE_PDL)
    keys = tl.load(best_ptr + row * BLOCKS + block, mask=inside, other=-0x7FFFFFFFFFFFFFFF)
    best = tl.max(keys, axis=0)
    chosen = 0x7FFFFFFF - (best & 0x7FFFFFFF).to(tl.int32)  # greedy, and the answer of rows that can't be drawn from
    if MODE >= 1:
        temperature, top_p, min_p, top_k, state = _row_parameters(packed_ptr, rows_ptr, positions_ptr, row, HAS_ROWS)
        top = from_order_bits((best >> 32).to(tl.int32))
        bad = tl.max(tl.load(bad_ptr + row * BLOCKS + block, mask=inside, other=0), axis=0)
        if (temperature > 0.0) & (bad == 0) & (top > float("-inf")):
            tops = from_order_bits((keys >> 32).to(tl.int32))
            exists = inside & (tops > float("-inf"))
            if _truncates(temperature, top_p, min_p, top_k, VOCAB):
                if MODE >= 2:
                    mass_of = tl.load(mass_ptr + row * BLOCKS + block, mask=exists, other=0.0)
                    mass = tl.sum(mass_of * tl.where(exists, weight_of(tops, top, temperature), 0.0).to(tl.float64), axis=0)
                    logits_row = logits_ptr + row.to(tl.int64) * logits_stride
                    peaks_row = peaks_ptr + row * PEAKS
                    values_row = values_ptr + row * CANDIDATES
                    ids_row = ids_ptr + row * CANDIDATES
                    bound = _bound(peaks_row, top, mass, temperature, top_p, min_p, top_k, VOCAB, PEAKS, PEAKS_PADDED)
                    list_row = list_ptr + row * PEAKS
                    count = _gather(
                        logits_row, peaks_row, list_row, values_row, ids_row, bound, VOCAB, PEAKS, PEAKS_PADDED, BLOCK, CANDIDATES
                    )
                    tl.debug_barrier()  # other threads of this program read what was gathered
                    gathered = count <= CANDIDATES
                    values = tl.where(gathered, values_row, logits_row)
                    count = tl.where(gathered, count, VOCAB)
                    threshold, ties = _threshold(values, count, top, mass, temperature, top_p, min_p, top_k, VOCAB, PASS)
                    chosen = _draw_kept(values, ids_row, gathered, count, threshold, ties, top, temperature, min_p, state, chosen, PASS)
            else:
                score = tl.load(score_ptr + row * BLOCKS + block, mask=exists, other=float("-inf"))
                token = tl.load(token_ptr + row * BLOCKS + block, mask=exists, other=0x7FFFFFFF)
                moved = tl.where(exists, score + (tops - top) / temperature, float("-inf"))
                _, chosen = _first_best(moved, token)
    tl.store(out_ptr + row, chosen.to(tl.int64))


def pack_parameters(
    temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor, keys: torch.Tensor
) -> torch.Tensor:
    """Per-row parameters [R] each -> int64 [R, 5], as ``SamplingState`` keeps them: floating ones by their float64 bits."""
    floats = torch.stack([temperature.double(), top_p.double(), min_p.double()], dim=1).view(torch.int64)
    return torch.cat([floats, top_k[:, None].long(), keys[:, None]], dim=1)


def sample_rows(
    logits: torch.Tensor,
    packed: torch.Tensor | None,
    row_index: torch.Tensor | None,
    positions: torch.Tensor | None,
    *,
    mode: int = TRUNCATED,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Draw logits[i]'s token with the parameters packed[row_index[i]]: int64 [R], written to ``out`` if given.

    logits: [R, V], float32 (bfloat16 and float16 too unless mode is TRUNCATED), rows contiguous, V < 2**31.
    packed: int64 [rows, 5]: temperature (0 greedy), top_p, min_p as float64 bits, top_k (0 or >= V keeps all), key.
    row_index: int64 [R], None for 0, 1, 2 …  positions: int64 [R], the index in its sequence of the token to draw.
    mode: GREEDY reads none of the parameters; PLAIN must have no row that truncates; TRUNCATED takes all.

    A row with NaN or +inf takes its best finite token, one with nothing finite token 0. ValueError for other shapes or types.
    Nothing waits for the device; the launches depend on shapes and ``mode`` only, so a graph may hold them.
    """
    if logits.dim() != 2 or logits.shape[1] < 1 or logits.stride(1) != 1:
        raise ValueError(f"sample_rows takes logits [R, V] with contiguous rows; got {tuple(logits.shape)}, strides {logits.stride()}.")
    if mode == TRUNCATED and logits.dtype != torch.float32:
        raise ValueError(f"sample_rows takes float32 logits when rows may truncate; got {logits.dtype}.")
    if mode != GREEDY and (packed is None or positions is None or packed.dtype != torch.int64 or not packed.is_contiguous()):
        raise ValueError("sample_rows needs packed parameters (int64, contiguous) and positions unless every row is greedy.")
    rows, vocab = logits.shape
    device = logits.device
    tokens = torch.empty(rows, dtype=torch.int64, device=device) if out is None else out
    if rows == 0:
        return tokens
    blocks, peaks = cdiv(vocab, BLOCK), cdiv(vocab, PEAK)
    best = torch.empty(rows, blocks, dtype=torch.int64, device=device)
    bad = score = token = mass = peak = runs = values = ids = best  # stand-ins for what the mode does not touch
    if mode >= PLAIN:
        bad, token = torch.empty(2, rows, blocks, dtype=torch.int32, device=device)
        score = torch.empty(rows, blocks, dtype=torch.float32, device=device)
    if mode >= TRUNCATED:
        mass = torch.empty(rows, blocks, dtype=torch.float64, device=device)
        peak = torch.empty(rows, peaks, dtype=torch.float32, device=device)
        runs = torch.empty(rows, peaks, dtype=torch.int32, device=device)
        values = torch.empty(rows, CANDIDATES, dtype=torch.float32, device=device)
        ids = torch.empty(rows, CANDIDATES, dtype=torch.int32, device=device)
    packed = best if packed is None else packed
    positions = best if positions is None else positions
    index = positions if row_index is None else row_index
    shared = (logits, logits.stride(0), packed, index, positions, best, bad, score, token, mass, peak)
    options = {"MODE": mode, "HAS_ROWS": row_index is not None, **pdl_options(logits)}
    launch(_scan_kernel, (blocks, rows), shared, VOCAB=vocab, BLOCK=BLOCK, PEAKS=peaks, num_warps=8, **options)
    launch(
        _choose_kernel, (rows,),
        (*shared, runs, values, ids, tokens),
        VOCAB=vocab, BLOCKS=blocks, BLOCKS_PADDED=next_power_of_2(blocks), PEAKS=peaks,
        PEAKS_PADDED=next_power_of_2(peaks), CANDIDATES=CANDIDATES, BLOCK=BLOCK, PASS=PASS,
        num_warps=16 if mode == TRUNCATED else 1, **options,
    )  # fmt: skip
    return tokens.zero_() if skipping() else tokens  # a trial looks up what it has drawn


def greedy_tokens(logits: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """The first of the largest finite logits of each row: int64 [R]."""
    return sample_rows(logits, None, None, None, mode=GREEDY, out=out)


def sample_tokens(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    keys: torch.Tensor,
    positions: torch.Tensor,
    *,
    truncates: bool = True,
) -> torch.Tensor:
    """``sample_rows`` with a tensor per parameter, each [R]. truncates: whether a row may set top_k, top_p or min_p."""
    packed = pack_parameters(temperature, top_k, top_p, min_p, keys)
    return sample_rows(logits, packed, None, positions, mode=TRUNCATED if truncates else PLAIN)


# ---------------------------------------------------------------------------------------------------------------------
# the same in torch


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def _mix64(value: torch.Tensor) -> torch.Tensor:
    for shift, factor in ((30, draw.MIX_1), (27, draw.MIX_2)):
        value = (value ^ ((value >> shift) & ((1 << (64 - shift)) - 1))) * _signed(factor)
    return value ^ ((value >> 31) & ((1 << 33) - 1))


def gumbel_reference(keys: torch.Tensor, positions: torch.Tensor, vocab: int) -> torch.Tensor:
    """The noise of every token: float64 [R, V]."""
    golden = _signed(draw.GOLDEN)
    state = _mix64(keys + (positions * draw.DRAWS_PER_POSITION + 1) * golden)
    token = torch.arange(1, vocab + 1, device=keys.device)
    bits = (_mix64(state[:, None] + token * golden) >> 32) & 0xFFFFFFFF
    return -torch.log(-torch.log1p(-(bits.double() + 0.5) * 2.0**-32))


def kept_reference(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """What min_p, then top_k, then top_p leave of each row: bool [R, V]. Logits must be drawable, temperature > 0."""
    vocab = logits.shape[1]
    weights = ((logits - logits.amax(-1, keepdim=True)).double() / temperature.double()[:, None]).exp()
    order = torch.sort(logits + 0.0, dim=-1, descending=True, stable=True).indices
    ordered = weights.gather(1, order)
    limit = torch.minimum((ordered >= min_p.double()[:, None]).sum(-1), torch.where((top_k > 0) & (top_k < vocab), top_k, vocab))
    rank = torch.arange(vocab, device=logits.device)
    cumulative = ordered.masked_fill(rank >= limit[:, None], 0.0).cumsum(-1)
    nucleus = (cumulative < (top_p.double() * cumulative[:, -1])[:, None]).sum(-1) + 1
    kept = torch.minimum(limit, torch.where(top_p < 1.0, nucleus, vocab))
    return torch.empty_like(logits, dtype=torch.bool).scatter_(1, order, rank < kept[:, None])


def sample_tokens_reference(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    keys: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """See ``sample_tokens``. One sort of everything; noise and sums in float64."""
    logits = logits.float()
    finite = torch.where(logits.isfinite(), logits, float("-inf"))
    greedy = finite.argmax(-1)
    certain = ~logits.amax(-1).isfinite() | (temperature <= 0)
    safe = torch.where(certain[:, None], 0.0, logits)
    heat = torch.where(temperature > 0, temperature, 1.0)
    scores = (safe - safe.amax(-1, keepdim=True)).double() / heat.double()[:, None] + gumbel_reference(keys, positions, logits.shape[1])
    kept = kept_reference(safe, heat, top_k, top_p, min_p)
    return torch.where(certain, greedy, scores.masked_fill(~kept, float("-inf")).argmax(-1))
