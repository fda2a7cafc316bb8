"""POST /v1/responses, what goes out: an answer's events as output items, and the typed events of a stream.

One machine makes both: a stream writes the events that it yields, an answer only keeps the items.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from octavo.frontend.parsers import Content, Event, Reasoning, ToolCallArguments, ToolCallEnd, ToolCallStart
from octavo.server.generation import Usage

encode = msgspec.json.Encoder().encode

TypedEvent = tuple[str, dict[str, Any]]  # type, and its fields beside type and sequence_number


def frame(kind: str, fields: dict[str, Any], number: int) -> bytes:
    """One server-sent event."""
    return b"event: " + kind.encode() + b"\ndata: " + encode({"type": kind, "sequence_number": number, **fields}) + b"\n\n"


def usage_json(usage: Usage) -> dict[str, Any]:
    details = usage.completion_tokens_details
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.prompt_tokens_details.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0 if isinstance(details, msgspec.UnsetType) else details.reasoning_tokens},
        "total_tokens": usage.total_tokens,
    }


class OutputItems:
    """The items of one response, in the order in which they began; at most one is open.

    ``add`` takes what a step brought and yields the typed events for it. ``keep_broken``: a call that turned out to be broken
    stays as an incomplete item, because a stream has shown it; its text follows in a message.
    """

    def __init__(self, response_id: str, *, keep_broken: bool) -> None:
        self.suffix = response_id.partition("_")[2]
        self.keep_broken = keep_broken
        self.items: list[dict[str, Any]] = []
        self.texts: list[str] = []  # of the open item
        self.logprobs: list[msgspec.Raw] = []  # of the open message
        self.waiting: list[msgspec.Raw] = []  # those that no text has been sent with yet
        self.kind = ""  # of the open item
        self.delta_start = b""  # of the open message's text events, with a place for their number

    def add(self, events: list[Event], logprobs: list[msgspec.Raw]) -> Iterator[TypedEvent]:
        self.waiting += logprobs
        for event in events:
            if isinstance(event, Content):
                if self.items and self.kind != "message":
                    self.waiting = list(logprobs)  # the others are of tags before it
                yield from self._begin("message")
                new, self.waiting = self.waiting, []
                self.logprobs += new
                self.texts.append(event.text)
                yield "response.output_text.delta", {**self._where(0), "delta": event.text, "logprobs": new}
            elif isinstance(event, Reasoning):
                self.waiting = []
                yield from self._begin("reasoning")
                self.texts.append(event.text)
                yield "response.reasoning_text.delta", {**self._where(0), "delta": event.text}
            elif isinstance(event, ToolCallArguments):
                self.waiting = []
                self.texts.append(event.text)
                yield "response.function_call_arguments.delta", {**self._where(), "delta": event.text}
            elif isinstance(event, ToolCallStart):
                yield from self.close("completed")
                yield from self._open(self._call_item(event))
            elif isinstance(event, ToolCallEnd):
                self.waiting = []
                yield from self.close("completed" if event.status == "complete" else "incomplete")
                if event.status == "broken" and not self.keep_broken:
                    self.items.pop()

    def text_delta(self, text: str, number: int) -> bytes:
        """The event ``number`` of a text that goes on in the open message, from a template. The hot path of ``add`` and ``frame``."""
        assert self.kind == "message" and not self.waiting
        self.texts.append(text)
        return self.delta_start % number + encode(text) + b',"logprobs":[]}\n\n'

    def _call_item(self, event: ToolCallStart) -> dict[str, Any]:
        return {
            "type": "function_call",
            "id": f"fc_{self.suffix}_{len(self.items)}",
            "call_id": event.id,
            "name": event.name,
            "arguments": "",
            "status": "in_progress",
        }

    def _begin(self, kind: str) -> Iterator[TypedEvent]:
        """Go on with the open item if it is of the kind, else begin one."""
        if self.kind == kind:
            return
        yield from self.close("completed")
        if kind == "message":
            item = {"type": "message", "id": f"msg_{self.suffix}_{len(self.items)}", "role": "assistant", "content": []}
        else:
            item = {"type": "reasoning", "id": f"rs_{self.suffix}_{len(self.items)}", "summary": [], "content": []}
        yield from self._open({**item, "status": "in_progress"})
        yield "response.content_part.added", {**self._where(0), "part": self._part("", [])}

    def _open(self, item: dict[str, Any]) -> Iterator[TypedEvent]:
        self.kind = item["type"]
        self.items.append(item)
        if self.kind == "message":
            name = b"response.output_text.delta"
            where = encode(self._where(0))[1:-1].replace(b"%", b"%%")
            self.delta_start = b'event: %b\ndata: {"type":"%b","sequence_number":%%d,%b,"delta":' % (name, name, where)
        self.texts, self.logprobs = [], []
        yield "response.output_item.added", {"output_index": len(self.items) - 1, "item": dict(item)}

    def _where(self, content_index: int | None = None) -> dict[str, Any]:
        where = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
        return where if content_index is None else {**where, "content_index": content_index}

    def _part(self, text: str, logprobs: list[msgspec.Raw]) -> dict[str, Any]:
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def close(self, status: str) -> Iterator[TypedEvent]:
        """End the open item, if there is one."""
        if not self.kind:
            return
        item, text = self.items[-1], "".join(self.texts)
        if self.kind == "function_call":
            item["arguments"] = text
            yield "response.function_call_arguments.done", {**self._where(), "name": item["name"], "arguments": text}
        else:
            part = self._part(text, self.logprobs)
            item["content"] = [part]
            if self.kind == "message":
                yield "response.output_text.done", {**self._where(0), "text": text, "logprobs": self.logprobs}
            else:
                yield "response.reasoning_text.done", {**self._where(0), "text": text}
            yield "response.content_part.done", {**self._where(0), "part": part}
        item["status"] = status
        self.kind = ""
        yield "response.output_item.done", {"output_index": len(self.items) - 1, "item": dict(item)}
