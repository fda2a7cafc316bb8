"""Log-probabilities that wait for their reader, packed; and the dictionaries that readers get.

A client that does not read leaves everything here until it is cut off. As dictionaries of objects, 20 candidates take
some 4 KB a token, as packed numbers 260 bytes; so they are unpacked only when somebody takes them.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from octavo.frontend.outputs import Logprob
from octavo.types import TokenLogprobs

MAX_TEXTS = 1 << 18  # more than most vocabularies have tokens


class LogprobBuffer:
    """First in, all out."""

    __slots__ = ("_counts", "_ids", "_ranks", "_values")

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._ids, self._values = array("q"), array("d")
        self._counts, self._ranks = array("q"), array("q")  # one a token

    def __len__(self) -> int:
        return len(self._counts)

    @property
    def num_bytes(self) -> int:
        return sum(part.itemsize * len(part) for part in (self._ids, self._values, self._counts, self._ranks))

    def extend(self, entries: Sequence[TokenLogprobs]) -> None:
        for entry in entries:
            self._ids.extend(entry.token_ids)
            self._values.extend(entry.logprobs)
            self._counts.append(len(entry.token_ids))
            self._ranks.append(entry.rank)

    def drain(self, tokenizer: Any | None) -> list[dict[int, Logprob]]:
        if not self._counts:
            return []
        result, start = [], 0
        ids, values = self._ids.tolist(), self._values.tolist()
        for count, rank in zip(self._counts, self._ranks):
            end = start + count
            result.append(logprob_dict(ids[start:end], values[start:end], rank, tokenizer))
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
