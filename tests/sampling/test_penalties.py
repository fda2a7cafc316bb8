"""Penalties: what they do to logits, and that the device's counts follow what was drawn."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch

from .helpers import make_sampler, random_logits, row_init


def slow_penalties(logits, prompt, outputs, repetition=1.0, frequency=0.0, presence=0.0):
    result = logits.clone()
    counts = Counter(outputs)
    for token in set(prompt) | set(outputs):
        result[token] = result[token] / repetition if result[token] > 0 else result[token] * repetition
    for token, count in counts.items():
        result[token] -= frequency * count + presence
    return result


def test_each_penalty_by_hand():
    logits = torch.tensor([[2.0, -2.0, 1.0, 0.5, -1.0]])
    cases = [
        ({"repetition_penalty": 2.0}, [1.0, -4.0, 0.5, 0.5, -1.0]),
        ({"frequency_penalty": 0.5}, [2.0, -3.0, 0.5, 0.5, -1.0]),
        ({"presence_penalty": -1.0}, [2.0, -1.0, 2.0, 0.5, -1.0]),
        ({"repetition_penalty": 2.0, "frequency_penalty": 0.5, "presence_penalty": 0.25}, [1.0, -5.25, -0.25, 0.5, -1.0]),
    ]
    for params, want in cases:
        sampler = make_sampler(5, row_init(prompt=[0, 1, 0], outputs=[1, 2, 1], **params))
        got = sampler.distribution(logits, [0], [6])
        assert torch.allclose(got, torch.tensor([want]).double().softmax(-1), atol=1e-6), params


@pytest.mark.parametrize("seed", range(4))
def test_counts_follow_random_lives_of_rows(seed):
    """Rows come, go, are preempted and rebuilt from their outputs; every distribution equals the slow truth."""
    rng = random.Random(seed)
    vocab, rows = 23, 5
    sampler = make_sampler(vocab, max_rows=rows)
    live: dict[int, tuple[list[int], list[int], dict]] = {}
    for _ in range(120):
        for row in range(rows):
            action = rng.random()
            if row in live and action < 0.03:
                sampler.state.clear_row(row)
                del live[row]
                continue
            if row not in live or action < 0.03:
                penalties = {
                    "repetition_penalty": rng.choice([1.0, 1.0, 1.3, 0.8]),
                    "frequency_penalty": rng.choice([0.0, 0.0, 0.4, -0.3]),
                    "presence_penalty": rng.choice([0.0, 0.0, 0.5, -0.5]),
                }
                live[row] = ([rng.randrange(vocab) for _ in range(rng.choice([1, 5, 400]))], [], penalties)
            elif action > 0.06:
                continue
            prompt, outputs, penalties = live[row]
            sampler.state.init_row(row_init(row, seed=rng.randrange(99), prompt=prompt, outputs=outputs, **penalties))
        if not live:
            continue
        step = rng.sample(sorted(live), rng.randint(1, len(live)))
        positions = [len(live[row][0]) + len(live[row][1]) for row in step]
        logits = random_logits(len(step), vocab, rng.randrange(10**6))
        got = sampler.distribution(logits, step, positions)
        for i, row in enumerate(step):
            prompt, outputs, p = live[row]
            truth = slow_penalties(logits[i], prompt, outputs, p["repetition_penalty"], p["frequency_penalty"], p["presence_penalty"])
            assert torch.allclose(got[i], truth.double().softmax(-1), atol=1e-5)
        for row, token in zip(step, sampler.sample(logits, step, positions).to_host()[0]):
            live[row][1].append(token)
        for row, (_, outputs, _) in live.items():
            counts = sampler.state.penalties.output_counts(row)
            assert counts is None or counts.tolist() == [outputs.count(t) for t in range(vocab)]


def test_long_outputs_grow_the_list():
    """More outputs than one allocation holds; the counts stay true, also after a rebuild."""
    vocab = 50
    sampler = make_sampler(vocab, row_init(prompt=[1, 2], frequency_penalty=0.01))
    outputs: list[int] = []
    logits = random_logits(1, vocab)
    for i in range(700):
        outputs += sampler.sample(logits.clone(), [0], [2 + i]).to_host()[0]
    counts = sampler.state.penalties.output_counts(0).tolist()
    assert counts == [outputs.count(t) for t in range(vocab)]
    before = sampler.distribution(logits, [0], [702])
    sampler.state.init_row(row_init(prompt=[1, 2], outputs=outputs, frequency_penalty=0.01))
    assert torch.equal(sampler.distribution(logits, [0], [702]), before)


def test_rows_without_penalties_cost_nothing():
    sampler = make_sampler(1000, *[row_init(row) for row in range(64)])
    assert sampler.state.penalties._counts.numel() == 0
    sampler.state.init_row(row_init(5, presence_penalty=1.0))
    assert sampler.state.penalties._counts.shape == (1, 1000)
    for _ in range(20):  # slots are given back
        sampler.state.init_row(row_init(7, presence_penalty=1.0))
        sampler.state.clear_row(7)
    assert sampler.state.penalties._counts.shape[0] == 2


def test_penalties_with_one_step_in_flight():
    """Outputs are never fed back by the host: drawing goes on for steps before any result is read."""
    vocab = 40
    sampler = make_sampler(vocab, row_init(frequency_penalty=2.0, temperature=0.0))
    logits = random_logits(1, vocab)
    drawn = [sampler.sample(logits.clone(), [0], [3 + i]) for i in range(30)]
    outputs: list[int] = []
    for output in drawn:
        token = output.to_host()[0][0]
        assert token == int(slow_penalties(logits[0], [], outputs, frequency=2.0).argmax())
        outputs.append(token)
