"""Log-probabilities written from templates say what dictionaries of the same numbers, encoded, say."""

from __future__ import annotations

import codecs
import json
import math
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.frontend.logprob_buffer import Logprobs, entries_of, to_entry, to_logprob_dict
from octavo.frontend.outputs import CompletionOutput
from octavo.server.logprobs import FLOOR, LegacyLists, LegacyLogprobs, TokenTexts, chat_logprobs, chat_object
from octavo.server.sse import ChatFrames, CompletionFrames
from octavo.types import TokenLogprobs

PIECES = [b"a", b" the", b"%b", b"%", b'"', b"\\", b"\n", "é".encode(), "漢字".encode(), b"\xe6", b"\xbc", b"\xa2", b"\xff", b"a", b"<s>"]


class Vocabulary:
    special_token_ids = frozenset({len(PIECES) - 1})

    def token_bytes(self, token_id: int) -> bytes:
        return PIECES[token_id]


@st.composite
def entries(draw: Any) -> TokenLogprobs:
    """As the engine sends them: the token with its rank, then the best in order, with and without the token."""
    k = draw(st.integers(0, 4))
    best = draw(st.permutations(range(len(PIECES))))[:k]
    value = st.floats(-30, 0) | st.sampled_from([-math.inf, math.nan, -1e30, -9999.0, 0.0, -1e-7])
    values = [draw(value) for _ in best]
    place = draw(st.integers(0, k))
    token = best[place] if place < k else draw(st.integers(0, len(PIECES) - 1))
    if token in best:
        return TokenLogprobs([token, *best], [values[best.index(token)], *values], best.index(token) + 1)
    return TokenLogprobs([token, *best], [draw(value), *values], k + 1)


def finite(value: float) -> float:
    return value if FLOOR < value < math.inf else FLOOR


def shown(token: int, value: float) -> dict[str, Any]:
    return {"token": PIECES[token].decode(errors="replace"), "logprob": value, "bytes": list(PIECES[token])}


def slow_chat(entry: TokenLogprobs, k: int) -> dict[str, Any]:
    pairs = list(zip(entry.token_ids, entry.logprobs))
    return {**shown(*pairs[0]), "top_logprobs": [shown(*pair) for pair in pairs[1 : k + 1]]}


def same(found: Any, expected: Any) -> bool:
    """Equal, numbers as they are written: what JSON can't carry, or is below the floor, may stand at the floor."""
    if isinstance(expected, float):
        return found == expected or found == finite(expected)
    if isinstance(expected, dict):
        return list(found) == list(expected) and all(same(found[key], expected[key]) for key in expected)
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(same, found, expected))
    return found == expected


def strict(text: bytes) -> Any:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


@given(st.lists(entries(), min_size=1, max_size=4), st.integers(0, 5))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_chat(some: list[TokenLogprobs], k: int) -> None:
    found = strict(chat_object(chat_logprobs(TokenTexts(Vocabulary()), some, k)))
    assert found["refusal"] is None and same(found["content"], [slow_chat(entry, k) for entry in some])


def legacy_text(token: int) -> str:
    try:
        return PIECES[token].decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in PIECES[token])


def slow_legacy(some: list[TokenLogprobs], k: int) -> dict[str, list[Any]]:
    result: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    decoder, offset = codecs.getincrementaldecoder("utf-8")(errors="replace"), 0
    for entry in some:
        token, own = entry.token_ids[0], entry.logprobs[0]
        top: dict[str, float] = {}
        for candidate, value in list(zip(entry.token_ids, entry.logprobs))[1 : k + 1]:
            top[legacy_text(candidate)] = value
        top.setdefault(legacy_text(token), own)
        for key, value in zip(result, (legacy_text(token), own, top, offset)):
            result[key].append(value)
        if token not in Vocabulary.special_token_ids:
            offset += len(decoder.decode(PIECES[token]))
    return result


@given(st.lists(entries(), min_size=1, max_size=6), st.integers(0, 5), st.integers(0, 6))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_legacy_in_two_chunks(some: list[TokenLogprobs], k: int, cut: int) -> None:
    legacy, lists = LegacyLogprobs(TokenTexts(Vocabulary()), k), LegacyLists()
    for part in (some[:cut], some[cut:]):
        lists.extend(legacy.add([entry.token_ids[0] for entry in part], part))
    assert same(strict(lists.json()), slow_legacy(some, k))


@given(st.lists(entries(), max_size=4))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_dictionaries_and_back(some: list[TokenLogprobs]) -> None:
    """What callers of the front end see is a sequence of dictionaries; entries made of those say the same."""
    some = [entry for entry in some if not any(map(math.isnan, entry.logprobs))]
    positions, plain = Logprobs(some), [to_logprob_dict(entry, None) for entry in some]
    assert positions == plain and list(positions) == plain and len(positions) == len(plain)
    assert positions[1:] == plain[1:] and positions + plain == plain + positions == [*plain, *plain]
    output = CompletionOutput(0, "", [entry.token_ids[0] for entry in some], logprobs=plain)
    for entry, again in zip(some, entries_of(output), strict=True):
        token = entry.token_ids[0]
        assert to_logprob_dict(again, None)[token].logprob == entry.logprobs[0] and again == to_entry(token, to_logprob_dict(entry, None))
        k = len(entry.token_ids) - 1
        assert (again.token_ids[1 : k + 1], again.logprobs[1 : k + 1]) == (entry.token_ids[1:], entry.logprobs[1:])


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8), st.booleans())
@settings(max_examples=100, deadline=None, derandomize=True)
def test_frames(text: str, include_usage: bool) -> None:
    written = b'{"content":[],"refusal":null}'
    for kind, fields in ((ChatFrames, {"delta": {"content": text}}), (CompletionFrames, {"text": text})):
        frames = kind("id", 1, "m", include_usage)
        for logprobs in (None, written):
            value = None if logprobs is None else json.loads(logprobs)
            plain = frames.choice(1, {**fields, "logprobs": value, "finish_reason": None})
            assert json.loads(frames.text(1, text, logprobs)[6:]) == json.loads(plain[6:])
