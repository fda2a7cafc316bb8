"""Server-sent events from byte templates.

A stream of n tokens sends n nearly equal frames: everything but the text is encoded once per request, and a frame is
two concatenations around one escaped string. Escaped JSON has no line breaks, so a frame is always one event.
"""

from __future__ import annotations

from typing import Any

import msgspec

DONE = b"data: [DONE]\n\n"
HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]

encode = msgspec.json.Encoder().encode


def event(body: bytes) -> bytes:
    return b"data: " + body + b"\n\n"


class Frames:
    """Frames of one response. ``include_usage``: every chunk has a ``usage`` field, null but in the last.

    Subclasses say what a choice looks like.
    """

    object_name = ""
    text_key = b""  # between the index and the text
    text_end = b""  # between the text and the rest of the choice

    def __init__(self, response_id: str, created: int, model: str, include_usage: bool) -> None:
        self.head = b'data: {"id":%s,"object":%s,"created":%d,"model":%s,"choices":[' % (
            encode(response_id),
            encode(self.object_name),
            created,
            encode(model),
        )
        self.include_usage = include_usage
        self.tail = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"
        self.plain_end = self.text_end + b',"logprobs":null,"finish_reason":null}' + self.tail
        self.starts: list[bytes] = []  # by choice: all that comes before its text
        self.call_starts: dict[tuple[int, int], bytes] = {}  # by choice and call: all that comes before its arguments

    def text(self, index: int, text: str, logprobs: bytes | None = None) -> bytes:
        """The frame of a text delta, with nothing else in it but ``logprobs`` (JSON). The hot path."""
        while len(self.starts) <= index:
            self.starts.append(self.head + b'{"index":%d,' % len(self.starts) + self.text_key)
        if logprobs is None:
            return self.starts[index] + encode(text) + self.plain_end
        return b"".join((self.starts[index], encode(text), self.text_end, b',"logprobs":', logprobs, b',"finish_reason":null}', self.tail))

    def choice(self, index: int, fields: dict[str, Any], *, top: dict[str, Any] | None = None, usage: Any = None) -> bytes:
        """A frame with one choice of any fields; ``top`` adds fields to the chunk itself."""
        body = self.head + encode({"index": index, **fields})
        if not top and usage is None:
            return body + self.tail
        extra = dict(top or {})
        if usage is not None or self.include_usage:
            extra["usage"] = usage
        return body + b"]," + encode(extra)[1:] + b"\n\n"

    def usage(self, usage: Any) -> bytes:
        """The last frame: no choices, the whole usage."""
        return self.head + b"]," + encode({"usage": usage})[1:] + b"\n\n"


class ChatFrames(Frames):
    object_name = "chat.completion.chunk"
    text_key = b'"delta":{"content":'
    text_end = b"}"

    def reasoning(self, index: int, text: str) -> bytes:
        """The frame of a reasoning delta, under both of the names that clients read."""
        body = encode(text)
        return self.head + b'{"index":%d,"delta":{"reasoning_content":%s,"reasoning":%s' % (index, body, body) + self.plain_end

    def arguments(self, index: int, call: int, text: str) -> bytes:
        """The frame of a further piece of a call's arguments."""
        start = self.call_starts.get((index, call))
        if start is None:
            start = b'{"index":%d,"delta":{"tool_calls":[{"index":%d,"function":{"arguments":' % (index, call)
            start = self.call_starts[index, call] = self.head + start
        return start + encode(text) + b"}}]" + self.plain_end


class CompletionFrames(Frames):
    object_name = "text_completion"
    text_key = b'"text":'
