"""Tools for chat templates that have no place for them: as a part of the system message, and calls and results as text.

The words are ours; the format is the one that most open models have seen (Hermes: JSON between <tool_call> tags), and what
the ``hermes`` parser reads. A model that was not trained on tools may still call them, or be forced to.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

PARSER = "hermes"

_HEAD = "You can call functions. These exist, one a line, each with its parameters as a JSON schema:\n<tools>\n"
_TAIL = (
    "\n</tools>\nTo call a function, answer with a JSON object that holds its name and its arguments, between tags like these:\n"
    '<tool_call>\n{"name": "the name", "arguments": {"a parameter": "its value"}}\n</tool_call>\n'
    "Results come back between <tool_response> tags. When no function helps, answer in plain words."
)


def with_tools_as_text(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
    """``messages`` such that a template without tools shows everything. ``tools``: none are offered if empty."""
    result: list[dict[str, Any]] = []
    for message in messages:
        role = message.get("role")
        if role == "assistant" and message.get("tool_calls"):
            result.append(_with_calls(message))
        elif role == "tool":
            _add_result(result, str(message.get("content") or ""))
        else:
            result.append(dict(message))
    if tools:
        lines = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
        text = _HEAD + lines + _TAIL
        if result and result[0].get("role") == "system":
            result[0]["content"] = f"{result[0].get('content') or ''}\n\n{text}".lstrip("\n")
        else:
            result.insert(0, {"role": "system", "content": text})
    return result


def _with_calls(message: Mapping[str, Any]) -> dict[str, Any]:
    parts = [message["content"]] if message.get("content") else []
    for call in message["tool_calls"]:
        function = call["function"]
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        shown = json.dumps({"name": function["name"], "arguments": arguments}, ensure_ascii=False)
        parts.append(f"<tool_call>\n{shown}\n</tool_call>")
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": "\n".join(parts)}


def _add_result(result: list[dict[str, Any]], content: str) -> None:
    """Results are what the user says next; those of parallel calls are one message, for roles must take turns."""
    text = f"<tool_response>\n{content}\n</tool_response>"
    if result and result[-1].get("role") == "user" and str(result[-1].get("content")).startswith("<tool_response>"):
        result[-1]["content"] += "\n" + text
    else:
        result.append({"role": "user", "content": text})
