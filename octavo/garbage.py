"""How often Python's garbage collector works in processes that make tokens: a full collection walks all that torch has made, some 100 ms.

A thousand streams, or a large batch, hold much that is no garbage, and looking at it again and again costs a sixth to a quarter of the
host's time.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

RARE = (20_000, 20, 50)  # gc's thresholds


def collect_rarely() -> None:
    """From now on, in a process of ours: what start-up made lives as long as the process and is not looked at again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*RARE)


_lock = threading.Lock()
_asked: list[tuple[int, int, int]] = []  # for each who is in there now, the thresholds of the process before any of them


@contextlib.contextmanager
def rare_collections() -> Iterator[None]:
    """Hardly any full collection for a while, in a process of others: afterwards their thresholds are what they were.

    Several threads may be in there: the last one out puts back what the first one found. Nothing is frozen: objects of others may be
    already (some interpreters start with some), and nobody could tell whose to thaw.
    """
    with _lock:
        thresholds = _asked[0] if _asked else gc.get_threshold()
        if not _asked and thresholds[0]:  # 0: turned off, they know better
            gc.set_threshold(*(max(pair) for pair in zip(RARE, thresholds, strict=True)))
        _asked.append(thresholds)
    try:
        yield
    finally:
        with _lock:
            _asked.pop()
            if not _asked:
                gc.set_threshold(*thresholds)


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """No collection meanwhile, but those that are asked for. Of two threads in there at once, the first to come in lets them come again."""
    enabled = gc.isenabled()
    try:  # Ctrl-C may come at once
        gc.disable()
        yield
    finally:
        if enabled:
            gc.enable()
