"""temperature, min_p (arXiv:2407.01082), top_k, top_p (nucleus sampling, arXiv:1904.09751), and the draw itself.

One order rules: tokens by (logit descending, id ascending). What min_p, top_k and top_p keep is always a prefix of it,
so the three come down to one number a row: how many tokens are kept.

The draw is the inverse CDF in order of token ids: the first token whose cumulative weight exceeds u * total. It does not
depend on how the kept tokens were found. What is here sorts everything and looks at no value on the host: the ground truth,
and what runs where no kernel does. ``kernels/sample.py`` is the CPU's fast path.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_BLOCK = 32  # of logits, for finding the best ones
_CDF_BLOCK = 64  # of weights, for the cumulative sum
_ID_MASK = 0xFFFFFFFF


@dataclass(slots=True)
class DrawParams:
    """How rows draw; one entry per row, all on the logits' device.

    temperature float32 [R], > 0 (0 stands for greedy, and is not for the functions here); top_k int64 [R], V keeps all;
    top_p float64 [R], 1 keeps all; min_p float64 [R], 0 keeps all.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor


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
    kept = _num_kept(ordered, params)
    dropped = torch.arange(logits.shape[1], device=logits.device) >= kept[:, None]
    return weights.masked_fill_(torch.empty_like(dropped).scatter_(1, order, dropped), 0.0)


def _num_kept(ordered: torch.Tensor, params: DrawParams) -> torch.Tensor:
    """How many of the best tokens min_p, top_k and top_p keep: int64 [R], 1 .. V. ordered: float64 [R, V] weights, best first."""
    limit = torch.minimum((ordered >= params.min_p[:, None]).sum(-1), params.top_k)
    rank = torch.arange(ordered.shape[1], device=ordered.device)
    cumulative = ordered.masked_fill(rank >= limit[:, None], 0.0).cumsum(-1)
    target = params.top_p * cumulative[:, -1]
    nucleus = (cumulative[:, :-1] < target[:, None]).sum(-1) + 1
    return torch.where(params.top_p < 1.0, torch.minimum(limit, nucleus), limit)
