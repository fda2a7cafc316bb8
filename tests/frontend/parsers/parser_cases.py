"""One table of answers: (parser, text, finish reason, what it says). Texts follow the formats' public documentation and templates."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from octavo.frontend.parsers import Event, OutputParser, ToolCallArguments, ToolCallEnd, ToolCallStart, make_parser
from octavo.frontend.parsers.events import merged


def tool(name: str, **properties: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


TOOLS = [
    tool(
        "get_weather",
        city={"type": "string"},
        days={"type": "integer"},
        metric={"type": "boolean"},
        near={"type": "array", "items": {"type": "string"}},
        options={"type": "object"},
        limit={"type": "number"},
        note={"type": ["string", "null"]},
        anything={},
        mode={"anyOf": [{"type": "integer"}, {"type": "string"}]},
    ),
    tool("now"),
    tool("write-file.v2", path={"type": "string"}, content={"type": "string"}),
]


@dataclass
class Case:
    parser: str
    text: str
    calls: list[tuple[str, Any]] = field(default_factory=list)  # (name, arguments); arguments as text if the call is cut
    content: str | None = None
    reasoning: str | None = None
    reason: str = "stop"
    note: str = ""

    def __str__(self) -> str:
        return f"{self.parser}-{self.note or self.text[:24]!r}"


def make(case: Case, **options: Any) -> OutputParser:
    return make_parser(case.parser, None, tools=TOOLS, **options)


def run(parser: OutputParser, pieces: list[str], reason: str = "stop") -> list[Event]:
    """All events of the pieces, neighbours merged."""
    events: list[Event] = []
    for piece in pieces:
        events += parser.push(piece)
    return merged(events + parser.finish(reason))


def check_order(events: list[Event]) -> None:
    """Each call starts, has arguments, ends; one at a time, indices counting up."""
    current: int | None = None
    following = 0
    for event in events:
        if isinstance(event, ToolCallStart):
            assert current is None and event.index == following
            current, following = event.index, following + 1
        elif isinstance(event, ToolCallArguments):
            assert event.index == current
        elif isinstance(event, ToolCallEnd):
            assert event.index == current
            current = None
    assert current is None


def as_values(calls: list[Any]) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments) if call.complete else call.arguments) for call in calls]


PARIS = ("get_weather", {"city": "Paris"})
NOW = ("now", {})
NESTED = {"city": 'a "b" \\ \n\t é 日本 😀 {[<tool_call>]} </tool_call>', "options": {"a": [1, {"b": [[], {}]}], "c": None}, "days": -3}
NESTED_CALL = ("get_weather", NESTED)
NESTED_JSON = json.dumps(NESTED, ensure_ascii=False)
ASCII_JSON = json.dumps(NESTED)

HERMES = [
    Case("hermes", '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>', [PARIS]),
    Case("hermes", '<tool_call>{"name":"now","arguments":{}}</tool_call>', [NOW], note="no white space, no arguments"),
    Case("hermes", '<tool_call>\n{"name": "now"}\n</tool_call>', [NOW], note="arguments left out"),
    Case("hermes", '<tool_call>\n{"name": "now", "arguments": null}\n</tool_call>', [NOW], note="arguments null"),
    Case(
        "hermes",
        'Let me see.\n\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n',
        [PARIS, NOW],
        "Let me see.",
        note="content, then parallel calls",
    ),
    Case(
        "hermes",
        'A\n<tool_call>{"name": "now", "arguments": {}}</tool_call>\n\nB\n',
        [NOW],
        "A\n\n\nB",
        note="content before and after",
    ),
    Case("hermes", '<tool_call>{"name": "now", "arguments": {}}</tool_call>\n\nB', [NOW], "B", note="content after"),
    Case("hermes", f'<tool_call>{{"name": "get_weather", "arguments": {NESTED_JSON}}}</tool_call>', [NESTED_CALL], note="nested"),
    Case("hermes", f'<tool_call>{{"name": "get_weather", "arguments": {ASCII_JSON}}}</tool_call>', [NESTED_CALL], note="nested, escaped"),
    Case("hermes", '<tool_call>{"arguments": {"city": "Paris"}, "name": "get_weather"}</tool_call>', [PARIS], note="name last"),
    Case(
        "hermes",
        '<tool_call>{"type": "function", "extra": [1, {"x": "}"}], "name": "get_weather", '
        '"arguments": {"city": "Paris"}, "z": 1}</tool_call>',
        [PARIS],
        note="other keys",
    ),
    Case(
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\"}"}</tool_call>',
        [PARIS],
        note="arguments as a string",
    ),
    Case("hermes", '<tool_call>{"name": "get_weather", "arguments": {"city": "a\nb"}}</tool_call>', [("get_weather", {"city": "a\nb"})]),
    Case("hermes", '<tool_call>{"name": "now", "arguments": {}}', [NOW], note="end tag missing"),
    Case("hermes", '<tool_call>{"name": "now", "arguments": {}}\n</tool', [NOW], reason="length", note="end tag cut"),
    Case("hermes", '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}', [PARIS], reason="length", note="only the brace"),
    Case("hermes", "plain < text <tool> \n ", content="plain < text <tool> \n "),
    Case("hermes", "", content=""),
    Case("hermes", " \n ", content=" \n "),
    Case("hermes", "cut <tool_ca", content="cut <tool_ca", reason="length"),
    Case("hermes", 'x <tool_call>\n{"name": "get_w', content='x <tool_call>\n{"name": "get_w', reason="length", note="cut in the name"),
    Case(
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Par',
        [("get_weather", '{"city": "Par')],
        reason="length",
        note="cut in a string",
    ),
    Case(
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": {"days": 12',
        [("get_weather", '{"days": ')],
        reason="length",
        note="cut in a number",
    ),
    Case(
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": {"city": "a\\u00',
        [("get_weather", '{"city": "a')],
        reason="abort",
        note="cut in an escape",
    ),
    Case(
        "hermes",
        ' \n<tool_call>{"name": "get_weather", "arguments": {"city": "Par',
        content=' \n<tool_call>{"name": "get_weather", "arguments": {"city": "Par',
        note="stopped in a string: broken",
    ),
    Case(
        "hermes", '<tool_call>{"name": "rm", "arguments": {}}</tool_call>', content='<tool_call>{"name": "rm", "arguments": {}}</tool_call>'
    ),
    Case("hermes", "<tool_call>hello</tool_call>", content="<tool_call>hello</tool_call>"),
    Case("hermes", '<tool_call>{"name": 5}</tool_call>', content='<tool_call>{"name": 5}</tool_call>'),
    Case("hermes", '<tool_call>{"arguments": {}}</tool_call>', content='<tool_call>{"arguments": {}}</tool_call>', note="no name"),
    Case(
        "hermes",
        '<tool_call>{"name": "now", "arguments": [1]}</tool_call>',
        content='<tool_call>{"name": "now", "arguments": [1]}</tool_call>',
    ),
    Case(
        "hermes",
        ' <tool_call>{"name": "get_weather", "arguments": {"city": }}</tool_call> ',
        content=' <tool_call>{"name": "get_weather", "arguments": {"city": }}</tool_call> ',
        note="broken after it began",
    ),
    Case(
        "hermes",
        '<tool_call><tool_call>{"name": "now", "arguments": {}}</tool_call>',
        [NOW],
        "<tool_call>",
        note="a good call after a broken one",
    ),
    Case(
        "hermes",
        '<tool_call>{"name": "now", "arguments": {]}\n<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>',
        [PARIS],
        '<tool_call>{"name": "now", "arguments": {]}',
        note="a good call after one that broke late",
    ),
]

LLAMA3 = [
    Case("llama3_json", '{"name": "get_weather", "parameters": {"city": "Paris"}}', [PARIS]),
    Case("llama3_json", '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}', [PARIS]),
    Case("llama3_json", '\n{"type": "function", "name": "now", "parameters": {}}\n', [NOW]),
    Case("llama3_json", '{"name": "get_weather", "arguments": {"city": "Paris"}}', [PARIS], note="arguments"),
    Case(
        "llama3_json",
        '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}; {"name": "now", "parameters": {}}',
        [PARIS, NOW],
        note="two",
    ),
    Case("llama3_json", '{"name": "now", "parameters": {}}\n{"name": "now", "parameters": {}};', [NOW, NOW], note="two, by a line break"),
    Case("llama3_json", f'{{"name": "get_weather", "parameters": {NESTED_JSON}}}', [NESTED_CALL], note="nested"),
    Case("llama3_json", 'Sure: <|python_tag|>{"name": "now", "parameters": {}}', [NOW], "Sure:"),
    Case("llama3_json", '{"name": "now", "parameters": {}} and text', [NOW], "and text"),
    Case(
        "llama3_json",
        '{"answer": {"name": "now", "parameters": {}}}',
        content='{"answer": {"name": "now", "parameters": {}}}',
        note="an answer",
    ),
    Case("llama3_json", '{"name": "Ada", "parameters": {}}', content='{"name": "Ada", "parameters": {}}', note="an answer with a name"),
    Case("llama3_json", '{"name": "now"}', content='{"name": "now"}', note="a name is not enough"),
    Case("llama3_json", "{}", content="{}"),
    Case("llama3_json", '  { "a', content='  { "a', reason="length"),
    Case("llama3_json", "<|python_tag|>print(1)", content="<|python_tag|>print(1)", note="code"),
    Case(
        "llama3_json", 'text {"name": "now", "parameters": {}}', content='text {"name": "now", "parameters": {}}', note="JSON within text"
    ),
    Case(
        "llama3_json",
        '{"name": "get_weather", "parameters": {"city": "P',
        [("get_weather", '{"city": "P')],
        reason="length",
        note="cut",
    ),
]

LLAMA4 = [
    Case("llama4_pythonic", '[get_weather(city="Paris")]', [PARIS]),
    Case("llama4_pythonic", "<|python_start|>[get_weather(city='Paris'), now()]<|python_end|>", [PARIS, NOW]),
    Case(
        "llama4_pythonic",
        "[get_weather(city='it\\'s \"x\"\\n\\x41\\u00e9\\q', days=-1_000, metric=True, near=['a', \"b\",], "
        "options={'k': (1, 2.5, None), \"l\": {}}, limit=.5)]",
        [
            (
                "get_weather",
                {
                    "city": 'it\'s "x"\nAé\\q',
                    "days": -1000,
                    "metric": True,
                    "near": ["a", "b"],
                    "options": {"k": [1, 2.5, None], "l": {}},
                    "limit": 0.5,
                },
            )
        ],
        note="every literal",
    ),
    Case("llama4_pythonic", "[ now ( ) , now(), ]", [NOW, NOW], note="white space, trailing comma"),
    Case(
        "llama4_pythonic",
        "[write-file.v2(path='a]b)', content='[now()]\n')]",
        [("write-file.v2", {"path": "a]b)", "content": "[now()]\n"})],
    ),
    Case("llama4_pythonic", "[now()] done", [NOW], "done"),
    Case("llama4_pythonic", "So: <|python_start|>[now()]<|python_end|> ok", [NOW], "So:  ok"),
    Case("llama4_pythonic", '{"name": "get_weather", "parameters": {"city": "Paris"}}', [PARIS], note="JSON"),
    Case("llama4_pythonic", "[1] says", content="[1] says"),
    Case("llama4_pythonic", "[nope(a=1)]", content="[nope(a=1)]"),
    Case("llama4_pythonic", "[get_weather]", content="[get_weather]"),
    Case("llama4_pythonic", "[get_weather('Paris')]", content="[get_weather('Paris')]", note="positional"),
    Case("llama4_pythonic", "[get_weather(days=1+2)]", content="[get_weather(days=1+2)]", note="arithmetic"),
    Case("llama4_pythonic", "[get_weather(city=f'x')]", content="[get_weather(city=f'x')]", note="prefix"),
    Case("llama4_pythonic", "[get_weather(options={1: 2})]", content="[get_weather(options={1: 2})]", note="key no string"),
    Case("llama4_pythonic", "[now(), nope()]", [NOW], "nope()]", note="second broken"),
    Case("llama4_pythonic", "[now()", [NOW], note="bracket missing"),
    Case("llama4_pythonic", "[get_weather(city='Par", [("get_weather", '{"city": "Par')], reason="length", note="cut"),
    Case("llama4_pythonic", "[get_weather(days=12", [("get_weather", '{"days": ')], reason="length", note="cut in a number"),
]

MISTRAL = [
    Case("mistral", '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}}]', [PARIS]),
    Case(
        "mistral",
        '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}, "id": "abcDEF123"}, {"name": "now", "arguments": {}}]',
        [PARIS, NOW],
        note="two, ids",
    ),
    Case("mistral", '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}', [PARIS]),
    Case("mistral", '[TOOL_CALLS]get_weather{"city": "Paris"}', [PARIS], note="[ARGS] missing"),
    Case("mistral", '[TOOL_CALLS]get_weather[CALL_ID]abcDEF123[ARGS]{"city": "Paris"}[TOOL_CALLS]now[CALL_ID]x[ARGS]{}', [PARIS, NOW]),
    Case("mistral", f"I will.[TOOL_CALLS]get_weather[ARGS]{NESTED_JSON}[TOOL_CALLS]now[ARGS]{{}}", [NESTED_CALL, NOW], "I will."),
    Case("mistral", "[TOOL_CALLS]now[ARGS]{} that is all", [NOW], "that is all"),
    Case("mistral", '[TOOL_CALLS]write-file.v2[ARGS]{"path": "[TOOL_CALLS]"}', [("write-file.v2", {"path": "[TOOL_CALLS]"})]),
    Case("mistral", "[TOOL_CALLS]", content="[TOOL_CALLS]", note="stopped at the marker"),
    Case("mistral", "[TOOL_CALLS]get_wea", content="[TOOL_CALLS]get_wea", reason="length"),
    Case("mistral", "[TOOL_CALLS]nope[ARGS]{}", content="[TOOL_CALLS]nope[ARGS]{}"),
    Case("mistral", "[TOOL_CALLS]now[ARGS]5", content="[TOOL_CALLS]now[ARGS]5"),
    Case("mistral", '[TOOL_CALLS][{"name": "now", "arguments": {}}, oops', [NOW], "oops"),
    Case("mistral", '[TOOL_CALLS][{"name": "now", "arguments": {}},', [NOW], reason="length", note="cut between calls"),
    Case("mistral", '[TOOL_CALLS]get_weather[ARGS]{"city": "Par', [("get_weather", '{"city": "Par')], reason="length", note="cut"),
    Case("mistral", "an [array] of [TOOL", content="an [array] of [TOOL"),
]

CODER = [
    Case(
        "qwen3_coder",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
        [("get_weather", {"city": "Paris", "days": 3})],
    ),
    Case("qwen3_coder", "<tool_call>\n<function=now>\n</function>\n</tool_call>", [NOW]),
    Case(
        "qwen3_coder",
        "Look:\n<tool_call>\n<function=now>\n</function>\n</tool_call>\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
        "</function>\n</tool_call>",
        [NOW, PARIS],
        "Look:",
    ),
    Case(
        "qwen3_coder",
        "<tool_call><function=write-file.v2><parameter=path>\n12\n</parameter><parameter=content>\n\n"
        '<p class="a">\n\t</parameter </function>\n'
        "\n</parameter></function></tool_call>",
        [("write-file.v2", {"path": "12", "content": '\n<p class="a">\n\t</parameter </function>\n'})],
        note="a value with markup and line breaks",
    ),
    Case("qwen3_coder", "<function=get_weather><parameter=city>Paris</parameter></function>", [PARIS], note="no tool_call, no line breaks"),
    Case(
        "qwen3_coder",
        "<tool_call><function=get_weather><parameter=metric>True</parameter><parameter=near>['a', \"b\"]</parameter><parameter=options>\n"
        '{"a": {"b": [1, true]}}\n</parameter><parameter=limit>5</parameter><parameter=note>null</parameter><parameter=mode>7</parameter>'
        "<parameter=anything>false</parameter><parameter=unknown>12</parameter></function></tool_call>",
        [
            (
                "get_weather",
                {
                    "metric": True,
                    "near": ["a", "b"],
                    "options": {"a": {"b": [1, True]}},
                    "limit": 5,
                    "note": None,
                    "mode": 7,
                    "anything": False,
                    "unknown": "12",
                },
            )
        ],
        note="types",
    ),
    Case(
        "qwen3_coder",
        "<tool_call><function=get_weather><parameter=days>many</parameter><parameter=mode>x</parameter><parameter=note>nullify</parameter>"
        "</function></tool_call>",
        [("get_weather", {"days": "many", "mode": "x", "note": "nullify"})],
        note="values that do not fit",
    ),
    Case("qwen3_coder", "<tool_call><function=now></function><function=now></function></tool_call>", [NOW, NOW], note="two in one"),
    Case("qwen3_coder", "<tool_call><function=now></function> after", [NOW], "after"),
    Case("qwen3_coder", "<tool_call>\n{}", content="<tool_call>\n{}"),
    Case("qwen3_coder", "<tool_call><function=nope></function></tool_call>", content="<tool_call><function=nope></function></tool_call>"),
    Case("qwen3_coder", "<tool_call><function=now>x</function></tool_call>", content="<tool_call><function=now>x</function></tool_call>"),
    Case(
        "qwen3_coder",
        "<tool_call><function=get_weather><parameter=city>\nPar\n</para",
        [("get_weather", '{"city": "Par')],
        reason="length",
        note="cut",
    ),
    Case(
        "qwen3_coder",
        "<tool_call><function=get_weather><parameter=city>\nPar",
        content="<tool_call><function=get_weather><parameter=city>\nPar",
        note="stopped within",
    ),
    Case("qwen3_coder", "<tool_call><function=get_w", content="<tool_call><function=get_w", reason="length"),
]

DEEPSEEK = [
    Case(
        "deepseek_v3",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{"city": "Paris"}\n```<｜tool▁call▁end｜>\n'
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [PARIS, NOW],
    ),
    Case(
        "deepseek_v3",
        f"Well.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{NESTED_JSON}<｜tool▁call▁end｜>"
        "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [NESTED_CALL, NOW],
        "Well.",
        note="V3.1",
    ),
    Case("deepseek_v3", "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜>bye", [NOW], "bye", note="no outer tags"),
    Case(
        "deepseek_v3",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>write-file.v2\n"
        '```json\n{"path": "```"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        [("write-file.v2", {"path": "```"})],
    ),
    Case("deepseek_v3", "<｜tool▁calls▁begin｜>x", content="<｜tool▁calls▁begin｜>x"),
    Case("deepseek_v3", "<｜tool▁call▁begin｜>nope<｜tool▁sep｜>{}", content="<｜tool▁call▁begin｜>nope<｜tool▁sep｜>{}"),
    Case("deepseek_v3", "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}\n```<｜tool▁call", [NOW], "```<｜tool▁call", reason="length"),
    Case("deepseek_v3", "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁e", [NOW], reason="length", note="end tag cut"),
    Case(
        "deepseek_v3",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{"city": "Par',
        [("get_weather", '{"city": "Par')],
        reason="length",
        note="cut",
    ),
    Case("deepseek_v3", "a <｜tool▁call", content="a <｜tool▁call"),
]

GLM = [
    Case(
        "glm",
        "\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
        [("get_weather", {"city": "Paris", "days": 3})],
    ),
    Case("glm", "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call>", [PARIS], note="4.7"),
    Case("glm", "<tool_call>now\n</tool_call>", [NOW]),
    Case("glm", "<tool_call>now</tool_call><tool_call>now</tool_call>", [NOW, NOW]),
    Case(
        "glm",
        'Ok.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value> </tool_call>"é\\ \n</arg_value>\n<arg_key>options</arg_key>\n'
        '<arg_value>{"a": [true, {}]}</arg_value>\n</tool_call>',
        [("get_weather", {"city": ' </tool_call>"é\\ \n', "options": {"a": [True, {}]}})],
        "Ok.",
        note="exact strings, objects",
    ),
    Case("glm", "<tool_call>nope\n</tool_call>", content="<tool_call>nope\n</tool_call>"),
    Case("glm", "<tool_call>now\nx</tool_call>", content="<tool_call>now\nx</tool_call>"),
    Case(
        "glm",
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Par</arg",
        [("get_weather", '{"city": "Par')],
        reason="length",
        note="cut",
    ),
    Case(
        "glm",
        "<tool_call>get_weather\n<arg_key>days</arg_key>\n<arg_value>12",
        [("get_weather", '{"days": ')],
        reason="length",
        note="cut number",
    ),
    Case("glm", "<tool_call>get_weather", content="<tool_call>get_weather", reason="length"),
]

C, M, S = "<|channel|>", "<|message|>", "<|start|>assistant"
HARMONY = [
    Case(
        "gpt_oss",
        f'{C}analysis{M}User asks: "2 + 2?"<|end|>{S}{C}final{M}2 + 2 = 4.<|return|>',
        content="2 + 2 = 4.",
        reasoning='User asks: "2 + 2?"',
    ),
    Case(
        "gpt_oss",
        f"{C}analysis{M}Need to use function get_weather.<|end|>{S}{C}commentary to=functions.get_weather "
        f'<|constrain|>json{M}{{"city": "Paris"}}<|call|>',
        [PARIS],
        reasoning="Need to use function get_weather.",
    ),
    Case(
        "gpt_oss",
        f'{S} to=functions.get_weather{C}commentary <|constrain|>json{M}{{"city": "Paris"}}',
        [PARIS],
        note="recipient in the role",
    ),
    Case("gpt_oss", f' to=functions.get_weather{C}commentary json{M}{{"city": "Paris"}}<|call|>', [PARIS], note="recipient at the start"),
    Case(
        "gpt_oss",
        f"{C}analysis{M}a<|end|>{S}{C}analysis{M}b<|end|>{S}{C}commentary{M}First I look.<|end|>{S}{C}commentary to=functions.now "
        f"<|constrain|>json{M}{{}}<|call|>",
        [NOW],
        "First I look.",
        "a\nb",
        note="preamble",
    ),
    Case("gpt_oss", f"{C}commentary to=functions.now{M}<|call|>", [NOW], note="empty arguments"),
    Case("gpt_oss", f"{C}commentary to=functions.now{M}", [NOW], note="empty arguments, no end"),
    Case("gpt_oss", f"{C}commentary to=functions.get_weather{M}{NESTED_JSON}", [NESTED_CALL], note="nested"),
    Case("gpt_oss", f"{C}commentary{M}One.<|end|>{S}{C}final{M}Two. <|return|>", content="One.\nTwo. "),
    Case("gpt_oss", f"{C}analysis{M}a{C}final{M}b", content="b", reasoning="a", note="end left out"),
    Case("gpt_oss", "plain text", content="plain text"),
    Case("gpt_oss", f"{C}anal", content="", reason="length", note="cut in the header"),
    Case("gpt_oss", "<|chan", content="", reason="length", note="cut in the first tag"),
    Case("gpt_oss", f"{C}analysis{M}hm <|en", content="", reasoning="hm <|en", reason="length"),
    Case(
        "gpt_oss",
        f"{C}commentary to=functions.rm <|constrain|>json{M}{{}}<|call|>",
        content=f"{C}commentary to=functions.rm <|constrain|>json{M}{{}}",
        note="unknown tool",
    ),
    Case("gpt_oss", f"{C}commentary to=functions.now{M}no JSON<|call|>", content=f"{C}commentary to=functions.now{M}no JSON"),
    Case(
        "gpt_oss",
        f'{C}commentary to=functions.get_weather{M}{{"city": "Par',
        [("get_weather", '{"city": "Par')],
        reason="length",
        note="cut",
    ),
]

CASES = [*HERMES, *LLAMA3, *LLAMA4, *MISTRAL, *CODER, *DEEPSEEK, *GLM, *HARMONY]
