from __future__ import annotations

import pytest
import torch

from octavo.kernels.sample import argmax_rows, argmax_rows_reference, sample_rows, sample_rows_reference


def options(rows: int, g: torch.Generator, temperature: float = 1.0, top_k: int = 10**6, top_p: float = 1.0, min_p: float = 0.0):
    return (
        torch.full((rows,), temperature),
        torch.full((rows,), top_k),
        torch.full((rows,), top_p, dtype=torch.float64),
        torch.full((rows,), min_p, dtype=torch.float64),
        torch.rand(rows, generator=g, dtype=torch.float64),
    )


def make_logits(rows: int, vocab: int, g: torch.Generator, spread: float) -> torch.Tensor:
    """Rounded to eighths, so that there are many ties."""
    return (torch.randn(rows, vocab, generator=g) * spread * 8).round() / 8


SETTINGS = [
    {}, {"temperature": 0.0}, {"temperature": 1e-40}, {"temperature": 0.3}, {"temperature": 5.0},
    {"top_k": 1}, {"top_k": 40}, {"top_k": 700}, {"top_p": 0.0},
    {"top_p": 0.5}, {"top_p": 0.95}, {"top_p": 0.9999}, {"min_p": 0.1}, {"min_p": 1.0}, {"min_p": 1e-6}, {"top_k": 50, "top_p": 0.9},
    {"top_k": 300, "top_p": 0.8, "min_p": 0.01, "temperature": 1.7}, {"top_p": 0.9, "temperature": 30.0},
]  # fmt: skip


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("vocab", [1, 5, 64, 1000, 4111])
def test_draws_what_the_reference_draws(setting: dict, vocab: int) -> None:
    """Equal tokens, but where float32 weights move a boundary: that hits few of 210 draws."""
    g = torch.Generator().manual_seed(vocab)
    different = 0
    for spread in (0.5, 3.0, 12.0):
        logits, chosen = make_logits(70, vocab, g, spread), options(70, g, **setting)
        different += int((sample_rows(logits, *chosen) != sample_rows_reference(logits, *chosen)).sum())
    assert different <= 2


def test_rows_with_different_options_do_not_mix() -> None:
    g = torch.Generator().manual_seed(3)
    logits = make_logits(len(SETTINGS), 900, g, 3.0)
    each = [options(1, g, **setting) for setting in SETTINGS]
    together = sample_rows(logits, *(torch.cat(column) for column in zip(*each, strict=True)))
    alone = [sample_rows(logits[i : i + 1], *one) for i, one in enumerate(each)]
    assert torch.equal(together, torch.cat(alone))


def test_frequencies_follow_the_distribution() -> None:
    """Chi-square of 40,000 draws over what top_k 6 keeps; 5 degrees of freedom exceed 30 once in 70,000 times."""
    g = torch.Generator().manual_seed(4)
    row = torch.randn(100, generator=g)
    drawn = sample_rows(row.expand(40000, 100).contiguous(), *options(40000, g, top_k=6, temperature=0.8))
    best = row.topk(6).indices
    expected = (row[best].double() / 0.8).softmax(-1) * 40000
    counts = torch.stack([(drawn == i).sum() for i in best]).double()
    assert counts.sum() == 40000
    assert ((counts - expected) ** 2 / expected).sum() < 30


def test_ends_of_the_uniform_range() -> None:
    """u = 0 gives the first kept id, u just below 1 the last one; masked tokens never come."""
    logits = torch.full((2, 300), float("-inf"))
    logits[:, [7, 100, 222]] = torch.tensor([0.0, 1.0, -2.0])
    for setting in ({}, {"top_p": 0.9999}):
        chosen = list(options(2, torch.Generator(), **setting))
        chosen[4] = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
        assert sample_rows(logits, *chosen).tolist() == [7, 222]


@pytest.mark.parametrize("vocab", [1, 3, 64, 1003])
def test_argmax(vocab: int) -> None:
    g = torch.Generator().manual_seed(vocab)
    logits = make_logits(50, vocab, g, 1.0)
    assert torch.equal(argmax_rows(logits), logits.argmax(-1))
    wide = torch.randn(50, vocab + 5, generator=g)[:, :vocab]  # rows that don't touch each other
    assert torch.equal(argmax_rows(wide), wide.argmax(-1))


def test_broken_rows_give_their_best_finite_token() -> None:
    nan, inf = float("nan"), float("inf")
    rows = [[1, nan, 3, 2], [1, inf, 0, 2], [-inf] * 4, [nan] * 4, [-inf, -5, -inf, -6], [nan, inf, -inf, 0]]
    logits = torch.tensor(rows).repeat(1, 40)
    expected = [2, 3, 0, 0, 1, 3]
    assert argmax_rows(logits).tolist() == expected == argmax_rows_reference(logits).tolist()
    chosen = options(6, torch.Generator().manual_seed(0), top_k=1)
    assert sample_rows(logits, *chosen).tolist() == expected == sample_rows_reference(logits, *chosen).tolist()


def test_bad_input_is_refused() -> None:
    g = torch.Generator()
    with pytest.raises(ValueError, match="one entry a row"):
        sample_rows(torch.zeros(3, 8), *options(2, g))
    with pytest.raises(ValueError, match="vocabulary"):
        argmax_rows(torch.zeros(8))
