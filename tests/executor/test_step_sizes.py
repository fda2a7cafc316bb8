"""Sizes of captured steps: they hold what is asked of them, are few, and fill tiles."""

from __future__ import annotations

import random

import pytest

from octavo.executor.step_sizes import (
    GRAPH_PROMPT_TOKENS,
    MIXED_DECODES,
    STEP_ROWS,
    askable_sizes,
    decode_sizes,
    filling_tokens,
    mixed_decodes,
    prompt_sizes,
)


@pytest.mark.parametrize("max_rows", [1, 31, 32, 100, 256, 1024, 3000, 16100, 20000])
def test_whatever_fits_has_a_size(max_rows: int) -> None:
    alone = decode_sizes(max_rows)
    assert alone == sorted(set(alone)) and alone[0] == 1 and alone[-1] == max_rows
    decodes = mixed_decodes(max_rows)
    assert decodes == sorted(set(decodes)) and decodes[0] == 0 and decodes[-1] == max_rows
    for padded in decodes:
        sizes = prompt_sizes(padded)
        assert sizes[0] >= 1 and sizes[-1] == GRAPH_PROMPT_TOKENS and list(sizes) == sorted(set(sizes)) and len(sizes) <= 14
        assert all(size % 16 == 0 for size in sizes), "kernels are compiled apart for other sizes"


@pytest.mark.parametrize("padded", [*MIXED_DECODES, 31, 100, 300])
def test_steps_fill_tiles_of_rows(padded: int) -> None:
    """All but the rows by which --max-num-seqs may miss a multiple of 16: they are missing at the end, and begin no tile."""
    for size in prompt_sizes(padded):
        assert -(padded + size) % 128 < 16 or padded + size < 128 or size == GRAPH_PROMPT_TOKENS
        assert padded not in MIXED_DECODES or (padded + size) % 128 == 0 or padded + size < 128 or size == GRAPH_PROMPT_TOKENS


@pytest.mark.parametrize("budget", [1, 15, 16, 100, 257, 600, 2500, None])
@pytest.mark.parametrize("most", [1, 40, 512, 2048])
@pytest.mark.parametrize("max_rows", [1, 31, 100, 600])
def test_askable_sizes_are_those_of_some_step(max_rows: int, most: int, budget: int | None) -> None:
    padded, found = mixed_decodes(max_rows), set()
    for decodes in range(max_rows + 1):
        size = next(s for s in padded if s >= decodes)
        for tokens in range(1, most + 1 if budget is None else min(most, budget - decodes) + 1):
            found.add((size, next(s for s in prompt_sizes(size) if s >= tokens)))
    assert found == {(size, tokens) for size in padded for tokens in askable_sizes(size, max_rows, most, budget)}


def test_filling_tokens_are_the_most_that_waste_nothing() -> None:
    rng = random.Random(1)
    for _ in range(3000):
        decodes, tokens = rng.randint(0, 1024), rng.choice((rng.randint(-5, 200), rng.randint(1, 8192)))
        max_rows = rng.choice((1024, 2000, decodes or 1, decodes + rng.randint(1, 100)))
        count = filling_tokens(decodes, tokens, max_rows)
        padded = next(s for s in mixed_decodes(max_rows) if s >= decodes)
        full = [(rows - padded) // 16 * 16 for rows in STEP_ROWS]
        assert 0 <= count <= max(0, tokens)
        if tokens > GRAPH_PROMPT_TOKENS:
            assert (padded + count) % 512 == 0 and tokens - count < 512
        elif count:
            assert count in full and count in prompt_sizes(padded)
            assert not any(count < size <= tokens for size in full)
        else:
            assert not any(0 < size <= tokens for size in full)
