"""A request's tools: checked, and in the forms that the template and the parser want."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Literal

from octavo.errors import RequestError
from octavo.frontend.parsers import ToolSet
from octavo.server.schemas import ChatRequest, Tool

MAX_TOOLS = 256
_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,128}")
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}

Mode = Literal["none", "auto", "required"]


@dataclass(frozen=True)
class ToolUse:
    """What a request says about tools.

    ``offered``: the tools as the template shows them; empty if none may be called. ``callable``: those that the answer may
    call (allowed_tools can name fewer than are offered). ``name``: the one function that must be called, with ``mode``
    "required".
    """

    offered: list[dict[str, Any]] = field(default_factory=list)
    callable: ToolSet = field(default_factory=ToolSet)
    mode: Mode = "none"
    name: str | None = None
    parallel: bool = True


NO_TOOLS = ToolUse()


def tool_use(request: ChatRequest) -> ToolUse:
    """RequestError, naming the field, for tools or a tool_choice that make no sense."""
    if not request.tools:
        return _without_tools(request.tool_choice)
    tools = _checked(request.tools)
    mode, name, allowed = _choice(request.tool_choice, set(tools))
    if mode == "none":
        return NO_TOOLS
    offered = [_for_template(tool) for tool in request.tools]
    usable = [tool for tool in offered if allowed is None or tool["function"]["name"] in allowed]
    return ToolUse(offered, ToolSet(usable), mode, name, request.parallel_tool_calls is not False)


def template_tools(tools: list[Tool] | None) -> list[dict[str, Any]]:
    """Checked tools as the template shows them, for requests that only count tokens."""
    _checked(tools or [])
    return [_for_template(tool) for tool in tools or ()]


def _without_tools(choice: Any) -> ToolUse:
    if choice not in (None, "none", "auto"):
        raise RequestError("tool_choice asks for a call, but the request has no tools.", param="tool_choice")
    return NO_TOOLS


def _checked(tools: list[Tool]) -> dict[str, Tool]:
    if len(tools) > MAX_TOOLS:
        raise RequestError(f"tools takes at most {MAX_TOOLS} tools, got {len(tools)}.", param="tools")
    found: dict[str, Tool] = {}
    for i, tool in enumerate(tools):
        where = f"tools[{i}]"
        if tool.type != "function":
            raise RequestError(
                f"{where}.type {tool.type[:80]!r} is not supported; this server runs no tools itself and takes functions only.",
                param=f"{where}.type",
            )
        if tool.function is None:
            raise RequestError(f"Field 'function' is missing in {where}.", param=f"{where}.function", code="missing_field")
        name = tool.function.name
        if not _NAME.fullmatch(name):
            raise RequestError(
                f"{where}.function.name must be 1 to 128 letters, digits, '_', '-' or '.', got {name[:140]!r}.",
                param=f"{where}.function.name",
            )
        if name in found:
            raise RequestError(f"{where}.function.name {name!r} is given twice.", param=f"{where}.function.name")
        found[name] = tool
    return found


def _for_template(tool: Tool) -> dict[str, Any]:
    """``strict`` is left out: models were not trained to see it."""
    function = tool.function
    assert function is not None
    shown: dict[str, Any] = {"name": function.name}
    if function.description is not None:
        shown["description"] = function.description
    shown["parameters"] = function.parameters or NO_PARAMETERS
    return {"type": "function", "function": shown}


def _choice(choice: Any, known: set[str]) -> tuple[Mode, str | None, set[str] | None]:
    """(mode, the function that must be called, the functions that may be called or None for all)."""
    if choice is None:
        return "auto", None, None
    if isinstance(choice, str):
        if choice not in ("none", "auto", "required"):
            raise RequestError(f"tool_choice must be none, auto, required or a function, got {choice[:80]!r}.", param="tool_choice")
        return choice, None, None  # type: ignore[return-value]
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "function":
        return "required", _named(choice, known, "tool_choice"), None
    if kind == "allowed_tools":
        allowed = choice.get("allowed_tools")
        if not isinstance(allowed, dict) or allowed.get("mode") not in ("auto", "required") or not isinstance(allowed.get("tools"), list):
            raise RequestError("tool_choice.allowed_tools needs a mode (auto or required) and tools.", param="tool_choice.allowed_tools")
        names = {_named(tool, known, f"tool_choice.allowed_tools.tools[{i}]") for i, tool in enumerate(allowed["tools"])}
        if not names:
            raise RequestError("tool_choice.allowed_tools.tools must not be empty.", param="tool_choice.allowed_tools.tools")
        return allowed["mode"], None, names
    raise RequestError(
        'tool_choice must be none, auto, required, {"type": "function", "function": {"name": ...}} or allowed_tools.', param="tool_choice"
    )


def _named(choice: Any, known: set[str], where: str) -> str:
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type", "function") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise RequestError(f"{where} needs a function with a name.", param=where)
    if name not in known:
        raise RequestError(f"{where} names {name[:140]!r}, which is not among the tools.", param=where)
    return name
