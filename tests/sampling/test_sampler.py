"""Promises about whole batches: a row's token is its own, whatever runs beside it and wherever it stands."""

from __future__ import annotations

import random

import pytest
import torch

from octavo.sampling.batch import SamplingState
from octavo.sampling.sampler import Sampler

from .helpers import make_sampler, random_logits, row_init

NAN, INF = float("nan"), float("inf")


def random_params(rng: random.Random, vocab: int) -> dict:
    """Any mix of options; most rows use few of them."""

    def maybe(chance, value):
        return value if rng.random() < chance else None

    options = {
        "temperature": rng.choice([0.0, 0.5, 1.0, 1.7]),
        "top_k": maybe(0.4, rng.choice([1, 2, 40, 100, 300, 5000])),
        "top_p": maybe(0.4, rng.choice([0.01, 0.5, 0.9, 0.99])),
        "min_p": maybe(0.2, rng.choice([0.01, 0.2])),
        "repetition_penalty": maybe(0.2, 1.2),
        "frequency_penalty": maybe(0.2, 0.3),
        "presence_penalty": maybe(0.2, -0.4),
        "logit_bias": maybe(0.2, {rng.randrange(vocab): rng.choice([-100.0, 3.0]) for _ in range(3)}),
        "allowed_token_ids": maybe(0.15, tuple(rng.sample(range(vocab), 20))),
        "bad_words_token_ids": maybe(0.2, tuple(tuple(rng.sample(range(vocab), rng.randint(1, 3))) for _ in range(4))),
        "min_tokens": maybe(0.3, rng.randint(1, 4)),
        "eos_token_ids": (2,),
        "logprobs": maybe(0.3, rng.choice([0, 3, -1])),
    }
    return {name: value for name, value in options.items() if value is not None}


@pytest.mark.parametrize("vocab", [200, 4096])
@pytest.mark.parametrize("seed", range(3))
def test_a_mixed_batch_equals_each_row_alone(seed, vocab):
    """Six steps of 16 rows with random options: in one batch, alone on another row, and shuffled over other rows."""
    rng = random.Random(seed)
    count, steps = 16, 6
    requests = [
        dict(seed=rng.randrange(2**63), prompt=rng.choices(range(vocab), k=rng.randint(1, 9)), **random_params(rng, vocab))
        for _ in range(count)
    ]
    logits = [random_logits(count, vocab, 100 * seed + step, rng.choice([0.5, 3.0])) for step in range(steps)]
    places = rng.sample(range(2 * count), count)
    together = make_sampler(vocab, *[row_init(row, **request) for row, request in enumerate(requests)])
    shuffled = make_sampler(vocab, *[row_init(place, **request) for place, request in zip(places, requests)])
    alone = [make_sampler(vocab, row_init(3, **request)) for request in requests]
    for step in range(steps):
        positions = [len(request["prompt"]) + step for request in requests]
        tokens, entries = together.sample(logits[step].clone(), list(range(count)), positions).to_host()
        order = rng.sample(range(count), count)
        other, other_entries = shuffled.sample(
            logits[step][order].clone(), [places[i] for i in order], [positions[i] for i in order]
        ).to_host()
        assert other == [tokens[i] for i in order]
        for i in range(count):
            token, entry = alone[i].sample(logits[step][i : i + 1].clone(), [3], [positions[i]]).to_host()
            assert token == [tokens[i]]
            assert (entry and entry[0]) == (entries and entries[i])
            assert (other_entries and other_entries[order.index(i)]) == (entries and entries[i])


@pytest.mark.parametrize("seed", range(3))
def test_the_blind_path_draws_the_same(seed):
    """What runs where the host must not look at values, against the CPU's way."""
    rng = random.Random(seed)
    vocab, count = 1000, 40
    inits = [row_init(row, seed=rng.randrange(2**40), **random_params(rng, vocab)) for row in range(count)]
    looking, blind = make_sampler(vocab, *inits), make_sampler(vocab, *inits)
    blind.on_cpu = False
    logits = random_logits(count, vocab, seed)
    logits[3] = NAN
    logits[5, :10] = INF
    logits[7] = -INF
    rows, positions = list(range(count)), [3] * count
    assert blind.sample(logits.clone(), rows, positions).to_host()[0] == looking.sample(logits.clone(), rows, positions).to_host()[0]
    some = [0, 11, 30]
    assert blind.sample(logits[some], some, [4] * 3).to_host()[0] == looking.sample(logits[some], some, [4] * 3).to_host()[0]


