"""repetition_penalty (Keskar et al., CTRL, arXiv:1909.05858), frequency_penalty and presence_penalty (OpenAI).

For a token with logit l that stands c times among the row's outputs:
    l = l / repetition if l > 0 else l * repetition        if it is in the prompt or c > 0
    l = l - frequency * c - presence * (c > 0)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from octavo.kernels.upload import upload
from octavo.sampling.feature import SlotPool, StepInputs, grown
from octavo.types import RowInit

_IN_PROMPT = 1 << 30  # bit of a count; the bits below count outputs
_COUNT_MASK = _IN_PROMPT - 1
_LIST_STEP = 256


@dataclass(slots=True)
class _Selection:
    batch: torch.Tensor  # int64 [S] rows of the step that use penalties
    batch_list: list[int]
    slots: torch.Tensor  # int64 [S]
    bases: list[int]
    base_index: torch.Tensor  # int64 [S]
    repetition: torch.Tensor  # float32 [S, 1]
    frequency: torch.Tensor
    presence: torch.Tensor


class Penalties:
    """Counts on the device, for the rows that use penalties and for no others.

    _counts int32 [slots, V]: how often each token stands in the outputs, and bit 30 for tokens of the prompt.
    _listed int32 [slots, L]: ids of tokens that have a count, in any order and with repetitions: first the prompt's
    distinct tokens (only if the row has a repetition penalty), then the outputs as they come. It lets ``apply`` touch
    a row's own tokens only, not the whole vocabulary. What is left in it from another row does no harm: what happens
    to a token follows from its count alone.

        _listed[slot]:  [0 ....... n) prompt tokens   [n ... n + outputs) outputs;
        the token at position p of the sequence stands in column p + base, base = n - prompt_len
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._slots = SlotPool()
        self._counts = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)
        self._listed = torch.zeros((0, _LIST_STEP), dtype=torch.int32, device=device)
        self._base: dict[int, int] = {}
        self._values: dict[int, tuple[float, float, float]] = {}

    def init_row(self, init: RowInit) -> None:
        p = init.params
        if p.repetition_penalty == 1.0 and p.frequency_penalty == 0.0 and p.presence_penalty == 0.0:
            return
        prompt = list(dict.fromkeys(init.prompt_token_ids)) if p.repetition_penalty != 1.0 else []
        slot = self._slots.take(init.row)
        listed = upload(prompt + init.output_token_ids, torch.int64, self._device)
        self._counts = grown(self._counts, slot + 1, 0)
        self._listed = grown(grown(self._listed, slot + 1, 0), len(listed) + 1, 1)
        self._listed[slot, : len(listed)] = listed
        counts = self._counts[slot].zero_()
        counts.index_fill_(0, listed[: len(prompt)], _IN_PROMPT)  # counts[…] = … would copy the number, and wait
        outputs = listed[len(prompt) :]
        counts.index_add_(0, outputs, torch.ones_like(outputs, dtype=torch.int32))
        self._base[init.row] = len(prompt) - len(init.prompt_token_ids)
        self._values[init.row] = (p.repetition_penalty, p.frequency_penalty, p.presence_penalty)

    def clear_row(self, row: int) -> None:
        self._slots.give(row)
        self._base.pop(row, None)
        self._values.pop(row, None)

    def output_counts(self, row: int) -> torch.Tensor | None:
        """int32 [V]: how often each token was drawn on the row; None if the row has no penalties."""
        slot = self._slots.slot_of.get(row)
        return None if slot is None else self._counts[slot] & _COUNT_MASK

    def select(self, rows: Sequence[int]) -> _Selection | None:
        users = [(i, row) for i, row in enumerate(rows) if row in self._values]
        if not users:
            return None

        def tensor(values: list[int]) -> torch.Tensor:
            return upload(values, torch.int64, self._device)

        bases = [self._base[row] for _, row in users]
        batch = [i for i, _ in users]
        values = upload([self._values[row] for _, row in users], torch.float32, self._device)
        repetition, frequency, presence = (column[:, None] for column in values.unbind(1))
        slots = tensor([self._slots.slot_of[row] for _, row in users])
        return _Selection(tensor(batch), batch, slots, bases, tensor(bases), repetition, frequency, presence)

    def apply(self, logits: torch.Tensor, selection: _Selection, step: StepInputs) -> None:
        width = max(step.positions[i] + base for i, base in zip(selection.batch_list, selection.bases))
        self._listed = grown(self._listed, width + 1, 1)
        if width <= 0:
            return  # no row has a token to be penalized yet
        width = -(-width // _LIST_STEP) * _LIST_STEP if self._device.type != "cpu" else width  # few shapes for graphs
        ids = self._listed[:, :width].index_select(0, selection.slots).long()
        where = (selection.batch[:, None], ids)
        old, count = logits[where], self._counts[selection.slots[:, None], ids]
        new = torch.where(old > 0, old / selection.repetition, old * selection.repetition)
        new = torch.where(count != 0, new, old)
        count &= _COUNT_MASK
        new = new - selection.frequency * count - selection.presence * (count > 0)
        logits[where] = new  # an id listed twice is written twice with the same value

    def update(self, tokens: torch.Tensor, selection: _Selection, step: StepInputs) -> None:
        drawn = tokens[selection.batch]
        self._counts[selection.slots, drawn] += 1
        column = step.position_index[selection.batch] + selection.base_index
        self._listed[selection.slots, column] = drawn.to(torch.int32)
