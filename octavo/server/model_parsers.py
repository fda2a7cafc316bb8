"""Which parsers read this model's answers: by the flags, else by the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from octavo.config import ServerOptions
from octavo.errors import ConfigError, RequestError
from octavo.frontend.parsers import detect
from octavo.frontend.parsers.registry import check_pair, reasoning_parser_name, tool_parser_name
from octavo.frontend.tool_prompt import PARSER as TEXT_TOOLS_PARSER
from octavo.server.tools import ToolUse

OFF = "none"  # as a parser's name on the command line


@dataclass(frozen=True)
class ModelParsers:
    """How this model's answers are read. ``text_tools``: its template has no place for tools, so they are put into the text."""

    tool_calls: str | None = None
    reasoning: str | None = None
    text_tools: bool = False


def model_parsers(engine: Any, options: ServerOptions) -> ModelParsers:
    """By --tool-call-parser and --reasoning-parser, else by the model. ConfigError for names that are unknown or don't go together."""
    template, config = engine.chat_template, engine.model_config
    source = getattr(template, "whole_source", None) or ""
    found = detect(source, getattr(config, "model_type", ""), getattr(config, "architecture", "")) if template is not None else (None, None)
    tool_calls, reasoning = found
    text_tools = template is not None and not template.takes_tools
    if text_tools:
        tool_calls = TEXT_TOOLS_PARSER if tool_calls != "gpt_oss" else tool_calls
    if options.tool_call_parser is not None:
        tool_calls = None if options.tool_call_parser == OFF else tool_parser_name(options.tool_call_parser)
        if text_tools and tool_calls not in (None, TEXT_TOOLS_PARSER):
            raise ConfigError(
                f"--tool-call-parser {options.tool_call_parser}: this model's chat template has no place for tools, so they are put into "
                f"the prompt in the format of {TEXT_TOOLS_PARSER!r}. Leave the flag out, or give a template with --chat-template."
            )
    if options.reasoning_parser is not None:
        reasoning = None if options.reasoning_parser == OFF else reasoning_parser_name(options.reasoning_parser)
    if options.tool_call_parser is None and "gpt_oss" in (tool_calls, reasoning) and tool_calls != reasoning:
        tool_calls = "gpt_oss" if reasoning == "gpt_oss" else None  # harmony does both, and only with itself
    check_pair(tool_calls, reasoning)
    return ModelParsers(tool_calls, reasoning, text_tools)


def check_parsers(plan_parsers: ModelParsers, use: ToolUse, options: ServerOptions) -> None:
    """RequestError for tools that this server could not read the calls of."""
    if not use.offered or use.mode == "required":
        return
    if plan_parsers.tool_calls is None or not options.enable_auto_tool_choice:
        why = "this server was started with --no-enable-auto-tool-choice"
        if options.enable_auto_tool_choice:
            why = "how this model writes calls is not known; start the server with --tool-call-parser"
        raise RequestError(f"tool_choice auto: {why}, or force a call (required, or a named function).", param="tool_choice")
