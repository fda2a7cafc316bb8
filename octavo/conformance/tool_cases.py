"""Cases of tool calls and of structured output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from octavo.conformance.client import Failed, Server, Skipped, expect, loads, short

CHAT = "/v1/chat/completions"


def _ask(server: Server, text: str, **fields: Any) -> dict[str, Any]:
    """The body of a chat; Skipped when the server says that it does not have what ``fields`` ask for."""
    answer = server.post(CHAT, {"messages": [{"role": "user", "content": text}], "temperature": 0, **fields})
    if answer.status in (400, 404, 422, 501):
        raise Skipped(f"the server refuses {' and '.join(k for k in fields if k != 'max_tokens')}: {short(answer.body, 120)}")
    return answer.ok()


def _tool(name: str, parameters: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": "Does what its name says.", "parameters": parameters}}


def _stream(server: Server, text: str, **fields: Any) -> list[dict[str, Any]]:
    body = {"messages": [{"role": "user", "content": text}], "temperature": 0, **fields}
    return [choice for chunk in server.events(CHAT, body) for choice in chunk["choices"]]


def cut_short(server: Server) -> str | None:
    """tool_choice "required" with one long argument: what max_tokens cuts short ends with "length", streamed or not."""
    story = {"type": "object", "properties": {"story": {"type": "string"}}, "required": ["story"], "additionalProperties": False}
    text = "Save a story of two thousand words about an octopus. Tell it in full, with every detail."
    fields: dict[str, Any] = {"tools": [_tool("save_story", story)], "tool_choice": "required", "max_tokens": 64}
    answer = _ask(server, text, **fields)
    remark = None
    if answer["choices"][0]["finish_reason"] != "length":
        used = answer["usage"]["completion_tokens"]
        expect(used < 64, f"64 of 64 tokens were used, and finish_reason is {answer['choices'][0]['finish_reason']!r}")
        fields["max_tokens"] = max(used // 2, 1)
        remark = f"the call was complete after {used} tokens; cut at {fields['max_tokens']} instead of 64"
        answer = _ask(server, text, **fields)
    reason = answer["choices"][0]["finish_reason"]
    expect(reason == "length", f"finish_reason is {reason!r}")
    choices = _stream(server, text, **fields)
    reasons = [choice["finish_reason"] for choice in choices if choice.get("finish_reason")]
    expect(reasons == ["length"], f"in the stream the finish reasons are {reasons}")
    return remark


def no_parameters(server: Server) -> None:
    """A forced call of a tool that takes nothing: the joined arguments parse to {}."""
    for parameters in ({"type": "object", "properties": {}}, None):
        tool = _tool("ping", parameters or {})
        if parameters is None:
            del tool["function"]["parameters"]
        fields: dict[str, Any] = {"tools": [tool], "tool_choice": {"type": "function", "function": {"name": "ping"}}, "max_tokens": 64}
        answer = _ask(server, "Call ping.", **fields)
        calls = answer["choices"][0]["message"].get("tool_calls") or []
        expect([call["function"]["name"] for call in calls] == ["ping"], f"the calls are {calls}")
        _expect_empty(calls[0]["function"]["arguments"], "")
        names, arguments = [], ""
        for choice in _stream(server, "Call ping.", **fields):
            for call in choice["delta"].get("tool_calls") or []:
                names += [call["function"]["name"]] if call["function"].get("name") else []
                arguments += call["function"].get("arguments") or ""
        expect(names == ["ping"], f"in the stream the names are {names}")
        _expect_empty(arguments, "in the stream ")


def _expect_empty(arguments: str, where: str) -> None:
    try:
        value = loads(arguments)
    except Failed:
        raise Failed(f"{where}the arguments are {arguments!r}, which is not JSON") from None
    expect(value == {}, f"{where}the arguments are {arguments!r} instead of {{}}")


# keyword -> (the schema of a property that has it, whether a value honours it)
KEYWORDS: dict[str, tuple[dict[str, Any], Callable[[Any], bool]]] = {
    "uniqueItems": (
        {"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 2, "uniqueItems": True},
        lambda value: sorted(value) == [1, 2],
    ),
    "contains": (
        {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 2, "contains": {"const": "b"}},
        lambda value: "b" in value,
    ),
    "not": ({"enum": ["yes", "no"], "not": {"const": "yes"}}, lambda value: value == "no"),
    "propertyNames": (
        {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 1, "propertyNames": {"enum": ["q"]}},
        lambda value: list(value) == ["q"],
    ),
    "unevaluatedProperties": (
        {"type": "object", "properties": {"q": {"const": 1}}, "unevaluatedProperties": False},
        lambda value: value in ({}, {"q": 1}),
    ),
    "if": ({"type": "integer", "enum": [1, 2], "if": {"const": 1}, "then": False}, lambda value: value == 2),
}


def unsupported_keywords(server: Server) -> str:
    """A keyword of JSON Schema is honoured, or refused with the pointer to it; never ignored."""
    _ask(server, "Say 1.", max_tokens=32, response_format=_format({"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}))
    refused, honoured, unknown = [], [], []
    for keyword, (schema, honours) in KEYWORDS.items():
        whole = {"type": "object", "properties": {"a": schema}, "required": ["a"], "additionalProperties": False}
        fields = {"messages": [{"role": "user", "content": "Answer in JSON."}], "temperature": 0, "max_tokens": 200}
        answer = server.post(CHAT, {**fields, "response_format": _format(whole)})
        if answer.status == 200:
            choice = answer.json()["choices"][0]
            if choice["finish_reason"] != "stop":
                unknown.append(keyword)
                continue
            value = loads(choice["message"]["content"])["a"]
            expect(honours(value), f"{keyword} was accepted and not honoured: {schema} gave {value!r}")
            honoured.append(keyword)
        else:
            answer.refused(400, f"/properties/a/{keyword}")
            refused.append(keyword)
    lists = (("refused", refused), ("honoured", honoured), ("cut short, so not known", unknown))
    return "; ".join(f"{what}: {', '.join(names)}" for what, names in lists if names)


def _format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
