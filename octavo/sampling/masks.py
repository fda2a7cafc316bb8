"""Which tokens may come at all: allowed_token_ids, bad_words, logit_bias, min_tokens.

The last three name few tokens of the vocabulary, so they are kept and applied as index tensors. What is allowed may be most
of it, so that is a bit a token: its memory depends on the rows alone, and the profile counts it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from octavo.kernels.token_bitmask import apply_token_bitmask
from octavo.kernels.upload import upload
from octavo.sampling.feature import Entries, RowEntries, SlotPool, StepInputs, grown
from octavo.types import RowInit, bits_of

NEG_INF = float("-inf")


class AllowedTokens:
    """Everything but ``allowed_token_ids`` becomes -inf. _bits int32 [slots, V / 32]: bit t % 32 of word t // 32 is token t's."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._device = device
        self._slots = SlotPool()
        self._bits = torch.zeros((0, -(-vocab_size // 32)), dtype=torch.int32, device=device)

    def init_row(self, init: RowInit) -> None:
        if init.params.allowed_token_ids is None:
            return
        slot = self._slots.take(init.row)
        self._bits = grown(self._bits, slot + 1, 0)
        bits = bits_of(init.params.allowed_token_ids, self._bits.shape[1])
        self._bits[slot] = upload(bits, torch.int32, self._device)

    def clear_row(self, row: int) -> None:
        self._slots.give(row)

    def select(self, rows: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor] | None:
        """(bits [N, V / 32], places int64 [N]) of the rows that use it."""
        users = [(i, self._slots.slot_of[row]) for i, row in enumerate(rows) if row in self._slots.slot_of]
        if not users:
            return None
        places, slots = upload(users, torch.int64, self._device).t()
        return self._bits[slots], places.contiguous()

    def apply(self, logits: torch.Tensor, selection: tuple[torch.Tensor, torch.Tensor], step: StepInputs) -> None:
        bits, places = selection
        apply_token_bitmask(logits, bits, places)

    def update(self, tokens: torch.Tensor, selection: tuple[torch.Tensor, torch.Tensor], step: StepInputs) -> None:
        pass


class LogitBias:
    """``logit_bias[token]`` is added to the token's logit."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._entries = RowEntries(vocab_size, device)

    def init_row(self, init: RowInit) -> None:
        bias = init.params.logit_bias
        if bias:
            self._entries.set(init.row, list(bias), list(bias.values()))

    def clear_row(self, row: int) -> None:
        self._entries.clear(row)

    def select(self, rows: Sequence[int]) -> Entries | None:
        return self._entries.select(rows)

    def apply(self, logits: torch.Tensor, selection: Entries, step: StepInputs) -> None:
        flat = logits.view(-1)
        flat[selection.flat] = flat[selection.flat] + selection.values  # a row's tokens are distinct: no lost addition

    def update(self, tokens: torch.Tensor, selection: Entries, step: StepInputs) -> None:
        pass


@dataclass(slots=True)
class _MinTokensSelection:
    entries: Entries
    ends: list[int | None]  # per row of the step, for the host's short cut
    end_index: torch.Tensor  # int64 [N], the same per entry


class MinTokens:
    """EOS and stop tokens are -inf while a row has fewer than ``min_tokens`` outputs.

    A row's outputs stand at positions prompt_len, prompt_len + 1, …; the token at position p is drawn when p - prompt_len
    outputs exist. So an end may come first at position prompt_len + min_tokens.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._entries = RowEntries(vocab_size, device)
        self._device = device
        self._end: dict[int, int] = {}

    def init_row(self, init: RowInit) -> None:
        ends = sorted({*init.params.eos_token_ids, *init.params.stop_token_ids})
        if init.params.min_tokens > 0 and ends:
            self._entries.set(init.row, ends)
            self._end[init.row] = len(init.prompt_token_ids) + init.params.min_tokens

    def clear_row(self, row: int) -> None:
        self._entries.clear(row)
        self._end.pop(row, None)

    def select(self, rows: Sequence[int]) -> _MinTokensSelection | None:
        entries = self._entries.select(rows)
        if entries is None:
            return None
        ends = [self._end.get(row) for row in rows]
        per_row = upload([end or 0 for end in ends], torch.int64, self._device)
        return _MinTokensSelection(entries, ends, per_row[entries.owner])

    def apply(self, logits: torch.Tensor, selection: _MinTokensSelection, step: StepInputs) -> None:
        if not any(end is not None and position < end for end, position in zip(selection.ends, step.positions)):
            return
        flat = logits.view(-1)
        entries = selection.entries
        early = step.position_index[entries.owner] < selection.end_index
        flat[entries.flat] = flat[entries.flat].masked_fill(early, NEG_INF)

    def update(self, tokens: torch.Tensor, selection: _MinTokensSelection, step: StepInputs) -> None:
        pass


_ANY = -1  # in a word's prefix: left padding, matches everything
_NONE = -2  # in a row's history: before the first token, matches no prefix token


@dataclass(slots=True)
class _BadWordsSelection:
    owner: torch.Tensor  # int64 [W] index into the step's rows
    flat: torch.Tensor  # int64 [W] the words' last tokens in the flattened logits
    prefix: torch.Tensor  # int64 [W, H] what must stand before, aligned right
    word_slot: torch.Tensor | None  # int64 [W]; None when all words are single tokens
    batch: torch.Tensor  # int64 [S] rows of the step that keep a history
    slots: torch.Tensor  # int64 [S]


class BadWords:
    """A token that would complete one of ``bad_words`` becomes -inf. The words are token sequences; what stands before
    may reach into the prompt.

    Rows that have a word of several tokens keep their last H tokens in ``_recent`` [slots, H], newest right, where H is
    the longest word's length - 1 that any row ever had.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._words: dict[int, list[tuple[int, ...]]] = {}
        self._slots = SlotPool()
        self._recent = torch.empty((0, 1), dtype=torch.int64, device=device)

    def init_row(self, init: RowInit) -> None:
        words = sorted({word for word in init.params.bad_words_token_ids if word})
        if not words:
            return
        self._words[init.row] = words
        history = max(len(word) for word in words) - 1
        if history == 0:
            return
        slot = self._slots.take(init.row)
        self._recent = grown(self._recent, slot + 1, 0, _NONE)
        self._widen(history)
        width = self._recent.shape[1]
        tail = ((init.prompt_token_ids[-width:]) + init.output_token_ids)[-width:]
        self._recent[slot] = upload([_NONE] * (width - len(tail)) + tail, torch.int64, self._device)

    def _widen(self, history: int) -> None:
        """Make room for longer words; rows that are there keep their newest tokens at the right."""
        missing = history - self._recent.shape[1]
        if missing > 0:
            self._recent = torch.nn.functional.pad(self._recent, (missing, 0), value=_NONE)

    def clear_row(self, row: int) -> None:
        self._words.pop(row, None)
        self._slots.give(row)

    def select(self, rows: Sequence[int]) -> _BadWordsSelection | None:
        if not self._words:
            return None
        words = [(i, row, word) for i, row in enumerate(rows) for word in self._words.get(row, ())]
        if not words:
            return None
        width = self._recent.shape[1]

        def tensor(values: list) -> torch.Tensor:
            return upload(values, torch.int64, self._device)

        owner = tensor([i for i, _, _ in words])
        flat = owner * self._vocab_size + tensor([word[-1] for _, _, word in words])
        prefix = tensor([[_ANY] * (width - len(word) + 1) + list(word[:-1]) for _, _, word in words])
        keepers = [(i, self._slots.slot_of[row]) for i, row in enumerate(rows) if row in self._slots.slot_of]
        # A row with single tokens only has no slot; its prefixes are all _ANY, so any slot's history will do.
        word_slot = tensor([self._slots.slot_of.get(row, 0) for _, row, _ in words]) if keepers else None
        return _BadWordsSelection(owner, flat, prefix, word_slot, tensor([i for i, _ in keepers]), tensor([s for _, s in keepers]))

    def apply(self, logits: torch.Tensor, selection: _BadWordsSelection, step: StepInputs) -> None:
        flat = logits.view(-1)
        if selection.word_slot is None:
            flat.index_fill_(0, selection.flat, NEG_INF)  # flat[…] = … would copy the number, and wait
            return
        recent = self._recent[selection.word_slot]
        complete = ((selection.prefix == recent) | (selection.prefix == _ANY)).all(-1)
        # Several words may end in one token: take the least, so that no word undoes what another forbids.
        bound = torch.full(complete.shape, -NEG_INF, device=self._device).masked_fill_(complete, NEG_INF)
        flat.scatter_reduce_(0, selection.flat, bound, "amin")

    def update(self, tokens: torch.Tensor, selection: _BadWordsSelection, step: StepInputs) -> None:
        if selection.word_slot is None:
            return
        shifted = torch.cat([self._recent[selection.slots, 1:], tokens[selection.batch, None]], dim=1)
        self._recent[selection.slots] = shifted
