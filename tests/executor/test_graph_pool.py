"""When a captured step is captured. What capturing does needs a GPU (tests/e2e/test_gpu_engine.py); here it is noted."""

from __future__ import annotations

import gc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from octavo.executor.graph_pool import CapturedStep, GraphPool
from octavo.executor.step_graphs import StepGraphs


class Pool(GraphPool):
    """A pool whose captures run nothing, and whose graphs note their replays."""

    def __init__(self) -> None:
        super().__init__(SimpleNamespace(device=torch.device("cpu"), last_token=torch.zeros(1), num_computed=torch.zeros(1)))  # type: ignore[arg-type]
        self.on_gpu = True
        self.seen: list[str] = []
        self.error: BaseException | None = None

    def _record(self, key: Any, body: Callable[[], torch.Tensor]) -> CapturedStep:
        if self.error is not None:
            raise self.error
        self.seen.append(f"capture {key}")
        graph: Any = SimpleNamespace(replay=lambda: self.seen.append(f"replay {key}"))
        return CapturedStep(graph, torch.zeros(1))

    def body(self, key: str) -> Callable[[], torch.Tensor]:
        def run() -> torch.Tensor:
            self.seen.append(f"run {key}")
            self.rows.last_token += 1
            return torch.ones(1)

        return run

    def ask(self, key: str) -> None:
        output = self.run(key, self.body(key))
        assert float(output) == (1.0 if self.seen[-1].startswith("run") else 0.0)


@pytest.fixture
def pool() -> Pool:
    return Pool()


def test_a_step_is_run_the_first_time_captured_the_second_and_replayed_from_then_on(pool: Pool) -> None:
    for key in "abaab":
        pool.ask(key)
    assert pool.seen == ["run a", "run b", "capture a", "replay a", "replay a", "capture b", "replay b"]


def test_when_a_capture_fails_the_step_is_run_and_it_is_not_tried_again(pool: Pool, caplog: pytest.LogCaptureFixture) -> None:
    pool.ask("a")
    pool.ask("a")
    pool.error = RuntimeError("no memory for it")
    for key in "bbbcc":
        pool.ask(key)
    assert pool.seen == ["run a", "capture a", "replay a", "run b", "run b", "run b", "run c", "run c"]
    assert caplog.text.count("no memory for it") == 1
    pool.ask("a")
    assert pool.seen[8:] == ["replay a"]
    assert pool.refused is pool.error and pool.refused.__traceback__ is None  # its frames hold tensors
    assert pool.capture("d", pool.body("d")) is None


def test_a_capture_that_is_broken_off_is_made_later(pool: Pool) -> None:
    pool.ask("a")
    pool.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        pool.ask("a")
    pool.error = None
    pool.ask("a")
    assert pool.seen == ["run a", "capture a", "replay a"] and not pool.refused


def test_a_step_whose_first_run_failed_is_run_again(pool: Pool) -> None:
    def fails() -> torch.Tensor:
        raise RuntimeError("out of memory")

    for _ in range(2):
        with pytest.raises(RuntimeError):
            pool.run("a", fails)
    assert pool.seen == []


def test_ahead_of_time_a_step_is_run_before_it_is_captured(pool: Pool) -> None:
    pool.prepare("a", pool.body("a"))
    assert float(pool.rows.last_token) == 0.0  # undone
    assert pool.seen == ["run a"]
    pool.prepare("a", pool.body("a"))
    assert pool.seen == ["run a", "capture a"]
    pool.ask("b")
    pool.prepare("b", pool.body("b"))
    pool.ask("a")
    pool.ask("b")
    assert pool.seen[2:] == ["run b", "capture b", "replay a", "replay b"]


# -- what is asked of torch ---------------------------------------------------------------------------------------------------


class Graph:
    """torch.cuda.CUDAGraph: a capture that an error has spoilt can't be ended without another."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.open = False

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local"
        self._call("begin", True)

    def capture_end(self) -> None:
        if not self.open:
            self.calls.append("refused")
            raise RuntimeError("no capture to end")
        self._call("end", False)

    def _call(self, name: str, opens: bool) -> None:
        self.calls.append(name)
        if name == "end" or name not in self.failing:
            self.open = opens
        if name in self.failing:
            raise RuntimeError(f"{name} failed")
        if name in self.interrupted:  # Ctrl-C while torch is at work comes when it is done
            raise KeyboardInterrupt

    failing: tuple[str, ...] = ()
    interrupted: tuple[str, ...] = ()


class Streams:
    """The current stream, and what was asked of torch on it."""

    def __init__(self) -> None:
        self.current = self.steps = SimpleNamespace(stream_id=1, device_index=2, device_type=3, wait_stream=lambda other: None)
        self.interrupted = False
        self.seen: list[tuple[str, Any]] = []

    def restore(self, **fields: int) -> None:
        assert fields == {name: getattr(self.steps, name) for name in ("stream_id", "device_index", "device_type")}
        self.current = self.steps

    def set(self, stream: Any) -> None:
        self.current = stream
        if self.interrupted:
            self.interrupted = False
            raise KeyboardInterrupt


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    streams = Streams()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: streams.current)
    monkeypatch.setattr(torch.cuda, "set_stream", streams.set)
    monkeypatch.setattr(torch._C, "_cuda_setStream", streams.restore, raising=False)
    monkeypatch.setattr(torch.cuda, "current_blas_handle", lambda: streams.seen.append(("workspace", streams.current)))
    return streams


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch, streams: Streams) -> tuple[GraphPool, list[Graph], list[Any]]:
    """A pool that captures in earnest, on a device that isn't there; the graphs it makes; the pools whose captures it ends by force,
    and states of torch's generator that it sets."""
    graphs: list[Graph] = []
    ended: list[Any] = []

    def make() -> Graph:
        graphs.append(Graph())
        return graphs[-1]

    generator = SimpleNamespace(clone_state=lambda: "a copy", graphsafe_set_state=ended.append)
    monkeypatch.setattr(torch.cuda, "default_generators", (generator,))
    rows: Any = SimpleNamespace(device=torch.device("cpu", 0), last_token=torch.zeros(1), num_computed=torch.zeros(1))
    pool = GraphPool(rows)
    pool.on_gpu, pool.pool, pool.stream = True, (0, 1), "the pool's"  # type: ignore[assignment]
    monkeypatch.setattr(torch.cuda, "CUDAGraph", make)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda device, handle: ended.append((device, handle)), raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", lambda device, handle: ended.append("released"), raising=False)
    return pool, graphs, ended


