"""CUDA graphs of whole steps, captured when they come again and kept; one memory pool for all of them."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from octavo.executor.rows import BatchRows
from octavo.garbage import no_collections

logger = logging.getLogger("octavo.executor")


@dataclass(slots=True)
class CapturedStep:
    """``output`` is what the step's body returned; the next replay overwrites it."""

    graph: torch.cuda.CUDAGraph
    output: torch.Tensor


class GraphPool:
    """Captures step bodies on a CUDA device; elsewhere runs them as they are (tests on the CPU).

    A body reads and writes fixed buffers only, and advances the rows; so it can be run again as it is. A step that comes for the first
    time is run so, and captured when it comes again: what comes seldom is never captured. Capturing takes the host as long as launching
    the kernels one by one would, some 17 ms, and nobody waits for the device, which is at work on the step before meanwhile: so it
    costs about what running the step without a graph once more would. (A thread that captures while steps go on without a graph takes
    ten times as long and slows them: Python's lock changes hands at every launch.)

    When a capture has failed no other is tried, and steps go on without: torch does not clear up behind it.
    """

    def __init__(self, rows: BatchRows) -> None:
        self.rows = rows
        self.on_gpu = rows.device.type == "cuda"
        self.steps: dict[Hashable, CapturedStep] = {}
        self._ran: Counter[Hashable] = Counter()  # without a graph: their kernels are compiled, their workspaces made
        self._reserved: torch.cuda.CUDAGraph | None = None
        self.refused: Exception | None = None  # why a capture has failed: no more of them
        self._failed: list[torch.cuda.CUDAGraph] = []  # torch's allocators may go on asking them which streams they capture
        if self.on_gpu:
            self.pool = torch.cuda.graph_pool_handle()
            self.stream = torch.cuda.Stream(rows.device)

    def run(self, key: Hashable, body: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The body's output, by replaying what was captured under ``key``, or by running it."""
        if not self.on_gpu:
            return body()
        step = self.steps.get(key)
        if step is None and key in self._ran and not self.refused:
            step = self.capture(key, body)
        if step is None:
            output = body()
            self._ran[key] += 1
            logger.debug("step %s ran without a graph, %d times", key, self._ran[key])
            return output
        step.graph.replay()
        return step.output

    def reserve(self, num_bytes: int) -> None:
        """Give the pool its memory now, in one piece. Graphs captured later, in any order of sizes, are cut out of it.

        Left to itself the pool grows with every graph that is larger than those before, beside a KV cache that leaves no room.
        """
        if not self.on_gpu or self._reserved is not None:
            return
        current = torch.cuda.current_stream()
        self.stream.wait_stream(current)
        step = self._record("room", lambda: torch.empty(num_bytes, dtype=torch.uint8, device=self.rows.device)[:1].zero_())
        current.wait_stream(self.stream)
        self._reserved = step.graph  # as long as it lives, the pool keeps the memory

    def capture(self, key: Hashable, body: Callable[[], torch.Tensor]) -> CapturedStep | None:
        """Record a body that ran before. None when that went wrong (nothing was launched then): no more are captured."""
        try:
            step = self.steps[key] = self._record(key, body)
        except Exception as error:  # noqa: BLE001 (whatever it is, steps go on without a graph)
            self.refused = error.with_traceback(None)  # whose frames hold tensors
            logger.warning("Steps are not captured any more, and slower where they were not yet: %s: %s", type(error).__name__, error)
            return None
        self._ran.pop(key, None)
        return step

    def prepare(self, key: Hashable, body: Callable[[], torch.Tensor]) -> None:
        """Do half of what it takes until a body that was not asked for yet is captured. With no step in flight.

        First it is run (compiles kernels, sizes workspaces), and what that did to the rows undone; then it is captured.
        """
        if key in self._ran:
            self.capture(key, body)
            return
        rows = self.rows
        saved = (rows.last_token.clone(), rows.num_computed.clone())
        body()
        rows.last_token.copy_(saved[0])
        rows.num_computed.copy_(saved[1])
        self._ran[key] = 1

    @torch.inference_mode()
    def _record(self, key: Hashable, body: Callable[[], torch.Tensor]) -> CapturedStep:
        """What the body launches becomes a graph. Raises what went wrong, Ctrl-C too, with nothing left open: of several errors the first,
        since a capture that one has spoilt can't be ended without another.

        Not ``torch.cuda.graph``: it waits for the device, collects garbage and empties the allocator's cache, ten times the cost of this.
        Garbage waits: destroying CUDA graphs (of an engine that is gone), or waiting for the device, in this thread would spoil the
        capture (pytorch/pytorch#161037; torch 2.11 does not guard against it). No ``with torch.cuda.stream``, nor one around the
        capture: Ctrl-C that comes while such a block is being entered goes out past its end.
        """
        begun = time.perf_counter()
        graph = torch.cuda.CUDAGraph()
        before = torch.cuda.current_stream(self.rows.device)
        with no_collections():
            try:
                torch.cuda.set_stream(self.stream)
                # Makes cuBLAS's handle and workspace, this thread's own, which nobody gives back. Making the one is not allowed in a
                # capture; the other would keep the pool's memory when the engine is gone.
                torch.cuda.current_blas_handle()
                graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
                output = body()
                ran = time.perf_counter()
                graph.capture_end()
            except BaseException:
                self._failed.append(graph)
                self._end_by_force(graph)
                raise
            finally:  # in one call: set_stream is Python, and Ctrl-C may come before its first line
                torch._C._cuda_setStream(stream_id=before.stream_id, device_index=before.device_index, device_type=before.device_type)
        parts = (ran - begun) * 1e3, (time.perf_counter() - ran) * 1e3
        logger.debug("captured step graph %s: run %.0f ms, made %.0f ms", key, *parts)
        return CapturedStep(graph, output)

    def _end_by_force(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a capture on the current stream, wherever it failed; what had not begun, or has ended, refuses."""
        with suppress(RuntimeError):
            graph.capture_end()
        with suppress(RuntimeError):  # the allocator may believe that it goes on, and would then never give back what it caches
            torch._C._cuda_endAllocateToPool(self.rows.device.index, self.pool)
            torch._C._cuda_releasePool(self.rows.device.index, self.pool)  # a graph whose capture has not ended does not
            # so does torch's generator (2.11), and would never draw again for others in this process; a copy doesn't
            generator = torch.cuda.default_generators[self.rows.device.index]
            generator.graphsafe_set_state(generator.clone_state())


def round_up(count: int, sizes: Sequence[int]) -> int:
    """The smallest of the sorted ``sizes`` that is at least ``count``."""
    return next(s for s in sizes if s >= count)
