"""temperature, min_p (arXiv:2407.01082), top_k, top_p (nucleus sampling, arXiv:1904.09751), and the draw itself.

One order rules: tokens by (logit descending, id ascending). What min_p, top_k and top_p keep is always a prefix of it,
so the three come down to one number a row: how many tokens are kept.

The draw is the inverse CDF in order of token ids: the first token whose cumulative weight exceeds u * total. It does not
depend on how the kept tokens were found. Two ways find them:

- ``draw_from_candidates``: the best 256, which decide most rows; a histogram for rows that they don't decide. It looks at
  values on the way, so it is for the CPU.
- ``kept_weights``: one sort of everything, no value looked at by the host, so it may run inside a CUDA graph; the ground
  truth of the other.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_BLOCK = 32  # of logits, for finding the best ones
_CDF_BLOCK = 64  # of weights, for the cumulative sum
_FEW_CANDIDATES = 64
_FIRST_CANDIDATES = 256
_WIDE_ELEMENTS = 2**18
_NUM_BUCKETS = 8192
_ONE_BITS = 0x3F80  # the upper 16 bits of 1.0 in float32
_ID_MASK = 0xFFFFFFFF


@dataclass(slots=True)
class DrawParams:
    """How rows draw; one entry per row, all on the logits' device.

    temperature float32 [R], > 0; top_k int64 [R], V keeps all; top_p float64 [R], 1 keeps all; min_p float64 [R], 0 keeps
    all. ``first_candidates``: how many candidates to look at first.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    first_candidates: int = _FIRST_CANDIDATES

    def take(self, index: torch.Tensor) -> DrawParams:
        return DrawParams(self.temperature[index], self.top_k[index], self.top_p[index], self.min_p[index], self.first_candidates)


def first_candidates(top_ks: list[int]) -> int:
    """How many candidates to begin with. Fewer only where they decide every row, so that it changes no token."""
    return _FEW_CANDIDATES if max(top_ks, default=0) <= _FEW_CANDIDATES else _FIRST_CANDIDATES


# ---------------------------------------------------------------------------------------------------------------------
# the order of tokens


