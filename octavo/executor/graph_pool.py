"""CUDA graphs of whole steps, captured when they come again and kept; one memory pool for all of them."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch

from octavo.executor.rows import BatchRows

logger = logging.getLogger("octavo.executor")


@dataclass(slots=True)
class CapturedStep:
    """``output`` is what the step's body returned; the next replay overwrites it."""

    graph: torch.cuda.CUDAGraph
    output: torch.Tensor


class GraphPool:
    """Captures step bodies on a CUDA device; elsewhere runs them as they are (tests on the CPU).

    A body reads and writes fixed buffers only, and advances the rows; so it can be run again as it is. A step that comes for the first
    time is run so, and captured when it comes again, or later: its streams wait for one or the other, never for both, and what comes
    seldom (of prompts beside decodes there are many kinds) is never captured at all.
    """

    def __init__(self, rows: BatchRows) -> None:
        self.rows = rows
        self.on_gpu = rows.device.type == "cuda"
        self.steps: dict[Hashable, CapturedStep] = {}
        self._ran: Counter[Hashable] = Counter()  # without a graph: their kernels are compiled, their workspaces made
        self._reserved: torch.cuda.CUDAGraph | None = None
        if self.on_gpu:
            self.pool = torch.cuda.graph_pool_handle()
            self.stream = torch.cuda.Stream(rows.device)

    def run(self, key: Hashable, body: Callable[[], torch.Tensor], times: int = 1) -> torch.Tensor:
        """The body's output, by replaying what was captured under ``key``, or running the body if that was not done ``times`` times."""
        if not self.on_gpu:
            return body()
        step = self.steps.get(key)
        if step is None:
            if self._ran[key] < times:
                output = body()
                self._ran[key] += 1
                logger.debug("step %s ran without a graph, %d of %d times", key, self._ran[key], times)
                return output
            step = self.capture(key, body)
        step.graph.replay()
        return step.output

    def reserve(self, num_bytes: int) -> None:
        """Give the pool its memory now, in one piece. Graphs captured later, in any order of sizes, are cut out of it.

        Left to itself the pool grows with every graph that is larger than those before, beside a KV cache that leaves no room.
        """
        if not self.on_gpu or self._reserved is not None:
            return
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream()
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                torch.empty(num_bytes, dtype=torch.uint8, device=self.rows.device)[:1].zero_()
            finally:
                graph.capture_end()
        current.wait_stream(self.stream)
        self._reserved = graph  # as long as it lives, the pool keeps the memory

    def capture(self, key: Hashable, body: Callable[[], torch.Tensor]) -> CapturedStep:
        """Record the body. One that never ran is run before (compiles kernels, sizes workspaces), and what that did to the rows undone."""
        times = [time.perf_counter()]
        if key not in self._ran:
            rows = self.rows
            saved = (rows.last_token.clone(), rows.num_computed.clone())
            body()
            rows.last_token.copy_(saved[0])
            rows.num_computed.copy_(saved[1])
        torch.cuda.synchronize()
        times.append(time.perf_counter())
        graph = torch.cuda.CUDAGraph()
        # Not ``torch.cuda.graph``: it collects garbage and empties the allocator's cache each time, ten times the cost of this.
        current = torch.cuda.current_stream()
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                output = body()
                times.append(time.perf_counter())
            finally:
                graph.capture_end()
        current.wait_stream(self.stream)
        times.append(time.perf_counter())
        parts = ((b - a) * 1e3 for a, b in zip(times, times[1:], strict=False))
        logger.debug("captured step graph %s: run %.0f ms, captured %.0f ms, made %.0f ms", key, *parts)
        del self._ran[key]
        step = self.steps[key] = CapturedStep(graph, output)
        return step


def round_up(count: int, sizes: Sequence[int]) -> int:
    """The smallest of the sorted ``sizes`` that is at least ``count``."""
    return next(s for s in sizes if s >= count)