def test_nothing_waits_for_the_device():
    """On the meta device every read of a value raises; all features at once, rows coming and going."""
    rng = random.Random(4)
    vocab = 5000
    state = SamplingState(16, vocab, "meta")
    sampler = Sampler(state)
    for step in range(8):
        for row in rng.sample(range(16), 16 if step == 0 else 3):
            state.clear_row(row)
            state.init_row(row_init(row, seed=row, outputs=[1] * step, **random_params(rng, vocab)))
        output = sampler.sample(torch.empty(16, vocab, device="meta"), list(range(16)), [3 + step] * 16)
        assert output.token_ids.shape == (16,) and output.token_ids.dtype == torch.int64
    with pytest.raises((RuntimeError, NotImplementedError)):
        output.to_host()


def test_seed_and_position_decide_the_draw():
    logits = random_logits(1, 5000, scale=0.1)
    sampler = make_sampler(5000, row_init(0, seed=7), row_init(1, seed=7), row_init(2, seed=8))
    a, b, c = sampler.sample(logits.repeat(3, 1), [0, 1, 2], [10, 10, 10]).token_ids.tolist()
    assert a == b != c
    assert sampler.sample(logits.clone(), [0], [11]).token_ids.tolist() != [a]
    assert sampler.sample(logits.clone(), [0], [10]).token_ids.tolist() == [a]  # no state moves on


