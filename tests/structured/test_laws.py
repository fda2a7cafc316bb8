"""A sequence's tokens do not depend on what else runs: engines under random schedules against llguidance and one sequence alone."""

from __future__ import annotations

import os
import random
import time
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from octavo.engine.core import Engine
from octavo.engine.grammar import build_tokenizer
from octavo.engine.request import Status, derive_seed
from octavo.engine.settings import SchedulerSettings
from octavo.types import GenerateRequest, GrammarVocabulary, TokenParams
from tests.engine.laws import check_empty, check_laws
from tests.structured.random_device import RandomDevice, draw, narrow

NUM_SCHEDULES = int(os.environ.get("OCTAVO_SCHEDULES", "2000")) // 10
EOS, EOS2, STOP = 290, 291, 292
PIECES = ["ab", "abc", "ba", "bb", "aé", "日", '{"', '":', '"}', " {", "tru", "true", "12", "00", " a", "\n ", "éé", "xyz"]
VOCABULARY = GrammarVocabulary(
    # Bytes, pieces (some twice), ids that are no token, special tokens, and more ids that are none.
    tokens=[*(bytes([i]) for i in range(256)), *(p.encode() for p in PIECES), b"ab", b"true"]
    + [b""] * (EOS - 256 - len(PIECES) - 2)
    + [b"</s>", b"<end>", b"<stop>", b"", b""],
    special_token_ids=[EOS, EOS2, STOP],
    eos_token_ids=[EOS, EOS2],
)
VOCAB = len(VOCABULARY.tokens)
SEEN: Counter[str] = Counter()


def random_grammar(rng: random.Random) -> str:
    """A few rules that refer to each other, often ambiguous, now and then endless."""
    terminals = ['"a"', '"b"', '"ab"', "/[ab]+/", "/[0-9]{1,3}/", '"é"', '"日本"', '"{"', '"}"', "/x?y*/", '"true"', "/(a|ba|é)*/"]
    rules = [f"r{i}" for i in range(rng.randint(1, 4))]

    def item() -> str:
        text = rng.choice(rules) if rng.random() < 0.3 else rng.choice(terminals)
        return text + rng.choice(("", "", "", "?", "*", "+", "{1,3}"))

    lines = ["start: " + " | ".join(" ".join(item() for _ in range(rng.randint(1, 3))) for _ in range(rng.randint(1, 2)))]
    for rule in rules:
        bodies = [" ".join(item() for _ in range(rng.randint(1, 3))) for _ in range(rng.randint(1, 3))] + [rng.choice(terminals)]
        lines.append(f"{rule}: " + " | ".join(bodies))
    if rng.random() < 0.1:
        lines[0] += " <stop>"  # a special token by its name
    return '%llguidance {"no_forcing": true}\n' + "\n".join(lines)


_TOKENIZER = build_tokenizer(VOCABULARY)


def start(grammar: str) -> Any:
    from llguidance import LLMatcher

    return LLMatcher(_TOKENIZER, grammar, log_level=0)


def usable(grammar: str) -> bool:
    matcher = start(grammar)
    return not matcher.is_error() and any(matcher.compute_bitmask()) and not matcher.is_error()


@dataclass
class Truth:
    tokens: list[int]
    reason: str


def truth(request: GenerateRequest, seed: int, favoured: np.ndarray) -> Truth:
    """One sequence, alone, straight from llguidance."""
    params, tokens = request.params, list(request.prompt_token_ids)
    num_prompt = len(tokens)
    matcher = start(params.grammar) if params.grammar else None
    while len(tokens) - num_prompt < params.max_tokens:
        allowed = np.ones(VOCAB, bool)
        early = len(tokens) - num_prompt < params.min_tokens
        if matcher is not None:
            allowed = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")[:VOCAB].astype(bool)
            if matcher.is_error():
                return Truth(tokens[num_prompt:], "error")
            if early or not params.eos_token_ids:
                allowed[list(VOCABULARY.eos_token_ids)] = False
        narrow(params, len(tokens) - num_prompt, allowed)
        if matcher is not None and not allowed.any():
            return Truth(tokens[num_prompt:], "stop" if matcher.is_accepting() else "error")
        token = draw(tokens, seed, allowed, favoured)
        tokens.append(token)
        if token in (*params.eos_token_ids, *params.stop_token_ids) and not early:
            return Truth(tokens[num_prompt:], "stop")
        if matcher is not None:
            assert matcher.consume_token(token)
            if matcher.is_stopped():
                return Truth(tokens[num_prompt:], "stop")
    return Truth(tokens[num_prompt:], "length")


