"""Tools in prompts: templates that know no tools, and templates that want a call's arguments as text."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest

from octavo.frontend.chat_template import ChatTemplate
from octavo.frontend.parsers import assemble, make_parser
from octavo.frontend.tool_prompt import PARSER, with_tools_as_text

TOKENIZER = SimpleNamespace(special_tokens={"eos_token": "</s>"})
CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"city": "Malm\u00f6", "days": 2}'}}
CHAT = [
    {"role": "user", "content": "weather?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
]
HEAD = "{% for m in messages %}{{ '[' + m.role + ']' + (m.content or '') }}{% if m.tool_calls %}{% for c in m.tool_calls %}"
TAIL = "{% endfor %}{% endif %}{% endfor %}"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("{{ c.function.arguments | tojson }}", '{"city": "Malm\u00f6", "days": 2}'),
        ("{{ 'x' + c.function['arguments'] }}", 'x{"city": "Malm\u00f6", "days": 2}'),
        ("{{ c.function.arguments }}", '{"city": "Malm\u00f6", "days": 2}'),
        ("{% for k, v in c.function.arguments.items() %}<{{ k }}>{{ v }}</{{ k }}>{% endfor %}", "<city>Malm\u00f6</city><days>2</days>"),
        ("{% for k, v in c.function.arguments | items %}{{ k }}={{ v | string }};{% endfor %}", "city=Malm\u00f6;days=2;"),
        (
            "{% if c.function.arguments is string %}S{{ c.function.arguments }}{% else %}O{{ c.function.arguments | tojson }}{% endif %}",
            'O{"city": "Malm\u00f6", "days": 2}',
        ),
    ],
)
def test_arguments_are_what_the_template_wants(arguments: str, expected: str) -> None:
    template = ChatTemplate(HEAD + arguments + TAIL, TOKENIZER)  # type: ignore[arg-type]
    as_object = copy.deepcopy(CHAT)
    as_object[1]["tool_calls"][0]["function"]["arguments"] = {"city": "Malm\u00f6", "days": 2}  # type: ignore[index]
    for chat in (CHAT, as_object):
        assert template.render(chat, add_generation_prompt=False) == f"[user]weather?[assistant]{expected}[tool]rain"


def test_what_is_not_json_is_shown_as_it_is() -> None:
    chat = copy.deepcopy(CHAT)
    chat[1]["tool_calls"][0]["function"]["arguments"] = '{"city": "Os'  # type: ignore[index]
    for shown in ("{{ 'x' + c.function['arguments'] }}", "{{ c.function.arguments }}"):
        assert '{"city": "Os' in ChatTemplate(HEAD + shown + TAIL, TOKENIZER).render(chat, add_generation_prompt=False)  # type: ignore[arg-type]


def test_tools_as_text() -> None:
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    before = copy.deepcopy(CHAT)
    chat = with_tools_as_text(CHAT, tools)
    assert CHAT == before
    assert [m["role"] for m in chat] == ["system", "user", "assistant", "user"]
    assert '{"name": "look", "parameters": {"type": "object"}}' in chat[0]["content"]
    assert chat[3]["content"] == "<tool_response>\nrain\n</tool_response>"
    assert with_tools_as_text(CHAT, None)[0]["role"] == "user"
    system = with_tools_as_text([{"role": "system", "content": "Be brief."}, *CHAT], tools)
    assert system[0]["content"].startswith("Be brief.\n\nYou can call") and len(system) == 4


def test_calls_as_text_are_what_the_parser_reads() -> None:
    text = with_tools_as_text(CHAT, None)[1]["content"]
    parser = make_parser(PARSER, None, tools=[{"name": "look"}])
    message = assemble([*parser.push(text), *parser.finish()])
    assert [(c.name, c.arguments) for c in message.tool_calls] == [("look", '{"city": "Malm\u00f6", "days": 2}')]
    assert message.content is None
