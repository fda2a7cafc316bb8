"""Which sequence owns which KV blocks: allocation, sharing, copy-on-write, publication.

A sequence gets the blocks of all tokens it is to prefill at admission, so a prompt's chunks can never run out of blocks
half-way; afterwards it grows a block at a time. ``Sequence.writable`` bounds what it may write without asking here.
"""

from __future__ import annotations

from octavo.engine.block_pool import BlockPool
from octavo.engine.prefix_cache import PrefixCache
from octavo.engine.request import NEVER, Sequence
from octavo.engine.swap_tier import AWAY, SwapTier
from octavo.types import BlockAppend, StepPlan


class KVManager:
    """Owns the block pool, the prefix cache and the swap tier. ``queries`` and ``hits`` count prompt tokens looked up and found."""

    def __init__(self, num_blocks: int, block_size: int, prefix_caching: bool = True, swap: SwapTier | None = None) -> None:
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.pool = BlockPool(num_blocks)
        self.cache = PrefixCache(num_blocks, block_size)
        self.swap = swap or SwapTier(0, 0.0)
        self.queries = 0
        self.hits = 0
        self._step = 0

    @property
    def usage(self) -> float:
        """Share of blocks that live sequences hold, 0 to 1."""
        pool = self.pool
        return 1 - (pool.num_free + pool.num_freeing) / pool.num_blocks

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def begin_step(self, step: int) -> None:
        self._step = step
        self.pool.begin_step(step)
        self.swap.begin_step(step)

    # -- admission ------------------------------------------------------------------------------------------------------

    def find_cached(self, seq: Sequence) -> list[int]:
        """Blocks of the longest cached prefix of the known tokens, the last token left out.

        That one must be run again, because only a run gives logits. A prompt whose own log-probabilities are asked for,
        or the mean of its hidden states, must be run whole. Of a swapped-out sequence: all blocks that it had computed something
        of, AWAY for those that must be brought in.
        """
        if seq.swapped is not None and (blocks := self._find_swapped(seq)) is not None:
            return blocks
        if not self.prefix_caching:
            return []
        if seq.generation != self.cache.generation:
            seq.hashes = []
            seq.generation = self.cache.generation
        if seq.request.runs_whole_prompt:
            return []
        count = (len(seq.tokens) - 1) // self.block_size
        self.cache.extend_hashes(seq.hashes, seq.tokens, count, seq.request.cache_salt)
        return self.cache.match(seq.hashes, count)

    def fits(self, seq: Sequence, cached: list[int], reserve: int) -> bool:
        """Whether all known tokens get their blocks with ``reserve`` free ones left over. Changes nothing."""
        pool = self.pool
        hits = idle = 0
        for block in cached:
            if block != AWAY:
                hits += 1
                idle += pool.is_free(block)
        return self.blocks_for(len(seq.tokens)) - hits + reserve <= pool.num_free - idle

    def start_of(self, seq: Sequence, cached: list[int]) -> int:
        """The first position to run, if ``seq`` is admitted with ``cached`` (from ``find_cached``)."""
        return len(cached) * self.block_size if seq.swapped is None else seq.swapped.num_computed

    def admit(self, seq: Sequence, cached: list[int]) -> None:
        """Give the sequence blocks for all its known tokens, ``cached`` (from ``find_cached``) first."""
        pool = self.pool
        for block in cached:  # before any allocation, which might evict them
            if block != AWAY:
                pool.ref(block)
        seq.num_computed = self.start_of(seq, cached)
        seq.num_prefill = len(seq.tokens)
        seq.num_published = len(cached)
        seq.blocks = cached + [self._allocate() for _ in range(self.blocks_for(len(seq.tokens)) - len(cached))]
        if seq.swapped is not None:
            self._bring_in(seq, len(cached))
        seq.writable = len(seq.blocks) * self.block_size
        seq.publish_at = (seq.num_published + 1) * self.block_size if self.prefix_caching else NEVER
        self._count_lookup(seq)

    def _find_swapped(self, seq: Sequence) -> list[int] | None:
        """What ``find_cached`` answers for a swapped-out sequence; None, and it must be recomputed, if a block that it left to the
        prefix cache is gone. Blocks whose tokens the cache has need not be brought in, whoever computed them."""
        swapped = seq.swapped
        assert swapped is not None
        blocks = [AWAY] * (swapped.left + len(swapped.blocks))
        if self.prefix_caching and seq.generation == self.cache.generation:
            full = swapped.num_computed // self.block_size
            self.cache.extend_hashes(seq.hashes, seq.tokens, full, seq.request.cache_salt)
            for i in range(full):
                blocks[i] = self.cache.block_of(seq.hashes[i], AWAY)
        if AWAY in blocks[: swapped.left]:
            self.swap.drop(seq)
            return None
        return blocks

    def _bring_in(self, seq: Sequence, count: int) -> None:
        """Find room for those of a swapped-out sequence's first ``count`` blocks that are AWAY. The full ones can then be published."""
        blocks = seq.blocks
        for i in range(count):
            if blocks[i] == AWAY:
                seq.num_published = min(seq.num_published, i)
                blocks[i] = self._allocate()
                self.swap.bring(seq, i, blocks[i])
        self.swap.drop(seq)

    def _count_lookup(self, seq: Sequence) -> None:
        """Once a request: resumptions mostly find their own blocks, and would blur what clients gain from the cache."""
        request = seq.request
        if request.started:
            return
        request.started = True
        request.num_cached_tokens = seq.num_computed
        if self.prefix_caching and not request.runs_whole_prompt:
            self.queries += seq.num_prompt
            self.hits += seq.num_computed

    # -- growth ---------------------------------------------------------------------------------------------------------

    def grow(self, seq: Sequence, plan: StepPlan) -> bool:
        """Make position ``num_computed`` writable; False if that needs a block and none is free.

        Either the blocks are full, and one is appended; or the last one is shared with sequences of the same request
        and half full, and is copied first (the last owner keeps it).
        """
        pool, blocks = self.pool, seq.blocks
        offset = seq.num_computed // self.block_size
        if offset < len(blocks) and pool.refs[blocks[offset]] == 1:
            seq.writable = len(blocks) * self.block_size
            return True
        if pool.num_free == 0:
            return False
        block = self._allocate()
        if offset < len(blocks):
            shared = blocks[offset]
            plan.copies.append((shared, block))
            # This step reads it, so even if its other owners go now, it must not be handed out within this step.
            pool.unref(shared, self._step, self.cache.hash_of[shared] is not None)
            blocks[offset] = block
        else:
            blocks.append(block)
        plan.block_appends.append(BlockAppend(seq.row, offset, [block]))
        seq.writable = len(blocks) * self.block_size
        return True

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let ``child`` share everything that ``parent`` has computed, which is all of ``parent.blocks``."""
        for block in parent.blocks:
            self.pool.ref(block)
        child.blocks = list(parent.blocks)
        child.hashes = list(parent.hashes)
        child.generation = parent.generation
        child.num_computed = parent.num_computed
        child.num_prefill = parent.num_prefill
        # The full blocks are the parent's to publish; nobody may write before grow() has looked at the last one.
        child.num_published = parent.num_computed // self.block_size
        child.publish_at = (child.num_published + 1) * self.block_size if self.prefix_caching else NEVER
        parent.writable = child.writable = parent.num_computed

    def hand_over(self, seq: Sequence, heir: Sequence) -> None:
        """Move everything that ``seq`` holds to ``heir``, which holds nothing."""
        for name in ("blocks", "hashes", "generation", "num_computed", "num_prefill", "num_published", "publish_at", "swapped", "writable"):
            setattr(heir, name, getattr(seq, name))
        seq.blocks, seq.hashes, seq.swapped = [], [], None

    # -- publication and release ----------------------------------------------------------------------------------------

    def publish(self, seq: Sequence) -> None:
        """Publish blocks that became full: tokens known, and computed by steps planned before any later reader's."""
        count = min(seq.num_computed, len(seq.tokens)) // self.block_size
        if seq.generation != self.cache.generation:
            seq.publish_at = NEVER  # computed before a reset
        if seq.publish_at == NEVER or count <= seq.num_published:
            return
        cache, hashes, blocks = self.cache, seq.hashes, seq.blocks
        cache.extend_hashes(hashes, seq.tokens, count, seq.request.cache_salt)
        for i in range(seq.num_published, count):
            cache.publish(hashes[i], blocks[i])
        seq.num_published = count
        seq.publish_at = (count + 1) * self.block_size

    def release(self, seq: Sequence, last_touch: int) -> None:
        """Take all blocks away, CPU blocks too. ``last_touch``: the last step that may touch the device's for this sequence.

        Last block first: so the end of a chain, worthless without its beginning, is evicted first.
        """
        if seq.swapped is not None:
            self.swap.drop(seq)
        self._release_device(seq, last_touch)

    def _release_device(self, seq: Sequence, last_touch: int) -> None:
        hash_of, unref = self.cache.hash_of, self.pool.unref
        for block in reversed(seq.blocks):
            unref(block, last_touch, hash_of[block] is not None)
        seq.blocks = []
        seq.num_computed = seq.num_prefill = seq.num_published = seq.writable = 0
        seq.publish_at = NEVER

    def num_left(self, seq: Sequence) -> int:
        """How many of its first blocks others hold, too, and the prefix cache knows: no copy is needed of them, nor recomputation."""
        refs, hash_of = self.pool.refs, self.cache.hash_of
        for i, block in enumerate(seq.blocks):
            if refs[block] == 1 or hash_of[block] is None:
                return i
        return len(seq.blocks)

    def swap_out(self, seq: Sequence, last_touch: int) -> None:
        """Like ``release``, but all blocks with computed tokens go to CPU memory, save the first that are left to the prefix cache.

        The copies are part of the step being planned, and come first in it; so the blocks are as free as ``release`` leaves them.
        """
        left = self.num_left(seq)
        self.swap.put(seq, left, seq.blocks[left : self.blocks_for(seq.num_computed)])
        self._release_device(seq, last_touch)

    def distrust(self, seq: Sequence) -> None:
        """Unpublish all blocks of a sequence whose run went wrong, so that its K and V can hurt nobody else."""
        for block in seq.blocks:
            self.cache.forget(block)

    def reset_prefix_cache(self) -> None:
        """Forget all that is published; what running sequences have computed so far will not be published either."""
        self.cache.reset()

    def _allocate(self) -> int:
        block = self.pool.allocate()
        if self.cache.hash_of[block] is not None:
            self.cache.forget(block)
        return block
