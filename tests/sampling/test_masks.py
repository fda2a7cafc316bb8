"""allowed_token_ids, bad_words, logit_bias, min_tokens."""

from __future__ import annotations

import random

import pytest
import torch

from octavo.sampling.masks import AllowedTokens

from .helpers import make_sampler, random_logits, row_init

NEG_INF = float("-inf")


def forced(sampler, row: int, position: int, token: int, vocab: int) -> None:
    """Draw ``token``: its logit alone is finite."""
    logits = torch.full((1, vocab), NEG_INF)
    logits[0, token] = 0.0
    assert sampler.sample(logits, [row], [position]).token_ids.tolist() == [token]


def support(sampler, logits, row=0, position=3) -> set[int]:
    """Tokens that have any probability."""
    return set(sampler.distribution(logits, [row], [position])[0].nonzero().view(-1).tolist())


def test_allowed_tokens_only():
    logits = random_logits(1, 100)
    sampler = make_sampler(100, row_init(allowed_token_ids=(5, 99, 0, 5)))
    got = sampler.distribution(logits, [0], [3])[0]
    assert set(got.nonzero().view(-1).tolist()) == {0, 5, 99}
    assert torch.allclose(got[[0, 5, 99]], logits[0, [0, 5, 99]].double().softmax(-1))


def test_allowed_tokens_leave_other_rows_alone():
    logits = random_logits(3, 50)
    sampler = make_sampler(50, row_init(0), row_init(1, allowed_token_ids=(7,)), row_init(2))
    got = sampler.distribution(logits, [0, 1, 2], [3, 3, 3])
    plain = logits.double().softmax(-1)
    assert torch.allclose(got[[0, 2]], plain[[0, 2]], atol=1e-6) and got[1, 7] == 1


def test_rows_come_and_go_with_lists_of_any_length():
    """Random rows, lists from one token to all of a vocabulary that is no multiple of 32, against the plain definition."""
    rng, vocab, rows = random.Random(5), 77, 6
    sampler, allowed = make_sampler(vocab, max_rows=rows), {}
    for turn in range(60):
        row = rng.randrange(rows)
        allowed[row] = rng.choice([None, tuple(rng.choices(range(vocab), k=rng.choice([1, 3, 76, 300]))), tuple(range(vocab))])
        sampler.state.init_row(row_init(row, allowed_token_ids=allowed[row]))
        drawn = rng.sample(sorted(allowed), rng.randrange(1, len(allowed) + 1))
        logits = random_logits(len(drawn), vocab, seed=turn)
        want = logits.double()
        for i, r in enumerate(drawn):
            if allowed[r] is not None:
                want[i, [t for t in range(vocab) if t not in allowed[r]]] = float("-inf")
        got = sampler.distribution(logits.clone(), drawn, [3] * len(drawn))
        assert torch.allclose(got, want.softmax(-1), atol=1e-6) and torch.equal(got == 0, want.softmax(-1) == 0)


def test_a_long_list_of_allowed_tokens_takes_a_bit_a_token():
    """All rows with nearly all of a large vocabulary, as a client may send them."""
    vocab, rows = 151_936, 64
    feature, most = AllowedTokens(vocab, torch.device("cpu")), tuple(range(5, vocab))
    for row in range(rows):
        feature.init_row(row_init(row, allowed_token_ids=most))
    bits, places = feature.select(range(rows))
    assert bits.numel() * 4 == feature._bits.numel() * 4 == rows * vocab // 8 and places.tolist() == list(range(rows))
    for row in range(rows):
        feature.clear_row(row)
        feature.init_row(row_init(row, allowed_token_ids=(row,)))  # slots are used again
    assert len(feature._bits) == rows and feature.select([3, 1])[0][:, 0].tolist() == [8, 2]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bias_of_100_forces_and_of_minus_100_forbids(temperature):
    logits = random_logits(1, 100, scale=3.0)
    best = int(logits.argmax())
    other = (best + 1) % 100
    sampler = make_sampler(100, row_init(0, temperature=temperature, logit_bias={other: 100.0}))
    assert {int(sampler.sample(logits.clone(), [0], [p]).token_ids) for p in range(3, 50)} == {other}
    sampler = make_sampler(100, row_init(0, temperature=temperature, logit_bias={best: -100.0}))
    assert best not in {int(sampler.sample(logits.clone(), [0], [p]).token_ids) for p in range(3, 50)}


def test_bias_is_added():
    logits = random_logits(1, 30)
    sampler = make_sampler(30, row_init(logit_bias={3: 1.5, 7: -0.25}))
    want = logits.clone()
    want[0, 3] += 1.5
    want[0, 7] -= 0.25
    assert torch.allclose(sampler.distribution(logits, [0], [3]), want.double().softmax(-1), atol=1e-6)


def test_bias_cannot_bring_back_a_token_that_is_not_allowed():
    sampler = make_sampler(30, row_init(allowed_token_ids=(1, 2), logit_bias={5: 100.0}))
    assert support(sampler, random_logits(1, 30)) == {1, 2}


