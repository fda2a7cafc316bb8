"""Log-probabilities in the two shapes that OpenAI's API has, always finite JSON.

Chat: ``{"content": [{"token", "logprob", "bytes", "top_logprobs"}]}``. Completions (legacy): parallel lists with
``text_offset``. Token texts and bytes come from the tokenizer's bytes, so that a token which is a part of a character
is told exactly: in chat by ``bytes``, in completions by OpenAI's own notation ``bytes:\\xe2\\x80``.
"""

from __future__ import annotations

import codecs
import math
from typing import Any

import msgspec

from octavo.frontend.outputs import Logprob

encode = msgspec.json.Encoder().encode
MAX_REMEMBERED = 1 << 18  # tokens; more than most vocabularies have

FLOOR = -9999.0  # what -inf (a masked token) is written as; JSON has no infinity

Position = dict[int, Logprob] | None


def finite(value: float) -> float:
    return value if FLOOR < value < math.inf else FLOOR  # NaN is neither


def _remember(known: dict[int, Any], token_id: int, value: Any) -> None:
    if len(known) >= MAX_REMEMBERED:
        known.clear()
    known[token_id] = value


class _ChatTexts(dict[int, tuple[str, str]]):
    """JSON of a chat entry before its log-probability, and after it up to its bytes; worked out when first asked for."""

    def __init__(self, texts: TokenTexts) -> None:
        super().__init__()
        self.texts = texts

    def __missing__(self, token_id: int) -> tuple[str, str]:
        raw = self.texts.raw(token_id)
        text = f"token_id:{token_id}" if self.texts.as_ids else raw.decode(errors="replace")
        parts = f'{{"token":{encode(text).decode()},"logprob":', f',"bytes":{encode(list(raw)).decode()}'
        _remember(self, token_id, parts)
        return parts


class TokenTexts:
    """Texts and bytes of single tokens. Without a tokenizer, or with ``as_ids``, a token is written as ``token_id:ID``."""

    def __init__(self, tokenizer: Any, *, as_ids: bool = False) -> None:
        self.tokenizer = tokenizer
        self.as_ids = as_ids
        self.special: frozenset[int] = frozenset(tokenizer.special_token_ids) if tokenizer is not None else frozenset()
        self._legacy: dict[int, str] = {}
        self.chat = _ChatTexts(self)

    def raw(self, token_id: int) -> bytes:
        return f"token_id:{token_id}".encode() if self.tokenizer is None else self.tokenizer.token_bytes(token_id)

    def legacy(self, token_id: int) -> str:
        text = self._legacy.get(token_id)
        if text is None:
            text = f"token_id:{token_id}" if self.as_ids else _legacy(self.raw(token_id))
            _remember(self._legacy, token_id, text)
        return text


def _legacy(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def best(position: dict[int, Logprob], k: int) -> list[tuple[int, Logprob]]:
    """The k most likely tokens of a position, best first. Positions have the token itself first, then the best in order."""
    items = list(position.items())
    if items and items[0][1].rank != 1:  # the token itself belongs further down
        items.sort(key=lambda item: (item[1].rank or math.inf, -item[1].logprob))
    return items[:k]


def chat_entry(texts: TokenTexts, token_id: int, position: dict[int, Logprob], k: int) -> msgspec.Raw:
    """``{"token", "logprob", "bytes", "top_logprobs"}``, as JSON: all but the numbers is remembered of each token."""
    chat = texts.chat
    tops = []
    for token, logprob in best(position, k) if k else ():
        head, tail = chat[token]
        value = logprob.logprob
        tops.append(f"{head}{value if FLOOR < value < math.inf else FLOOR!r}{tail}}}")
    head, tail = chat[token_id]
    own = finite(position[token_id].logprob) if token_id in position else FLOOR
    return msgspec.Raw(f'{head}{own!r}{tail},"top_logprobs":[{",".join(tops)}]}}'.encode())


def chat_logprobs(texts: TokenTexts, token_ids: list[int], positions: list[dict[int, Logprob]] | None, k: int) -> list[msgspec.Raw]:
    return [chat_entry(texts, token, position, k) for token, position in zip(token_ids, positions or ())]


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
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, token_ids: list[int], positions: list[Position] | None, *, text: str | None = None) -> dict[str, list[Any]]:
        """The lists for these tokens. ``text``: the prompt that they spell, when they are one (its end is known exactly)."""
        result: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        start, drop_space = self.offset, text is not None and not text.startswith(" ")
        for i, token in enumerate(token_ids):
            position = positions[i] if positions is not None and i < len(positions) else None
            result["tokens"].append(self.texts.legacy(token))
            result["text_offset"].append(self.offset)
            result["token_logprobs"].append(None if position is None else _own(position, token))
            result["top_logprobs"].append(None if position is None else self._top(position, token))
            if token not in self.hidden:
                raw = self.texts.raw(token)
                if drop_space and raw.startswith(b" "):
                    raw = raw[1:]  # SentencePiece puts a space before a text, and takes it away again
                drop_space = False
                self.offset += len(self.decoder.decode(raw))
        if text is not None:
            self.offset = start + len(text)
            self.decoder.reset()
        return result

    def _top(self, position: dict[int, Logprob], token_id: int) -> dict[str, float]:
        """The k best, and the token itself: up to k + 1 entries, as OpenAI documents."""
        top = {self.texts.legacy(token): finite(logprob.logprob) for token, logprob in best(position, self.k)}
        if token_id in position:
            top.setdefault(self.texts.legacy(token_id), finite(position[token_id].logprob))
        return top


def _own(position: dict[int, Logprob], token_id: int) -> float:
    return finite(position[token_id].logprob) if token_id in position else FLOOR


def join_legacy(parts: list[dict[str, list[Any]]]) -> dict[str, list[Any]]:
    result: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for part in parts:
        for key, values in part.items():
            result[key].extend(values)
    return result


def prompt_logprobs_json(texts: TokenTexts, prompt_logprobs: list[Position] | None) -> list[Any] | None:
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
