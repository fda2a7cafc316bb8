"""Timing kernels as a decode step meets them: inside a CUDA graph, every call on data that is not in L2."""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

DEVICE = "cuda" if torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1" else "cpu"
BANDWIDTH = 4.3e12  # bytes/s, an H200's copy bandwidth as measured
FLOPS = 790e12  # bf16 flop/s, measured likewise
COLD_BYTES = 400 * 2**20  # several times an L2 of 50 MB


@dataclass(frozen=True)
class Check:
    """A kernel's result beside its torch reference's: how much they differ, in words, and whether that is right."""

    words: str
    right: bool


def equal(ours: torch.Tensor, theirs: torch.Tensor) -> Check:
    """Right if all are the same."""
    return agree(ours == theirs)


def agree(same: torch.Tensor, right: torch.Tensor | None = None) -> Check:
    """Bool tensors: which results are the reference's, and which are right, if others are, too."""
    return Check(f"{int(same.sum())} of {same.numel()} equal", bool((same if right is None else right).all()))


def close(*pairs: tuple[torch.Tensor, torch.Tensor], tolerance: float) -> Check:
    """Right if ||ours - theirs|| / ||theirs|| is at most ``tolerance`` in each of the pairs; NaN never is."""
    errors = [float((ours.float() - theirs.float()).norm() / theirs.float().norm()) for ours, theirs in pairs]
    return within(errors, tolerance)


def within(errors: list[float], tolerance: float) -> Check:
    wrong = [error for error in errors if not error <= tolerance]
    return Check(f"err {max(wrong or errors):.1e} of {tolerance:.0e}", not wrong)


@dataclass(frozen=True)
class Timing:
    """One operation: seconds a call, the bytes and operations that it can't do without. ``check`` is None for the reference."""

    name: str
    seconds: float
    num_bytes: float
    flops: float = 0.0
    check: Check | None = None

    @property
    def floor(self) -> float:
        return max(self.num_bytes / BANDWIDTH, self.flops / FLOPS)

    def __str__(self) -> str:
        computes = self.flops / FLOPS > self.num_bytes / BANDWIDTH
        rate = f"{self.flops / self.seconds / 1e12:5.0f} TFLOP/s" if computes else f"{self.num_bytes / self.seconds / 1e12:8.2f} TB/s"
        line = f"{self.name:56} {self.seconds * 1e6:9.2f} us {rate} {self.floor / self.seconds:6.1%} of the floor"
        return line if self.check is None else f"{line}  {self.check.words}{'' if self.check.right else '  WRONG'}"


def shown(timing: Timing) -> Timing:
    print(timing, flush=True)
    return timing


def exit_status(timings: Iterable[Timing]) -> int:
    """1 if a result is wrong; says which."""
    wrong = [timing for timing in timings if timing.check is not None and not timing.check.right]
    for timing in wrong:
        print(f"The result differs from the reference's: {timing.name} ({timing.check.words})", file=sys.stderr)
    return 1 if wrong else 0


def copies_for(num_bytes: int, most: int = 64) -> int:
    """How many sets of operands make a round whose data does not fit L2; two where nothing is really timed."""
    if DEVICE == "cpu":
        return 2
    return max(1, min(most, -(-COLD_BYTES // max(1, num_bytes))))


def time_graph(calls: Sequence[Callable[[], object]], rounds: int = 5, min_seconds: float = 2e-3) -> float:
    """Seconds a call, the median of ``rounds``: all calls captured one after another in one CUDA graph, replayed.

    Without a GPU (Triton's interpreter, which tests use) a few calls are made, and what they take says nothing.
    """
    if DEVICE == "cpu":
        return time_eager(calls[:2], rounds=1)
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def once(replays: int) -> float:
        start.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e-3 / (replays * len(calls))

    first = once(2)
    replays = max(2, min(200, int(min_seconds / (first * len(calls)))))
    return statistics.median(once(replays) for _ in range(rounds))


def time_eager(calls: Sequence[Callable[[], object]], rounds: int = 5) -> float:
    """Seconds a call with its launches, the median of ``rounds``: for what waits for the device, which no graph can hold."""

    def once() -> float:
        start = time.perf_counter()
        for call in calls:
            call()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / len(calls)

    once()
    return statistics.median(once() for _ in range(rounds))