@pytest.mark.parametrize("outputs", [0, 1, 2])
def test_min_tokens_boundary(outputs):
    """With min_tokens m, outputs number 0 .. m-1 are no end, whether or not the row was rebuilt in between."""
    logits = random_logits(1, 20)
    params = {"min_tokens": 3, "eos_token_ids": (4, 5), "stop_token_ids": (6, 4)}
    sampler = make_sampler(20, row_init(outputs=[9] * outputs, **params))
    everything = set(range(20))
    for position in range(3 + outputs, 10):
        want = everything - {4, 5, 6} if position - 3 < 3 else everything
        assert support(sampler, logits, position=position) == want


def test_min_tokens_are_each_rows_own():
    logits = random_logits(3, 20)
    sampler = make_sampler(
        20,
        row_init(0, prompt=[1], min_tokens=5, eos_token_ids=(4,)),
        row_init(1, prompt=[1] * 9, min_tokens=1, eos_token_ids=(5,)),
        row_init(2, prompt=[1] * 4, eos_token_ids=(4, 5)),
    )
    got = sampler.distribution(logits, [2, 1, 0], [4, 9, 6]) == 0
    assert [row.nonzero().view(-1).tolist() for row in got] == [[], [5], []]
    got = sampler.distribution(logits, [2, 1, 0], [4, 10, 5]) == 0
    assert [row.nonzero().view(-1).tolist() for row in got] == [[], [], [4]]


def test_bad_words_of_one_token():
    sampler = make_sampler(20, row_init(bad_words_token_ids=((3,), (7,))))
    assert support(sampler, random_logits(1, 20)) == set(range(20)) - {3, 7}


def test_bad_words_of_several_tokens():
    vocab, logits = 20, random_logits(1, 20)
    words = ((5, 6), (5, 6, 7), (8, 9, 10), (11, 6))
    sampler = make_sampler(vocab, row_init(prompt=[1, 8], bad_words_token_ids=words))
    everything = set(range(vocab))
    assert support(sampler, logits, position=2) == everything
    forced(sampler, 0, 2, 9, vocab)  # 8 in the prompt, 9 drawn
    assert support(sampler, logits, position=3) == everything - {10}
    forced(sampler, 0, 3, 5, vocab)
    assert support(sampler, logits, position=4) == everything - {6}
    forced(sampler, 0, 4, 11, vocab)
    assert support(sampler, logits, position=5) == everything - {6}  # two words end in 6: one alone forbids it
    forced(sampler, 0, 5, 8, vocab)
    assert support(sampler, logits, position=6) == everything


def test_bad_word_longer_than_the_sequence_does_not_match():
    sampler = make_sampler(20, row_init(prompt=[2], bad_words_token_ids=((1, 2, 3), (0, 2, 4))))
    assert support(sampler, random_logits(1, 20), position=1) == set(range(20))


def test_a_longer_word_on_another_row_keeps_histories():
    sampler = make_sampler(20, row_init(0, prompt=[1, 5], bad_words_token_ids=((5, 6),)), max_rows=2)
    forced(sampler, 0, 2, 5, 20)
    sampler.state.init_row(row_init(1, prompt=[1, 2, 3], bad_words_token_ids=((1, 2, 3, 7),)))
    logits = random_logits(2, 20)
    zero = sampler.distribution(logits, [0, 1], [3, 3]) == 0
    assert zero[0].nonzero().view(-1).tolist() == [6] and zero[1].nonzero().view(-1).tolist() == [7]


def forbidden(tokens: list[int], words) -> set[int]:
    """The slow truth: last tokens of words whose beginning ends the sequence."""
    return {w[-1] for w in words if len(w) == 1 or (len(tokens) >= len(w) - 1 and tuple(tokens[len(tokens) - len(w) + 1 :]) == w[:-1])}


@pytest.mark.parametrize("seed", range(6))
def test_bad_words_random_walk_equals_the_slow_truth(seed):
    """Rows come, go, move on and are rebuilt with their outputs, with words of all lengths over a tiny vocabulary."""
    rng = random.Random(seed)
    vocab, rows = 5, 4
    sampler = make_sampler(vocab, max_rows=rows)
    live: dict[int, tuple[list[int], list[int], tuple]] = {}
    for _ in range(150):
        for row in range(rows):
            action = rng.random()
            if row in live and action < 0.03:
                sampler.state.clear_row(row)
                del live[row]
            elif row not in live or action < 0.1:
                if row not in live or action < 0.06:
                    words = {tuple(rng.randrange(vocab - 1) for _ in range(rng.randint(1, 2 + seed))) for _ in range(rng.randrange(5))}
                    # Token vocab-1 is never a word's end, so something is always left to draw.
                    live[row] = ([rng.randrange(vocab) for _ in range(rng.randint(1, 6))], [], tuple(words))
                prompt, outputs, words = live[row]
                sampler.state.init_row(row_init(row, seed=rng.randrange(99), prompt=prompt, outputs=outputs, bad_words_token_ids=words))
        step = rng.sample(sorted(live), rng.randint(1, len(live)))
        positions = [len(live[row][0]) + len(live[row][1]) for row in step]
        logits = random_logits(len(step), vocab, rng.randrange(10**6), 0.5)
        chances = sampler.distribution(logits, step, positions)
        tokens = sampler.sample(logits.clone(), step, positions).to_host()[0]
        for i, row in enumerate(step):
            prompt, outputs, words = live[row]
            assert set((chances[i] == 0).nonzero().view(-1).tolist()) == forbidden(prompt + outputs, words)
            assert tokens[i] not in forbidden(prompt + outputs, words)
            outputs.append(tokens[i])
