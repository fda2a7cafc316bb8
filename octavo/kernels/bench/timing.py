"""Timing kernels as a decode step meets them: inside a CUDA graph, every call on data that is not in L2."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

DEVICE = "cuda" if torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1" else "cpu"
BANDWIDTH = 4.3e12  # bytes/s, an H200's copy bandwidth as measured
FLOPS = 790e12  # bf16 flop/s, measured likewise
COLD_BYTES = 400 * 2**20  # several times an L2 of 50 MB


@dataclass(frozen=True)
class Timing:
    """One operation: seconds a call, the bytes and operations that it can't do without."""

    name: str
    seconds: float
    num_bytes: float
    flops: float = 0.0

    @property
    def floor(self) -> float:
        return max(self.num_bytes / BANDWIDTH, self.flops / FLOPS)

    def __str__(self) -> str:
        share = self.floor / self.seconds
        return f"{self.name:56} {self.seconds * 1e6:9.2f} us {self.num_bytes / self.seconds / 1e12:6.2f} TB/s {share:6.1%} of the floor"


def copies_for(num_bytes: int, most: int = 64) -> int:
    """How many sets of operands make a round whose data does not fit L2."""
    return max(1, min(most, -(-COLD_BYTES // max(1, num_bytes))))


def time_graph(calls: list[Callable[[], object]], rounds: int = 5, min_seconds: float = 2e-3) -> float:
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


def time_eager(calls: list[Callable[[], object]], rounds: int = 5) -> float:
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


def equal_parts(ours: torch.Tensor, theirs: torch.Tensor) -> str:
    """How many results are the reference's, for a line."""
    return f"{int((ours == theirs).sum())} of {theirs.numel()} equal"
