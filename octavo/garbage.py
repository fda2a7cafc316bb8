"""How often Python's garbage collector works in processes that make tokens: a full collection walks all that torch has made, some 100 ms.

A thousand streams, or a large batch, hold much that is no garbage, and looking at it again and again costs a sixth to a quarter of the
host's time.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

RARE = (20_000, 20, 50)  # gc's thresholds


def collect_rarely() -> None:
    """From now on, in a process of ours: what start-up made lives as long as the process and is not looked at again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*RARE)


@contextlib.contextmanager
def rare_collections() -> Iterator[None]:
    """The same for a while, in a process of others: afterwards everything is as it was.

    A caller who has frozen objects of their own knows better, and keeps what they chose.
    """
    if gc.get_freeze_count():
        yield
        return
    thresholds = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(*RARE)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
