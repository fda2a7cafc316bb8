"""Calls that a request demands (tool_choice "required" or a named function): the JSON schema that an answer must have for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from octavo.server.tools import NO_PARAMETERS, ToolUse


@dataclass(frozen=True)
class ForcedCall:
    """``schema``: what the answer must be. ``name``: the answer is that function's arguments; None: it is a list of calls."""

    schema: dict[str, Any]
    name: str | None


def forced_call_schema(use: ToolUse) -> ForcedCall:
    """For ``use.mode`` "required".

    A named function's answer is its arguments; so is that of the only function, when only one call may be made. Else it is a
    list of {"name", "parameters"}, the name first, so that a stream can say which function it is before its arguments.
    """
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in use.offered if tool["function"]["name"] in use.callable}
    only = use.name or (next(iter(schemas)) if len(schemas) == 1 and not use.parallel else None)
    if only is not None:
        return ForcedCall(_object_schema(schemas[only]), only)
    definitions: dict[str, Any] = {}
    calls = []
    for name, schema in schemas.items():
        schema = _object_schema(schema)
        if _has_reference(schema):
            definitions[name] = _rebased(schema, f"#/$defs/{name}")
            schema = {"$ref": f"#/$defs/{name}"}
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": name}, "parameters": schema},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    answer: dict[str, Any] = {"type": "array", "minItems": 1, "items": calls[0] if len(calls) == 1 else {"anyOf": calls}}
    if not use.parallel:
        answer["maxItems"] = 1
    if definitions:
        answer["$defs"] = definitions
    return ForcedCall(answer, None)


# Where a schema has one of these, it is not for us to say which parameters there are.
_OPEN = ("patternProperties", "additionalProperties", "unevaluatedProperties", "$ref", "anyOf", "oneOf", "allOf", "enum", "const", "if")


def _object_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Arguments are an object of the parameters that the function names: a schema that doesn't say whether there may be others
    would allow any, and models ramble."""
    if not any(key in schema for key in _OPEN):
        schema = {**NO_PARAMETERS, **schema, "additionalProperties": False}
    return schema if "type" in schema or "$ref" in schema else {"type": "object", **schema}


def _has_reference(value: Any) -> bool:
    if isinstance(value, dict):
        return "$ref" in value or any(_has_reference(item) for item in value.values())
    return isinstance(value, list) and any(_has_reference(item) for item in value)


def _rebased(value: Any, root: str) -> Any:
    """The schema with its references to its own parts made to point into where it now stands."""
    if isinstance(value, dict):
        return {
            key: root + item[1:] if key == "$ref" and isinstance(item, str) and item.startswith("#") else _rebased(item, root)
            for key, item in value.items()
        }
    return [_rebased(item, root) for item in value] if isinstance(value, list) else value
