"""The tools of a request, as parsers need them: which names there are, and which types their parameters have."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from octavo.frontend.parsers.scan import JsonScanner, PythonScanner, as_json, escaped

_MAX_REFERENCES = 32
_ANY: frozenset[str] = frozenset()
_STRING = frozenset({"string"})
_NAMES = {bool: "boolean", str: "string", int: "integer", float: "number", list: "array", dict: "object", type(None): "null"}
_WORDS = {"true": "true", "false": "false", "null": "null", "none": "null"}
_INTEGER = re.compile(r"-?[0-9]+")


class ToolSet:
    """The tools that a request offers, by name.

    ``tools``: as in the OpenAI API ({"type": "function", "function": {"name", "parameters"}}), or flat ({"name",
    "parameters" or "input_schema"}). ValueError for anything else.
    """

    def __init__(self, tools: Iterable[Mapping[str, Any]] | None = None) -> None:
        self._schemas: dict[str, Mapping[str, Any]] = {}
        for tool in tools or ():
            function = tool.get("function", tool)
            name = function.get("name") if isinstance(function, Mapping) else None
            if not isinstance(name, str):
                raise ValueError(f"A tool needs a name: {tool!r:.200}")
            schema = function.get("parameters", function.get("input_schema"))
            self._schemas[name] = schema if isinstance(schema, Mapping) else {}
        self._types: dict[tuple[str, str], frozenset[str]] = {}

    def __contains__(self, name: object) -> bool:
        return name in self._schemas

    def __len__(self) -> int:
        return len(self._schemas)

    def __iter__(self) -> Iterator[str]:
        return iter(self._schemas)

    def types(self, name: str, parameter: str) -> frozenset[str]:
        """The JSON types that the tool's schema allows for the parameter; empty: any. One the schema does not know is a string."""
        key = (name, parameter)
        if key not in self._types:
            if len(self._types) > 4096:  # parameters that the model makes up
                self._types.clear()
            self._types[key] = self._find_types(self._schemas[name], parameter)
        return self._types[key]

    def _find_types(self, root: Mapping[str, Any], parameter: str) -> frozenset[str]:
        root = _resolved(root, root)
        properties = root.get("properties")
        if isinstance(properties, Mapping) and parameter in properties:
            return _types_of(properties[parameter], root, _MAX_REFERENCES)
        extra = root.get("additionalProperties")
        return _types_of(extra, root, _MAX_REFERENCES) if isinstance(extra, Mapping) and extra else _STRING


def _resolved(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    for _ in range(_MAX_REFERENCES):
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#"):
            return schema
        target: Any = root
        for part in reference[1:].split("/")[1:]:
            target = target.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(target, Mapping) else None
        if not isinstance(target, Mapping):
            return {}
        schema = target
    return {}


def _types_of(schema: Any, root: Mapping[str, Any], depth: int) -> frozenset[str]:
    if not isinstance(schema, Mapping) or depth == 0:
        return _ANY
    schema = _resolved(schema, root)
    declared = schema.get("type")
    if isinstance(declared, str):
        return frozenset({declared})
    if isinstance(declared, list):
        return frozenset(name for name in declared if isinstance(name, str))
    for word in ("anyOf", "oneOf"):
        options = schema.get(word)
        if isinstance(options, list) and options:
            parts = [_types_of(option, root, depth - 1) for option in options[:64]]
            return frozenset().union(*parts) if all(parts) else _ANY
    if isinstance(schema.get("allOf"), list):
        for part in schema["allOf"][:64]:
            if types := _types_of(part, root, depth - 1):
                return types
    if isinstance(schema.get("enum"), list):
        return frozenset(_NAMES.get(type(value), "string") for value in schema["enum"])
    if "const" in schema:
        return frozenset({_NAMES.get(type(schema["const"]), "string")})
    if isinstance(schema.get("properties"), Mapping):
        return frozenset({"object"})
    return frozenset({"array"}) if "items" in schema else _ANY


def is_plain_string(types: frozenset[str]) -> bool:
    """Whether a value of these types is its text, whatever the text says."""
    return types == _STRING


def value_as_json(text: str, types: frozenset[str]) -> str:
    """JSON for a value that a model wrote as bare text.

    Of the types allowed the one that the text fits is taken: 5 is a number where numbers are allowed, else a string;
    Python's True, None and {'a': 1} are understood. Text that fits none becomes a string: for the caller to refuse.
    """
    if is_plain_string(types):
        return f'"{escaped(text)}"'
    bare = text.strip()
    value = _WORDS.get(bare.lower())
    if value is None:
        value = as_json(JsonScanner(), bare)
    if value is None and (bare.startswith(("{", "[", "(", "'")) or "string" not in types):
        value = as_json(PythonScanner(), bare)
    if value is not None:
        value = value.strip()
        kind = _kind(value)
        fits = not types or kind in types or (kind == "integer" and "number" in types) or (kind == "number" and _is_whole(value, types))
        if fits and not (kind == "string" and "string" in types):
            return value
    return f'"{escaped(text)}"'


def _kind(value: str) -> str:
    first = value[0]
    named = {"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean", "n": "null"}.get(first)
    return named or ("integer" if _INTEGER.fullmatch(value) else "number")


def _is_whole(value: str, types: frozenset[str]) -> bool:
    return "integer" in types and float(value).is_integer()  # JSON Schema: 5.0 is an integer
