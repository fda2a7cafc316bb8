"""What a parser of model output yields, and the message that a whole answer's events make."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

CallStatus = Literal["complete", "cut", "broken"]


@dataclass(slots=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(slots=True)
class Reasoning:
    """Text that the model thought to itself."""

    text: str


@dataclass(slots=True)
class ToolCallStart:
    """A call of a known tool begins. ``index`` counts the starts of an answer from 0; ``id`` where the model wrote one."""

    index: int
    name: str
    id: str | None = None


@dataclass(slots=True)
class ToolCallArguments:
    """A further piece of the call's arguments: all pieces together are one JSON object (a prefix of one if the call was cut)."""

    index: int
    text: str


@dataclass(slots=True)
class ToolCallEnd:
    """The call ends: ``complete`` (its arguments are a JSON object), ``cut`` (the text ended within it) or ``broken``.

    A broken call is none: all of its text, from its tag on, follows as `Content`. A client of a stream has seen its
    arguments begin by then; `WholeCalls` holds calls back until they are whole for those who must not.
    """

    index: int
    status: CallStatus = "complete"


Event = Content | Reasoning | ToolCallStart | ToolCallArguments | ToolCallEnd


@dataclass(slots=True)
class ToolCall:
    """One call; ``arguments`` is JSON text, valid if ``complete``."""

    name: str
    arguments: str
    id: str | None = None
    complete: bool = True


@dataclass(slots=True)
class Message:
    """An answer. ``content`` is None if there are only tool calls, ``reasoning`` None if there was none."""

    content: str | None
    reasoning: str | None = None
    tool_calls: list[ToolCall] = field(default_factory=list)


def assemble(events: Iterable[Event]) -> Message:
    """The message that ``events`` (all of one answer) add up to; broken calls are left out, their text is in the content."""
    content: list[str] = []
    reasoning: list[str] = []
    starts: dict[int, ToolCallStart] = {}
    arguments: dict[int, list[str]] = {}
    complete: dict[int, bool] = {}
    for event in events:
        if isinstance(event, Content):
            content.append(event.text)
        elif isinstance(event, Reasoning):
            reasoning.append(event.text)
        elif isinstance(event, ToolCallStart):
            starts[event.index] = event
            arguments[event.index] = []
        elif isinstance(event, ToolCallArguments):
            arguments[event.index].append(event.text)
        elif event.status == "broken":
            del starts[event.index]
        else:
            complete[event.index] = event.status == "complete"
    calls = [ToolCall(start.name, "".join(arguments[i]), start.id, complete.get(i, False)) for i, start in starts.items()]
    text = "".join(content)
    return Message(text if text or not calls else None, "".join(reasoning) or None, calls)


def merged(events: list[Event]) -> list[Event]:
    """``events`` with neighbours of one kind joined, in linear time."""
    if len(events) < 2:
        if events and not isinstance(events[0], (ToolCallStart, ToolCallEnd)) and not events[0].text:
            return []
        return events
    result: list[Event] = []
    run: list[str] = []
    last: Content | Reasoning | ToolCallArguments | None = None

    def close() -> None:
        if last is not None:
            text = "".join(run)
            result.append(ToolCallArguments(last.index, text) if isinstance(last, ToolCallArguments) else type(last)(text))

    for event in events:
        if isinstance(event, (ToolCallStart, ToolCallEnd)):
            close()
            last = None
            result.append(event)
        elif not event.text:
            continue
        elif last is not None and type(last) is type(event) and getattr(last, "index", 0) == getattr(event, "index", 0):
            run.append(event.text)
        else:
            close()
            last, run = event, [event.text]
    close()
    return result
