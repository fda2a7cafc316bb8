"""Who goes first, who gives way, and what giving way means.

Orders are total: every sequence has its own ``order`` tuple, smallest first. The same order serves admission (the
smallest waiting one, and none past it) and preemption (the largest running one). So the first in order can always
take what it needs from those behind it, and nobody starves.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from operator import attrgetter
from typing import Protocol

from octavo.engine.cost_model import CostModel
from octavo.engine.kv_manager import KVManager
from octavo.engine.request import Sequence
from octavo.types import GenerateRequest

_order = attrgetter("order")


class Policy(Protocol):
    def order(self, request: GenerateRequest, counter: int) -> tuple:
        """The request's place, smallest first. ``counter`` numbers requests as they came in."""
        ...

    def displaces(self, waiting: Sequence, running: Sequence) -> bool:
        """Whether ``running`` must make room for ``waiting``, rather than let it wait for a row or blocks."""
        ...


class Fcfs:
    """First come, first served, by arrival time."""

    def order(self, request: GenerateRequest, counter: int) -> tuple:
        return (request.arrival_time, counter)

    def displaces(self, waiting: Sequence, running: Sequence) -> bool:
        return False


class Priority:
    """Lower ``priority`` number first, then arrival. A strictly lower number takes rows and blocks from a higher one."""

    def order(self, request: GenerateRequest, counter: int) -> tuple:
        return (request.priority, request.arrival_time, counter)

    def displaces(self, waiting: Sequence, running: Sequence) -> bool:
        return waiting.order[0] < running.order[0]


POLICIES: dict[str, type[Policy]] = {"fcfs": Fcfs, "priority": Priority}


class Preemption(Protocol):
    def take(self, seq: Sequence, kv: KVManager, last_touch: int) -> None:
        """Take a sequence's blocks away, so that it can go back to the waiting queue."""
        ...


class RecomputePreemption:
    """Drop K and V; on resumption prompt and outputs are prefilled again (often from the prefix cache)."""

    def take(self, seq: Sequence, kv: KVManager, last_touch: int) -> None:
        kv.release(seq, last_touch)


SWAP_CALL_S = 0.5e-3  # seconds, either way, that a sequence's copies take however few they are: launches, and gaps in the copying
PLENTY = 0.5  # with this share of all blocks free, what a sequence published will still be there when it comes back


class SwapPreemption:
    """Move K and V to CPU memory, if there is room and it is predicted to take less time than computing them again."""

    def __init__(self, costs: CostModel) -> None:
        self.costs = costs

    def take(self, seq: Sequence, kv: KVManager, last_touch: int) -> None:
        if self._worth_moving(seq, kv):
            kv.swap_out(seq, last_touch)
        else:
            kv.release(seq, last_touch)

    def _worth_moving(self, seq: Sequence, kv: KVManager) -> bool:
        count = seq.num_computed
        # Pooled vectors grow in the row, which is lost. And who waits only for the last token in flight needs no blocks any more.
        if count + 1 >= seq.max_length or seq.request.pooling is not None:
            return False
        left = kv.num_left(seq)
        copies = kv.blocks_for(count) - left
        if not 0 < copies <= kv.swap.pool.num_free:
            return False
        if not self.costs.prompt.count:  # nothing is known yet, and reading is nearly always quicker than computing
            return True
        kept = max(left, seq.num_published) if kv.pool.num_free >= PLENTY * kv.pool.num_blocks else left
        kept *= kv.block_size
        return 2 * (SWAP_CALL_S + copies * kv.swap.block_s) < self.costs.chunk_seconds(kept, count - kept)


class OrderedSequences:
    """Sequences sorted by ``order``: the waiting queue, and the running ones.

    A sorted list rather than a heap: aborts take from the middle, and the running ones are walked in order each step.
    """

    def __init__(self) -> None:
        self.items: list[Sequence] = []

    def __len__(self) -> int:
        return len(self.items)

    def add(self, seq: Sequence) -> None:
        items = self.items
        if not items or items[-1].order < seq.order:
            items.append(seq)
        else:
            insort(items, seq, key=_order)

    def remove(self, seq: Sequence) -> None:
        index = bisect_left(self.items, seq.order, key=_order)
        if self.items[index] is not seq:
            raise RuntimeError(f"sequence {seq.request.id}/{seq.index} is not where it should be")
        del self.items[index]
