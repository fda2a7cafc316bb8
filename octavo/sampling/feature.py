"""What the features that edit logits have in common: their interface, and how they keep data of few rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from octavo.kernels.upload import upload
from octavo.types import RowInit


@dataclass(slots=True)
class StepInputs:
    """Which rows draw in this step, and where.

    rows[i] draws the token at index positions[i] of its sequence from logits[i]; the tensors hold the same numbers on
    the device (int64 [R]).
    """

    rows: Sequence[int]
    positions: Sequence[int]
    row_index: torch.Tensor
    position_index: torch.Tensor


class LogitFeature(Protocol):
    """A sampling option that edits logits. One class holds the data of all rows that use it.

    ``select`` prepares what depends on *which* rows draw; its answer is kept for as long as the same rows go on
    drawing, so ``apply`` and ``update`` hold the per-step work only. Neither waits for the device.
    """

    def init_row(self, init: RowInit) -> None:
        """Take what the row needs; keep nothing for a row that does not use the option. The row is clear before."""
        ...

    def clear_row(self, row: int) -> None:
        """Forget the row. No error when it has nothing here."""
        ...

    def select(self, rows: Sequence[int]) -> Any | None:
        """What ``apply`` needs for these rows, or None when none of them uses the option."""
        ...

    def apply(self, logits: torch.Tensor, selection: Any, step: StepInputs) -> None:
        """Edit logits (float32 [R, V], contiguous) in place."""
        ...

    def update(self, tokens: torch.Tensor, selection: Any, step: StepInputs) -> None:
        """Learn what the step drew: tokens int64 [R], on the device."""
        ...


@dataclass(slots=True)
class Entries:
    """The (row, token) pairs of a step's rows, one after another.

    batch: int64 [R'] indices into the step's rows that have entries; owner: int64 [N] index into the step's rows;
    flat: int64 [N] index into the flattened logits; values: float32 [N] or None.
    """

    batch: torch.Tensor
    owner: torch.Tensor
    flat: torch.Tensor
    values: torch.Tensor | None


class RowEntries:
    """row → token ids (and a value each), as small index tensors."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._rows: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}

    def set(self, row: int, token_ids: Sequence[int], values: Sequence[float] | None = None) -> None:
        ids = upload(token_ids, torch.int64, self._device)
        self._rows[row] = (ids, None if values is None else upload(values, torch.float32, self._device))

    def clear(self, row: int) -> None:
        self._rows.pop(row, None)

    def select(self, rows: Sequence[int]) -> Entries | None:
        if not self._rows:
            return None
        users = [(i, *self._rows[row]) for i, row in enumerate(rows) if row in self._rows]
        if not users:
            return None
        batch = upload([i for i, _, _ in users], torch.int64, self._device)
        sizes = upload([len(ids) for _, ids, _ in users], torch.int64, self._device)
        total = sum(len(ids) for _, ids, _ in users)
        owner = torch.repeat_interleave(batch, sizes, output_size=total)  # output_size: known here, so no wait for the device
        flat = owner * self._vocab_size + torch.cat([ids for _, ids, _ in users])
        values = [v for _, _, v in users if v is not None]
        return Entries(batch, owner, flat, torch.cat(values) if values else None)


class SlotPool:
    """row → slot in buffers that only the rows which use a feature pay for."""

    def __init__(self) -> None:
        self.slot_of: dict[int, int] = {}
        self._free: list[int] = []
        self._count = 0

    def take(self, row: int) -> int:
        """The slot for a row that has none; slots are dense, so buffers of ``needed`` slots are enough."""
        slot = self._free.pop() if self._free else self._count
        self._count = max(self._count, slot + 1)
        self.slot_of[row] = slot
        return slot

    def give(self, row: int) -> None:
        slot = self.slot_of.pop(row, None)
        if slot is not None:
            self._free.append(slot)


def grown(buffer: torch.Tensor, size: int, dim: int, fill: int = 0) -> torch.Tensor:
    """``buffer``, or a copy of it with at least ``size`` (doubled) entries along ``dim``; new ones hold ``fill``."""
    if buffer.shape[dim] >= size:
        return buffer
    shape = list(buffer.shape)
    shape[dim] = max(size, 2 * shape[dim])
    larger = torch.full(shape, fill, dtype=buffer.dtype, device=buffer.device)
    larger.narrow(dim, 0, buffer.shape[dim]).copy_(buffer)
    return larger
