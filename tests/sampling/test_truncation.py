"""temperature, min_p, top_k, top_p and the draw: against slow truths, and against exact distributions."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from octavo.kernels.sample import sample_rows
from octavo.sampling.random import row_key, uniforms
from octavo.sampling.truncation import DrawParams, draw_from_weights, full_weights, kept_weights, top_candidates

from .helpers import chi_square_ok, make_sampler, random_logits, row_init, slow_distribution


def draw_params(rows: int, vocab: int, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> DrawParams:
    def full(value, dtype):
        return torch.full((rows,), value, dtype=dtype)

    return DrawParams(
        full(temperature, torch.float32), full(top_k or vocab, torch.int64), full(top_p, torch.float64), full(min_p, torch.float64)
    )


def tied_logits(rows: int, vocab: int, seed: int) -> torch.Tensor:
    """Few distinct values, as bf16 logits have."""
    return (random_logits(rows, vocab, seed) * 4).round() / 4


# ---------------------------------------------------------------------------------------------------------------------
# the order of tokens


@pytest.mark.parametrize(("vocab", "count"), [(50, 50), (1000, 7), (4096, 16), (4096, 32), (4096, 33), (8192, 64), (8191, 64), (70, 1)])
@pytest.mark.parametrize("make", [random_logits, tied_logits])
def test_top_candidates_equal_a_stable_sort(vocab, count, make):
    logits = make(3, vocab, vocab + count)
    logits[0, ::3] = float("-inf")
    logits[1, 5] = -0.0
    logits[1, 40] = 0.0
    values, ids = top_candidates(logits, count)
    for row in range(3):
        x = logits[row].tolist()
        assert ids[row].tolist() == sorted(range(vocab), key=lambda i: (-x[i], i))[:count]
    assert torch.equal(values, logits.gather(1, ids))


def test_top_candidates_of_equal_logits_are_the_lowest_ids():
    assert top_candidates(torch.zeros(2, 8192), 64)[1].tolist() == [list(range(64))] * 2


# ---------------------------------------------------------------------------------------------------------------------
# which tokens are kept

MIXES = [
    {"temperature": 0.7},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.3, "top_k": 5},
    {"temperature": 1.0, "top_k": 40, "top_p": 0.8},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 2.0, "top_p": 0.99},
    {"temperature": 1.0, "top_p": 1e-9},
    {"temperature": 0.5, "min_p": 0.1},
    {"temperature": 1.0, "min_p": 1.0},
    {"temperature": 1.5, "min_p": 0.02, "top_k": 30},
    {"temperature": 1.5, "min_p": 0.02, "top_k": 300, "top_p": 0.7},
    {"temperature": 5.0, "top_k": 500, "top_p": 0.9},
]


@pytest.mark.parametrize("mix", MIXES, ids=str)
@pytest.mark.parametrize("make", [random_logits, tied_logits])
def test_distribution_equals_the_slow_truth(mix, make):
    logits = make(4, 700, 5)
    sampler = make_sampler(700, *[row_init(row, **mix) for row in range(4)])
    got = sampler.distribution(logits, [0, 1, 2, 3], [3] * 4).numpy()
    for row in range(4):
        truth = slow_distribution(logits[row], **mix)
        assert np.array_equal(got[row] > 0, truth > 0)
        np.testing.assert_allclose(got[row], truth, atol=1e-6)


@pytest.mark.parametrize("mix", MIXES, ids=str)
@pytest.mark.parametrize("make", [random_logits, tied_logits])
@pytest.mark.parametrize("vocab", [37, 1000, 8192])
def test_the_cpu_kernel_draws_the_same_tokens_as_the_full_sort(mix, make, vocab):
    rows = 24
    logits = make(rows, vocab, vocab)
    logits[3, : vocab // 2] = float("-inf")
    uniform = torch.rand(rows, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    uniform[0], uniform[1] = 0.0, 1 - 2**-53
    params = draw_params(rows, vocab, **mix)
    params.top_k.clamp_(max=vocab)
    truth = draw_from_weights(kept_weights(logits, params), uniform)
    assert torch.equal(sample_rows(logits, params.temperature, params.top_k, params.top_p, params.min_p, uniform), truth)


def test_ties_at_the_edge_go_to_the_lowest_ids():
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0, 2.0]])
    sampler = make_sampler(6, row_init(top_k=2))
    assert sampler.distribution(logits, [0], [3])[0].nonzero().view(-1).tolist() == [1, 2]
    sampler = make_sampler(6, row_init(top_p=0.5))
    assert sampler.distribution(logits, [0], [3])[0].nonzero().view(-1).tolist() == [1, 2, 3]
    equal = torch.zeros(1, 1000)
    sampler = make_sampler(1000, row_init(top_p=0.25))
    assert sampler.distribution(equal, [0], [3])[0].nonzero().view(-1).tolist() == list(range(250))


def test_top_p_keeps_at_least_one_token():
    logits = random_logits(1, 100)
    for top_p in (1e-300, 1e-12, 0.01):
        assert draw_many_distinct(logits, top_p=top_p) == {int(logits.argmax())}


def draw_many_distinct(logits: torch.Tensor, **params) -> set[int]:
    sampler = make_sampler(logits.shape[1], row_init(**params))
    return {int(sampler.sample(logits.clone(), [0], [p]).token_ids) for p in range(3, 40)}


def test_top_k_one_is_greedy_even_with_ties():
    logits = tied_logits(50, 64, 0).round()
    greedy = make_sampler(64, *[row_init(r, temperature=0) for r in range(50)])
    one = make_sampler(64, *[row_init(r, temperature=3.0, top_k=1) for r in range(50)])
    rows, positions = list(range(50)), [3] * 50
    assert torch.equal(greedy.sample(logits.clone(), rows, positions).token_ids, one.sample(logits.clone(), rows, positions).token_ids)
    assert torch.equal(greedy.sample(logits.clone(), rows, positions).token_ids, logits.argmax(-1))


def test_extreme_temperatures():
    logits = random_logits(1, 200)
    logits[0, 7] = float("-inf")
    best = int(logits.argmax())
    for cold in (1e-320, 1e-30, 1e-6, 1e-4):
        assert draw_many_distinct(logits, temperature=cold) == {best}
    hot = make_sampler(200, row_init(temperature=1e300)).distribution(logits, [0], [3])[0]
    assert hot[7] == 0 and torch.allclose(hot[hot > 0], torch.tensor(1 / 199, dtype=torch.float64))


# ---------------------------------------------------------------------------------------------------------------------
# the draw


def test_first_above_never_picks_an_empty_token():
    weights = torch.zeros(4, 130)
    weights[0, 129] = 1e-30
    weights[1, 0] = 1.0
    weights[2, [3, 64, 128]] = torch.tensor([0.1, 1e-8, 0.3])
    weights[3, 77] = 1.0
    for u in (0.0, 1e-17, 0.25, 0.25 + 1e-16, 0.5, 1 - 2**-53):
        tokens = draw_from_weights(weights, torch.full((4,), u, dtype=torch.float64))
        assert (weights.gather(1, tokens[:, None]) > 0).all()


def test_draw_is_the_inverse_cdf():
    weights = torch.rand(1, 1000, generator=torch.Generator().manual_seed(3))
    cdf = (weights.double() / weights.double().sum()).cumsum(-1)[0].numpy()
    u = np.linspace(0, 1, 5001)[:-1]
    got = draw_from_weights(weights.expand(5000, -1), torch.from_numpy(u)).numpy()
    want = np.searchsorted(cdf, u, side="right")
    assert (got != want).sum() <= 3  # rounding may move a u that lies within 1e-7 of an edge
    edge = np.abs(cdf[np.minimum(got, want)] - u)
    assert (edge[got != want] < 1e-7).all()


@pytest.mark.parametrize("mix", [m for m in MIXES if m.get("top_k") != 1], ids=str)
def test_draws_fit_the_exact_distribution(mix):
    """Many positions are independent draws; one batch holds many rows of different seeds."""
    vocab, rows, steps = 300, 250, 40
    logits = random_logits(1, vocab, 11)
    sampler = make_sampler(vocab, *[row_init(row, seed=1000 + row, **mix) for row in range(rows)])
    observed = np.zeros(vocab)
    for step in range(steps):
        tokens = sampler.sample(logits.repeat(rows, 1), list(range(rows)), [3 + step] * rows).token_ids
        observed += np.bincount(tokens.numpy(), minlength=vocab)
    assert chi_square_ok(observed, slow_distribution(logits[0], **mix))


def test_chi_square_can_fail():
    p = np.full(100, 0.01)
    assert not chi_square_ok(np.random.default_rng(0).multinomial(20000, np.linspace(0.5, 1.5, 100) / 100), p)
    assert chi_square_ok(np.random.default_rng(0).multinomial(20000, p), p)


def test_big_vocabulary_draws_fit():
    vocab = 50257  # divides by neither block size
    logits = random_logits(1, vocab, 2, scale=3.0)
    probabilities = logits.double().softmax(-1)[0].numpy()
    keys = torch.tensor([row_key(s) for s in range(200)])
    observed = np.zeros(vocab)
    weights = full_weights(logits, torch.ones(1)).expand(200, -1)
    for position in range(100):
        tokens = draw_from_weights(weights, uniforms(keys, torch.full((200,), position)))
        observed += np.bincount(tokens.numpy(), minlength=vocab)
    assert chi_square_ok(observed, probabilities)
