"""Log-probabilities in the two shapes that OpenAI's API has, always finite JSON.

Chat: ``{"content": [{"token", "logprob", "bytes", "top_logprobs"}]}``. Completions (legacy): parallel lists with
``text_offset``. Token texts and bytes come from the tokenizer's bytes, so that a token which is a part of a character
is told exactly: in chat by ``bytes``, in completions by OpenAI's own notation ``bytes:\\xe2\\x80``.

Both are written as JSON at once, from the engine's entries: all but the numbers is remembered of each token.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from octavo.frontend.outputs import Logprob
from octavo.types import TokenLogprobs

encode = msgspec.json.Encoder().encode
MAX_REMEMBERED = 1 << 18  # tokens; more than most vocabularies have

FLOOR = -9999.0  # what -inf (a masked token) is written as; JSON has no infinity
_FLOOR_JSON = encode(FLOOR)


def finite(value: float) -> float:
    return value if FLOOR < value < math.inf else FLOOR  # NaN is neither


def numbers(values: Sequence[float]) -> list[bytes]:
    """Each of at least one log-probability as JSON. All at once, for that takes a sixth of the time."""
    if values[0] < FLOOR or values[-1] < FLOOR:  # that of the token itself, and the least of the best
        values = [finite(value) for value in values]
    written = encode(values)
    if b"null" in written:  # infinities and NaN
        written = written.replace(b"null", _FLOOR_JSON)
    return written[1:-1].split(b",")


class _PerToken(dict[int, Any]):
    """What is a function of a token's id alone, worked out when it is first asked for."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        super().__init__()
        self.make = make

    def __missing__(self, token_id: int) -> Any:
        value = self.make(token_id)
        if len(self) >= MAX_REMEMBERED:
            self.clear()
        self[token_id] = value
        return value


class TokenTexts:
    """Texts and bytes of single tokens. Without a tokenizer, or with ``as_ids``, a token is written as ``token_id:ID``.

    ``chat[id]``: the JSON of a chat entry with ``%b`` for its number. ``legacy[id]``: the token's text as JSON, and how many
    characters it adds to a text that ends with a whole one, or None if it is not made of whole ones itself.
    """

    def __init__(self, tokenizer: Any, *, as_ids: bool = False) -> None:
        self.tokenizer = tokenizer
        self.as_ids = as_ids
        self.special: frozenset[int] = frozenset(tokenizer.special_token_ids) if tokenizer is not None else frozenset()
        self.chat: dict[int, bytes] = _PerToken(self._chat)
        self.legacy: dict[int, tuple[bytes, int | None]] = _PerToken(self._legacy)

    def raw(self, token_id: int) -> bytes:
        return f"token_id:{token_id}".encode() if self.tokenizer is None else self.tokenizer.token_bytes(token_id)

    def _chat(self, token_id: int) -> bytes:
        raw = self.raw(token_id)
        text = encode(f"token_id:{token_id}" if self.as_ids else raw.decode(errors="replace"))
        return b'{"token":%b,"logprob":%%b,"bytes":%b}' % (text.replace(b"%", b"%%"), encode(list(raw)))

    def _legacy(self, token_id: int) -> tuple[bytes, int | None]:
        raw = self.raw(token_id)
        try:
            text, length = raw.decode(), len(raw.decode())
        except UnicodeDecodeError:
            text, length = "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw), None
        return encode(f"token_id:{token_id}" if self.as_ids else text), length


def chat_entry(texts: TokenTexts, entry: TokenLogprobs, k: int, start: bytes = b"", end: bytes = b"") -> bytes:
    """``{"token", "logprob", "bytes", "top_logprobs"}``, as JSON: one template out of those of its tokens, filled at once.

    ``start``, ``end``: what stands around it, without a ``%``; copying it later would take longer.
    """
    own, *best = map(texts.chat.__getitem__, entry.token_ids[: k + 1])
    template = b"".join((start, own[:-1], b',"top_logprobs":[', b",".join(best), b"]}", end))
    return template % tuple(numbers(entry.logprobs[: k + 1]))


def chat_logprobs(texts: TokenTexts, entries: Sequence[TokenLogprobs], k: int) -> list[bytes]:
    """What chat shows of each, as JSON."""
    return [chat_entry(texts, entry, k) for entry in entries]


_OBJECT_START, _OBJECT_END = b'{"content":[', b'],"refusal":null}'


