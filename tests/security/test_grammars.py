"""Schemas, expressions and grammars that crashed, blocked or misled other servers: refused, or compiled, in a bounded time.

tests/structured holds the compiler to its bounds; here are the known attacks.
"""

from __future__ import annotations

import time
from typing import Any

import pytest

from octavo.errors import RequestError
from octavo.frontend.grammar_compiler import COMPILE_S, GrammarCompiler
from octavo.frontend.structured import of_kind
from tests.structured.conftest import compiler, tokenizer  # noqa: F401 (fixtures)


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


HOSTILE: list[tuple[str, Any]] = [
    ("regex", "(a+)+$"),
    ("regex", "(a|a)*b"),
    ("regex", "(.*)*x"),
    ("regex", "((a{1,1000}){1,1000}){1,1000}"),
    ("regex", "a{1000000000}"),
    ("regex", "(" * 5000),
    ("regex", "[" + "a-" * 5000),
    ("regex", "(?=a)(?!b)"),
    ("regex", "\\"),
    ("json_schema", nested(5000)),
    ("json_schema", {"type": "array", "minItems": 10**9}),
    ("json_schema", {"type": "string", "minLength": 10**12}),
    ("json_schema", {"type": "string", "pattern": "(a+)+$"}),
    ("json_schema", {"type": "string", "pattern": "(" * 3000}),
    ("json_schema", {"$ref": "#"}),
    ("json_schema", {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}),
    ("json_schema", {"type": "no-such-type"}),
    ("json_schema", {"enum": [[i] for i in range(20_000)]}),
    ("json_schema", {"type": "object", "properties": {str(i): {"$ref": "#"} for i in range(3000)}}),
    ("grammar", "start: start"),
    ("grammar", "start: a\na: b\nb: a"),
    ("grammar", "start: " + "(" * 3000),
    ("grammar", "%import common.WS\n%import ../../etc/passwd\nstart: WS"),
    ("grammar", 'root ::= "a" root'),
    ("choice", ["x" * 100_000]),
]


@pytest.mark.parametrize(("kind", "value"), HOSTILE, ids=[f"{kind}-{i}" for i, (kind, _) in enumerate(HOSTILE)])
def test_it_ends_in_time_and_the_next_one_works(compiler: GrammarCompiler, kind: Any, value: Any) -> None:  # noqa: F811
    compiler.compile(of_kind("regex", "warm|up", "structured_outputs"))
    start = time.monotonic()
    try:
        assert isinstance(compiler.compile(of_kind(kind, value, "structured_outputs")), str)
    except RequestError as error:
        assert error.status == 400 and str(error)
    assert time.monotonic() - start < COMPILE_S + 60  # much more than its bound: the machine may be busy
    assert compiler.compile(of_kind("choice", ["yes", "no"], "structured_outputs"))


@pytest.mark.parametrize("address", ["http://127.0.0.1:9/x", "https://json-schema.org/x", "file:///etc/passwd", "other.json#/a"])
def test_references_to_elsewhere_are_refused(compiler: GrammarCompiler, address: str) -> None:  # noqa: F811
    schema = {"type": "object", "properties": {"a": {"$ref": address}}}
    with pytest.raises(RequestError, match="/properties/a"):
        compiler.compile(of_kind("json_schema", schema, "structured_outputs"))
