"""What form the answer must have: OpenAI's ``response_format``, vLLM's ``structured_outputs`` and older ``guided_*``."""

from __future__ import annotations

from typing import Any

from octavo.errors import RequestError
from octavo.frontend.structured import Kind, StructuredOutput, of_kind, structured_output
from octavo.server.schemas import GenerationRequest

_GUIDED: dict[str, Kind] = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
_FORMATS = ("text", "json_object", "json_schema", "structural_tag")


def requested_output(request: GenerationRequest) -> StructuredOutput | None:
    """The one constraint that a request asks for. RequestError, naming the field, for several or for one that can't be read.

    Whether a schema or grammar can be honoured is found later, off the event loop.
    """
    found: list[StructuredOutput] = []
    if request.response_format is not None and (output := response_format(request.response_format)):
        found.append(output)
    if request.structured_outputs is not None and (output := structured_output(request.structured_outputs)):
        found.append(output)
    for name, kind in _GUIDED.items():
        value = getattr(request, name)
        if value is not None:
            found.append(of_kind(kind, value, name))
    if len(found) > 1:
        names = " and ".join(output.param for output in found)
        raise RequestError(f"{names} both say what form the answer has; send one.", param=found[1].param)
    return found[0] if found else None


def response_format(value: Any, param: str = "response_format") -> StructuredOutput | None:
    """OpenAI's form, None for text. ``strict`` false is honoured like true: the schema is always kept."""
    if not isinstance(value, dict):
        raise RequestError(f"{param} must be an object.", param=param)
    kind = value.get("type")
    if kind not in _FORMATS:
        raise RequestError(f"{param}.type must be one of {', '.join(_FORMATS)}, got {kind!r:.80}.", param=f"{param}.type")
    if kind == "structural_tag":
        return of_kind("structural_tag", value, param)
    _only(value, {"type", "json_schema"} if kind == "json_schema" else {"type"}, param)
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutput("json_object", "", param)
    param = f"{param}.json_schema"
    named = value.get("json_schema")
    if not isinstance(named, dict):
        raise RequestError(f"{param} must be an object with name and schema.", param=param)
    _only(named, {"name", "description", "schema", "strict"}, param)
    for field, types in (("name", str), ("description", str), ("strict", bool)):
        if named.get(field) is not None and not isinstance(named[field], types):
            raise RequestError(f"{param}.{field} must be {'true or false' if types is bool else 'a text'}.", param=f"{param}.{field}")
    if named.get("schema") is None:
        raise RequestError(f"{param}.schema is missing.", param=f"{param}.schema")
    return of_kind("json_schema", named["schema"], f"{param}.schema")


def _only(value: dict[str, Any], known: set[str], param: str) -> None:
    for key, content in value.items():
        if key not in known and content is not None:
            raise RequestError(f"{param} has no field {key[:80]!r}; it takes {', '.join(sorted(known))}.", param=f"{param}.{key[:80]}")
