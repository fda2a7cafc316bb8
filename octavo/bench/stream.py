"""One streamed completion or chat: from the pieces of an event stream to the times that its tokens came."""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Iterable
from time import perf_counter
from typing import Any

from octavo.bench.http import Client, HttpError, describe_failure

# A chunk that brings text. A quote inside of a JSON string has a backslash, so no model's output can look like this.
_TEXT = re.compile(rb'"(?:text|content|reasoning_content|reasoning|arguments)"\s*:\s*"[^"]').search


class EventStream:
    """Takes an SSE body piece by piece. Counts most events without parsing them; JSON only where it has to be.

    An event counts as tokens that came (``arrivals``) if it has text, or if it is a chunk of an answer that goes on and
    is not the one that only names the role: tokens may have no text yet. The chunk that only tells the finish reason does
    not count. How many tokens a chunk had is not known, but for the sum.
    """

    __slots__ = ("arrivals", "input_tokens", "output_tokens", "error", "done", "kept", "streams", "_rest")

    def __init__(self, keep: bool = False) -> None:
        self.arrivals = array("d")  # perf_counter of each chunk with tokens
        self.input_tokens: int | None = None
        self.output_tokens: int | None = None
        self.error: str | None = None
        self.done = False
        self.kept: list[bytes] | None = [] if keep else None
        self.streams = False  # an event has come
        self._rest = b""

    def feed(self, data: bytes, now: float) -> None:
        if self._rest:
            data, self._rest = self._rest + data, b""
        lines = data.split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line, now)

    def _event(self, line: bytes, now: float) -> None:
        self.streams = True
        has_text = _TEXT(line) is not None
        if has_text:
            self.arrivals.append(now)
            if self.kept is not None:
                self.kept.append(line)
            if b'"completion_tokens"' not in line:
                return
        data = line[5:].strip()
        if data == b"[DONE]":
            self.done = True
            return
        event = json.loads(data)
        if not isinstance(event, dict):
            self.error = f"an event of the stream is no JSON object: {data[:100].decode(errors='replace')}"
            return
        if event.get("error"):
            error = event["error"]
            self.error = f"error in the stream: {error.get('message', error) if isinstance(error, dict) else error}"[:300]
        usage = event.get("usage")
        if usage:
            self.input_tokens, self.output_tokens = _count(usage.get("prompt_tokens")), _count(usage.get("completion_tokens"))
        if not has_text and any(self._has_tokens(choice) for choice in event.get("choices") or ()):
            self.arrivals.append(now)

    @staticmethod
    def _has_tokens(choice: dict[str, Any]) -> bool:
        if choice.get("token_ids") is not None:  # return_token_ids was asked for (--extra-body): then it is told
            return bool(choice["token_ids"])
        return choice.get("finish_reason") is None and "role" not in (choice.get("delta") or ())


def _count(value: Any) -> int | None:
    """A number of tokens as the server tells it; None for what is none."""
    return value if type(value) is int and value >= 0 else None


class Result:
    """What became of one request. Times are ``perf_counter`` seconds; ``error`` is None if it succeeded.

    ``output_tokens`` is the server's own count, or the number of chunks where it gives none (``counted`` False).
    """

    __slots__ = ("index", "start", "end", "arrivals", "input_tokens", "output_tokens", "counted", "error", "kept")

    def __init__(self, index: int, start: float) -> None:
        self.index, self.start, self.end = index, start, start
        self.arrivals: array[float] = array("d")
        self.input_tokens: int | None = None
        self.output_tokens = 0
        self.counted = True
        self.error: str | None = None
        self.kept: list[bytes] | None = None

    @property
    def ttft(self) -> float:
        return self.arrivals[0] - self.start

    @property
    def e2el(self) -> float:
        """Until the last token, not the end of the HTTP answer."""
        return self.arrivals[-1] - self.start

    @property
    def tpot(self) -> float | None:
        """Mean time per token after the first; None for a single token."""
        return (self.arrivals[-1] - self.arrivals[0]) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    @property
    def itls(self) -> list[float]:
        """Gaps between chunks; where a chunk had several tokens, they came at once."""
        return [b - a for a, b in zip(self.arrivals, self.arrivals[1:], strict=False)]


async def stream(client: Client, request: bytes, index: int = 0, *, keep: bool = False) -> Result:
    """Send an encoded request and time its answer. Never raises for what the server or the network does: that is counted."""
    events = EventStream(keep)
    result = Result(index, perf_counter())
    try:
        status, body = await client.send(request, events.feed)
        if status != 200:
            result.error = describe_failure(status, body)
    except HttpError as error:
        result.error = str(error)
    result.end = perf_counter()
    try:
        events.feed(b"\n", result.end)  # the last line may lack its end
    except ValueError:
        pass  # broken off in the middle of an event; [DONE] is missing, which is told below
    result.arrivals, result.input_tokens, result.kept = events.arrivals, events.input_tokens, events.kept
    if result.error is None and events.error is not None:
        result.error = events.error
    if result.error is None and not events.done:
        result.error = "the stream ended without [DONE]" if events.streams else "the answer is no stream of events (no line with data:)"
    result.counted = events.output_tokens is not None
    result.output_tokens = events.output_tokens if events.output_tokens is not None else len(events.arrivals)
    if result.error is None and not result.arrivals:
        if result.output_tokens:
            result.arrivals.append(result.end)  # tokens without any text, told at the end
        else:
            result.error = "the answer has no tokens"
    return result


def text_of(lines: Iterable[bytes]) -> str:
    """The text in kept events."""
    parts = []
    for line in lines:
        for choice in json.loads(line[5:]).get("choices") or ():
            delta = choice.get("delta") or {}
            parts.append(choice.get("text") or delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning") or "")
    return "".join(parts)
