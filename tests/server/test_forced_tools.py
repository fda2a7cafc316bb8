"""The schema that a forced call's answer must have."""

from __future__ import annotations

import json

import jsonschema
import pytest

from octavo.server.forced_tools import forced_call_schema
from octavo.server.schemas import ChatRequest, FunctionDefinition, Tool
from octavo.server.tools import tool_use

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False}
TREE = {
    "type": "object",
    "properties": {"root": {"$ref": "#/$defs/node"}, "again": {"$ref": "#"}},
    "required": ["root"],
    "additionalProperties": False,
    "$defs": {
        "node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}, "v": {"type": "integer"}}, "required": ["v"]},
    },
}
LIST = {**TREE, "$defs": {"node": {"type": "string"}}}


def forced(choice, parallel=None, **tools):
    given = [Tool(function=FunctionDefinition(name=name, parameters=schema)) for name, schema in tools.items()]
    return forced_call_schema(tool_use(ChatRequest(messages=[], tools=given, tool_choice=choice, parallel_tool_calls=parallel)))


def named(name):
    return {"type": "function", "function": {"name": name}}


def fits(schema, value) -> bool:
    return jsonschema.Draft202012Validator(schema).is_valid(value)


def test_named() -> None:
    call = forced(named("a"), a=CITY, b=TREE)
    assert call.name == "a" and call.schema == CITY


@pytest.mark.parametrize("schema", [None, {}, {"type": "object"}, {"type": "object", "properties": {}}, {"description": "none"}])
def test_a_function_without_parameters_gets_none(schema) -> None:
    call = forced(named("f"), f=schema)
    assert fits(call.schema, {}) and not fits(call.schema, {"x": 1}) and not fits(call.schema, [])


def test_any_object_where_it_is_asked_for() -> None:
    assert fits(forced(named("f"), f={"type": "object", "additionalProperties": True}).schema, {"x": 1})


def test_required() -> None:
    call = forced("required", a=CITY, b=None)
    assert call.name is None
    assert fits(call.schema, [{"name": "a", "parameters": {"city": "x"}}, {"name": "b", "parameters": {}}])
    for wrong in ([], [{"name": "a", "parameters": {}}], [{"name": "c", "parameters": {}}], [{"name": "b", "parameters": {}, "x": 1}]):
        assert not fits(call.schema, wrong)
    assert list(call.schema["items"]["anyOf"][0]["properties"]) == ["name", "parameters"]  # the name comes first


def test_at_most_one() -> None:
    assert forced("required", False, a=CITY).name == "a"
    call = forced("required", False, a=CITY, b=CITY)
    one = {"name": "a", "parameters": {"city": "x"}}
    assert fits(call.schema, [one]) and not fits(call.schema, [one, one])


def test_references_point_into_their_own_tool() -> None:
    call = forced("required", tree=TREE, list=LIST, plain=CITY)
    node = {"v": 1, "next": {"v": 2}}
    assert fits(call.schema, [{"name": "tree", "parameters": {"root": node, "again": {"root": node}}}])
    assert fits(call.schema, [{"name": "list", "parameters": {"root": "x", "again": {"root": "y"}}}])
    for name, root in (("tree", "x"), ("list", node), ("tree", {"v": "x"})):
        assert not fits(call.schema, [{"name": name, "parameters": {"root": root}}])
    assert "plain" not in call.schema["$defs"]
    assert json.loads(json.dumps(call.schema)) == call.schema


def test_allowed_tools() -> None:
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named("b")]}}
    call = forced(choice, a=CITY, b=CITY)
    assert fits(call.schema, [{"name": "b", "parameters": {"city": "x"}}])
    assert not fits(call.schema, [{"name": "a", "parameters": {"city": "x"}}])
