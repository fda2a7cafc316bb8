"""When a captured step is captured, and by whom. What capturing does needs a GPU (tests/e2e/test_gpu_engine.py); here it is noted."""

from __future__ import annotations

import gc
import random
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.executor.graph_pool import TIMES_BESIDE, CapturedStep, GraphPool
from octavo.executor.local import LocalExecutor
from octavo.executor.step_graphs import StepGraphs

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
        assert self.in_thread() == (threading.current_thread() is not MAIN)
        if self.in_thread():
            assert self.let.wait(10)
            self.give_way()
        if self.error is not None:
            raise self.error
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
        pool.ask("c")
    assert pool.seen == ["run a"] * 3 + ["run b", "run c"] * (TIMES_BESIDE + 2)
    assert pool._behind is None


def test_when_the_hosts_capture_fails_the_step_is_run(pool: Pool, caplog: pytest.LogCaptureFixture) -> None:
    pool.ask("a")
    pool.ask("a")
    pool.error = RuntimeError("no memory for it")
    for _ in range(3):
        pool.ask("b")
    assert pool.seen == ["run a", "capture a", "replay a", "run b", "run b", "run b"]
    assert caplog.text.count("no memory for it") == 1
    pool.ask("a")
    assert pool.seen[6:] == ["replay a"]
    with pytest.raises(RuntimeError, match="no memory for it"):
        pool.capture("c", lambda: torch.ones(1))


