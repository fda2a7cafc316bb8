"""The scanners against json and ast, which are slow here but right; and values by schema."""

from __future__ import annotations

import ast
import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.frontend.parsers.scan import JsonScanner, PythonScanner, as_json
from octavo.frontend.parsers.schema import ToolSet, value_as_json

SCALARS = (
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8)
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4), max_leaves=12
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(VALUES, st.booleans(), st.sampled_from([None, 2]))
def test_json_is_passed_on_as_it_is(value: Any, ascii_only: bool, indent: int | None) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    assert as_json(JsonScanner(), text) == text


@settings(max_examples=300, deadline=None, derandomize=True)
@given(VALUES)
def test_python_literals_become_json(value: Any) -> None:
    written = as_json(PythonScanner(), repr(value))
    assert written is not None and json.loads(written) == value


@settings(max_examples=1500, deadline=None, derandomize=True)
@given(
    st.lists(st.sampled_from(list('{}[]",:\\ 01-.eE+tfnu') + ["true", "null", '"a"', "\\u00e9", "1.5", '{"a":']), max_size=10).map("".join)
)
def test_what_json_refuses_is_refused(text: str) -> None:
    try:
        valid = math.nan is not json.loads(text, parse_constant=lambda _: math.nan)
    except ValueError:
        valid = False
    assert (as_json(JsonScanner(), text) is not None) == valid


@pytest.mark.filterwarnings("ignore:invalid escape")
@settings(max_examples=1500, deadline=None, derandomize=True)
@given(
    st.lists(st.sampled_from([*"{}[](),:'\"\\ 01-.e", "True", "None", "'a'", '"b"', "1.5", "{'a':", "x", "1_0"]), max_size=9).map("".join)
)
def test_what_is_taken_for_python_is_python(text: str) -> None:
    written = as_json(PythonScanner(), text)
    if written is None:
        return
    value = json.loads(written)
    try:
        expected = ast.literal_eval(text.strip())
    except (ValueError, SyntaxError):
        return  # more is taken than Python's: null, leading zeros, "(1" + ")" for a list
    plain = json.loads(json.dumps(expected))
    assert value == plain or value == [plain]  # (1) is a number in Python


@pytest.mark.parametrize(
    ("text", "types", "value"),
    [
        ("5", {"integer"}, 5),
        ("5.0", {"integer"}, 5.0),
        ("5.5", {"integer"}, "5.5"),
        ("5", {"number"}, 5),
        ("5", {"string"}, "5"),
        ("5", {"string", "integer"}, 5),
        ("5", {"string", "null"}, "5"),
        ("null", {"string", "null"}, None),
        ("None", {"integer", "null"}, None),
        ("null", {"string"}, "null"),
        ("TRUE", {"boolean"}, True),
        ("yes", {"boolean"}, "yes"),
        ("{'a': [True, None]}", {"object"}, {"a": [True, None]}),
        ('{"a": 1}', {"string"}, '{"a": 1}'),
        ("[1, 2", {"array"}, "[1, 2"),
        ("[1]", {"object"}, "[1]"),
        ("NaN", {"number"}, "NaN"),
        ("1e999", {"number"}, 1e999),
        ("", {"integer"}, ""),
        (" 7 ", {"integer"}, 7),
        ("[1]", set(), [1]),
        ("hello", set(), "hello"),
        ('"quoted"', {"string", "integer"}, '"quoted"'),
    ],
)
def test_value_by_type(text: str, types: set[str], value: Any) -> None:
    assert json.loads(value_as_json(text, frozenset(types))) == value


def test_types_out_of_schemas() -> None:
    schema = {
        "$defs": {"Size": {"enum": [1, "big"]}, "Loop": {"$ref": "#/$defs/Loop"}},
        "properties": {
            "ref": {"$ref": "#/$defs/Size"},
            "loop": {"$ref": "#/$defs/Loop"},
            "union": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "open": {"anyOf": [{"type": "string"}, {}]},
            "all": {"allOf": [{"description": "x"}, {"type": "integer"}]},
            "const": {"const": True},
            "object": {"properties": {}},
            "strange": 5,
        },
    }
    tools = ToolSet([{"name": "f", "input_schema": schema}, {"name": "g", "parameters": {"additionalProperties": {"type": "integer"}}}])
    got = {name: set(tools.types("f", name)) for name in [*schema["properties"], "unknown"]}
    assert got == {
        "ref": {"integer", "string"},
        "loop": set(),
        "union": {"string", "null"},
        "open": set(),
        "all": {"integer"},
        "const": {"boolean"},
        "object": {"object"},
        "strange": set(),
        "unknown": {"string"},
    }
    assert tools.types("g", "any") == {"integer"}
    with pytest.raises(ValueError, match="name"):
        ToolSet([{"type": "function"}])
