"""Text that only goes on is passed on at one look: when that is so, and that it changes nothing."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parser_cases import CASES, TOOLS, Case, check_order, make

from octavo.frontend.parsers import Content, Reasoning, ToolCallArguments, make_parser
from octavo.frontend.parsers.events import Event, merged

CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "P'


@pytest.mark.parametrize(
    ("before", "text", "event"),
    [
        ("Hello", " there", Content(" there")),
        ("Hello", "\nthere", Content("\nthere")),
        ("Hello", " there ", None),  # its white space may stand before a call
        ("Hello ", "there", None),  # so may this
        ("Hello", " <b", None),
        ("Hello <", "b", None),
        ("", "Hello", None),
        (CALL, "aris", ToolCallArguments(0, "aris")),
        (CALL, "<tool_call>", ToolCallArguments(0, "<tool_call>")),
        (CALL, 'aris"', None),
        (CALL, "\\u00e9", None),
        (CALL + "\\", "n", None),
        (CALL, "a\n", None),  # is written as an escape
        (CALL + '", "days": 1', "2", None),
        (CALL + '"}}</tool_call>', "more", None),
        (CALL + '"}}</tool_call>more', " still", Content(" still")),
    ],
)
def test_what_is_plain(before: str, text: str, event: Event | None) -> None:
    parser = make_parser("hermes", None, tools=TOOLS)
    parser.push(before)
    assert parser.plain(text) == event
    parser.finish()
    assert parser.plain(text) is None


def test_reasoning_and_what_follows_it() -> None:
    parser = make_parser("hermes", "qwen3", tools=TOOLS)
    assert parser.plain("<think>") is None
    parser.push("<think>So")
    assert parser.plain(" far") == Reasoning(" far") and parser.plain(" <") is None and parser.plain(" far ") is None
    parser.push("</think>Well")
    assert parser.plain(" now") == Content(" now") and parser.plain("<tool_call>") is None


def test_harmony() -> None:
    parser = make_parser("gpt_oss", "gpt_oss", tools=TOOLS)
    parser.push("<|channel|>analysis<|message|>So")
    assert parser.plain(" far ") == Reasoning(" far ")
    parser.push("<|end|><|start|>assistant<|channel|>final<|message|>Well")
    assert parser.plain(" now") == Content(" now")


def test_calls_that_are_shown_whole_are_not_plain() -> None:
    parser = make_parser("hermes", None, tools=TOOLS, whole_calls=True)
    parser.push("Hello")
    assert parser.plain(" there") == Content(" there")
    parser.push(CALL)
    assert parser.plain("aris") is None


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.sampled_from(CASES), st.lists(st.integers(0, 10_000), max_size=30))
def test_any_cuts_with_and_without(case: Case, cuts: list[int]) -> None:
    """The same events, piece by piece but for neighbours of one kind, as a parser gives that looks at everything."""
    quick, slow = make(case), make(case)
    parts = [part for part in (slow._reasoning, slow._tool_calls) if part is not None]
    edges = [0, *sorted(cut % (len(case.text) + 1) for cut in cuts), len(case.text)]
    found: list[Event] = []
    expected: list[Event] = []
    for a, b in zip(edges, edges[1:]):
        piece = case.text[a:b]
        event = quick.plain(piece)
        found += quick.push(piece) if event is None else [event]
        for part in parts:
            part._stretch = None
        expected += slow.push(piece)
        assert merged(found) == merged(expected)
    found, expected = found + quick.finish(case.reason), expected + slow.finish(case.reason)
    check_order(found)
    assert merged(found) == merged(expected)
