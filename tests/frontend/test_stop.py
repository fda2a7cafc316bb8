"""StopChecker against an obvious model of its rule, for every way to cut the text."""

from __future__ import annotations

import itertools
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.frontend.stop import StopChecker
from tests.waiting import slowness


def truth(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The rule, read off its docstring: smallest end; longest of those that end there."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return (text[:end] if include else text[: end - len(stop)]), stop
    return text, None


def run(pieces: list[str], stops: list[str], include: bool) -> tuple[str, str | None, list[str]]:
    checker = StopChecker(stops, include)
    sent, matched = [], None
    for piece in pieces:
        text, matched = checker.push(piece)
        sent.append(text)
        if matched is not None:
            break
    sent.append(checker.finish())
    return "".join(sent), matched, sent


def cuts(text: str):
    """Every way to cut ``text`` into non-empty pieces."""
    for mask in range(1 << max(len(text) - 1, 0)):
        pieces, start = [], 0
        for i in range(1, len(text)):
            if mask >> (i - 1) & 1:
                pieces.append(text[start:i])
                start = i
        pieces.append(text[start:])
        yield pieces


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize(
    ("text", "stops"),
    [
        ("hello world", ["wor"]),
        ("aaaaabaaa", ["aab"]),
        ("abababac", ["ababac", "bc"]),
        ("xabcdx", ["abcd", "bc"]),
        ("xabcdx", ["cd", "abcd", "d"]),
        ("abcabd", ["abd", "zz"]),
        ("aaaa", ["aaaaa"]),
        ("a", ["a"]),
        ("", ["a"]),
        ("żółć🙂🙂x", ["🙂x"]),
    ],
)
def test_every_cut(text: str, stops: list[str], include: bool) -> None:
    expected = truth(text, stops, include)
    for pieces in cuts(text):
        sent, matched, _ = run(pieces, stops, include)
        assert (sent, matched) == expected, pieces


def test_random_texts_over_a_small_alphabet() -> None:
    rng = random.Random(7)
    for _ in range(4000):
        text = "".join(rng.choices("ab", k=rng.randint(0, 30)))
        stops = ["".join(rng.choices("ab", k=rng.randint(1, 8))) for _ in range(rng.randint(0, 4))]
        include = rng.random() < 0.3
        pieces, left = [], text
        while left:
            n = rng.randint(1, 6)
            pieces.append(left[:n])
            left = left[n:]
        sent, matched, _ = run(pieces, stops, include)
        assert (sent, matched) == truth(text, stops, include), (pieces, stops, include)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.text("abc", max_size=4), max_size=12), st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=3))
def test_holds_back_exactly_what_may_become_a_stop(pieces: list[str], stops: list[str]) -> None:
    checker = StopChecker(stops)
    seen = sent = ""
    for piece in pieces:
        text, matched = checker.push(piece)
        sent += text
        seen += piece
        if matched is not None:
            return
        longest = max((n for stop in stops for n in range(len(stop)) if seen.endswith(stop[:n])), default=0)
        assert sent == seen[: len(seen) - longest]


def test_nothing_is_held_back_when_the_stop_is_sent_too() -> None:
    checker = StopChecker(["abc"], include_in_output=True)
    assert checker.push("xab") == ("xab", None)
    assert checker.push("cd") == ("c", "abc")
    assert checker.match_end == 4


def test_unarmed_text_does_not_match_but_may_begin_a_stop() -> None:
    checker = StopChecker(["ab"])
    assert checker.push("ab a", armed=False) == ("ab ", None)
    assert checker.push("b", armed=True) == ("", "ab")


def test_unarmed_pushes_against_the_truth() -> None:
    rng = random.Random(11)
    for _ in range(2000):
        text = "".join(rng.choices("ab", k=rng.randint(1, 20)))
        stops = ["".join(rng.choices("ab", k=rng.randint(1, 5))) for _ in range(rng.randint(1, 3))]
        split = rng.randint(0, len(text))
        expected: tuple[str, str | None] = (text, None)
        for end in range(split + 1, len(text) + 1):
            complete = [stop for stop in stops if text[:end].endswith(stop)]
            if complete:
                stop = max(complete, key=len)
                expected = text[: end - len(stop)], stop
                break
        checker = StopChecker(stops)
        first, _ = checker.push(text[:split], armed=False)
        second, matched = checker.push(text[split:])
        assert (first + second + checker.finish(), matched) == expected


def test_after_a_match_nothing_more_is_sent() -> None:
    checker = StopChecker(["!"])
    assert checker.push("hi! there") == ("hi", "!")
    assert checker.match_end == 3
    assert checker.push("more") == ("", "!")
    assert checker.finish() == ""


def test_no_stops_pass_all() -> None:
    checker = StopChecker([])
    assert checker.push("text") == ("text", None)
    assert checker.finish() == ""


@pytest.mark.parametrize("stops", ["abc", [""], [1]])
def test_refuses_what_is_no_list_of_stops(stops: object) -> None:
    with pytest.raises(ValueError):
        StopChecker(stops)  # type: ignore[arg-type]


@pytest.mark.parametrize("piece", [1, 7, 100_000])
def test_pathological_stops_cost_linear_time(piece: int) -> None:
    stops = ["a" * n + "b" for n in (50_000, 49_999, 20_000)]
    text = "a" * 100_000

    def seconds() -> float:
        checker = StopChecker(stops)
        start = time.process_time()
        for i in range(0, len(text), piece):
            checker.push(text[i : i + piece])
        return time.process_time() - start

    # A quadratic matcher needs 10^9 steps here, far beyond any noise of this bound.
    assert min(seconds() for _ in range(2)) < 5.0 * slowness()


def test_a_huge_stop_costs_nothing_until_the_text_follows_it() -> None:
    checker = StopChecker(["x" * 5_000_000])
    assert checker.push("yyxx") == ("yy", None)
    assert len(checker._patterns[0].failure) < 10


def test_stops_spread_over_tokens_of_real_text() -> None:
    text = "The quick brown fox jumps over the lazy dog. " * 3
    for start, length in itertools.product(range(0, 40, 3), (7, 10)):
        stop = text[start : start + length]
        for width in (1, 2, 3, 5):
            sent, matched, parts = run([text[i : i + width] for i in range(0, len(text), width)], [stop], False)
            assert matched == stop and sent == text[: text.index(stop)]
            assert "".join(parts) == sent