def test_preemption_does_not_change_what_follows():
    """Rebuilt from its outputs on another row, a sequence goes on as if nothing had happened."""
    vocab = 60
    params = {
        "seed": 5,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "bad_words_token_ids": ((1, 2), (3,), (4, 5, 6)),
        "min_tokens": 12,
        "eos_token_ids": (9,),
    }
    logits = [random_logits(1, vocab, 1000 + i) for i in range(20)]
    straight = make_sampler(vocab, row_init(0, **params))
    want = [int(straight.sample(logits[i].clone(), [0], [3 + i]).token_ids) for i in range(20)]
    broken = make_sampler(vocab, row_init(0, **params), max_rows=4)
    got: list[int] = []
    for i in range(20):
        if i % 6 == 5:
            broken.state.clear_row(i // 6)
            broken.state.init_row(row_init(i // 6 + 1, outputs=got, **params))
        got.append(int(broken.sample(logits[i].clone(), [(i + 1) // 6], [3 + i]).token_ids))
    assert got == want


def test_a_cleared_row_leaves_no_trace():
    vocab = 100
    rng = random.Random(0)
    sampler = make_sampler(vocab, max_rows=3)
    logits = random_logits(1, vocab)
    for i in range(40):
        heavy = {
            "repetition_penalty": 3.0,
            "frequency_penalty": 2.0,
            "presence_penalty": 2.0,
            "logit_bias": {5: 50.0},
            "allowed_token_ids": (5, 6, 7),
            "bad_words_token_ids": ((6,), (5, 5)),
            "min_tokens": 9,
            "eos_token_ids": (7,),
            "logprobs": -1,
            "temperature": 0.1,
            "top_k": 2,
            "min_p": 0.5,
            "top_p": 0.3,
        }
        sampler.state.init_row(row_init(1, seed=i, **heavy))
        sampler.sample(logits.clone(), [1], [3])
        if i % 2:
            sampler.state.clear_row(1)
            sampler.state.clear_row(1)
        light = random_params(rng, vocab)
        sampler.state.init_row(row_init(1, seed=99, **light))
        fresh = make_sampler(vocab, row_init(1, seed=99, **light))
        for position in range(3, 6):
            assert sampler.sample(logits.clone(), [1], [position]).to_host() == fresh.sample(logits.clone(), [1], [position]).to_host()
        sampler.state.clear_row(1)
    with pytest.raises(KeyError):
        sampler.sample(logits.clone(), [1], [3])


@pytest.mark.parametrize("half", ["init_row", "clear_row"])
def test_a_row_whose_setting_up_or_clearing_was_broken_off_leaves_no_trace(half, monkeypatch):
    """Ctrl-C in the process of who calls LLM."""
    sampler = make_sampler(16, row_init(max_tokens=1), max_rows=1)
    state = sampler.state
    strange = row_init(temperature=0.0, logit_bias={3: 100.0}, presence_penalty=2.0, logprobs=2, allowed_token_ids=(3, 4))
    if half == "clear_row":
        state.init_row(strange)

    def interrupted(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(state.features[0 if half == "clear_row" else -1], half, interrupted)
        with pytest.raises(KeyboardInterrupt):
            state.init_row(strange)
    state.init_row(row_init(temperature=0.0))
    assert sampler.graph_mode([0]) == "greedy"


@pytest.mark.parametrize(
    "params", [{"temperature": 0.0}, {}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.1, "top_p": 0.9, "repetition_penalty": 2.0}], ids=str
)
@pytest.mark.parametrize("blind", [False, True])
def test_broken_logits_hurt_only_their_row(params, blind):
    vocab = 64
    good = random_logits(8, vocab)
    bad = good.clone()
    bad[1] = NAN
    bad[2, 5] = NAN
    bad[3] = -INF
    bad[4, 9] = INF
    bad[5] = torch.where(torch.arange(vocab) % 2 == 0, INF, NAN)
    bad[6, : vocab - 1] = -INF
    sampler, other = (make_sampler(vocab, *[row_init(row, seed=row, prompt=[60], **params) for row in range(8)]) for _ in range(2))
    sampler.on_cpu = not blind
    rows, positions = list(range(8)), [1] * 8
    tokens = sampler.sample(bad.clone(), rows, positions).token_ids.tolist()
    expected = other.sample(good.clone(), rows, positions).token_ids.tolist()
    assert [tokens[i] for i in (0, 7)] == [expected[i] for i in (0, 7)]
    assert tokens[1] == tokens[3] == tokens[5] == 0
    for i in (2, 4):
        finite = torch.where(bad[i].isfinite(), bad[i], -INF)
        assert tokens[i] == int(finite.argmax())
    assert tokens[6] == vocab - 1


def test_everything_forbidden_draws_token_0():
    sampler = make_sampler(10, row_init(0, allowed_token_ids=(4,), bad_words_token_ids=((4,),)), row_init(1))
    logits = random_logits(2, 10)
    tokens = sampler.sample(logits.clone(), [0, 1], [3, 3]).token_ids.tolist()
    assert tokens == [0, int(make_sampler(10, row_init(1)).sample(logits[1:].clone(), [1], [3]).token_ids)]


def test_refusals_name_what_is_wrong():
    sampler = make_sampler(10, row_init(0), row_init(1))
    with pytest.raises(ValueError, match="float32 logits"):
        sampler.sample(torch.zeros(1, 11), [0], [3])
    with pytest.raises(ValueError, match="float32 logits"):
        sampler.sample(torch.zeros(1, 10, dtype=torch.float16), [0], [3])
    with pytest.raises(ValueError, match="positions"):
        sampler.sample(torch.zeros(1, 10), [0], [3, 4])
    with pytest.raises(KeyError, match="distinct"):
        sampler.sample(torch.zeros(2, 10), [0, 0], [3, 3])
    with pytest.raises(IndexError, match="row 2"):
        sampler.state.init_row(row_init(2))


def test_no_rows_and_strided_logits():
    sampler = make_sampler(10, row_init(0), row_init(1, frequency_penalty=1.0))
    assert sampler.sample(torch.empty(0, 10), [], []).to_host() == ([], None)
    wide = random_logits(2, 20)
    strided = wide[:, ::2]
    assert not strided.is_contiguous()
    want = make_sampler(10, row_init(0), row_init(1, frequency_penalty=1.0)).sample(strided.contiguous(), [0, 1], [3, 3])
    assert torch.equal(sampler.sample(strided, [0, 1], [3, 3]).token_ids, want.token_ids)


def test_inside_and_outside_of_inference_mode():
    """Rows are made outside, logits inside of inference mode, and the other way round."""
    state = SamplingState(2, 20, "cpu")
    sampler = Sampler(state)
    options = {"frequency_penalty": 1.0, "bad_words_token_ids": ((1, 2),), "logprobs": 2, "logit_bias": {3: 1.0}}
    for _ in range(3):
        state.init_row(row_init(0, **options))
        with torch.inference_mode():
            state.init_row(row_init(1, **options))
            first = sampler.sample(random_logits(2, 20), [0, 1], [3, 3])
        second = sampler.sample(random_logits(2, 20), [0, 1], [4, 4])
        assert len(first.to_host()[0]) == len(second.to_host()[0]) == 2
        state.clear_row(0)
