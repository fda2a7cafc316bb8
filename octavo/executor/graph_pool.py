"""CUDA graphs of whole steps, captured when they come again and kept; one memory pool for all of them."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
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


# How often a step that streams wait for runs without a graph before it is captured, if no thread can do that meanwhile. It takes 30 ms,
# launching the kernels one by one 10 more than replaying them: so neither costs more than twice what was unavoidable.
TIMES_BESIDE = 3


class GraphPool:
    """Captures step bodies on a CUDA device; elsewhere runs them as they are (tests on the CPU).

    A body reads and writes fixed buffers only, and advances the rows; so it can be run again as it is. A step that comes for the first
    time is run so, and captured when it comes again: what comes seldom is never captured. Steps with streams beside them are captured by
    a thread, and run without a graph until it is done: capturing launches nothing, so the host goes on submitting steps, and the streams
    wait for neither. Two threads that launch in turns, kernel by kernel, take more than twice as long, since Python's lock changes hands
    at each; so while the host submits a step (``going_first``) the thread pauses, between two layers.

    While the thread captures, nobody may wait for the whole device or empty torch's cache: the capture would be lost, and with it the
    means to make others, since torch does not clear up behind it. ``rest`` first. When a capture has failed no other is tried, and steps
    go on without.
    """

    def __init__(self, rows: BatchRows) -> None:
        self.rows = rows
        self.on_gpu = rows.device.type == "cuda"
        self.has_room: Callable[[], bool] = lambda: True  # for a graph, and for what steps allocate while one is captured
        self.steps: dict[Hashable, CapturedStep] = {}
        self._ran: Counter[Hashable] = Counter()  # without a graph: their kernels are compiled, their workspaces made
        self._reserved: torch.cuda.CUDAGraph | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._thread_id: int | None = None
        self._behind: tuple[Hashable, Future[CapturedStep]] | None = None  # what the thread captures
        self._free = threading.Event()  # the host submits nothing
        self._free.set()
        self.refused: Exception | None = None  # why a capture has failed: no more of them
        self._failed: list[torch.cuda.CUDAGraph] = []  # torch's allocators may go on asking them which streams they capture
        if self.on_gpu:
            self.pool = torch.cuda.graph_pool_handle()
            self.stream = torch.cuda.Stream(rows.device)

    def run(self, key: Hashable, body: Callable[[], torch.Tensor], beside: bool = False) -> torch.Tensor:
        """The body's output, by replaying what was captured under ``key``, or by running it. ``beside``: streams wait for the step."""
        if not self.on_gpu:
            return body()
        busy = self.busy()
        step = self.steps.get(key)
        if step is None:
            ran = self._ran[key]
            now = ran > 0 and not busy and not self.refused
            if now and beside:
                now = not self._capture_behind(key, body) and ran >= TIMES_BESIDE
            if now:
                with suppress(RuntimeError):  # nothing was launched: run it instead
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
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream()
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            # makes cuBLAS's workspace, which nobody gives back: made in a capture, it would keep the pool's memory when the engine is gone
            torch.cuda.current_blas_handle()
        with self._recording(graph):
            torch.empty(num_bytes, dtype=torch.uint8, device=self.rows.device)[:1].zero_()
        current.wait_stream(self.stream)
        self._reserved = graph  # as long as it lives, the pool keeps the memory

    def capture(self, key: Hashable, body: Callable[[], torch.Tensor]) -> CapturedStep:
        """Record the body, here and now."""
        self._take(wait=True)
        self._run_once(key, body)
        try:
            step = self.steps[key] = self._record(key, body)
        except Exception as error:
            self._refuse(error)
            raise
        del self._ran[key]
        return step

    def capture_ahead(self, key: Hashable, body: Callable[[], torch.Tensor]) -> None:
        """Record a body that was not asked for yet, by the thread if it may. Not while it is ``busy``, nor with a step in flight."""
        self._run_once(key, body)
        if not self._capture_behind(key, body):
            self.capture(key, body)

    def busy(self) -> bool:
        """Whether the thread is capturing."""
        self._take()
        return self._behind is not None

    def rest(self) -> None:
        """Wait for the thread: nothing is being captured now, nor will be before the next step."""
        self._take(wait=True)

    def _run_once(self, key: Hashable, body: Callable[[], torch.Tensor]) -> None:
        """A body that never ran is run (compiles kernels, sizes workspaces), and what that did to the rows undone."""
        if key in self._ran:
            return
        rows = self.rows
        saved = (rows.last_token.clone(), rows.num_computed.clone())
        body()
        rows.last_token.copy_(saved[0])
        rows.num_computed.copy_(saved[1])
        self._ran[key] = 1

    @contextmanager
    def going_first(self) -> Iterator[None]:
        """Meanwhile the thread pauses when it next asks. Without room for a step it is waited for: torch returns nothing that it caches
        while a capture goes on, so an allocation that fails would have no second try."""
        if self.busy() and not self.has_room():
            self.rest()
        try:
            self._free.clear()
            yield
        finally:
            self._free.set()

    def in_thread(self) -> bool:
        """Is it the thread that calls?"""
        return threading.get_ident() == self._thread_id

    def give_way(self) -> None:
        """For the thread: wait while the host submits a step."""
        self._free.wait()

    def _capture_behind(self, key: Hashable, body: Callable[[], torch.Tensor]) -> bool:
        """Have the thread record the body; False if it must not, and the host may instead."""
        if not self.has_room():
            return False
        if self._thread is None:
            # the thread keeps what begins it: with ``self`` in it, an engine that was only dropped would never be freed
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="capture", initializer=_start_thread, initargs=(weakref.ref(self),))
        try:
            self._behind = key, self._thread.submit(self._record, key, body)
        except RuntimeError as error:  # no thread to be had: too many of them, or Python is ending
            self._refuse(error)
        return True

    def _start_thread(self) -> None:
        """The libraries' handles are a thread's own, and making them is not allowed in a capture."""
        self._thread_id = threading.get_ident()
        torch.cuda.set_device(self.rows.device)
        with torch.cuda.stream(self.stream):
            for dtype in (torch.bfloat16, torch.float16, torch.float32):
                ones = torch.ones(16, 16, dtype=dtype, device=self.rows.device)
                torch.addmm(ones[0], ones, ones)
                torch.mm(ones, ones)

    def _take(self, wait: bool = False) -> None:
        """Put what the thread has captured among the steps, if it is done."""
        if self._behind is None or not (wait or self._behind[1].done()):
            return
        if wait:
            self._free.set()  # whoever waits for it submits nothing
            futures.wait([self._behind[1]])
        (key, future), self._behind = self._behind, None
        try:
            self.steps[key] = future.result()
            del self._ran[key]
        except Exception as error:  # noqa: BLE001 (whatever it is, steps go on without a graph)
            self._refuse(error)

    def _refuse(self, error: Exception) -> None:
        self.refused = error.with_traceback(None)  # whose frames hold tensors
        logger.warning("Steps are not captured any more, and slower where they were not yet: %s: %s", type(error).__name__, error)

    def close(self) -> None:
        """Wait for the thread and end it; steps can be run and captured all the same."""
        self._take(wait=True)
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = self._thread_id = None  # another thread may get the number

    @torch.inference_mode()
    def _record(self, key: Hashable, body: Callable[[], torch.Tensor]) -> CapturedStep:
        begun = time.perf_counter()
        graph = torch.cuda.CUDAGraph()
        with self._recording(graph):
            output = body()
            ran = time.perf_counter()
        parts = (ran - begun) * 1e3, (time.perf_counter() - ran) * 1e3
        logger.debug("captured step graph %s in thread %s: run %.0f ms, made %.0f ms", key, threading.current_thread().name, *parts)
        return CapturedStep(graph, output)

    @contextmanager
    def _recording(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        """What is launched meanwhile becomes ``graph``. Of several errors the first comes out: a capture that one has spoilt can't be
        ended without another.

        Not ``torch.cuda.graph``: it waits for the device, collects garbage and empties the allocator's cache, ten times the cost of this.
        Garbage waits: destroying CUDA graphs (of an engine that is gone), or waiting for the device, in this thread would spoil the
        capture (pytorch/pytorch#161037; torch 2.11 does not guard against it).
        """
        with torch.cuda.stream(self.stream), no_collections():
            try:
                graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
                try:
                    yield
                except BaseException:
                    with suppress(RuntimeError):
                        graph.capture_end()
                    raise
                graph.capture_end()
            except BaseException:
                self._failed.append(graph)
                with suppress(RuntimeError):  # the allocator may believe that it goes on, and would then never give back what it caches
                    torch._C._cuda_endAllocateToPool(self.rows.device.index, self.pool)
                    # so does torch's generator (2.11), and would never draw again for others in this process; a copy doesn't
                    generator = torch.cuda.default_generators[self.rows.device.index]
                    generator.graphsafe_set_state(generator.clone_state())
                raise


def _start_thread(pool: weakref.ref[GraphPool]) -> None:
    if (found := pool()) is not None:
        found._start_thread()


def round_up(count: int, sizes: Sequence[int]) -> int:
    """The smallest of the sorted ``sizes`` that is at least ``count``."""
    return next(s for s in sizes if s >= count)
