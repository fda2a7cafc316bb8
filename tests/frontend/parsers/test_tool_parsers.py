"""Every format's answers, whole and for every way to cut them."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parser_cases import CASES, NOW, PARIS, TOOLS, Case, as_values, check_order, make, run

from octavo.frontend.parsers import (
    TOOL_PARSERS,
    Content,
    Reasoning,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    assemble,
    make_forced_parser,
    make_parser,
)
from octavo.frontend.parsers.events import Event


@pytest.mark.parametrize("case", CASES, ids=str)
def test_answer(case: Case) -> None:
    message = assemble(run(make(case), [case.text], case.reason))
    assert as_values(message.tool_calls) == case.calls
    assert message.content == case.content
    assert message.reasoning == case.reasoning


@pytest.mark.parametrize("case", CASES, ids=str)
def test_cut_in_two_anywhere_and_character_by_character(case: Case) -> None:
    whole = run(make(case), [case.text], case.reason)
    check_order(whole)
    for at in range(1, len(case.text)):
        assert run(make(case), [case.text[:at], case.text[at:]], case.reason) == whole
    assert run(make(case), list(case.text), case.reason) == whole


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[a:b] for a, b in zip(edges, edges[1:])]


@settings(max_examples=400, deadline=None, derandomize=True)
@given(st.sampled_from(CASES), st.lists(st.integers(0, 10_000), max_size=30))
def test_any_cuts(case: Case, cuts: list[int]) -> None:
    whole = run(make(case), [case.text], case.reason)
    assert run(make(case), pieces_of(case.text, cuts), case.reason) == whole


FRAGMENTS = sorted(
    {
        *(
            '{"name": "now", "arguments": {}}',
            '{"name": "get_weather", "parameters": {"city": "P',
            '"name"',
            '{"a": [1, {',
            "}",
            "]",
            '"',
            "'",
        ),
        *(
            "[now()",
            "[get_weather(city='x', days=",
            "]",
            ")",
            ", ",
            ";",
            " ",
            "\n",
            "\\",
            "\\u00e9",
            "\\",
            "12",
            "-",
            "1e",
            "true",
            "Non",
            "None",
        ),
        *(
            "<tool_call>",
            "</tool_call>",
            "<function=",
            "<function=now>",
            "<parameter=city>",
            "</parameter>",
            "</function>",
            "<",
            "now",
            "get_weather",
        ),
        *("<arg_key>", "days</arg_key>", "<arg_value>", "</arg_value>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[", "{", "<|python_tag|>"),
        *(
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁sep｜>",
            "```json\n",
            "```",
            "<｜tool▁call▁end｜>",
            "<｜tool▁calls▁end｜>",
        ),
        *(
            "<|channel|>",
            "<|message|>",
            "<|start|>",
            "<|end|>",
            "<|call|>",
            "analysis",
            "commentary to=functions.now ",
            "final",
            "<|python_start|>",
        ),
        *("é", "😀", "text", "\x01", "<|python_end|>", "x" * 300, "<think>", "</think>"),
    }
)


@settings(max_examples=1200, deadline=None, derandomize=True)
@given(
    st.sampled_from(sorted(TOOL_PARSERS)),
    st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join),
    st.lists(st.integers(0, 10_000), max_size=8),
    st.sampled_from(["stop", "length"]),
    st.sampled_from([None, "qwen3"]),
)
def test_any_text_with_any_cuts(name: str, text: str, cuts: list[int], reason: str, reasoning: str | None) -> None:
    def fresh():  # noqa: ANN202
        return make_parser(name, None if name == "gpt_oss" else reasoning, tools=TOOLS)

    whole = run(fresh(), [text], reason)
    check_order(whole)
    for call in assemble(whole).tool_calls:
        if call.complete:
            assert isinstance(json.loads(call.arguments), dict)
    assert run(fresh(), pieces_of(text, cuts), reason) == whole
    assert run(fresh(), list(text), reason) == whole


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.sampled_from([name for name in sorted(TOOL_PARSERS) if name != "gpt_oss"]),
    st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join),
)
def test_text_without_calls_comes_back_to_the_letter(name: str, text: str) -> None:
    events = run(make_parser(name, None, tools=TOOLS), [text])
    message = assemble(events)
    if not message.tool_calls:
        assert message.content == text


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_cut_answer_is_a_prefix_of_the_whole_one(case: Case) -> None:
    """Wherever "length" cuts: the arguments seen are a prefix of the whole call's, and no call is complete too early."""
    whole = assemble(run(make(case), [case.text], case.reason)).tool_calls
    if not whole or any(isinstance(e, ToolCallEnd) and e.status == "broken" for e in run(make(case), [case.text], case.reason)):
        return
    for at in range(len(case.text)):
        calls = assemble(run(make(case), [case.text[:at]], "length")).tool_calls
        assert len(calls) <= len(whole)
        for seen, full in zip(calls, whole):
            assert seen.name == full.name
            assert full.arguments.startswith(seen.arguments)
            assert seen.arguments == full.arguments or not seen.complete
        assert all(call.complete for call in calls[:-1])


def text_of(events: list[Event], kind: type) -> str:
    return "".join(event.text for event in events if isinstance(event, kind))


