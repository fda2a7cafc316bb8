"""Structured output: tokens that a row's grammar does not allow next become -inf.

Which ones, the host knows once it has the token before; so the masks come between a step's forward pass and its sampling
(``set_masks``), and hold for that one step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from octavo.kernels.token_bitmask import apply_token_bitmask
from octavo.kernels.upload import upload
from octavo.sampling.feature import StepInputs
from octavo.types import RowInit, TokenMasks


class GrammarMask:
    """``set_masks`` before a step, then ``apply`` in it."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._device = device
        self._rows: set[int] = set()
        self._masks: tuple[torch.Tensor, torch.Tensor] | None = None

    def set_masks(self, masks: TokenMasks | None) -> None:
        """The next step's masks, in one upload; None: no row has one."""
        if masks is None or not masks.places:
            self._masks = None
            return
        count, words = masks.bits.shape
        packed = np.empty(2 * count + count * words, np.int32)  # places first: they are 64 bits wide and must be aligned
        packed[: 2 * count].view(np.int64)[:] = masks.places
        packed[2 * count :].reshape(count, words)[:] = masks.bits
        there = upload(torch.from_numpy(packed), torch.int32, self._device)
        self._masks = there[: 2 * count].view(torch.int64), there[2 * count :].view(count, words)

    def init_row(self, init: RowInit) -> None:
        if init.params.grammar is not None:
            self._rows.add(init.row)

    def clear_row(self, row: int) -> None:
        self._rows.discard(row)

    def select(self, rows: Sequence[int]) -> bool | None:
        return True if self._rows and not self._rows.isdisjoint(rows) else None

    def apply(self, logits: torch.Tensor, selection: bool, step: StepInputs) -> None:
        if self._masks is not None:
            places, bits = self._masks
            apply_token_bitmask(logits, bits, places)

    def update(self, tokens: torch.Tensor, selection: bool, step: StepInputs) -> None:
        pass
