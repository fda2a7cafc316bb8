"""Waiting for what comes to pass, however slow the machine is: the time here bounds a test that would fail, not one that passes."""

from __future__ import annotations

import asyncio
import random
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

PORTS = random.SystemRandom()  # tests seed the usual one, and all would ask for the same ports
PATIENCE_S = 60.0  # far more than a busy machine needs


def until(condition: Callable[[], T], seconds: float = PATIENCE_S, every: float = 0.01) -> T:
    """Call ``condition`` until what it returns is true, and return that; AssertionError with the last one after ``seconds``."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, f"it did not come to pass in {seconds:g} s; last seen: {value!r}"
        time.sleep(every)
    return value


async def until_async(condition: Callable[[], T], seconds: float = PATIENCE_S, every: float = 0.01) -> T:
    """The same beside the event loop's other work."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, f"it did not come to pass in {seconds:g} s; last seen: {value!r}"
        await asyncio.sleep(every)
    return value


def runs(pid: int | str) -> bool:
    """Whether that process does. One that ended is none, though nobody has asked for its exit status yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def slowness() -> float:
    """How many times as long as on the machine where bounds were measured plain Python takes here and now; at least 1."""
    best = float("inf")
    for _ in range(5):
        begun = time.thread_time()
        sum(i * i % 7 for i in range(100_000))
        best = min(best, time.thread_time() - begun)
    return max(1.0, best / 8e-3)


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nothing listens on.

    Below those that the system gives to whoever names none, or a client's connection could take it before it is used.
    """
    names = Path("/proc/sys/net/ipv4/ip_local_port_range")
    first = int(names.read_text().split()[0]) if names.exists() else 0
    while True:
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", PORTS.randrange(10_000, first) if first > 20_000 else 0))
            except OSError:
                continue
            return probe.getsockname()[1]
