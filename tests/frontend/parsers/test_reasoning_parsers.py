"""Reasoning split off, by prompt and tags, for every cut; together with tool calls."""

from __future__ import annotations

import pytest
from parser_cases import TOOLS, as_values, run

from octavo.frontend.parsers import Content, Reasoning, assemble, make_parser

OPEN, CLOSED, BARE = "<|assistant|>\n<think>\n", "<|assistant|>\n<think>\n\n</think>\n\n", "<|assistant|>\n"
ANSWERS = [
    ("deepseek_r1", None, "I think.\n</think>\n\nYes.", "I think.", "Yes."),
    ("deepseek_r1", OPEN, "I think.\n</think>\n\nYes.", "I think.", "Yes."),
    ("deepseek_r1", BARE, "<think>\nI think.\n</think>\n\nYes. ", "I think.", "Yes. "),
    ("deepseek_r1", OPEN, "I think", "I think", ""),
    ("deepseek_r1", OPEN, "I < </thin", "I < </thin", ""),
    ("deepseek_r1", OPEN, "\n</think>", None, ""),
    ("deepseek_r1", "<｜Assistant｜></think>", " Yes <think>no</think>", None, " Yes <think>no</think>"),
    ("qwen3", BARE, "<think>\na\n\n b\n</think>\n\nYes", "a\n\n b", "Yes"),
    ("qwen3", None, "\n\n<think></think>Yes", None, "Yes"),
    ("qwen3", BARE, " \nYes <think>no</think>", None, " \nYes <think>no</think>"),
    ("qwen3", BARE, " <thin", None, " <thin"),
    ("qwen3", BARE, " ", None, " "),
    ("qwen3", BARE, "", None, ""),
    ("qwen3", CLOSED, "Yes", None, "Yes"),
    ("qwen3", CLOSED, "<think>a</think>b", None, "<think>a</think>b"),
    ("qwen3", OPEN, "a</think>b</think>", "a", "b</think>"),
    ("qwen3", "user: <think>\n" + BARE, "Yes", None, "Yes"),
    (
        "qwen3",
        OPEN,
        '<tool_call>{"name": "now", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "now", "arguments": {}}</tool_call>',
        "",
    ),
    ("glm", BARE, "\n<think>é 😀</think>\nYes", "é 😀", "Yes"),
    ("glm", "<|assistant|>\n<think></think>", "\nYes", None, "\nYes"),
    ("mistral", BARE, "[THINK]hm[/THINK]Yes <think>", "hm", "Yes <think>"),
]


@pytest.mark.parametrize(("name", "prompt", "text", "reasoning", "content"), ANSWERS)
def test_answer_however_cut(name: str, prompt: str | None, text: str, reasoning: str | None, content: str) -> None:
    def fresh():  # noqa: ANN202
        return make_parser("hermes", name, tools=TOOLS, prompt=prompt)

    whole = run(fresh(), [text], "length")
    message = assemble(whole)
    assert (message.reasoning, message.content, message.tool_calls) == (reasoning, content, [])
    for at in range(len(text)):
        assert run(fresh(), [text[:at], text[at:]], "length") == whole
    assert run(fresh(), list(text), "length") == whole
    assert assemble(run(make_parser(None, name, prompt=prompt), list(text))) == message


def test_beginning_overrules_the_prompt() -> None:
    assert run(make_parser(None, "qwen3", prompt=BARE, beginning="open"), ["a</think>b"]) == [Reasoning("a"), Content("b")]
    assert run(make_parser(None, "deepseek_r1", beginning="closed"), ["a</think>b"]) == [Content("a</think>b")]


def test_reasoning_then_content_then_calls() -> None:
    text = '<think>\nUse <tool_call>?\n</think>\n\nSure.\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    whole = run(make_parser("hermes", "qwen3", tools=TOOLS), [text])
    message = assemble(whole)
    assert (message.reasoning, message.content) == ("Use <tool_call>?", "Sure.")
    assert as_values(message.tool_calls) == [("now", {})]
    for at in range(len(text)):
        assert run(make_parser("hermes", "qwen3", tools=TOOLS), [text[:at], text[at:]]) == whole


def test_bare_json_call_after_reasoning() -> None:
    message = assemble(run(make_parser("llama3_json", "deepseek_r1", tools=TOOLS), list('hm</think>\n{"name": "now", "parameters": {}}')))
    assert message.reasoning == "hm" and message.content is None and as_values(message.tool_calls) == [("now", {})]


def test_reasoning_streams_and_the_parser_knows_where_it_is() -> None:
    parser = make_parser("hermes", "qwen3", tools=TOOLS)
    assert not parser.in_reasoning
    assert parser.push("<think>\none") == [Reasoning("one")]
    assert parser.in_reasoning
    assert parser.push(" two \n</thi") == [Reasoning(" two")]
    assert parser.push("nk>\n\nYes") == [Content("Yes")]
    assert not parser.in_reasoning
    harmony = make_parser("gpt_oss", "gpt_oss")
    assert harmony.push("<|channel|>analysis<|message|>a") == [Reasoning("a")] and harmony.in_reasoning
    assert harmony.push("<|end|><|start|>assistant<|channel|>final<|message|>b") == [Content("b")] and not harmony.in_reasoning
