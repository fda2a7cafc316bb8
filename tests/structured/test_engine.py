"""Requests that wait for their grammar: beside the queue, ended like any other, and a bad one alone."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from octavo.engine.core import Engine
from octavo.engine.settings import SchedulerSettings
from octavo.errors import RequestError
from octavo.frontend.grammars import OPTIONS
from octavo.types import GenerateRequest, TokenDelta, TokenParams
from tests.engine.laws import check_empty
from tests.structured.random_device import RandomDevice
from tests.structured.test_laws import VOCAB, VOCABULARY

ABC = OPTIONS + 'start: "abc"'


@pytest.fixture
def engine() -> Engine:
    settings = SchedulerSettings(num_blocks=40, block_size=4, max_model_len=40, max_num_seqs=6, max_num_batched_tokens=64)
    engine = Engine.from_settings(settings, RandomDevice(VOCAB, num_blocks=40))
    engine.set_vocabulary(VOCABULARY)
    return engine


@pytest.fixture
def gate(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Until it is set, no grammar is ready."""
    gate, compile_now = threading.Event(), engine.grammars._compile

    def slowly(grammar: str) -> Any:
        assert gate.wait(10)
        return compile_now(grammar)

    monkeypatch.setattr(engine.grammars, "_compile", slowly)
    return gate


def request(name: str, grammar: str | None = ABC, **fields: Any) -> GenerateRequest:
    return GenerateRequest(request_id=name, prompt_token_ids=[5, 6], params=TokenParams(**{"max_tokens": 8, "grammar": grammar} | fields))


def run(engine: Engine) -> list[TokenDelta]:
    deltas = []
    while engine.has_work():
        deltas += engine.step()
    check_empty(engine)
    return deltas


def ends(deltas: list[TokenDelta]) -> dict[tuple[str, int], str | None]:
    return {(d.request_id, d.index): d.finish_reason for d in deltas if d.finish_reason}


def test_others_do_not_wait(engine: Engine, gate: threading.Event) -> None:
    engine.add_request(request("slow"))
    engine.add_request(request("plain", None, seed=1))
    assert engine.stats().num_waiting == 2
    deltas: list[TokenDelta] = []
    while ("plain", 0) not in ends(deltas):
        deltas += engine.step()
    assert ("slow", 0) not in ends(deltas) and engine.has_work() and engine.step() == []
    gate.set()
    deltas += run(engine)
    text = b"".join(VOCABULARY.tokens[t] for d in deltas if d.request_id == "slow" for t in d.token_ids)
    assert text == b"abc" and ends(deltas)["slow", 0] == "stop"


def test_seeds_do_not_depend_on_how_long_it_takes(engine: Engine, gate: threading.Event) -> None:
    def tokens(wait: bool) -> dict[str, list[int]]:
        gate.clear() if wait else gate.set()
        engine.abandon()
        engine.scheduler._num_added = 0
        engine.grammars._cache.clear()
        engine.add_request(request("a", OPTIONS + "start: /[a-z]*/"))
        if not wait:
            engine.grammars.compile(OPTIONS + "start: /[a-z]*/").result()
        engine.add_request(request("b", None))
        deltas = engine.step()
        gate.set()
        deltas += run(engine)
        return {name: [t for d in deltas if d.request_id == name for t in d.token_ids] for name in "ab"}

    assert tokens(True) == tokens(False)


def test_aborts_while_it_compiles(engine: Engine, gate: threading.Event) -> None:
    engine.add_request(request("whole", n=2))
    engine.add_request(request("part", n=3))
    with pytest.raises(RequestError, match="running already"):
        engine.add_request(request("part"))
    assert ends(engine.abort("whole")) == {("whole", 0): "abort", ("whole", 1): "abort"} and engine.abort("whole") == []
    assert engine.abort("part", 1) == []
    gate.set()
    assert ends(run(engine)) == {("part", 0): "stop", ("part", 1): "abort", ("part", 2): "stop"}
    gate.clear()
    engine.grammars._cache.clear()
    engine.add_request(request("left"))
    assert ends(engine.abort_all()) == {("left", 0): "abort"}
    engine.add_request(request("forgotten"))
    engine.abandon()
    gate.set()
    assert not engine.has_work() and run(engine) == []


def test_a_bad_grammar_ends_its_request_alone(engine: Engine) -> None:
    engine.add_request(request("bad", OPTIONS + "start: missing", n=2))
    engine.add_request(request("good"))
    deltas = run(engine)
    assert ends(deltas) == {("bad", 0): "error", ("bad", 1): "error", ("good", 0): "stop"}
    errors = [d for d in deltas if d.error]
    assert len(errors) == 2 and all("missing" in d.error and d.error_status == 400 for d in errors)


def test_without_a_vocabulary(engine: Engine) -> None:
    engine.grammars._vocabulary = None
    with pytest.raises(RequestError, match="vocabulary"):
        engine.add_request(request("early"))
    assert not engine.has_work()


def test_a_matcher_that_fails_ends_its_request_alone(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that draws what it may not (as on logits that are not numbers) is found out."""
    endless = OPTIONS + "start: /a{20}b/"
    engine.add_request(request("wrong", endless, n=2, max_tokens=30))
    engine.add_request(request("right", endless, max_tokens=30))
    while "right" not in engine.scheduler.requests:  # the grammar compiles
        engine.step()
    engine.step()
    row = next(s.row for s in engine.scheduler.requests["wrong"].sequences)
    draw = engine.executor._draw

    def wrongly(masks: dict[int, Any]) -> None:
        draw(masks)
        result = engine.executor.pending[-1]
        result.token_ids = [200 if r == row else t for r, t in zip(result.rows, result.token_ids, strict=True)]

    monkeypatch.setattr(engine.executor, "_draw", wrongly)
    deltas = run(engine)
    assert all("forbid every token" in d.error for d in deltas if d.error)
    assert ends(deltas) == {("wrong", 0): "error", ("wrong", 1): "error", ("right", 0): "stop"}


def test_old_grammars_are_let_go(engine: Engine) -> None:
    from octavo.engine import grammar

    for i in range(grammar.CACHED_GRAMMARS + 20):
        engine.grammars.compile(OPTIONS + f'start: "a{i}"').result()
    assert len(engine.grammars._cache) == grammar.CACHED_GRAMMARS
    assert OPTIONS + 'start: "a0"' not in engine.grammars._cache


@pytest.mark.parametrize("alone_s", [-1.0, 1e-9, 3600.0])
def test_masks_are_the_same_in_one_thread_and_in_many(alone_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    from octavo.engine import grammar

    grammars = grammar.Grammars()
    grammars.set_vocabulary(VOCABULARY)
    texts = [OPTIONS + f"start: /[a-{last}]+/" for last in "bcdefgh"]
    matchers = [grammar.Matcher(grammars.compile(text).result()) for text in texts]
    alone = [grammars.fill([matcher])[0].tolist() for matcher in matchers]
    assert len({tuple(bits) for bits in alone}) == len(alone)
    monkeypatch.setattr(grammar, "ALONE_S", alone_s)
    for count in (0, 1, 2, 7):
        assert grammars.fill(matchers[:count]).tolist() == alone[:count]
    grammars.shutdown()
