"""When requests are sent: arrival times, a limit of concurrency, and the loop that keeps to both."""

from __future__ import annotations

import asyncio
import gc
import math
import random
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter, process_time
from typing import Any

from octavo.bench.http import Client
from octavo.bench.stream import Result, stream
from octavo.garbage import no_collections


@dataclass
class LoadRun:
    """What a load became. Times in seconds; ``results`` in the requests' order, their times relative to no common zero.

    ``interrupted``: stopped before its end; the results are those of the requests that had ended.
    """

    results: list[Result]
    start: float = 0.0  # perf_counter
    duration: float = 0.0  # until the last request ended
    peak: int = 0  # most requests at the same time
    client_cpu: float = 0.0  # CPU time of this process in the meantime
    lateness: float = 0.0  # most that a sending was late, other than for the limit of concurrency
    interrupted: bool = False


def arrival_times(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Seconds after the start at which requests come: gaps of gamma distribution with mean ``1/rate``.

    The gaps' shape is ``burstiness`` (1: exponential, so a Poisson process; inf: even gaps). The first comes at 0. The
    times are fixed in advance, so that a slow answer or a late wake-up does not stretch the load.
    """
    if math.isinf(rate):
        return [0.0] * count
    rng = random.Random(seed)
    times, now = [], 0.0
    for _ in range(count):
        times.append(now)
        now += 1 / rate if math.isinf(burstiness) else rng.gammavariate(burstiness, 1 / (rate * burstiness))
    return times


async def run_load(
    client: Client,
    requests: Sequence[bytes],
    arrivals: Sequence[float],
    max_concurrency: int | None = None,
    *,
    on_done: Callable[[Result], Any] | None = None,
    keep: bool = False,
    stop: asyncio.Event | None = None,
) -> LoadRun:
    """Send encoded ``requests`` at ``arrivals``; with a limit, a request waits here for its turn, and its clock with it.

    ``on_done`` is called as each ends. ``keep``: keep the events with text. ``stop``: set it to end the load early; requests under
    way are given up. No request's failure raises.
    """
    gate = asyncio.Semaphore(max_concurrency or len(requests) or 1)
    run = LoadRun([])
    active = 0

    async def one(index: int) -> Result:
        nonlocal active
        active += 1
        run.peak = max(run.peak, active)
        try:
            result = await stream(client, requests[index], index, keep=keep)
        finally:
            active -= 1
            gate.release()
        if on_done is not None:
            on_done(result)
        return result

    tasks: list[asyncio.Task[Result]] = []

    async def send_all() -> None:
        freed = run.start  # when the limit last let one pass
        for index, at in enumerate(arrivals):
            wait = run.start + at - perf_counter()
            if wait > 0:
                await asyncio.sleep(wait)
            held = gate.locked()
            await gate.acquire()
            if held:
                freed = perf_counter()
            else:
                run.lateness = max(run.lateness, perf_counter() - max(run.start + at, freed))
            tasks.append(asyncio.create_task(one(index)))
        await asyncio.gather(*tasks)

    gc.collect()
    with no_collections():  # one in the middle would be seen as a stall of every stream
        cpu, run.start = process_time(), perf_counter()
        sending = asyncio.create_task(send_all())
        ends: list[asyncio.Task[Any]] = [sending] if stop is None else [sending, asyncio.create_task(stop.wait())]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            run.interrupted = not sending.done()
            if not run.interrupted:
                sending.result()
        finally:
            for task in (*ends, *tasks):
                task.cancel()
            await asyncio.gather(*ends, *tasks, return_exceptions=True)
    run.results = [task.result() for task in tasks if not task.cancelled()]
    run.duration = max((r.end for r in run.results), default=run.start) - run.start
    run.client_cpu = process_time() - cpu
    return run


@contextmanager
def first_ctrl_c() -> Iterator[asyncio.Event]:
    """An event that the first Ctrl-C in this block sets; from the second on it is a KeyboardInterrupt as ever."""
    loop, pressed = asyncio.get_running_loop(), asyncio.Event()

    def press() -> None:
        pressed.set()
        loop.remove_signal_handler(signal.SIGINT)

    try:
        loop.add_signal_handler(signal.SIGINT, press)
    except (NotImplementedError, RuntimeError, ValueError):  # Windows, or not in the main thread
        yield pressed
        return
    try:
        yield pressed
    finally:
        loop.remove_signal_handler(signal.SIGINT)