def test_arguments_and_strings_stream_as_they_come() -> None:
    steps = {
        "hermes": ('<tool_call>{"name": "get_weather", "arguments": {"city": "Pa', '{"city": "Pa'),
        "qwen3_coder": ("<tool_call><function=get_weather><parameter=city>\nPa", '{"city": "Pa'),
        "glm": ("<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Pa", '{"city": "Pa'),
        "llama4_pythonic": ("[get_weather(city='Pa", '{"city": "Pa'),
        "mistral": ('[TOOL_CALLS]get_weather[ARGS]{"city": "Pa', '{"city": "Pa'),
        "gpt_oss": ('<|channel|>commentary to=functions.get_weather<|message|>{"city": "Pa', '{"city": "Pa'),
    }
    for name, (text, arguments) in steps.items():
        events = make_parser(name, None, tools=TOOLS).push(text)
        assert events == [ToolCallStart(0, "get_weather"), ToolCallArguments(0, arguments)], name


def test_content_is_held_back_only_while_it_may_be_a_tag() -> None:
    parser = make_parser("hermes", None, tools=TOOLS)
    assert parser.push("a <tool") == [Content("a")]
    assert parser.push("box>") == [Content(" <toolbox>")]
    assert parser.push(" <tool_call") == []
    assert parser.push("er>") == [Content(" <tool_caller>")]
    bare = make_parser("llama3_json", None, tools=TOOLS)
    assert bare.push('{"answer"') == [Content('{"answer"')]  # at its first key


def test_call_ids_that_the_model_wrote() -> None:
    case = Case("mistral", '[TOOL_CALLS]now[CALL_ID]abcDEF123[ARGS]{}[TOOL_CALLS][{"id": "x", "name": "now", "arguments": {}}]')
    assert [call.id for call in assemble(run(make(case), [case.text])).tool_calls] == ["abcDEF123", "x"]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_without_tools_all_is_content(case: Case) -> None:
    if case.parser != "gpt_oss":
        assert run(make_parser(case.parser, None), list(case.text)) == ([Content(case.text)] if case.text else [])
    else:
        events = run(make_parser("gpt_oss", None), list(case.text))
        assert not any(isinstance(event, ToolCallStart) for event in events)
        assert text_of(events, Reasoning) == (case.reasoning or "")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_whole_calls_only(case: Case) -> None:
    """With ``whole_calls`` a stream never shows a call that turns out broken, and says the same in the end."""
    events = run(make(case, whole_calls=True), list(case.text), case.reason)
    check_order(events)
    assert not any(isinstance(event, ToolCallEnd) and event.status == "broken" for event in events)
    assert assemble(events) == assemble(run(make(case), [case.text], case.reason))


def test_broken_call_ends_as_broken_and_its_text_follows() -> None:
    text = '<tool_call>{"name": "get_weather", "arguments": {"city": }}</tool_call>'
    events = run(make(Case("hermes", text)), [text])
    assert events[-2:] == [ToolCallEnd(0, "broken"), Content(text)]


FORCED = [
    (None, '[{"name": "now", "parameters": {}}, {"name": "get_weather", "arguments": {"city": "Paris"}}]', "stop", [NOW, PARIS], None),
    (None, ' {"name": "now", "parameters": {}} ', "stop", [NOW], None),
    (None, '[{"name": "now", "parameters": {}}', "length", [NOW], None),
    (None, '[{"name": "get_weather", "parameters": {"city": "P', "length", [("get_weather", '{"city": "P')], None),
    (None, "sorry", "stop", [], "sorry"),
    ("now", "{} \0 text", "stop", [NOW], "\0 text"),
    ("get_weather", '{"city": "Paris"}', "stop", [PARIS], None),
    ("now", "{}", "stop", [NOW], None),
    ("get_weather", '{"city": "P', "length", [("get_weather", '{"city": "P')], None),
    ("now", "5", "stop", [], "5"),
]


@pytest.mark.parametrize(("name", "text", "reason", "calls", "content"), FORCED)
def test_forced_calls(name: str | None, text: str, reason: str, calls: list, content: str | None) -> None:
    whole = run(make_forced_parser(name, None, tools=TOOLS), [text], reason)
    assert run(make_forced_parser(name, None, tools=TOOLS), list(text), reason) == whole
    message = assemble(whole)
    assert (as_values(message.tool_calls), message.content) == (calls, content)
    thought = assemble(run(make_forced_parser(name, "qwen3", tools=TOOLS), [f"<think>hm</think>\n{text}"], reason))
    assert (thought.reasoning, thought.tool_calls) == ("hm", message.tool_calls)


def test_a_parser_serves_one_answer() -> None:
    parser = make_parser("hermes", None, tools=TOOLS)
    parser.finish()
    with pytest.raises(RuntimeError, match="new answer"):
        parser.push("x")


def test_names_and_nesting_have_bounds() -> None:
    deep = '<tool_call>{"name": "now", "arguments": {"a": ' + "[" * 5000 + "]" * 5000 + "}}</tool_call>"
    long_name = '<tool_call>{"name": "' + "n" * 100_000 + '", "arguments": {}}</tool_call>'
    long_number = '<tool_call>{"name": "now", "arguments": {"a": ' + "9" * 100_000 + "}}</tool_call>"
    for text in (deep, long_name, long_number):
        message = assemble(run(make(Case("hermes", text)), [text]))
        assert message.tool_calls == [] and message.content == text
