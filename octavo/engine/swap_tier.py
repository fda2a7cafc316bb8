"""The swap tier: blocks of CPU memory that preempted sequences' K and V wait in.

What is planned here is done at the beginning of the next step that is submitted, before anything else of it: first all that go out,
then all that come in. So

- a device block that goes out may be written by every step before, those in flight included, and be handed out again at once;
- a block that comes in is complete before the step that reads it;
- a CPU block that is given up may be named by the step being planned, so it is handed out again only after that.

A plan may come to nothing (no sequence can advance); what was to be moved then stays for the next one, which has the same number.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.engine.block_pool import BlockPool
from octavo.engine.request import Sequence

AWAY = -1  # stands for a device block that has yet to be brought in


@dataclass(slots=True)
class SwappedOut:
    """Where a swapped-out sequence's K and V are.

    Its blocks, in token order:

        [0 ...... left)             left to the prefix cache: others held them, too
        [left ... len(blocks)+left) copied to the CPU blocks ``blocks``
    """

    num_computed: int
    left: int
    blocks: list[int]


class SwapTier:
    """The CPU blocks, who is out there, and what the next plan must move. ``block_s``: seconds that one block takes, either way."""

    def __init__(self, num_blocks: int, block_s: float) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_s = block_s
        self.outs: list[tuple[int, int]] = []  # (device block, CPU block)
        self.ins: list[tuple[int, int]] = []  # (CPU block, device block)
        self.num_sequences = 0
        self._step = 0

    @property
    def usage(self) -> float:
        """Share of the CPU blocks that swapped-out sequences hold, 0 to 1."""
        pool = self.pool
        return 1 - (pool.num_free + pool.num_freeing) / pool.num_blocks if pool.num_blocks else 0.0

    def begin_step(self, step: int) -> None:
        self._step = step
        self.pool.begin_step(step)

    def put(self, seq: Sequence, left: int, device_blocks: list[int]) -> None:
        """Plan to copy these device blocks out, which follow the ``left`` that stay. The caller has seen that there is room."""
        pool = self.pool
        blocks = [pool.allocate() for _ in device_blocks]
        self.outs.extend(zip(device_blocks, blocks, strict=True))
        seq.swapped = SwappedOut(seq.num_computed, left, blocks)
        self.num_sequences += 1

    def bring(self, seq: Sequence, index: int, device_block: int) -> None:
        """Plan to copy the sequence's block ``index`` in."""
        swapped = seq.swapped
        assert swapped is not None
        self.ins.append((swapped.blocks[index - swapped.left], device_block))

    def drop(self, seq: Sequence) -> None:
        """The sequence is back, or has ended, or must be recomputed: its CPU blocks become free."""
        swapped, seq.swapped = seq.swapped, None
        assert swapped is not None
        for block in swapped.blocks:
            self.pool.unref(block, self._step, False)
        self.num_sequences -= 1

    def take_moves(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """(ins, outs) for a plan that will be submitted."""
        moves = self.ins, self.outs
        self.ins, self.outs = [], []
        return moves
