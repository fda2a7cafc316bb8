"""Vectors of prompts that come in chunks, mixed with whatever else runs, against the whole prompt's states at once."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from octavo.sampling.pooling import Pooler
from octavo.types import Advance, PoolingParams

SIZE = 24


def truth(states: torch.Tensor, params: PoolingParams) -> np.ndarray:
    """states float64 [tokens, SIZE]."""
    vector = {"mean": states.mean(0), "last": states[-1], "cls": states[0]}[params.kind]
    vector = vector[: params.dimensions]
    return (F.normalize(vector, dim=0) if params.normalize else vector).numpy()


def random_params(rng: random.Random, *kinds: str) -> PoolingParams:
    dimensions = rng.choice([None, None, 1, 7, SIZE])
    return PoolingParams(kind=rng.choice(kinds), normalize=rng.random() < 0.7, dimensions=dimensions)


@pytest.mark.parametrize("seed", range(30))
def test_chunks_in_mixed_steps_equal_the_whole(seed: int) -> None:
    rng = random.Random(seed)
    pooler = Pooler(6)
    free, running, seen = list(range(6)), {}, 0
    states = {}
    while seen < 40:
        while free and rng.random() < 0.7:  # rows change hands, so what an earlier prompt left must not show
            row = free.pop(rng.randrange(len(free)))
            states[row] = torch.randn(rng.randint(1, 30), SIZE, dtype=torch.float64)
            running[row] = (0, None if rng.random() < 0.2 else random_params(rng, "mean", "last"))
        advances, parts = [], []
        for row in rng.sample(sorted(running), rng.randint(0, len(running))):
            start, params = running[row]
            count = rng.randint(1, len(states[row]) - start)
            ends = start + count == len(states[row])
            advances.append(Advance(row, start, count, None, pooling=params, pooling_ends=ends and params is not None))
            parts.append(states[row][start : start + count])
            running[row] = (start + count, params)
        if not advances:
            continue
        padding = torch.full((rng.randint(0, 3), SIZE), torch.nan)
        hidden = torch.cat([*(p.float() for p in parts), padding])
        pooled = pooler.pool(hidden, advances)
        found = {} if pooled is None else pooled.to_host()
        assert set(found) == {a.row for a in advances if a.pooling_ends}
        for advance in advances:
            row = advance.row
            if advance.pooling_ends:
                vector = np.frombuffer(found[row], "<f4")
                np.testing.assert_allclose(vector, truth(states[row], advance.pooling), atol=2e-6)
                seen += 1
            if running[row][0] == len(states[row]):
                del running[row]
                free.append(row)


def test_the_first_token_of_whole_prompts() -> None:
    states = torch.randn(9, SIZE)
    params = PoolingParams(kind="cls", normalize=False)
    advances = [Advance(3, 0, 4, None, pooling=params, pooling_ends=True), Advance(1, 0, 5, None, pooling=params, pooling_ends=True)]
    found = Pooler(4).pool(states, advances).to_host()
    assert np.array_equal(np.frombuffer(found[3], "<f4"), states[0]) and np.array_equal(np.frombuffer(found[1], "<f4"), states[4])


def test_a_vector_does_not_depend_on_the_batch() -> None:
    """To the bit: a sum is over its own prompt's states, in their order."""
    states = torch.randn(40, SIZE)
    params = PoolingParams(kind="mean")
    alone = Pooler(2).pool(states[:11], [Advance(0, 0, 11, None, pooling=params, pooling_ends=True)]).to_host()[0]
    both = [Advance(0, 0, 11, None, pooling=params, pooling_ends=True), Advance(1, 0, 29, None, pooling=params, pooling_ends=True)]
    assert Pooler(2).pool(states, both).to_host()[0] == alone


def test_nothing_to_do() -> None:
    assert Pooler(1).pool(torch.randn(3, SIZE), [Advance(0, 0, 3, None)]) is None


def test_states_of_zero_stay_zero() -> None:
    params = PoolingParams(kind="last")
    found = Pooler(1).pool(torch.zeros(2, SIZE), [Advance(0, 0, 2, None, pooling=params, pooling_ends=True)]).to_host()
    assert found[0] == bytes(4 * SIZE)
