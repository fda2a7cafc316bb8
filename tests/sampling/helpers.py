"""What the sampling tests share: building states, and slow truths."""

from __future__ import annotations

import numpy as np
import torch

from octavo.sampling.batch import SamplingState
from octavo.sampling.sampler import Sampler
from octavo.types import RowInit, TokenParams


def row_init(row: int = 0, *, seed: int = 0, prompt: list[int] | None = None, outputs: list[int] | None = None, **params) -> RowInit:
    return RowInit(row, TokenParams(**params), seed, [1, 2, 3] if prompt is None else prompt, outputs or [], [])


def make_sampler(vocab_size: int, *inits: RowInit, max_rows: int | None = None) -> Sampler:
    rows = max_rows or max((init.row for init in inits), default=0) + 1
    state = SamplingState(rows, vocab_size, torch.device("cpu"))
    for init in inits:
        state.init_row(init)
    return Sampler(state)


def random_logits(rows: int, vocab: int, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def draw_many(sampler: Sampler, logits: torch.Tensor, count: int, row: int = 0, start: int = 3) -> list[int]:
    """``count`` independent draws of one row from the same logits [V], at positions start, start + 1, …"""
    return [int(sampler.sample(logits[None].clone(), [row], [start + i]).token_ids) for i in range(count)]


def chi_square_ok(observed: np.ndarray, probabilities: np.ndarray, sigmas: float = 4.5) -> bool:
    """Do counts fit a distribution? Cells that expect fewer than 5 are pooled; a cell of probability 0 must be empty."""
    total = observed.sum()
    if observed[probabilities == 0].any():
        return False
    expected = probabilities * total
    small = expected < 5
    cells = [(observed[~small], expected[~small])]
    if expected[small].sum() > 0:
        cells.append((observed[small].sum(keepdims=True), expected[small].sum(keepdims=True)))
    seen, want = (np.concatenate(part) for part in zip(*cells))
    freedom = len(want) - 1
    if freedom == 0:
        return bool(seen[0] == total)
    statistic = ((seen - want) ** 2 / np.maximum(want, 1e-9)).sum()
    return bool(statistic < freedom + sigmas * np.sqrt(2 * freedom) + 5)


def slow_distribution(logits: torch.Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> np.ndarray:
    """The truth for one row [V], one token at a time in float64: min_p, then top_k, then top_p."""
    x = logits.double().numpy()
    order = sorted(range(len(x)), key=lambda i: (-x[i], i))
    if temperature == 0:
        order, weights = order[:1], {order[0]: 1.0}
    else:
        weights = {i: float(np.exp((x[i] - x[order[0]]) / temperature)) for i in order}
        order = [i for i in order if weights[i] >= min_p]
        order = order[: top_k or None]
        mass, kept, sum_kept = sum(weights[i] for i in order), [], 0.0
        for i in order:
            kept.append(i)
            sum_kept += weights[i]
            if top_p < 1 and sum_kept >= top_p * mass:
                break
        order = kept
    result = np.zeros(len(x))
    for i in order:
        result[i] = weights[i]
    return result / result.sum()