def _order_keys(values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """int64 keys whose descending order is (value descending, id ascending). values: float32, ids: int64 < 2**32."""
    bits = (values + 0.0).view(torch.int32)  # + 0.0 makes one zero of two
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # floats compare like these integers
    return (ordered.to(torch.int64) << 32) | (_ID_MASK - ids)


def _key_ids(keys: torch.Tensor) -> torch.Tensor:
    return _ID_MASK - (keys & _ID_MASK)


def _key_values(keys: torch.Tensor) -> torch.Tensor:
    ordered = (keys >> 32).to(torch.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).view(torch.float32)


def _largest(keys: torch.Tensor, count: int, sort: bool = True) -> torch.Tensor:
    """The ``count`` largest keys of each row, descending if ``sort``. NumPy's partition and sort use SIMD; torch's don't."""
    if keys.device.type != "cpu":
        return keys.topk(count, dim=-1, sorted=sort).values
    array = (~keys).numpy()  # ~ reverses the order
    if count < keys.shape[1]:
        array.partition(count - 1, axis=-1)
        array = array[:, :count]
    if sort:
        array.sort(axis=-1)
    return ~torch.from_numpy(array)


def top_candidates(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The best ``count`` tokens of each row in the order of tokens, exact with ties.

    logits: float32 [R, V], without NaN. Returns (values float32 [R, count], ids int64 [R, count]).

    The best ``count`` tokens lie in the best ``count`` blocks, blocks ordered by (largest logit, index): any token of
    another block has ``count`` tokens before it, the largest of each of those.
    """
    num_rows, vocab = logits.shape
    blocks = vocab // _BLOCK
    if vocab % _BLOCK == 0 and count * 4 <= blocks:
        peaks = logits.view(num_rows, blocks, _BLOCK).amax(-1)
        best = _key_ids(_largest(_order_keys(peaks, torch.arange(blocks, device=logits.device)), count, sort=False))
        ids = (best[:, :, None] * _BLOCK + torch.arange(_BLOCK, device=logits.device)).view(num_rows, -1)
        rows = best + torch.arange(num_rows, device=logits.device)[:, None] * blocks
        values = logits.view(-1, _BLOCK).index_select(0, rows.view(-1)).view(num_rows, -1)
        keys = _order_keys(values, ids)
    else:
        keys = _order_keys(logits, torch.arange(vocab, device=logits.device))
    keys = _largest(keys, count)
    return _key_values(keys), _key_ids(keys)


# ---------------------------------------------------------------------------------------------------------------------
# weights and the draw


def repair(logits: torch.Tensor) -> torch.Tensor:
    """Make every row drawable: a row with a NaN or +inf, or with nothing but -inf, becomes certain of its best finite
    token, or of token 0 if there is none. Other rows are returned as they are."""
    bad = ~logits.amax(-1).isfinite()  # amax passes NaN on
    if logits.device.type == "cpu":
        if not bad.any():
            return logits
        index = bad.nonzero().view(-1)
        return logits.index_copy(0, index, _certain(logits[index]))
    return torch.where(bad[:, None], _certain(logits), logits)


def _certain(logits: torch.Tensor) -> torch.Tensor:
    finite = torch.where(logits.isfinite(), logits, float("-inf"))
    return torch.full_like(logits, float("-inf")).scatter_(1, finite.argmax(-1, keepdim=True), 0.0)


def full_weights(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """exp((logit - largest) / temperature): float32 [R, V], the largest is 1. Rows must be drawable."""
    return torch.sub(logits, logits.amax(-1, keepdim=True)).div_(temperature[:, None]).exp_()


def _block_sums(weights: torch.Tensor) -> torch.Tensor:
    """float64 [R, ceil(V / 64)]: sums of short runs in float32, so that long sums are made in float64 only."""
    vocab = weights.shape[1]
    whole = vocab - vocab % _CDF_BLOCK
    sums = weights[:, :whole].unflatten(1, (-1, _CDF_BLOCK)).sum(-1)
    if whole < vocab:
        sums = torch.cat([sums, weights[:, whole:].sum(-1, keepdim=True)], dim=1)
    return sums.to(torch.float64)


def _first_above(cumulative: torch.Tensor, fraction: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Per row: the first index whose cumulative sum exceeds fraction * total, and how far into that entry that point
    lies, 0 to 1, as a fraction of it. Never an entry of weight 0. cumulative: float64 [R, N]; fraction: float64 [R], 0 to 1."""
    total = cumulative[:, -1]
    target = torch.minimum(fraction * total, torch.nextafter(total, torch.zeros_like(total)))[:, None]
    index = (cumulative <= target).sum(-1, keepdim=True)
    end = cumulative.gather(1, index)
    start = torch.where(index > 0, cumulative.gather(1, (index - 1).clamp_(min=0)), 0.0)
    return index.squeeze(1), ((target - start) / (end - start)).squeeze(1)


def draw_from_weights(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Inverse CDF in order of ids, in two levels (blocks, then within one). weights: float32 [R, V], >= 0, one of a row
    > 0; uniform: float64 [R] in [0, 1). Returns int64 [R]."""
    block, rest = _first_above(_block_sums(weights).cumsum(-1), uniform)
    ids = block[:, None] * _CDF_BLOCK + torch.arange(_CDF_BLOCK, device=weights.device)
    inside = weights.gather(1, ids.clamp(max=weights.shape[1] - 1)).to(torch.float64)
    inside = inside.masked_fill_(ids >= weights.shape[1], 0.0)
    index, _ = _first_above(inside.cumsum(-1), rest)
    return block * _CDF_BLOCK + index


def kept_weights(logits: torch.Tensor, params: DrawParams) -> torch.Tensor:
    """``full_weights`` with the dropped tokens' at 0: float32 [R, V]. One sort of everything, nothing read back."""
    weights = full_weights(logits, params.temperature)
    order = torch.sort(logits + 0.0, dim=-1, descending=True, stable=True).indices
    ordered = weights.gather(1, order).to(torch.float64)
    kept, _ = _cut(ordered, params, torch.full_like(params.top_p, float("nan")), logits.shape[1])
    dropped = torch.arange(logits.shape[1], device=logits.device) >= kept[:, None]
    return weights.masked_fill_(torch.empty_like(dropped).scatter_(1, order, dropped), 0.0)


def _cut(ordered: torch.Tensor, params: DrawParams, total: torch.Tensor, vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
    """How many of the best tokens min_p, top_k and top_p keep, judged from the best C of them.

    ordered: float64 [R, C] weights, best first, the best is 1. total: float64 [R] mass of the whole vocabulary, NaN where
    it is not known. Returns (kept int64 [R], 1 .. C, decided bool [R]): where ``decided`` is False the kept tokens may
    reach beyond C, and ``kept`` is void.
    """
    count = ordered.shape[1]
    limit = torch.minimum((ordered >= params.min_p[:, None]).sum(-1), params.top_k)
    bounded = (limit < count) | (params.top_k <= count) | (count == vocab)
    rank = torch.arange(count, device=ordered.device)
    cumulative = ordered.masked_fill(rank >= limit[:, None], 0.0).cumsum(-1)
    mass = torch.where(total.isnan() & bounded, cumulative[:, -1], total)
    target = params.top_p * mass  # NaN: not known; compares False
    nucleus = (cumulative[:, :-1] < target[:, None]).sum(-1) + 1
    kept = torch.where(params.top_p < 1.0, torch.minimum(limit, nucleus), limit)
    return kept, bounded | ((params.top_p < 1.0) & (cumulative[:, -1] >= target))


def draw_from_candidates(logits: torch.Tensor, params: DrawParams, uniform: torch.Tensor) -> torch.Tensor:
    """Truncate and draw; the same tokens as ``draw_from_weights(kept_weights(...))``, without sorting everything.

    logits: float32 [R, V], contiguous, drawable, on the CPU. Returns int64 [R]. What a row goes through follows from the
    row alone, so its token does not depend on the other rows to the last bit.
    """
    vocab = logits.shape[1]
    # The mass of the whole vocabulary is asked for only where nothing but top_p cuts.
    total = torch.full_like(uniform, float("nan"))
    whole = ((params.top_p < 1.0) & (params.top_k >= vocab) & (params.min_p <= 0.0)).nonzero().view(-1)
    if len(whole):
        some = logits if len(whole) == len(logits) else logits[whole]
        total[whole] = _block_sums(full_weights(some, params.temperature[whole])).sum(-1)

    values, ids = top_candidates(logits, min(params.first_candidates, vocab))
    weights = ((values - values[:, :1]).double() / params.temperature[:, None]).exp_()
    kept, decided = _cut(weights, params, total, vocab)
    tokens = _draw_kept(weights, ids, kept, uniform)
    # A few rows at a time: the work memory stays in the cache, and is not asked of the system anew for every step.
    for left in (~decided).nonzero().view(-1).split(max(1, _WIDE_ELEMENTS // vocab)):
        tokens[left] = draw_from_weights(_wide_weights(logits[left], params.take(left)), uniform[left])
    return tokens


def _wide_weights(logits: torch.Tensor, params: DrawParams) -> torch.Tensor:
    """``kept_weights`` for rows that keep many tokens, without sorting: by histograms. CPU only."""
    weights = full_weights(logits, params.temperature)
    if bool((params.min_p > 0.0).any()):
        weights.masked_fill_(weights < params.min_p[:, None], 0.0)
    users = (params.top_k < logits.shape[1]).nonzero().view(-1)
    if len(users):
        part = weights[users]
        weights[users] = _keep_until(part, logits[users], (part > 0).double(), params.top_k[users].double())
    users = (params.top_p < 1.0).nonzero().view(-1)
    if len(users):
        part, some = (weights, logits) if len(users) == len(logits) else (weights[users], logits[users])
        amounts = part.double()
        part = _keep_until(part, some, amounts, params.top_p[users] * amounts.sum(-1))
        if part is not weights:
            weights[users] = part
    return weights


def _keep_until(weights: torch.Tensor, logits: torch.Tensor, amounts: torch.Tensor, goal: torch.Tensor) -> torch.Tensor:
    """Zero the weights (in place) after the shortest prefix, in the order of tokens, whose amounts sum to the goal.

    weights: float32 [G, V] in [0, 1]; amounts: float64 [G, V]; goal: float64 [G], > 0. Tokens are thrown into buckets by
    exponent and top 7 mantissa bits of their weight (1/128 wide); only the bucket in which the goal is reached is sorted.
    """
    # The bits of a float in [0, 1] order like the float. Bucket 0 holds the largest; weights below 2**-63 share the last.
    bucket = (weights.view(torch.int32) >> 16).neg_().add_(_ONE_BITS).clamp_(max=_NUM_BUCKETS - 1)
    sums = torch.zeros(len(weights), _NUM_BUCKETS, dtype=torch.float64).scatter_add_(1, bucket.long(), amounts)
    cumulative = sums.cumsum_(-1)
    edge = (cumulative < goal[:, None]).sum(-1, keepdim=True).clamp_(max=_NUM_BUCKETS - 1)
    start = torch.where(edge > 0, cumulative.gather(1, (edge - 1).clamp_(min=0)), 0.0)
    edge = edge.int()
    weights.masked_fill_(bucket > edge, 0.0)

    # The edge buckets' tokens as a [G, M] table of keys, sorted; padding sorts last.
    rows, ids = (bucket == edge).nonzero(as_tuple=True)
    sizes = torch.bincount(rows, minlength=len(weights))
    place = torch.arange(len(rows)) - (sizes.cumsum(0) - sizes)[rows]
    keys = torch.full((len(weights), int(sizes.max())), torch.iinfo(torch.int64).min)
    keys[rows, place] = _order_keys(logits[rows, ids], ids)
    padding = torch.arange(keys.shape[1]) >= sizes[:, None]
    ids = _key_ids(_largest(keys, keys.shape[1])).masked_fill_(padding, 0)
    reached = start + amounts.gather(1, ids).cumsum(-1)
    before = torch.cat([start, reached[:, :-1]], dim=1)
    rows, place = ((before >= goal[:, None]) & ~padding).nonzero(as_tuple=True)
    weights[rows, ids[rows, place]] = 0.0
    return weights


def _draw_kept(weights: torch.Tensor, ids: torch.Tensor, kept: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Draw from the first ``kept`` candidates of each row, in order of ids."""
    width = int(kept.max())
    column = torch.arange(width)
    keys = torch.where(column < kept[:, None], ids[:, :width], 0x7FFFFFFF) << 32 | column  # dropped ones go to the end
    array = keys.numpy()
    array.sort(axis=-1)
    place = keys & _ID_MASK
    weights = weights.gather(1, place).masked_fill_(column >= kept[:, None], 0.0)
    index, _ = _first_above(weights.cumsum(-1), uniform)
    return ids.gather(1, place.gather(1, index[:, None])).squeeze(1)
