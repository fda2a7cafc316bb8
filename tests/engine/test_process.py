"""The engine process's loop, on a fake device and a fake socket: what it takes in, sends, and survives."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from octavo.engine.core import Engine
from octavo.engine.process import EngineServer
from octavo.engine.settings import SchedulerSettings
from octavo.types import AbortRequest, GenerateRequest, Heartbeat, StepOutputs, TokenParams, UtilityReply, UtilityRequest

from .fake_executor import FakeExecutor


class Frame:
    def __init__(self, buffer: bytes) -> None:
        self.buffer = buffer


class Socket:
    """Messages that "arrive" one batch per turn of the loop; ``None`` is a turn without any."""

    def __init__(self, batches: list[list[Any] | None]) -> None:
        self.batches = deque(batches)
        self.arrived: deque[bytes] = deque()
        self.waits: list[int] = []
        self.turn_over = True

    def poll(self, wait_ms: int) -> bool:
        if self.arrived:
            return True
        self.turn_over = not self.turn_over
        if self.turn_over:  # this turn's batch was read
            return False
        self.waits.append(wait_ms)
        shutdown = [UtilityRequest(call_id=99, method="shutdown")]
        batch = self.batches.popleft() if self.batches else shutdown
        self.arrived.extend(msgspec.msgpack.encode(m) for m in batch or [])
        self.turn_over = not batch
        return bool(batch)

    def recv(self, copy: bool) -> Frame:
        return Frame(self.arrived.popleft())


def server(batches: list[list[Any] | None]) -> tuple[EngineServer, list[Any], Socket]:
    executor = FakeExecutor(64, 4, 4, 64, 50, steps_ahead=0)
    settings = SchedulerSettings(num_blocks=64, block_size=4, max_model_len=64, max_num_seqs=4, max_num_batched_tokens=64)
    sent: list[Any] = []
    socket = Socket(batches)
    return EngineServer(Engine.from_settings(settings, executor), socket, sent.append), sent, socket  # type: ignore[arg-type]


def request(name: str, **params: Any) -> GenerateRequest:
    return GenerateRequest(request_id=name, prompt_token_ids=[1, 2, 3], params=TokenParams(**{"max_tokens": 3, **params}))


def reasons(sent: list[Any], name: str) -> list[str]:
    deltas = [d for m in sent if isinstance(m, StepOutputs) for d in m.deltas if d.request_id == name]
    return [d.finish_reason for d in deltas if d.finish_reason]


def statuses(sent: list[Any]) -> set[int]:
    return {d.error_status for m in sent if isinstance(m, StepOutputs) for d in m.deltas if d.error}


def test_a_request_runs_and_calls_are_answered() -> None:
    engine, sent, _ = server([[request("a"), UtilityRequest(call_id=1, method="reset_prefix_cache")], None, None, None, None])
    engine.run()
    assert reasons(sent, "a") == ["length"]
    assert [(m.call_id, m.result, m.error) for m in sent if isinstance(m, UtilityReply)] == [(1, True, None), (99, True, None)]
    tokens = [t for m in sent if isinstance(m, StepOutputs) for d in m.deltas for t in d.token_ids]
    assert len(tokens) == 3
    assert sent[-2].stats.generation_tokens == 3 and sent[-2].stats.num_running == 0


@pytest.mark.parametrize("bad", [{"n": 5}, {"max_tokens": -1}])
def test_a_refusal_is_told_to_every_sequence_and_harms_nobody(bad: dict[str, int]) -> None:
    engine, sent, _ = server([[request("good"), request("bad", **bad), request("good")], None, None, None, None])
    engine.run()
    assert reasons(sent, "good") == ["error", "length"], "the second of the same name is refused, the first one runs"
    assert reasons(sent, "bad") == ["error"] * bad.get("n", 1)
    assert statuses(sent) == {400}


def test_a_fault_while_a_request_is_taken_in_fails_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, sent, _ = server([[request("good"), request("bad")], None, None, None, None])
    add = engine.engine.add_request
    monkeypatch.setattr(engine.engine, "add_request", lambda r: add(r) if r.request_id == "good" else 1 / 0)
    engine.run()
    assert reasons(sent, "good") == ["length"] and reasons(sent, "bad") == ["error"]
    [text] = [d.error for m in sent if isinstance(m, StepOutputs) for d in m.deltas if d.error]
    assert statuses(sent) == {500}, "a fault of ours is not the client's"
    assert "ZeroDivisionError" in text


def test_aborts() -> None:
    n = request("n", n=2, max_tokens=30)
    engine, sent, _ = server(
        [
            [n, AbortRequest(request_id="unknown"), AbortRequest(request_id="n", index=7)],
            [AbortRequest(request_id="n", index=0)],
            [AbortRequest(request_id="n"), AbortRequest(request_id="n")],
        ]
    )
    engine.run()
    assert reasons(sent, "n") == ["abort", "abort"]
    assert not engine.engine.has_work()


def test_idle_it_prepares_until_there_is_nothing_left_or_something_comes() -> None:
    engine, sent, socket = server([None, None, None, None, [request("a")], None, None, None, None, None, None, None])
    left = iter([True, True, False])
    calls: list[int] = []

    def prepare() -> bool:
        assert not engine.engine.has_work()
        calls.append(len(socket.waits))
        return next(left, False)

    engine.prepare = prepare
    engine.run()
    assert socket.waits[:5] == [50, 1, 1, 1000, 1000] and calls[:4] == [1, 2, 3, 4]
    assert reasons(sent, "a") == ["length"]
    assert 100 in socket.waits[5:] and 50 not in socket.waits[5:]  # idle again: a longer pause first


def test_idle_it_waits_and_shows_that_it_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 10_000, 2))
    monkeypatch.setattr("octavo.engine.process.time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    engine, sent, socket = server([None, None, [request("a")], None])
    engine.run()
    assert any(isinstance(m, Heartbeat) for m in sent[:3])
    assert socket.waits[:4] == [50, 1000, 1000, 0]
