"""Reads a JSON schema before it becomes a grammar: everything in it must be understood, or it is refused by its place.

A grammar that quietly left out a keyword would let outputs through that the schema forbids. JSON Schema (2020-12) says to
ignore unknown keywords; here they are refused like known ones that have no grammar, since most are misspelt or of another
dialect ("nullable"). What only describes is let through.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

MAX_DEPTH = 48  # of schemas within schemas; the library reads 128 levels of JSON
MAX_NODES = 20_000  # schemas within the schema


class SchemaError(ValueError):
    """``pointer``: a JSON pointer (RFC 6901) to the place in the schema."""

    def __init__(self, message: str, pointer: str) -> None:
        super().__init__(message)
        self.pointer = pointer


# Keywords whose value is a schema, a list of schemas, or schemas by name.
_ONE = {"additionalProperties", "items", "additionalItems"}
_LIST = {"anyOf", "oneOf", "allOf", "prefixItems"}
_MAP = {"properties", "patternProperties", "$defs", "definitions"}
_PLAIN = {
    "type", "enum", "const", "required", "minProperties", "maxProperties", "minItems", "maxItems", "minLength", "maxLength",
    "pattern", "format", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "$ref",
}  # fmt: skip
# They describe, and no value is valid or not because of them.
_NOTES = {
    "title", "description", "default", "examples", "example", "$comment", "$schema", "$id", "deprecated", "readOnly", "writeOnly",
    "contentEncoding", "contentMediaType", "contentSchema", "externalDocs", "xml", "discriminator",
}  # fmt: skip
_TYPES = {"string", "number", "integer", "boolean", "object", "array", "null"}
_HINTS = {
    "nullable": 'write "type": ["string", "null"]',
    "x-guidance": "the server sets these options",
    "$dynamicRef": "use $ref",
    "$recursiveRef": "use $ref",
    "not": "say what the value may be instead",
    "if": "use anyOf",
    "then": "use anyOf",
    "else": "use anyOf",
}


@dataclass(slots=True)
class Place:
    """A schema within the schema."""

    schema: Any
    pointer: str
    depth: int


def escape(token: str) -> str:
    return token.replace("~", "~0").replace("/", "~1")


def parse(text: str) -> Any:
    """The schema of a JSON text, its keywords checked. SchemaError says what is wrong, and where."""
    try:
        schema = json.loads(text, object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
    except SchemaError:
        raise
    except (ValueError, RecursionError) as error:
        what = "nested too deeply" if isinstance(error, RecursionError) else f"not JSON: {error}"
        raise SchemaError(f"The schema is {what}.", "") from None
    found: set[str] = set()
    references: list[tuple[str, str]] = []
    for place in walk(schema):
        found.add(place.pointer)
        if len(found) > MAX_NODES:
            raise SchemaError(f"The schema holds more than {MAX_NODES:,} schemas.", place.pointer)
        if place.depth > MAX_DEPTH:
            raise SchemaError(f"The schema is nested more than {MAX_DEPTH} levels deep.", place.pointer)
        check(place)
        if isinstance(place.schema, dict) and "$ref" in place.schema:
            references.append((f"{place.pointer}/$ref", _target(place.schema["$ref"], f"{place.pointer}/$ref")))
    for pointer, target in references:
        if target not in found:
            raise SchemaError(f"$ref {'#' + target[:80]!r} leads to no schema.", pointer)
    return schema


def walk(schema: Any) -> Iterator[Place]:
    """The schema and all within it, outer ones first."""
    stack = [Place(schema, "", 0)]
    while stack:
        place = stack.pop()
        yield place
        stack.extend(reversed(list(children(place))))


def children(place: Place) -> Iterator[Place]:
    """The schemas that stand directly within one."""
    if not isinstance(place.schema, dict):
        return
    for key, value in place.schema.items():
        here, depth = f"{place.pointer}/{escape(key)}", place.depth + 1
        if key in _MAP and isinstance(value, dict):
            for name, inner in value.items():
                yield Place(inner, f"{here}/{escape(name)}", depth)
        elif (key in _LIST or key == "items") and isinstance(value, list):
            for i, inner in enumerate(value):
                yield Place(inner, f"{here}/{i}", depth)
        elif key in _ONE:
            yield Place(value, here, depth)


def check(place: Place) -> None:
    """SchemaError for a keyword that is unknown or can't be honoured, in this schema itself."""
    schema = place.schema
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise SchemaError(f"A schema is an object, true or false; this is {json.dumps(schema)[:80]}.", place.pointer)
    for key, value in schema.items():
        pointer = f"{place.pointer}/{escape(key)}"
        if key in _MAP:
            if not isinstance(value, dict):
                raise SchemaError(f"{key} must be an object of schemas.", pointer)
        elif key in _LIST:
            if not isinstance(value, list) or not value:
                raise SchemaError(f"{key} must be a list of schemas.", pointer)
        elif key == "type":
            _check_type(value, pointer)
        elif key == "enum" and (not isinstance(value, list) or not value):
            raise SchemaError("enum must be a list of values that is not empty.", pointer)
        elif key in ("exclusiveMinimum", "exclusiveMaximum") and isinstance(value, bool):
            raise SchemaError(f"{key} must be a number (true and false are draft 4's).", pointer)
        elif key not in _PLAIN and key not in _ONE and key not in _NOTES and (not key.startswith("x-") or key == "x-guidance"):
            hint = _HINTS.get(key)
            raise SchemaError(f"The keyword {key[:80]!r} is not supported{': ' + hint if hint else ''}.", pointer)


def _check_type(value: Any, pointer: str) -> None:
    for name in value if isinstance(value, list) else [value]:
        if not isinstance(name, str) or name not in _TYPES:
            raise SchemaError(f"{json.dumps(name)[:80]} is not a type; there are {', '.join(sorted(_TYPES))}.", pointer)


def _target(reference: Any, pointer: str) -> str:
    """The JSON pointer that a reference within the schema holds."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        shown = json.dumps(reference)[:80]
        raise SchemaError(f"$ref {shown} leads out of the schema; only references such as #/$defs/name are followed.", pointer)
    return unquote(reference[1:])


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise SchemaError(f"An object of the schema has the key {twice[:80]!r} twice.", "")
    return found


def _no_constant(name: str) -> Any:
    raise SchemaError(f"{name} is not JSON.", "")
