"""When a captured step is captured. What capturing does needs a GPU (tests/e2e/test_gpu_engine.py); here it is counted."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import torch

from octavo.executor.graph_pool import CapturedStep, GraphPool


class Pool(GraphPool):
    """A pool whose captures run nothing and whose graphs note their replays."""

    def __init__(self) -> None:
        self.rows, self.on_gpu, self.steps, self._ran = None, True, {}, Counter()  # type: ignore[assignment]
        self.seen: list[str] = []

    def capture(self, key: Any, body: Any) -> CapturedStep:
        self.seen.append(f"capture {key}" if key in self._ran else f"run and capture {key}")
        del self._ran[key]
        graph: Any = SimpleNamespace(replay=lambda: self.seen.append(f"replay {key}"))
        step = self.steps[key] = CapturedStep(graph, torch.zeros(1))
        return step


def test_a_step_is_run_the_first_time_captured_the_second_and_replayed_from_then_on() -> None:
    pool = Pool()

    def body(key: str) -> torch.Tensor:
        pool.seen.append(f"run {key}")
        return torch.ones(1)

    for key in ("a", "b", "a", "a", "b"):
        output = pool.run(key, lambda key=key: body(key))
        assert float(output) == (1.0 if pool.seen[-1].startswith("run") else 0.0)
    assert pool.seen == ["run a", "run b", "capture a", "replay a", "replay a", "capture b", "replay b"]


def test_a_capture_can_be_put_off() -> None:
    pool = Pool()
    for _ in range(5):
        pool.run("a", lambda: torch.ones(1), times=3)
    assert pool.seen == ["capture a", "replay a", "replay a"]
    pool.run("b", lambda: torch.ones(1), times=3)
    pool.run("b", lambda: torch.ones(1))
    assert pool.seen[3:] == ["capture b", "replay b"]


def test_a_step_whose_first_run_failed_is_run_again() -> None:
    pool = Pool()

    def fails() -> torch.Tensor:
        raise RuntimeError("out of memory")

    for _ in range(2):
        try:
            pool.run("a", fails)
        except RuntimeError:
            pool.seen.append("failed")
    assert pool.seen == ["failed", "failed"]


def test_ahead_of_time_a_step_is_run_before_it_is_captured() -> None:
    pool = Pool()
    pool.capture("a", lambda: torch.ones(1))
    pool.run("a", lambda: torch.ones(1))
    assert pool.seen == ["run and capture a", "replay a"]
