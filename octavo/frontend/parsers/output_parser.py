"""The parser of one answer: reasoning first, tool calls in what remains."""

from __future__ import annotations

from octavo.frontend.parsers.base import ToolParser
from octavo.frontend.parsers.events import Content, Event, ToolCallArguments, ToolCallEnd, ToolCallStart, merged
from octavo.frontend.parsers.harmony import HarmonyParser
from octavo.frontend.parsers.reasoning import ReasoningParser


class WholeCalls:
    """Holds each call's events back until it is known to be one, and drops those of broken calls.

    With it a stream says exactly what the whole answer would; without it, arguments are seen as they come, and a call that
    turns out to be broken has been seen in part.
    """

    def __init__(self) -> None:
        self._held: list[Event] = []
        self._index = 0
        self.holding = False

    def push(self, events: list[Event]) -> list[Event]:
        out: list[Event] = []
        for event in events:
            if isinstance(event, ToolCallStart):
                self.holding = True
            if not self.holding:
                out.append(event)
                continue
            self._held.append(event)
            if isinstance(event, ToolCallEnd):
                if event.status != "broken":
                    out.extend(_with_index(held, self._index) for held in merged(self._held))
                    self._index += 1
                self._held, self.holding = [], False
        return out


def _with_index(event: Event, index: int) -> Event:
    if isinstance(event, ToolCallStart):
        return ToolCallStart(index, event.name, event.id)
    if isinstance(event, ToolCallEnd):
        return ToolCallEnd(index, event.status)
    return ToolCallArguments(index, event.text) if isinstance(event, ToolCallArguments) else event


class OutputParser:
    """Takes the text of one answer in pieces and yields typed events; no I/O, not thread-safe, one per answer.

    Either part may be None: text that no part takes is `Content`. ``whole_calls``: see `WholeCalls`.
    """

    def __init__(
        self, reasoning: ReasoningParser | None = None, tool_calls: ToolParser | None = None, *, whole_calls: bool = False
    ) -> None:
        self._reasoning = reasoning
        self._tool_calls = tool_calls
        self._whole_calls = WholeCalls() if whole_calls else None

    @property
    def in_reasoning(self) -> bool:
        """Whether the text so far ends within reasoning."""
        if isinstance(self._tool_calls, HarmonyParser):
            return self._tool_calls.in_reasoning
        return self._reasoning is not None and self._reasoning.in_reasoning

    @property
    def markers(self) -> tuple[str, ...]:
        """Special tokens that the text must still contain, for the parser to see them."""
        return tuple(marker for part in (self._reasoning, self._tool_calls) if part is not None for marker in part.markers)

    def plain(self, text: str) -> Event | None:
        """The one event that ``text`` comes to, if it only goes on with what stands before it: `TextParser.plain`."""
        if self._whole_calls is not None and self._whole_calls.holding:
            return None
        if self._reasoning is not None:
            event = self._reasoning.plain(text)
            if self._tool_calls is None or type(event) is not Content:
                return event
        return self._tool_calls.plain(text) if self._tool_calls is not None else None

    def push(self, text: str) -> list[Event]:
        """Take new text; the events that are now certain. Neighbours of one kind are one event."""
        if self._reasoning is None:
            if self._tool_calls is None:
                return [Content(text)] if text else []
            events = self._tool_calls.push(text)
            return self._whole_calls.push(events) if self._whole_calls is not None else events
        return self._call_events(self._reasoning.push(text))

    def finish(self, finish_reason: str | None = "stop") -> list[Event]:
        """No more text comes; the rest. ``finish_reason`` as the engine gave it: all but "stop" means that the text was cut."""
        events = self._call_events(self._reasoning.finish(finish_reason) if self._reasoning is not None else [])
        if self._tool_calls is not None:
            last = self._tool_calls.finish(finish_reason)
            events += self._whole_calls.push(last) if self._whole_calls is not None else last
        return events

    def _call_events(self, events: list[Event]) -> list[Event]:
        if self._tool_calls is None:
            return events
        out: list[Event] = []
        for event in events:
            if isinstance(event, Content):
                out += self._tool_calls.push(event.text)
            else:
                out.append(event)
        return self._whole_calls.push(out) if self._whole_calls is not None else out
