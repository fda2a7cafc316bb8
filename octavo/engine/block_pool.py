"""All KV blocks: reference counts and the free list, least recently used first.

A block is in exactly one state:
    used     one reference or more
    free     no reference, in the free list: may be allocated now
    freeing  no reference, but a planned step may still touch it: becomes free with the first step after that one

Free blocks whose content is published stay readable through the prefix cache until they are allocated again.
"""

from __future__ import annotations


class BlockPool:
    """Hands out block ids 0 … num_blocks-1. Every operation is O(1), but for ``begin_step``'s few freeing blocks.

    The free list is a doubly-linked list threaded through two arrays, because a prefix hit must take a block out of
    its middle: ``collections.deque`` cannot do that in O(1), and an ``OrderedDict`` allocates a node per move.
    Index ``num_blocks`` is the list's head and tail; ``next[b] == -1`` means that b is not in it.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.refs = [0] * num_blocks
        self.num_free = num_blocks
        self._next = [*range(1, num_blocks + 1), 0]
        self._prev = [num_blocks, *range(num_blocks)]
        self._last_touch = [-1] * num_blocks  # the last step that may read or write a block, as its releasers said
        self._freeing: dict[int, bool] = {}  # block -> keep, in the order of release
        self._step = 0

    def begin_step(self, step: int) -> None:
        """From here on allocations are for ``step``: blocks that only earlier steps touch become free."""
        self._step = step
        if self._freeing:
            freeing, self._freeing = self._freeing, {}
            for block, keep in freeing.items():
                self._set_free(block, keep)

    def allocate(self) -> int:
        """Take the least recently used free block, with one reference. The caller has looked at ``num_free``."""
        block = self._next[self.num_blocks]
        if block == self.num_blocks:
            raise RuntimeError("allocate() with no free block; look at num_free first")
        self._unlink(block)
        self.refs[block] = 1
        return block

    def ref(self, block: int) -> None:
        """Add a reference; a free or freeing block (a prefix hit) is used again."""
        if self.refs[block] == 0:
            if self._next[block] >= 0:
                self._unlink(block)
            else:
                del self._freeing[block]
        self.refs[block] += 1

    def unref(self, block: int, last_touch: int, keep: bool) -> None:
        """Drop a reference. ``last_touch`` is the last step that may touch the block on the releaser's behalf.

        The last reference gone, the block is free for steps after all its releasers' last touches. ``keep``: its
        content is worth keeping (published), so it goes to the end of the free list; else to the front.
        """
        refs = self.refs[block] - 1
        if refs < 0:
            raise RuntimeError(f"block {block} was released more often than it was taken")
        self.refs[block] = refs
        self._last_touch[block] = max(self._last_touch[block], last_touch)
        if refs == 0:
            self._set_free(block, keep)

    def is_free(self, block: int) -> bool:
        return self._next[block] >= 0

    def free_list(self) -> list[int]:
        """Free blocks in the order in which they will be allocated (for tests and debugging)."""
        out, block = [], self._next[self.num_blocks]
        while block != self.num_blocks:
            out.append(block)
            block = self._next[block]
        return out

    @property
    def num_freeing(self) -> int:
        return len(self._freeing)

    def _set_free(self, block: int, keep: bool) -> None:
        if self._last_touch[block] >= self._step:
            self._freeing[block] = keep
            return
        end = self.num_blocks
        before = self._prev[end] if keep else end
        after = self._next[before]
        self._next[before] = self._prev[after] = block
        self._prev[block] = before
        self._next[block] = after
        self.num_free += 1

    def _unlink(self, block: int) -> None:
        before, after = self._prev[block], self._next[block]
        self._next[before] = after
        self._prev[after] = before
        self._next[block] = -1
        self.num_free -= 1