def test_without_a_thread_to_be_had_steps_go_on(pool: Pool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    for _ in range(TIMES_BESIDE + 2):
        pool.ask("a", beside=True)
    assert pool.seen == ["run a"] * (TIMES_BESIDE + 2) and caplog.text.count("can't start") == 1


def test_when_the_thread_cannot_begin_steps_go_on(pool: Pool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def start() -> None:
        raise RuntimeError("no handle for you")

    monkeypatch.setattr(pool, "_start_thread", start)
    for _ in range(2):
        pool.ask("a", beside=True)
    pool.rest()
    for _ in range(TIMES_BESIDE):
        pool.ask("a", beside=True)
    assert pool.seen == ["run a"] * (TIMES_BESIDE + 2) and "no handle for you" in caplog.text and pool.refused


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


def test_a_pool_that_is_only_dropped_is_freed_and_its_thread_ends() -> None:
    pool = Pool()
    for _ in range(2):
        pool.ask("a", beside=True)
    pool.finish()
    pool.rest()
    assert pool._thread is not None
    (thread,) = pool._thread._threads
    left = weakref.ref(pool)
    del pool
    gc.collect()
    thread.join(10)
    assert left() is None and not thread.is_alive()


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
        assert pool.seen == ["run a"] * 3
        raise RuntimeError("out of memory")
    pool.finish()
    pool.ask("a", beside=True)
    assert pool.seen[3:] == ["capture a", "replay a"]


def test_without_room_for_a_step_the_thread_is_waited_for(pool: Pool) -> None:
    asked: list[bool] = []
    pool.has_room = lambda: asked.append(True) or len(asked) < 3  # type: ignore[func-returns-value]
    pool.ask("a", beside=True)
    pool.ask("a", beside=True)
    with pool.going_first():
        pool.ask("a", beside=True)
    assert pool.seen == ["run a"] * 3 and pool.busy()
    threading.Timer(0.05, pool.let.set).start()
    with pool.going_first():
        pool.ask("a", beside=True)
    assert pool.seen[3:] == ["capture a", "replay a"] and len(asked) == 3
    with pool.going_first():  # nothing goes on: no need to ask
        pool.ask("a", beside=True)
    assert len(asked) == 3


def test_whoever_waits_for_the_thread_lets_it_go_on(pool: Pool) -> None:
    pool.ask("a", beside=True)
    pool.ask("a", beside=True)
    pool.let.set()
    with pool.going_first():
        pool.rest()
    assert pool.seen[2:] == ["capture a"] and not pool.busy()


def test_a_wait_that_is_broken_off_leaves_the_thread_known(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    pool.ask("a", beside=True)
    pool.ask("a", beside=True)
    with monkeypatch.context() as patch:
        patch.setattr(futures, "wait", lambda fs: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            pool.rest()
    assert pool.busy()
    pool.let.set()
    pool.rest()
    pool.ask("a", beside=True)
    assert pool.seen[2:] == ["capture a", "replay a"]


def test_a_later_thread_is_not_taken_for_the_one_that_captured(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thread numbers come again: one that submits steps would wait for itself."""
    pool.ask("a", beside=True)
    pool.ask("a", beside=True)
    pool.let.set()
    pool.rest()
    number = pool._thread_id
    pool.close()
    with monkeypatch.context() as patch:
        patch.setattr(threading, "get_ident", lambda: number)
        assert not pool.in_thread()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_whatever_comes_when(seed: int) -> None:
    """Keys in any order, the thread as slow as can be: each step's output is its own, one capture at a time and one a key, and what
    comes often is captured in the end."""
    rng = random.Random(seed)
    pool = Pool()
    tight = False  # if it came at random, most would wait for the thread
    pool.has_room = lambda: not tight
    record, recording, known = pool._record, threading.Lock(), set[str]()

    def one_at_a_time(key: Any, body: Callable[[], torch.Tensor]) -> CapturedStep:
        assert recording.acquire(blocking=False), "two captures at once"
        try:
            return record(key, body)
        finally:
            recording.release()

    pool._record = one_at_a_time  # type: ignore[method-assign]
    keys = [f"{name}{i}" for i in range(rng.randint(1, 4)) for name in "db"]  # b: with streams beside

    def ask(key: str) -> None:
        before = len(pool.seen)
        with pool.going_first():
            pool.ask(key, beside=key[0] == "b")
        assert pool.seen[-1] in (f"run {key}", f"replay {key}")
        assert [e for e in pool.seen[before:] if not e.startswith("capture")] == pool.seen[-1:]
        assert pool.seen[-1].startswith("replay") or key not in known
        known.update(pool.steps)

    try:
        for _ in range(rng.randint(0, 60)):
            tight = rng.random() < 0.1
            match rng.randrange(8):
                case 0 if pool._behind is not None:
                    pool.finish()
                case _ if tight and pool._behind is not None:
                    pool.let.set()
                    ask(rng.choice(keys))
                    pool.let.clear()
                case 1 if not pool.busy() and (missing := [key for key in keys if key not in pool.steps]):
                    pool.capture_ahead(rng.choice(missing), lambda: torch.ones(1))
                case 2:
                    pool.let.set()
                    pool.rest() if rng.random() < 0.8 else pool.close()
                    pool.let.clear()
                case _:
                    ask(rng.choice(keys))
        pool.let.set()
        tight = rng.random() < 0.5
        for _ in range(TIMES_BESIDE + 1):
            for key in keys:
                ask(key)
                pool.rest()
        for key in keys:
            ask(key)
            assert pool.seen[-1] == f"replay {key}"
        captures = Counter(event for event in pool.seen if event.startswith("capture"))
        assert set(captures.values()) == {1} and len(captures) == len(keys) and not pool.refused
    finally:
        pool.let.set()
        pool.close()


# -- what is asked of torch ---------------------------------------------------------------------------------------------------


class Graph:
    """torch.cuda.CUDAGraph: a capture that an error has spoilt can't be ended without another."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local"
        self._call("begin")

    def capture_end(self) -> None:
        self._call("end")

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name in self.failing:
            raise RuntimeError(f"{name} failed")

    failing: tuple[str, ...] = ()


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[GraphPool, list[Graph], list[Any]]]:
    """A pool that captures in earnest, on a device that isn't there; the graphs it makes; the pools whose captures it ends by force,
    and states of torch's generator that it sets."""
    graphs: list[Graph] = []
    ended: list[Any] = []

    @contextmanager
    def stream(stream: Any) -> Iterator[None]:
        yield

    def make() -> Graph:
        graphs.append(Graph())
        return graphs[-1]

    generator = SimpleNamespace(clone_state=lambda: "a copy", graphsafe_set_state=ended.append)
    monkeypatch.setattr(torch.cuda, "default_generators", (generator,))
    rows: Any = SimpleNamespace(device=torch.device("cpu", 0), last_token=torch.zeros(1), num_computed=torch.zeros(1))
    pool = GraphPool(rows)
    pool.on_gpu, pool.pool, pool.stream = True, (0, 1), None  # type: ignore[assignment]
    monkeypatch.setattr(torch.cuda, "CUDAGraph", make)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda device, handle: ended.append((device, handle)), raising=False)
    monkeypatch.setattr(pool, "_start_thread", lambda: setattr(pool, "_thread_id", threading.get_ident()))
    yield pool, graphs, ended
    pool.close()


def test_a_capture_begins_and_ends(recorder: tuple[GraphPool, list[Graph], list[Any]]) -> None:
    pool, graphs, ended = recorder
    step = pool.capture("a", lambda: torch.ones(1))
    assert graphs[0].calls == ["begin", "end"] and step.graph is graphs[0] and not ended and not pool._failed


def test_memory_is_set_aside_with_nothing_of_cublas_in_it(
    recorder: tuple[GraphPool, list[Graph], list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its workspace stays for good: in the pool's memory, that would stay, too."""
    pool, graphs, _ = recorder
    seen: list[str] = []
    waits = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(pool, "stream", waits)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: waits)
    monkeypatch.setattr(torch.cuda, "current_blas_handle", lambda: seen.append("workspace"))
    monkeypatch.setattr(Graph, "_call", lambda self, name: seen.append(name))
    pool.reserve(64)
    pool.reserve(64)
    assert seen == ["workspace", "begin", "end"] and pool._reserved is graphs[0]


class Old:
    """A graph of an engine that is gone: garbage in a cycle."""

    def __init__(self, seen: list[str]) -> None:
        self.itself, self.seen = self, seen

    def __del__(self) -> None:
        self.seen.append("destroyed")


@pytest.mark.parametrize("beside", [False, True])
def test_no_garbage_is_collected_in_a_capture(recorder: tuple[GraphPool, list[Graph], list[Any]], beside: bool) -> None:
    """In the thread that captures, destroying another graph is an error, and spoils the capture."""
    pool, graphs, _ = recorder
    seen: list[str] = []

    def body() -> torch.Tensor:
        if graphs:
            for _ in range(100):
                Old(seen)
            seen.append("captured")
        return torch.ones(1)

    thresholds = gc.get_threshold()
    gc.set_threshold(50, 1, 1)
    try:
        (pool.capture_ahead if beside else pool.capture)("a", body)
        pool.rest()
        assert seen[0] == "captured" and gc.isenabled()
    finally:
        gc.set_threshold(*thresholds)


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize(
    ("failing", "said", "calls"),
    [
        (("begin",), "begin failed", ["begin"]),
        (("body",), "body failed", ["begin", "end"]),
        (("end",), "end failed", ["begin", "end"]),
        (("body", "end"), "body failed", ["begin", "end"]),
    ],
)
def test_of_a_capture_that_fails_the_first_error_is_told_and_nothing_left_open(
    recorder: tuple[GraphPool, list[Graph], list[Any]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    failing: tuple[str, ...],
    said: str,
    calls: list[str],
    beside: bool,
) -> None:
    pool, graphs, ended = recorder
    monkeypatch.setattr(Graph, "failing", failing)

    def body() -> torch.Tensor:
        if "body" in failing and graphs and graphs[-1].calls == ["begin"]:
            raise RuntimeError("body failed")
        return torch.ones(1)

    for _ in range(3):
        assert float(pool.run("a", body, beside)) == 1.0
        pool.rest()
    assert said in caplog.text and caplog.text.count("failed") == 1
    assert len(graphs) == 1 and graphs[0].calls == calls and pool._failed == graphs and pool.refused
    assert ended == [(0, (0, 1)), "a copy"]


def test_of_a_capture_that_ended_torch_is_asked_no_more(
    recorder: tuple[GraphPool, list[Graph], list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, _, ended = recorder

    def end(device: int, handle: Any) -> None:
        raise RuntimeError("endAllocatePool: not currently recording to mempool_id")

    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end)
    monkeypatch.setattr(Graph, "failing", ("end",))
    with pytest.raises(RuntimeError, match="end failed"):
        pool.capture("a", lambda: torch.ones(1))
    assert not ended and pool.refused


# -- who uses it --------------------------------------------------------------------------------------------------------------


def test_nothing_is_prepared_after_a_failure(pool: Pool) -> None:
    pool.error = RuntimeError("no memory for it")
    pool.capture_ahead("a", lambda: torch.ones(1))
    graphs: Any = SimpleNamespace(pool=pool)  # it asks for nothing else
    assert StepGraphs.capture_next(graphs)
    pool.finish()
    assert not StepGraphs.capture_next(graphs) and pool.refused


def test_an_executor_ends_the_thread_before_it_waits_for_the_device() -> None:
    calls: list[str] = []

    class Runner:
        graphs = SimpleNamespace(pool=SimpleNamespace(rest=lambda: calls.append("rest"), close=lambda: calls.append("close")))
        swap = property(fset=lambda self, swap: calls.append("wait for the device"))

    executor: Any = object.__new__(LocalExecutor)
    executor.runner, executor._pending = Runner(), []
    executor.kernels = SimpleNamespace(stop=lambda: None)
    executor.rest()
    executor.shutdown()
    assert calls == ["rest", "close", "wait for the device"]
    executor.runner.graphs = None
    executor.rest()
    executor.shutdown()
