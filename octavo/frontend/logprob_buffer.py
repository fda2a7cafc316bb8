"""Log-probabilities that wait for their reader, packed; and the dictionaries that readers get.

A client that does not read leaves everything here until it is cut off. As dictionaries of objects, 20 candidates take
some 4 KB a token, as packed numbers 260 bytes; so but for the newest they are packed. Readers that write JSON take the
engine's entries as they are: making dictionaries of them costs more than writing them.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Any, overload

from octavo.frontend.outputs import CompletionOutput, Logprob
from octavo.types import TokenLogprobs

MAX_TEXTS = 1 << 18  # more than most vocabularies have tokens
MAX_UNPACKED = 16  # tokens; a reader that keeps up never leaves so many


class Logprobs(Sequence[dict[int, Logprob]]):
    """One token id -> Logprob a position, made when it is asked for; ``entries`` are the engine's own."""

    __slots__ = ("entries", "tokenizer")

    def __init__(self, entries: list[TokenLogprobs], tokenizer: Any | None = None) -> None:
        self.entries = entries
        self.tokenizer = tokenizer

    def __len__(self) -> int:
        return len(self.entries)

    @overload
    def __getitem__(self, at: int) -> dict[int, Logprob]: ...

    @overload
    def __getitem__(self, at: slice) -> Logprobs: ...

    def __getitem__(self, at: int | slice) -> dict[int, Logprob] | Logprobs:
        if isinstance(at, slice):
            return Logprobs(self.entries[at], self.tokenizer)
        return to_logprob_dict(self.entries[at], self.tokenizer)

    def __iter__(self) -> Iterator[dict[int, Logprob]]:
        return (to_logprob_dict(entry, self.tokenizer) for entry in self.entries)

    def __add__(self, other: Sequence[dict[int, Logprob]]) -> list[dict[int, Logprob]]:
        return [*self, *other]

    def __radd__(self, other: Sequence[dict[int, Logprob]]) -> list[dict[int, Logprob]]:
        return [*other, *self]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))


def entries_of(output: CompletionOutput) -> Sequence[TokenLogprobs]:
    """An output's log-probabilities as the engine's entries; empty if it has none."""
    positions = output.logprobs
    if isinstance(positions, Logprobs):
        return positions.entries
    return [to_entry(token, position) for token, position in zip(output.token_ids, positions or ())]


def to_entry(token: int, position: dict[int, Logprob]) -> TokenLogprobs:
    """What `to_logprob_dict` made ``position`` of. The token itself may be among the best or not: its rank tells."""
    own = position.get(token) or Logprob(float("-inf"), 0)
    best = list(position.items())
    if best and best[0][1].rank != 1:  # the token itself belongs further down
        best.sort(key=lambda item: (item[1].rank or float("inf"), -item[1].logprob))
    return TokenLogprobs([token, *(t for t, _ in best)], [own.logprob, *(lp.logprob for _, lp in best)], own.rank or 0)


class LogprobBuffer:
    """First in, all out."""

    __slots__ = ("_counts", "_ids", "_new", "_ranks", "_values")

    def __init__(self) -> None:
        self._new: list[TokenLogprobs] = []
        self._clear()

    def _clear(self) -> None:
        self._ids, self._values = array("q"), array("d")
        self._counts, self._ranks = array("q"), array("q")  # one a token

    def __len__(self) -> int:
        return len(self._counts) + len(self._new)

    @property
    def num_bytes(self) -> int:
        """What is packed; the newest are few."""
        return sum(part.itemsize * len(part) for part in (self._ids, self._values, self._counts, self._ranks))

    def extend(self, entries: Sequence[TokenLogprobs]) -> None:
        self._new += entries
        if len(self._new) > MAX_UNPACKED:
            self._pack()

    def _pack(self) -> None:
        for entry in self._new:
            self._ids.extend(entry.token_ids)
            self._values.extend(entry.logprobs)
            self._counts.append(len(entry.token_ids))
            self._ranks.append(entry.rank)
        self._new = []

    def drain(self, tokenizer: Any | None) -> Logprobs:
        entries, self._new = self._new, []
        return Logprobs(self._unpacked() + entries if self._counts else entries, tokenizer)

    def _unpacked(self) -> list[TokenLogprobs]:
        result, start = [], 0
        ids, values = self._ids.tolist(), self._values.tolist()
        for count, rank in zip(self._counts, self._ranks):
            end = start + count
            result.append(TokenLogprobs(ids[start:end], values[start:end], rank))
            start = end
        self._clear()
        return result


def logprob_dict(ids: Sequence[int], values: Sequence[float], rank: int, tokenizer: Any | None) -> dict[int, Logprob]:
    """token id -> Logprob: the sampled (or prompt) token first, with its ``rank``, then the best ones in order."""
    result: dict[int, Logprob] = {}
    for i, token in enumerate(ids):
        if token not in result:
            result[token] = Logprob(values[i], rank if i == 0 else i, token_text(tokenizer, token))
    return result


def to_logprob_dict(entry: TokenLogprobs, tokenizer: Any | None) -> dict[int, Logprob]:
    return logprob_dict(entry.token_ids, entry.logprobs, entry.rank, tokenizer)


_texts: dict[int, tuple[Any, dict[int, str]]] = {}  # id of a tokenizer -> it, and texts of single tokens


def token_text(tokenizer: Any | None, token: int) -> str | None:
    """The text of one token by itself. Remembered: candidates repeat, and to decode one costs more than all the rest."""
    if tokenizer is None:
        return None
    known = _texts.get(id(tokenizer))
    if known is None or known[0] is not tokenizer:
        if len(_texts) > 8:
            _texts.clear()
        known = _texts[id(tokenizer)] = (tokenizer, {})
    texts = known[1]
    text = texts.get(token)
    if text is None:
        if len(texts) >= MAX_TEXTS:
            texts.clear()
        text = texts[token] = tokenizer.decode([token], skip_special_tokens=False)
    return text