def chat_object(shown: list[bytes]) -> bytes:
    """A choice's ``logprobs``, as JSON."""
    return _OBJECT_START + b",".join(shown) + _OBJECT_END


def chat_object_of_one(texts: TokenTexts, entry: TokenLogprobs, k: int) -> bytes:
    """`chat_object` of one entry: what nearly every frame has."""
    return chat_entry(texts, entry, k, _OBJECT_START, _OBJECT_END)


@dataclass(slots=True)
class LegacyLists:
    """Legacy log-probabilities of some tokens of one choice, each list's members as JSON."""

    tokens: list[bytes] = field(default_factory=list)
    token_logprobs: list[bytes] = field(default_factory=list)
    top_logprobs: list[bytes] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)

    def extend(self, other: LegacyLists) -> None:
        self.tokens += other.tokens
        self.token_logprobs += other.token_logprobs
        self.top_logprobs += other.top_logprobs
        self.text_offset += other.text_offset

    def json(self) -> bytes:
        join = b",".join
        return b'{"tokens":[%b],"token_logprobs":[%b],"top_logprobs":[%b],"text_offset":%b}' % (
            join(self.tokens),
            join(self.token_logprobs),
            join(self.top_logprobs),
            encode(self.text_offset),
        )


class LegacyLogprobs:
    """Legacy log-probabilities of one choice, over all of its chunks: it remembers where in the text it is.

    A token's ``text_offset`` counts the characters of the text before it, whichever chunk they were sent in; a token
    inside of a character has the offset of that character. Special tokens that the text leaves out take no room.
    """

    def __init__(self, texts: TokenTexts, k: int, *, skip_special_tokens: bool = True) -> None:
        self.texts = texts
        self.k = k
        self.hidden = texts.special if skip_special_tokens else frozenset()
        self.offset = 0
        self.decoder: codecs.IncrementalDecoder | None = None  # there while the text ends within a character

    def add(self, token_ids: list[int], entries: Sequence[TokenLogprobs | None], *, text: str | None = None) -> LegacyLists:
        """The lists for these tokens; without an entry their numbers are null.

        ``text``: the prompt that they spell, when they are one (its end is known exactly).
        """
        lists = LegacyLists()
        start, drop_space = self.offset, text is not None and not text.startswith(" ")
        for i, token in enumerate(token_ids):
            written, length = self.texts.legacy[token]
            lists.tokens.append(written)
            lists.text_offset.append(self.offset)
            self._add_numbers(lists, entries[i] if i < len(entries) else None)
            if token in self.hidden:
                continue
            if length is not None and self.decoder is None and not drop_space:
                self.offset += length
                continue
            raw = self.texts.raw(token)
            if drop_space and raw.startswith(b" "):
                raw = raw[1:]  # SentencePiece puts a space before a text, and takes it away again
            drop_space = False
            self._decode(raw)
        if text is not None:
            self.offset = start + len(text)
            self.decoder = None
        return lists

    def _decode(self, raw: bytes) -> None:
        decoder = self.decoder or codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.offset += len(decoder.decode(raw))
        self.decoder = decoder if decoder.getstate()[0] else None

    def _add_numbers(self, lists: LegacyLists, entry: TokenLogprobs | None) -> None:
        """The token's own, and of the k best and the token itself: up to k + 1 entries, as OpenAI documents."""
        if entry is None:
            lists.token_logprobs.append(b"null")
            lists.top_logprobs.append(b"null")
            return
        k, legacy, ids = self.k, self.texts.legacy, entry.token_ids
        own, *best = numbers(entry.logprobs[: k + 1])
        top = dict(zip([legacy[token][0] for token in ids[1 : k + 1]], best))  # two tokens may have one text
        top.setdefault(legacy[ids[0]][0], own)
        lists.token_logprobs.append(own)
        lists.top_logprobs.append(b"{%b}" % b",".join([text + b":" + number for text, number in top.items()]))


def prompt_logprobs_json(texts: TokenTexts, prompt_logprobs: Sequence[dict[int, Logprob] | None] | None) -> list[Any] | None:
    """vLLM's shape: one ``{token id: {logprob, rank, decoded_token}}`` a position, null for the first."""
    if prompt_logprobs is None:
        return None
    return [
        None
        if position is None
        else {
            str(token): {"logprob": finite(lp.logprob), "rank": lp.rank, "decoded_token": texts.raw(token).decode(errors="replace")}
            for token, lp in position.items()
        }
        for position in prompt_logprobs
    ]
