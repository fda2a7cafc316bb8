"""Log-probabilities equal log_softmax of what the model gave; ranks and order are exact; values are always finite."""

from __future__ import annotations

import pytest
import torch

from octavo.sampling import logprobs as module
from octavo.sampling.logprobs import LEAST_LOGPROB, PromptLogprobs
from octavo.types import TokenLogprobs

from .helpers import make_sampler, random_logits, row_init


def check(entry: TokenLogprobs, logits: torch.Tensor, token: int, count: int) -> None:
    """One entry against the slow truth, logits [V]."""
    truth = logits.double().log_softmax(-1)
    x = logits.tolist()
    order = sorted(range(len(x)), key=lambda i: (-x[i], i))
    assert entry.token_ids == [token] + order[:count]
    assert entry.rank == order.index(token) + 1
    assert torch.allclose(torch.tensor(entry.logprobs).double(), truth[entry.token_ids], atol=1e-5)


def prompt_logprobs(logits: torch.Tensor, tokens: list[int], k: int) -> list[TokenLogprobs]:
    found = PromptLogprobs()
    found.add(7, logits, tokens, k)
    return found.to_host().get(7, [])


@pytest.mark.parametrize(
    "extra", [{}, {"temperature": 0.0}, {"repetition_penalty": 1.5, "logit_bias": {3: 50.0}, "allowed_token_ids": (3, 9)}]
)
@pytest.mark.parametrize("vocab", [100, 8192])
def test_rows_with_different_counts_in_one_batch(extra, vocab):
    wanted = [None, 0, 5, 20, None, -1, 1, vocab]
    rows = len(wanted)
    for ties in (False, True):
        logits = random_logits(rows, vocab, vocab)
        if ties:
            logits = logits.round()
        sampler = make_sampler(vocab, *[row_init(row, seed=row, logprobs=k, **extra) for row, k in enumerate(wanted)])
        tokens, entries = sampler.sample(logits.clone(), list(range(rows)), [3] * rows).to_host()
        for row, k in enumerate(wanted):
            if k is None:
                assert entries[row] is None
            else:
                check(entries[row], logits[row], tokens[row], vocab if k == -1 else k)


def test_nothing_asked_nothing_given():
    sampler = make_sampler(10, row_init())
    assert sampler.sample(random_logits(1, 10), [0], [3]).to_host()[1] is None


@pytest.mark.parametrize("k", [0, 3, -1])
def test_prompt_logprobs(k, monkeypatch):
    logits = random_logits(30, 64, 4)
    tokens = torch.randint(0, 64, (30,), generator=torch.Generator().manual_seed(0)).tolist()
    whole = prompt_logprobs(logits, tokens, k)
    for i in range(30):
        check(whole[i], logits[i], tokens[i], 64 if k == -1 else k)
    monkeypatch.setattr(module, "_CHUNK_ELEMENTS", 64 * 7)
    assert prompt_logprobs(logits, tokens, k) == whole


def test_prompts_of_a_step_share_a_bounded_way_to_the_host(monkeypatch):
    """What is on its way never exceeds the bound by more than a piece, and comes out as it would without one."""
    most, sent = 0, PromptLogprobs._send

    def watched(self, *piece):
        nonlocal most
        sent(self, *piece)
        most = max(most, sum(part.nbytes for _, _, part in self._parts))

    monkeypatch.setattr(PromptLogprobs, "_send", watched)
    monkeypatch.setattr(module, "_CHUNK_ELEMENTS", 64 * 4)
    calls = [(row, random_logits(size, 64, row), list(range(size)), k) for row, size, k in [(3, 9, -1), (5, 10, 2), (3, 7, -1), (4, 1, 0)]]
    results = []
    for bound in (2**28, 9000, 1):
        monkeypatch.setattr(module, "HOST_BYTES", bound)
        most, found = 0, PromptLogprobs()
        for call in calls:
            found.add(*call)
        results.append(found.to_host())
        piece = 4 * (65 * 12 + 8)
        assert piece <= most <= max(bound, piece)
    assert results[0] == results[1] == results[2]
    assert {row: len(entries) for row, entries in results[0].items()} == {3: 16, 5: 10, 4: 1}


def test_prompt_logprobs_of_nothing_and_of_unpaired():
    assert prompt_logprobs(torch.empty(0, 10), [], 2) == []
    with pytest.raises(ValueError, match="pair up"):
        prompt_logprobs(torch.zeros(2, 10), [1], 2)


def test_values_are_finite_whatever_the_logits():
    nan, inf = float("nan"), float("inf")
    logits = torch.tensor([[-inf, 1.0, 2.0], [nan, 1.0, 2.0], [inf, 1.0, 2.0], [-inf, -inf, -inf], [3e38, -3e38, 0.0], [nan, nan, nan]])
    sampler = make_sampler(3, *[row_init(row, logprobs=3) for row in range(6)])
    _tokens, entries = sampler.sample(logits.clone(), list(range(6)), [3] * 6).to_host()
    for entry in entries + prompt_logprobs(logits, [0] * 6, 3):
        assert all(LEAST_LOGPROB <= value <= 0.0 for value in entry.logprobs)
        assert all(0 <= token < 3 for token in entry.token_ids) and 1 <= entry.rank <= 3
    assert entries[0].logprobs[entries[0].token_ids.index(0, 1)] == LEAST_LOGPROB
    check_free = prompt_logprobs(logits[:1], [2], 1)[0]
    assert check_free.token_ids == [2, 2] and abs(check_free.logprobs[0] - torch.tensor([1.0, 2.0]).log_softmax(-1)[1]) < 1e-6


def test_logprobs_are_taken_before_anything_is_changed():
    logits = random_logits(1, 50)
    plain = make_sampler(50, row_init(logprobs=50, temperature=0.0)).sample(logits.clone(), [0], [3]).to_host()[1][0]
    best = plain.token_ids[0]
    other = (
        make_sampler(50, row_init(logprobs=50, temperature=0.3, top_k=3, logit_bias={best: -100.0}))
        .sample(logits.clone(), [0], [3])
        .to_host()[1][0]
    )
    assert other.token_ids[0] != best and other.token_ids[1:] == plain.token_ids[1:] and other.logprobs[1:] == plain.logprobs[1:]
