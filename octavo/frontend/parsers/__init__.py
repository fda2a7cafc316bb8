"""Parsers of model output: text in, content, reasoning and tool calls out. No I/O."""

from octavo.frontend.parsers.events import (
    Content,
    Event,
    Message,
    Reasoning,
    ToolCall,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    assemble,
)
from octavo.frontend.parsers.output_parser import OutputParser
from octavo.frontend.parsers.registry import REASONING_PARSERS, TOOL_PARSERS, detect, make_forced_parser, make_parser
from octavo.frontend.parsers.schema import ToolSet

__all__ = [
    "REASONING_PARSERS",
    "TOOL_PARSERS",
    "Content",
    "Event",
    "Message",
    "OutputParser",
    "Reasoning",
    "ToolCall",
    "ToolCallArguments",
    "ToolCallEnd",
    "ToolCallStart",
    "ToolSet",
    "assemble",
    "detect",
    "make_forced_parser",
    "make_parser",
]