def test_a_capture_begins_and_ends(recorder: tuple[GraphPool, list[Graph], list[Any]], streams: Streams) -> None:
    pool, graphs, ended = recorder
    on: list[Any] = []
    step = pool.capture("a", lambda: (on.append(streams.current), torch.ones(1))[1])
    assert step is pool.steps["a"] and step.graph is graphs[0] and not ended and not pool._failed
    assert graphs[0].calls == ["begin", "end"] and on == ["the pool's"] and streams.current is streams.steps


def test_nothing_of_cublas_is_made_in_a_capture(
    recorder: tuple[GraphPool, list[Graph], list[Any]], streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Handles and workspaces are a thread's own, and steps come from any. A handle can't be made in a capture; the workspace stays for
    good: in the pool's memory, that would stay, too."""
    pool, _, _ = recorder
    monkeypatch.setattr(Graph, "_call", lambda self, name, opens: streams.seen.append((name, streams.current)))
    monkeypatch.setattr(Graph, "capture_end", lambda self: self._call("end", False))
    pool.stream = SimpleNamespace(wait_stream=lambda other: None)  # type: ignore[assignment]
    pool.reserve(64)
    pool.reserve(64)
    assert pool._reserved is not None
    pool.capture("a", lambda: torch.ones(1))
    assert streams.seen == [(name, pool.stream) for name in ("workspace", "begin", "end")] * 2


@pytest.mark.parametrize("place", ["stream", "begin", "body", "end"])
def test_ctrl_c_leaves_no_capture_open(recorder: tuple[GraphPool, list[Graph], list[Any]], streams: Streams, place: str) -> None:
    pool, graphs, ended = recorder

    def body() -> torch.Tensor:
        if place == "body" and graphs and graphs[-1].calls == ["begin"] and len(graphs) == 1:
            raise KeyboardInterrupt
        return torch.ones(1)

    pool.run("a", body)
    streams.interrupted = place == "stream"
    Graph.interrupted = (place,)
    try:
        with pytest.raises(KeyboardInterrupt):
            pool.run("a", body)
    finally:
        Graph.interrupted = ()
    assert streams.current is streams.steps and gc.isenabled() and not graphs[0].open
    assert ended == [(0, (0, 1)), "released", "a copy"] and pool._failed == graphs and not pool.refused
    assert pool.capture("a", body) is not None  # made later


class Old:
    """A graph of an engine that is gone: garbage in a cycle."""

    def __init__(self, seen: list[str]) -> None:
        self.itself, self.seen = self, seen

    def __del__(self) -> None:
        self.seen.append("destroyed")


def test_no_garbage_is_collected_in_a_capture(recorder: tuple[GraphPool, list[Graph], list[Any]]) -> None:
    """In a capture, destroying another graph is an error, and spoils the capture."""
    pool, graphs, _ = recorder
    seen: list[str] = []

    def body() -> torch.Tensor:
        if graphs:  # in the capture
            for _ in range(100):
                Old(seen)
            seen.append("captured")
        return torch.ones(1)

    thresholds = gc.get_threshold()
    gc.set_threshold(50, 1, 1)
    try:
        pool.capture("a", body)
        assert seen[0] == "captured" and gc.isenabled()
    finally:
        gc.set_threshold(*thresholds)


@pytest.mark.parametrize(
    ("failing", "said", "calls"),
    [
        (("begin",), "begin failed", ["begin", "refused"]),
        (("body",), "body failed", ["begin", "end"]),
        (("end",), "end failed", ["begin", "end", "refused"]),
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
) -> None:
    pool, graphs, ended = recorder
    monkeypatch.setattr(Graph, "failing", failing)

    def body() -> torch.Tensor:
        if "body" in failing and graphs and graphs[-1].calls == ["begin"]:
            raise RuntimeError("body failed")
        return torch.ones(1)

    for _ in range(3):
        assert float(pool.run("a", body)) == 1.0
    assert said in caplog.text and caplog.text.count("failed") == 1
    assert len(graphs) == 1 and graphs[0].calls == calls and pool._failed == graphs and pool.refused
    assert ended == [(0, (0, 1)), "released", "a copy"]


def test_of_a_capture_that_ended_torch_is_asked_no_more(
    recorder: tuple[GraphPool, list[Graph], list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, _, ended = recorder

    def end(device: int, handle: Any) -> None:
        raise RuntimeError("endAllocatePool: not currently recording to mempool_id")

    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end)
    monkeypatch.setattr(Graph, "failing", ("end",))
    assert pool.capture("a", lambda: torch.ones(1)) is None
    assert not ended and "end failed" in str(pool.refused)


# -- who uses it --------------------------------------------------------------------------------------------------------------


def test_nothing_is_prepared_after_a_failure(pool: Pool) -> None:
    pool.ask("a")
    pool.error = RuntimeError("no memory for it")
    pool.ask("a")
    graphs: Any = SimpleNamespace(pool=pool)  # it asks for nothing else
    assert not StepGraphs.capture_next(graphs) and pool.refused
