"""Waiting for what comes to pass, however slow the machine is: the time here bounds a test that would fail, not one that passes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
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
