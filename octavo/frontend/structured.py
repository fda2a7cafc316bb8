"""What form an output must have: ``StructuredOutput``, and the spellings in which callers ask for it.

One kind and one text. ``grammar.py`` checks it and turns it into what the engine takes.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from octavo.errors import RequestError

Kind = Literal["json_schema", "json_object", "regex", "choice", "grammar", "structural_tag"]

# Field of ``structured_outputs`` (vLLM's names) -> kind.
_FIELDS: dict[str, Kind] = {
    "json": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
    "json_object": "json_object",
    "structural_tag": "structural_tag",
}


class StructuredOutput(msgspec.Struct, frozen=True):
    """The form of an output.

    kind, and what ``value`` then holds:
        json_schema     a JSON schema, as JSON text
        json_object     "" (any JSON object)
        regex           a regular expression that the whole output matches
        choice          a JSON list of strings, one of which the output is
        grammar         a Lark or GBNF grammar
        structural_tag  a JSON object: text that is free but for tags, whose content has a form
    param: the client's field that it came from, for error messages.
    """

    kind: Kind
    value: str = ""
    param: str = "structured_outputs"


class StructuredOutputsParams(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's spelling of the same: exactly one field is set. ``json``: a schema as an object or as JSON text."""

    json: Any = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Any = None


def structured_output(value: Any, param: str = "structured_outputs") -> StructuredOutput | None:
    """Any spelling (one of the two structs above, or a dict with the fields of the second) as a ``StructuredOutput``.

    None stands for no constraint. RequestError, naming the field, for what is none of them.
    """
    if value is None or isinstance(value, StructuredOutput):
        return value
    if isinstance(value, StructuredOutputsParams):
        value = msgspec.structs.asdict(value)
    if not isinstance(value, dict):
        raise RequestError(f"{param} must be an object with one of {', '.join(_FIELDS)}.", param=param)
    chosen = {name: v for name, v in value.items() if v is not None and not (name == "json_object" and v is False)}
    unknown = [str(name)[:80] for name in chosen if name not in _FIELDS]
    if unknown:
        raise RequestError(f"{param} has no field {unknown[0]!r}; it takes {', '.join(_FIELDS)}.", param=f"{param}.{unknown[0]}")
    if len(chosen) != 1:
        raise RequestError(f"{param} takes exactly one of {', '.join(_FIELDS)}; got {', '.join(chosen) or 'none'}.", param=param)
    ((name, content),) = chosen.items()
    return of_kind(_FIELDS[name], content, f"{param}.{name}")


def of_kind(kind: Kind, content: Any, param: str) -> StructuredOutput:
    """One constraint out of the value that a client sent for it. RequestError for a value of another type."""
    if kind == "json_object":
        if content is not True:
            raise RequestError(f"{param} must be true, or left out.", param=param)
        return StructuredOutput(kind, "", param)
    if kind == "choice":
        if not isinstance(content, (list, tuple)) or not content or not all(isinstance(c, str) and c for c in content):
            raise RequestError(f"{param} must be a list of texts that are not empty.", param=param)
        return StructuredOutput(kind, _to_json(list(content), param), param)
    if isinstance(content, str):
        return StructuredOutput(kind, content, param)
    if kind == "json_schema" and isinstance(content, type) and hasattr(content, "model_json_schema"):  # a pydantic model
        content = content.model_json_schema()
    if kind in ("json_schema", "structural_tag") and isinstance(content, (dict, bool)):
        return StructuredOutput(kind, _to_json(content, param), param)
    wanted = "a text" if kind in ("regex", "grammar") else "a JSON object, or its text"
    raise RequestError(f"{param} must be {wanted}, got {type(content).__name__}.", param=param)


def _to_json(content: Any, param: str) -> str:
    try:
        return msgspec.json.encode(content).decode()  # a tenth of json's time: it may be as large as a body can be
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"{param} is not JSON: {error}.", param=param) from None
