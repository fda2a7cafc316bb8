"""The distribution equals that of transformers' logits processors, composed in our order, on random logits."""

from __future__ import annotations

import pytest
import torch

from .helpers import make_sampler, random_logits, row_init

processors = pytest.importorskip("transformers.generation.logits_process")

VOCAB = 400
PROMPT = [5, 9, 17, 5, 300, 42]
OUTPUTS = [17, 17, 80, 8, 42]


def ours(logits: torch.Tensor, outputs: list[int], **params) -> torch.Tensor:
    sampler = make_sampler(VOCAB, row_init(prompt=PROMPT, outputs=outputs, **params))
    return torch.cat([sampler.distribution(row[None], [0], [len(PROMPT) + len(outputs)]) for row in logits])


def theirs(logits: torch.Tensor, outputs: list[int], *chain) -> torch.Tensor:
    ids = torch.tensor([PROMPT + outputs]).expand(len(logits), -1)
    scores = logits.clone()
    for processor in chain:
        scores = processor(ids, scores)
    return scores.double().softmax(-1)


def assert_same(got: torch.Tensor, want: torch.Tensor) -> None:
    assert torch.equal(got > 0, want > 0)
    assert torch.allclose(got, want, atol=1e-6)


def temperature(t):
    return processors.TemperatureLogitsWarper(t)


def top_k(k):
    return processors.TopKLogitsWarper(k)


def top_p(p):
    return processors.TopPLogitsWarper(p)


def min_p(p):
    return processors.MinPLogitsWarper(p)


def repetition(r):
    return processors.RepetitionPenaltyLogitsProcessor(r)


CASES = [
    ({"temperature": 0.6}, lambda: [temperature(0.6)]),
    ({"top_k": 7}, lambda: [top_k(7)]),
    ({"top_p": 0.83}, lambda: [top_p(0.83)]),
    ({"top_p": 0.0001}, lambda: [top_p(0.0001)]),
    ({"min_p": 0.07}, lambda: [min_p(0.07)]),
    ({"repetition_penalty": 1.3}, lambda: [repetition(1.3)]),
    ({"repetition_penalty": 0.7, "temperature": 1.4}, lambda: [repetition(0.7), temperature(1.4)]),
    ({"temperature": 1.5, "min_p": 0.02, "top_k": 60, "top_p": 0.9}, lambda: [temperature(1.5), min_p(0.02), top_k(60), top_p(0.9)]),
    ({"temperature": 3.0, "top_k": 350, "top_p": 0.95}, lambda: [temperature(3.0), top_k(350), top_p(0.95)]),
    (
        {"repetition_penalty": 1.2, "temperature": 0.8, "top_k": 50, "top_p": 0.92},
        lambda: [repetition(1.2), temperature(0.8), top_k(50), top_p(0.92)],
    ),
]


@pytest.mark.parametrize(("params", "chain"), CASES, ids=[str(params) for params, _ in CASES])
@pytest.mark.parametrize("outputs", [[], OUTPUTS])
def test_warpers(params, chain, outputs):
    logits = random_logits(12, VOCAB, 3)
    assert_same(ours(logits, outputs, **params), theirs(logits, outputs, *chain()))


BAD_WORDS = ((3,), (8, 42, 6), (42, 7), (80, 8, 42, 9), (1, 42, 10), (5, 9, 17, 5, 300, 42, 11))


@pytest.mark.parametrize("outputs", [[], OUTPUTS])
def test_bad_words(outputs):
    logits = random_logits(4, VOCAB)
    chain = processors.NoBadWordsLogitsProcessor([list(word) for word in BAD_WORDS])
    assert_same(ours(logits, outputs, bad_words_token_ids=BAD_WORDS), theirs(logits, outputs, chain))


@pytest.mark.parametrize("outputs", [[], OUTPUTS[:2], OUTPUTS[:3], OUTPUTS])
def test_min_new_tokens(outputs):
    logits = random_logits(4, VOCAB)
    chain = processors.MinNewTokensLengthLogitsProcessor(len(PROMPT), 3, [2, 7], device="cpu")
    assert_same(ours(logits, outputs, min_tokens=3, eos_token_ids=(2,), stop_token_ids=(7,)), theirs(logits, outputs, chain))


def test_all_together_in_order():
    logits = random_logits(12, VOCAB, 8)
    got = ours(
        logits, OUTPUTS, bad_words_token_ids=BAD_WORDS, logit_bias={17: 2.0, 42: -1.0, 200: 3.0}, min_tokens=9, eos_token_ids=(2,),
        repetition_penalty=1.25, temperature=1.3, min_p=0.01, top_k=100, top_p=0.9,
    )  # fmt: skip
    chain = [
        processors.NoBadWordsLogitsProcessor([list(word) for word in BAD_WORDS]),
        processors.SequenceBiasLogitsProcessor({(17,): 2.0, (42,): -1.0, (200,): 3.0}),
        processors.MinNewTokensLengthLogitsProcessor(len(PROMPT), 9, [2], device="cpu"),
        repetition(1.25), temperature(1.3), min_p(0.01), top_k(100), top_p(0.9),
    ]  # fmt: skip
    assert_same(got, theirs(logits, OUTPUTS, *chain))
