"""Random JSON schemas in the style of the public JSON Schema test suite: every keyword that is supported, nested and combined."""

from __future__ import annotations

import random
from typing import Any

FORMATS = ["date", "date-time", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"]
PATTERNS = ["^[a-f]{2,4}$", "^a|b$", "[0-9]+", "^\\d{3}-\\d{2}$", "x.y", "^(foo|bär)+$", '^[^"\\\\]{1,3}$', "^\\w+$"]
VALUES: list[Any] = [0, -1, 3.5, 12345678901, True, False, None, "", "a", "é", "日本", 'a"b', "back\\slash", "new\nline"]
VALUES += [[], [1, "x"], {}, {"k": [None]}]


def random_schema(rng: random.Random) -> dict[str, Any]:
    """A schema whose references lead to its own definitions."""
    names = [f"d{i}" for i in range(rng.choice((0, 0, 1, 2)))]
    schema = _schema(rng, 3, names)
    if names:
        schema = {"$defs": {name: _schema(rng, 1, []) for name in names}, **schema}
        if rng.random() < 0.3:  # a list that holds lists, and so on
            schema["$defs"]["node"] = {
                "type": "object",
                "properties": {"value": {"$ref": f"#/$defs/{names[0]}"}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
                "required": ["value", "next"],
                "additionalProperties": False,
            }
            schema = {"$defs": schema["$defs"], "$ref": "#/$defs/node"}
    if rng.random() < 0.2:
        schema |= {"title": "t", "description": "d", "$schema": "https://json-schema.org/draft/2020-12/schema", "x-note": 1}
    return schema


def _schema(rng: random.Random, depth: int, names: list[str]) -> dict[str, Any]:
    kinds = [_string, _number, _integer, _simple, _enum, _const]
    if depth:
        kinds += [_object, _object, _object, _array, _array, _any_of, _all_of, _one_of]
        if names:
            kinds.append(lambda rng, depth, names: {"$ref": f"#/$defs/{rng.choice(names)}"})
    return rng.choice(kinds)(rng, depth - 1, names)


def _string(rng: random.Random, depth: int, names: list[str]) -> dict[str, Any]:
    which = rng.random()
    if which < 0.3:
        return {"type": "string", "format": rng.choice(FORMATS)}
    if which < 0.6:
        return {"type": "string", "pattern": rng.choice(PATTERNS)}
    low = rng.randint(0, 4)
    return {"type": "string"} | rng.choice(({}, {"minLength": low}, {"maxLength": low + 3}, {"minLength": low, "maxLength": low + 2}))


def _number(rng: random.Random, depth: int, names: list[str]) -> dict[str, Any]:
    low = rng.randint(-100, 100) / rng.choice((1, 2, 4))
    high = low + rng.randint(1, 50)
    return {"type": "number"} | rng.choice(
        ({}, {"minimum": low}, {"maximum": high}, {"exclusiveMinimum": low, "exclusiveMaximum": high}, {"multipleOf": 0.5, "minimum": low})
    )


def _integer(rng: random.Random, depth: int, names: list[str]) -> dict[str, Any]:
    low = rng.randint(-1000, 1000)
    high = low + rng.randint(2, 500)
    return {"type": "integer"} | rng.choice(
        ({}, {"minimum": low, "maximum": high}, {"exclusiveMinimum": low}, {"exclusiveMaximum": high}, {"multipleOf": rng.randint(2, 9)})
    )


def _simple(rng: random.Random, depth: int, names: list[str]) -> dict[str, Any]:
    return {"type": rng.choice(("boolean", "null", ["string", "null"], ["integer", "boolean"]))}


def _enum(rng: random.Random, depth: int, names: list[str]) -> dict[str, Any]:
    return {"enum": rng.sample(VALUES, rng.randint(1, 5))}


def _const(rng: random.Random, depth: int, names: list[str]) -> dict[str, Any]:
    return {"const": rng.choice(VALUES)}


def _object(rng: random.Random, depth: int, names: list[str]) -> dict[str, Any]:
    keys = rng.sample(["a", "b b", 'c"c', "dé", "long_property_name", "f/g", "~", ""], rng.randint(0, 4))
    schema: dict[str, Any] = {"type": "object", "properties": {key: _schema(rng, depth, names) for key in keys}}
    schema["required"] = [key for key in keys if rng.random() < 0.7]
    which = rng.random()
    if which < 0.5:
        schema["additionalProperties"] = False
    elif which < 0.6:
        schema["additionalProperties"] = _schema(rng, 0, [])
    elif which < 0.7 and keys:
        schema |= {"required": keys, "minProperties": len(keys), "maxProperties": len(keys) + 2}
    elif which < 0.8:
        schema |= {"patternProperties": {"^x_": {"type": "integer"}}, "additionalProperties": False}
    return schema


def _array(rng: random.Random, depth: int, names: list[str]) -> dict[str, Any]:
    low = rng.randint(0, 2)
    schema: dict[str, Any] = {"type": "array", "items": _schema(rng, depth, names)}
    schema |= rng.choice(({}, {"minItems": low}, {"maxItems": low + 1}, {"minItems": low, "maxItems": low + 2}))
    if rng.random() < 0.2:
        schema = {"type": "array", "prefixItems": [_schema(rng, depth, names) for _ in range(low + 1)], "items": rng.choice((False, {}))}
        schema["minItems"] = low
    return schema


def _any_of(rng: random.Random, depth: int, names: list[str]) -> dict[str, Any]:
    return {"anyOf": [_schema(rng, depth, names) for _ in range(rng.randint(1, 3))]}


def _all_of(rng: random.Random, depth: int, names: list[str]) -> dict[str, Any]:
    first, second = _object(rng, depth, names), {"type": "object", "properties": {"extra": {"type": "boolean"}}, "required": ["extra"]}
    first.pop("additionalProperties", None)
    first.pop("maxProperties", None)
    first.pop("patternProperties", None)
    return {"allOf": [first, second]}


def _one_of(rng: random.Random, depth: int, names: list[str]) -> dict[str, Any]:
    """Alternatives that a discriminating property tells apart, as pydantic writes them."""
    return {
        "oneOf": [
            {"type": "object", "properties": {"kind": {"const": kind}, "value": _schema(rng, depth, names)}, "required": ["kind", "value"]}
            for kind in ("x", "y")
        ]
    }
