"""Parsers take linear time and bounded memory, whatever a model (or whoever steers it) writes."""

from __future__ import annotations

import time

import pytest
from parser_cases import TOOLS, run

from octavo.frontend.parsers import TOOL_PARSERS, OutputParser, make_parser

UNITS = {
    "hermes": ["<tool_call>", "<tool_call>{", '<tool_call>{"name": "now", "arguments": {]', '{"name": "now"', '<tool_call>{"a": "'],
    "llama3_json": ["<|python_tag|>", '<|python_tag|>{"name": "now", "parameters": {', '{"name": ', '{"name": "now", "parameters": {}};'],
    "llama4_pythonic": ["<|python_start|>", "<|python_start|>[now(a=", "[now(), ", "[now(a='\\", "[now(a=[(["],
    "mistral": ["[TOOL_CALLS]", "[TOOL_CALLS]now", "[TOOL_CALLS][{", "[TOOL_CALLS]now[ARGS]{", "[TOOL_CALLS]now[ARGS]{}"],
    "qwen3_coder": [
        "<tool_call><function=now><parameter=a>",
        "<function=",
        "\n</parameter",
        "<function=now><parameter=a>\n</parameter></function>",
        "<function=now><parameter=a>1</parameter>",
    ],
    "deepseek_v3": ["<｜tool▁call▁begin｜>", "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{", "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}"],
    "glm": ["<tool_call>now<arg_key>", "<tool_call>", "<tool_call>now\n<arg_key>a</arg_key><arg_value>", "<tool_call>now</tool_call>"],
    "gpt_oss": ["<|channel|>", "<|channel|>final<|message|>", "<|start|>", "<|channel|>commentary to=functions.now<|message|>{", "<|end|>"],
}
COMMON = ["<", "[", " ", "\n", "a", '"', "\\", "{", "]", "<tool_cal", "1", " a", "<think>", "</think>"]
PREFIXES = {
    "hermes": '<tool_call>{"name": "now", "arguments": {"a": ',
    "llama3_json": '{"name": "now", "parameters": {"a": ',
    "llama4_pythonic": "[now(a=",
    "mistral": '[TOOL_CALLS]now[ARGS]{"a": "',
    "qwen3_coder": "<tool_call><function=now><parameter=a>",
    "deepseek_v3": '<｜tool▁call▁begin｜>now<｜tool▁sep｜>{"a": "',
    "glm": "<tool_call>now\n<arg_key>a</arg_key><arg_value>",
    "gpt_oss": '<|channel|>commentary to=functions.now<|message|>{"a": "',
}


def fresh(name: str) -> OutputParser:
    return make_parser(name, None if name == "gpt_oss" else "qwen3", tools=TOOLS)


def seconds(name: str, text: str) -> float:
    best = float("inf")
    for _ in range(2):
        begin = time.process_time()  # others' work does not count
        run(fresh(name), [text], "length")
        best = min(best, time.process_time() - begin)
    return best


@pytest.mark.parametrize("name", sorted(TOOL_PARSERS))
def test_linear_time(name: str) -> None:
    """Ten times the text may not take a hundred times the time."""
    for unit in [*UNITS[name], *COMMON]:
        for prefix in ("", PREFIXES[name]):
            texts = [prefix + unit * (length // len(unit)) for length in (15_000, 150_000)]
            if seconds(name, texts[1]) > 0.02 + 40 * seconds(name, texts[0]):
                again, later = seconds(name, texts[0]), seconds(name, texts[1])  # the machine may have been busy
                assert later <= 0.02 + 40 * again, f"{prefix + unit!r}: {again:.4f} s, then {later:.4f} s"


@pytest.mark.parametrize("name", sorted(TOOL_PARSERS))
def test_what_waits_for_more_text_is_bounded(name: str) -> None:
    """A push looks at what waited before it again: with that bounded, a stream of any cut takes linear time, too."""
    for unit in [*UNITS[name], *COMMON]:
        for prefix in ("", PREFIXES[name]):
            parser = fresh(name)
            readers = [part._reader for part in (parser._reasoning, parser._tool_calls) if part is not None]
            for char in prefix + unit * (1_500 // len(unit)):
                parser.push(char)
                assert all(len(reader.text) <= 64 for reader in readers), f"{prefix + unit!r}"


@pytest.mark.parametrize("name", sorted(TOOL_PARSERS))
def test_what_is_held_back_is_bounded(name: str) -> None:
    """Content is not kept: after any amount of it no more than a tag is still to come."""
    for unit in ("word ", "<", "[TOOL_", "<tool_c", "{", "<|chan", "<｜tool"):
        parser = make_parser(name, None, tools=TOOLS)
        events, length = [], 0
        for _ in range(2_000):
            length += len(unit) + 1
            events += parser.push("x" + unit)
        assert length - sum(len(event.text) for event in events) <= 64
