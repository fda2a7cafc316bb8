"""When a captured step is captured, and by whom. What capturing does needs a GPU (tests/e2e/test_gpu_engine.py); here it is noted."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from octavo.executor.graph_pool import TIMES_BESIDE, CapturedStep, GraphPool

MAIN = threading.current_thread()


class Pool(GraphPool):
    """A pool whose captures run nothing, its thread's when they are let, and whose graphs note their replays."""

    def __init__(self) -> None:
        super().__init__(SimpleNamespace(device=torch.device("cpu"), last_token=torch.zeros(1), num_computed=torch.zeros(1)))  # type: ignore[arg-type]
        self.on_gpu = True
        self.seen: list[str] = []
        self.let = threading.Event()
        self.error: Exception | None = None

    def _start_thread(self) -> None:
        assert threading.current_thread() is not MAIN
        self._thread_id = threading.get_ident()

    def _record(self, key: Any, body: Callable[[], torch.Tensor]) -> CapturedStep:
        if threading.current_thread() is not MAIN:
            assert self.let.wait(10)
            if self.error is not None:
                raise self.error
            assert self.in_thread()
            self.give_way()
        self.seen.append(f"capture {key}")
        graph: Any = SimpleNamespace(replay=lambda: self.seen.append(f"replay {key}"))
        return CapturedStep(graph, torch.zeros(1))

    def ask(self, key: str, beside: bool = False) -> None:
        def body() -> torch.Tensor:
            self.seen.append(f"run {key}")
            return torch.ones(1)

        output = self.run(key, body, beside)
        assert float(output) == (1.0 if self.seen[-1].startswith("run") else 0.0)

    def finish(self) -> None:
        """Let the thread capture, and wait until it has."""
        assert self._behind is not None
        self.let.set()
        self._behind[1].exception(10)
        self.let.clear()


@pytest.fixture
def pool() -> Iterator[Pool]:
    made = Pool()
    yield made
    made.let.set()
    made.close()


def test_a_step_is_run_the_first_time_captured_the_second_and_replayed_from_then_on(pool: Pool) -> None:
    for key in "abaab":
        pool.ask(key)
    assert pool.seen == ["run a", "run b", "capture a", "replay a", "replay a", "capture b", "replay b"]


def test_with_streams_beside_it_runs_without_a_graph_while_a_thread_captures(pool: Pool) -> None:
    for _ in range(6):
        pool.ask("a", beside=True)
    assert pool.seen == ["run a"] * 6
    pool.finish()
    pool.ask("a", beside=True)
    assert pool.seen[6:] == ["capture a", "replay a"]


def test_while_the_thread_captures_no_other_step_is_captured(pool: Pool) -> None:
    for key in "aabb":
        pool.ask(key, beside=True)
    pool.ask("c")
    pool.ask("c")
    assert pool.seen == [f"run {key}" for key in "aabbcc"]
    pool.finish()
    pool.ask("c")
    pool.ask("b", beside=True)
    assert pool.seen[6:] == ["capture a", "capture c", "replay c", "run b"]
    pool.finish()
    pool.ask("b", beside=True)
    pool.ask("a", beside=True)
    assert pool.seen[10:] == ["capture b", "replay b", "replay a"]


def test_without_room_for_the_thread_the_capture_is_put_off(pool: Pool) -> None:
    pool.has_room = lambda: False
    for _ in range(TIMES_BESIDE + 2):
        pool.ask("a", beside=True)
    assert pool.seen == ["run a"] * TIMES_BESIDE + ["capture a", "replay a", "replay a"]


def test_when_the_threads_capture_fails_steps_go_on_and_it_is_not_tried_again(pool: Pool, caplog: pytest.LogCaptureFixture) -> None:
    pool.error = RuntimeError("no memory for it")
    pool.ask("a", beside=True)
    pool.ask("a", beside=True)
    pool.finish()
    pool.ask("a", beside=True)
    assert "no memory for it" in caplog.text
    for _ in range(TIMES_BESIDE + 2):
        pool.ask("b", beside=True)
    assert pool.seen == ["run a"] * 3 + ["run b"] * (TIMES_BESIDE + 2)
    assert pool._behind is None


def test_what_is_captured_ahead_waits_for_the_thread(pool: Pool) -> None:
    pool.ask("a", beside=True)
    pool.ask("a", beside=True)
    threading.Timer(0.05, pool.let.set).start()
    pool.capture("b", lambda: torch.ones(1))
    assert pool.seen[2:] == ["capture a", "capture b"]
    pool.ask("a", beside=True)
    assert pool.seen[4:] == ["replay a"]


def test_closing_waits_and_what_was_captured_is_there(pool: Pool) -> None:
    pool.ask("a", beside=True)
    pool.ask("a", beside=True)
    threading.Timer(0.05, pool.let.set).start()
    pool.close()
    pool.ask("a", beside=True)
    assert pool.seen == ["run a", "run a", "capture a", "replay a"]


def test_a_step_whose_first_run_failed_is_run_again(pool: Pool) -> None:
    def fails() -> torch.Tensor:
        raise RuntimeError("out of memory")

    for _ in range(2):
        with pytest.raises(RuntimeError):
            pool.run("a", fails)
    assert pool.seen == []


def test_ahead_of_time_a_step_is_run_before_it_is_captured(pool: Pool) -> None:
    def body() -> torch.Tensor:
        pool.seen.append("run a")
        pool.rows.last_token += 1
        return torch.ones(1)

    pool.capture("a", body)
    assert float(pool.rows.last_token) == 0.0  # undone
    pool.run("a", body)
    assert pool.seen == ["run a", "capture a", "replay a"]


def test_ahead_of_time_the_thread_captures_what_the_host_has_run(pool: Pool) -> None:
    def body() -> torch.Tensor:
        assert not pool.in_thread()
        pool.seen.append("run a")
        pool.rows.num_computed += 1
        return torch.ones(1)

    pool.capture_ahead("a", body)
    assert pool.busy() and float(pool.rows.num_computed) == 0.0
    pool.finish()
    assert not pool.busy()
    pool.has_room = lambda: False
    pool.capture_ahead("b", lambda: torch.ones(1))
    assert not pool.busy()
    pool.ask("a")
    pool.ask("b")
    assert pool.seen == ["run a", "capture a", "capture b", "replay a", "replay b"]


def test_the_thread_pauses_while_the_host_submits(pool: Pool) -> None:
    pool.ask("a", beside=True)
    pool.ask("a", beside=True)
    with pytest.raises(RuntimeError, match="out of memory"), pool.going_first():
        pool.let.set()
        time.sleep(0.05)
        pool.ask("a", beside=True)
        raise RuntimeError("out of memory")
    assert pool.seen == ["run a"] * 3
    pool.finish()
    pool.ask("a", beside=True)
    assert pool.seen[3:] == ["capture a", "replay a"]
