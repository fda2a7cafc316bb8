"""POST /v1/messages, what goes out: an answer's events as content blocks, and the typed events of a stream."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec

from octavo.frontend.parsers import Content, Event, Reasoning, ToolCallArguments, ToolCallEnd, ToolCallStart
from octavo.server.generation import Usage

encode = msgspec.json.Encoder().encode

TypedEvent = dict[str, Any]

SIGNATURE = "octavo"  # clients send thinking back with its signature; here it proves nothing, and is not looked at
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def frame(event: TypedEvent) -> bytes:
    """One server-sent event."""
    return b"event: " + event["type"].encode() + b"\ndata: " + encode(event) + b"\n\n"


def usage_json(usage: Usage) -> dict[str, Any]:
    """Anthropic counts cached tokens apart from the input's others."""
    cached = usage.prompt_tokens_details.cached_tokens
    return {
        "input_tokens": usage.prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.completion_tokens,
    }


_DELTA_START = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":'
_DELTA_TEXT = b',"delta":{"type":"text_delta","text":'


class ContentBlocks:
    """The blocks of one message, in the order in which they began; at most one is open.

    ``keep_broken``: a call that turned out to be broken stays, with what of its input was whole, because a stream has shown it;
    its text follows in a block.
    """

    def __init__(self, *, keep_broken: bool) -> None:
        self.keep_broken = keep_broken
        self.blocks: list[dict[str, Any]] = []
        self.texts: list[str] = []  # of the open block
        self.kind = ""  # of the open block

    def add(self, events: list[Event]) -> Iterator[TypedEvent]:
        for event in events:
            if isinstance(event, Content):
                yield from self._begin("text", {"text": ""})
                yield self._delta({"type": "text_delta", "text": event.text}, event.text)
            elif isinstance(event, Reasoning):
                yield from self._begin("thinking", {"thinking": "", "signature": ""})
                yield self._delta({"type": "thinking_delta", "thinking": event.text}, event.text)
            elif isinstance(event, ToolCallArguments):
                yield self._delta({"type": "input_json_delta", "partial_json": event.text}, event.text)
            elif isinstance(event, ToolCallStart):
                yield from self.close()
                yield from self._begin("tool_use", {"id": event.id, "name": event.name, "input": {}})
            elif isinstance(event, ToolCallEnd):
                yield from self.close()
                if event.status == "broken" and not self.keep_broken:
                    self.blocks.pop()

    def text_delta(self, text: str) -> bytes:
        """The event of a text that goes on in the open block, from a template. The hot path of ``add`` and ``frame``."""
        assert self.kind == "text"
        self.texts.append(text)
        return b"%b%d%b%b}}\n\n" % (_DELTA_START, len(self.blocks) - 1, _DELTA_TEXT, encode(text))

    def _begin(self, kind: str, fields: dict[str, Any]) -> Iterator[TypedEvent]:
        """Go on with the open block if it is of the kind, else begin one."""
        if self.kind == kind:
            return
        yield from self.close()
        self.kind, self.texts = kind, []
        block = {"type": kind, **fields}
        self.blocks.append(block)
        yield {"type": "content_block_start", "index": len(self.blocks) - 1, "content_block": dict(block)}

    def _delta(self, delta: dict[str, Any], text: str) -> TypedEvent:
        self.texts.append(text)
        return {"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": delta}

    def close(self) -> Iterator[TypedEvent]:
        """End the open block, if there is one."""
        if not self.kind:
            return
        block, text = self.blocks[-1], "".join(self.texts)
        if self.kind == "tool_use":
            block["input"] = whole_part(text)
        elif self.kind == "thinking":
            block["thinking"], block["signature"] = text, SIGNATURE
            yield self._delta({"type": "signature_delta", "signature": SIGNATURE}, "")
        else:
            block["text"] = text
        self.kind = ""
        yield {"type": "content_block_stop", "index": len(self.blocks) - 1}


_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],]', re.DOTALL)


def whole_part(text: str) -> dict[str, Any]:
    """A JSON object out of a text that may be cut: the members that are whole. One pass."""
    closers: list[str] = []
    good, ends = 0, ""  # text[:good] + ends is JSON
    for match in _TOKEN.finditer(text):
        char = match.group()
        if char in ("{", "["):
            closers.append("}" if char == "{" else "]")
        elif char in ("}", "]") and closers:
            closers.pop()
        elif char != ",":
            continue
        good, ends = match.start() if char == "," else match.end(), "".join(reversed(closers))
    try:
        value = msgspec.json.decode(text[:good] + ends)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