def random_request(rng: random.Random, name: str, grammars: list[str]) -> GenerateRequest:
    params = TokenParams(
        n=rng.choice((1, 1, 2, 3)),
        max_tokens=rng.choice((0, *range(1, 24))),
        min_tokens=rng.choice((0, 0, 3, 30)),
        temperature=1.0,
        seed=rng.randint(0, 10**6),
        eos_token_ids=rng.choice(((EOS, EOS2), (EOS, EOS2), ())),
        stop_token_ids=rng.choice(((), (STOP,), (97,))),
        allowed_token_ids=rng.choice((None, None, None, tuple(range(97, 123)))),
        grammar=rng.choice((*grammars, None)),
    )
    prompt = [rng.randrange(256) for _ in range(rng.randint(1, 12))] if rng.random() < 0.5 else list(range(rng.randint(4, 12)))
    return GenerateRequest(request_id=name, prompt_token_ids=prompt, params=params, priority=rng.randint(0, 2))


@pytest.mark.parametrize("part", range(10))
def test_random_schedules(part: int) -> None:
    rng = random.Random(part)
    grammars = [g for g in (random_grammar(rng) for _ in range(60)) if usable(g)]
    assert len(grammars) > 10
    for number in range(part, NUM_SCHEDULES, 10):
        run_schedule(random.Random(number), grammars)


def run_schedule(rng: random.Random, grammars: list[str]) -> None:
    max_num_seqs = rng.randint(3, 6)
    device = RandomDevice(VOCAB, steps_ahead=rng.randint(0, 1), num_blocks=rng.choice((12, 14, 20, 60)), favoured=[97, 98, EOS])
    settings = SchedulerSettings(
        num_blocks=device.num_blocks,
        block_size=rng.choice((3, 4, 8)),
        max_model_len=36,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=rng.choice((max_num_seqs, 9, 64)),
        prefix_caching=rng.random() < 0.7,
        policy=rng.choice(("fcfs", "priority")),
    )
    engine = Engine.from_settings(settings, device)
    engine.set_vocabulary(VOCABULARY)
    requests = {str(i): random_request(rng, str(i), grammars) for i in range(rng.randint(3, 10))}
    arriving = deque(requests.values())
    tokens: dict[tuple[str, int], list[int]] = {}
    ends: dict[tuple[str, int], str] = {}
    errors: dict[str, str] = {}
    steps, begun = 0, time.monotonic()
    while arriving or engine.has_work():
        steps += 1
        assert steps < 5000 or time.monotonic() - begun < 60  # steps go on while a grammar compiles in its thread
        for _ in range(min(len(arriving), rng.choice((0, 1, 4)))):
            engine.add_request(arriving.popleft())
        deltas = engine.step()
        if rng.random() < 0.01 and engine.scheduler.requests:
            deltas += engine.abort(rng.choice([*engine.scheduler.requests]))
        for delta in deltas:
            key = (delta.request_id, delta.index)
            assert key not in ends
            tokens.setdefault(key, []).extend(delta.token_ids)
            if delta.finish_reason:
                ends[key] = delta.finish_reason
            if delta.error:
                assert delta.error_status == 400
                errors[delta.request_id] = delta.error
        check_laws(engine)
        for request in engine.scheduler.requests.values():
            assert all((s.matcher is not None) == (request.params.grammar is not None) for s in request.live)
        following = [s for r in engine.scheduler.requests.values() for s in r.live if s.matcher is not None]
        assert engine.scheduler._num_following == len(following)
        SEEN["preempted"] += any(s.status is Status.WAITING and s.num_outputs for r in engine.scheduler.requests.values() for s in r.live)
    check_empty(engine)
    for name, request in requests.items():
        expected = [truth(request, derive_seed(request.params.seed, i), device.favoured) for i in range(request.params.n)]
        failed = any(t.reason == "error" for t in expected)
        for i, one in enumerate(expected):
            got, reason = tokens[name, i], ends[name, i]
            SEEN[f"{reason} {request.params.grammar is not None}"] += 1
            if reason == "abort" or failed:  # when a sibling fails depends on the schedule
                assert one.tokens[: len(got)] == got
                assert reason != "error" or failed
            else:
                assert (got, reason) == (one.tokens, one.reason), (request, one)
        assert (name in errors) == failed or "abort" in {ends[name, i] for i in range(request.params.n)}


def test_the_schedules_came_across_everything() -> None:
    if NUM_SCHEDULES >= 200 and "PYTEST_XDIST_WORKER" not in os.environ:
        assert min(SEEN[k] for k in ("stop True", "length True", "error True", "abort True", "preempted", "length False")) > 5, SEEN
