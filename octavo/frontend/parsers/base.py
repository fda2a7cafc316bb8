"""What all parsers of tool calls share: the loop between text and calls, and what becomes of calls that are no calls.

The rules, for every format:
- A call begins (`ToolCallStart`) when its tag, its name and the beginning of its arguments have been read. A name that
  the request does not offer is no call: its text is content. Without tools all text is content.
- A call is complete when its arguments are; closing tags may be missing at the end of the text.
- The text ends within a call: if it was cut ("length", "abort"), what came of the arguments stands and the call ends as
  "cut"; if the model stopped by itself ("stop"), the call is broken. One that had not begun comes back as content.
- A broken call comes back as content, from its tag to the offending character, after which the parser looks for tags again.
- White space around calls is dropped where nothing would stand before it; otherwise text is never changed.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import ClassVar

from octavo.frontend.parsers.events import CallStatus, Content, Event, ToolCallArguments, ToolCallEnd, ToolCallStart, merged
from octavo.frontend.parsers.reader import SPACE, Broken, EndOfText, Reader, Steps, Stretch, Tags
from octavo.frontend.parsers.scan import JSON_SPECIAL, JsonScanner
from octavo.frontend.parsers.schema import ToolSet

MAX_NAME = 256  # characters of a tool's or a parameter's name: what is longer is no call
NAME = re.compile(r"[\w.\-]*")


class TextParser:
    """A parser of one answer's text: ``push`` its pieces, ``finish`` once. Subclasses write `_run`, and may write `_standing`."""

    markers: ClassVar[tuple[str, ...]] = ()
    """The special tokens that the detokenizer must not skip, for the parser to see them."""

    def __init__(self) -> None:
        self._reader = Reader()
        self._out: list[Event] = []
        self._finish_reason: str | None = None
        self._finished = False
        self._steps: Steps[None] | None = None
        self._stretch: Stretch | None = None

    def plain(self, text: str) -> Event | None:
        """The one event that ``text`` comes to, if it only goes on with what stands before it, as nearly every token does.

        None, and nothing is done, if it must be looked at: `push` it then. That gives the same event, only later.
        """
        stretch = self._stretch
        if stretch is None or not text or stretch.special(text) or (stretch.space_waits and text[-1] in SPACE):
            return None
        if (raw := self._reader.raw) is not None:
            raw.append(text)
        return stretch.event(text)

    def push(self, text: str) -> list[Event]:
        """Take new text; what is now certain. RuntimeError after `finish`."""
        if self._finished:
            raise RuntimeError("The parser has finished: a new answer needs a new parser.")
        if not text:
            return []
        if (event := self.plain(text)) is not None:
            return [event]
        reader = self._reader
        reader.feed(text)
        self._resume()
        self._stretch = self._standing() if reader.at == len(reader.text) else None
        return self._drain()

    def finish(self, finish_reason: str | None = "stop") -> list[Event]:
        """No more text comes; the rest. ``finish_reason``: "stop" if the model ended by itself; all else is a cut."""
        if self._finished:
            return []
        self._finished = True
        self._stretch = None
        self._finish_reason = finish_reason
        self._reader.closed = True
        self._resume()
        self._steps = None
        return self._drain()

    def _resume(self) -> None:
        if self._steps is None:
            self._steps = self._run()
        next(self._steps, None)

    def _drain(self) -> list[Event]:
        events, self._out = self._out, []
        return merged(events)

    def _run(self) -> Steps[None]:
        """Read all of the text; returns when it has ended."""
        raise NotImplementedError

    def _standing(self) -> Stretch | None:
        """Where `_run` stands, all text that has come being consumed; None where it must see what comes."""
        return None


class ToolParser(TextParser):
    """The loop of a format with tags: content up to a tag, then what `_calls` reads."""

    tags: ClassVar[Tags | None] = None
    """What calls begin with; None for formats whose calls stand at the beginning of the text only."""

    def __init__(self, tools: ToolSet | None = None) -> None:
        super().__init__()
        self.tools = tools if tools is not None else ToolSet()
        self._index = -1  # of the last call that began
        self._open = False  # a call has begun and not ended
        self._whole = False  # its arguments are a whole object
        self._settled = True  # all that was read since the tag belongs to calls that are complete
        self._had_call = self._had_content = False
        self._space: list[str] = []  # white space that is content if text follows it
        self._between = False  # what comes next is content, up to a tag
        self._scanner: JsonScanner | None = None  # there while arguments are passed on as they come

    def push(self, text: str) -> list[Event]:
        if not self.tools and not self._finished:
            return [Content(text)] if text else []
        return super().push(text)

    def _standing(self) -> Stretch | None:
        if self._between and self.tags is not None:
            return Stretch(self.tags.special, Content, True) if self._had_content and not self._space else None
        if self._scanner is not None and self._scanner.in_string:
            return Stretch(JSON_SPECIAL, partial(ToolCallArguments, self._index))
        return None

    def _run(self) -> Steps[None]:
        yield from self._attempt(self._opening, "")
        if self.tags is None:
            yield from self._reader.rest(self.content)
        else:
            self._between = True
            while tag := (yield from self._reader.until(self.tags, self.content)):
                self._between = False
                yield from self._attempt(self._calls, tag)
                self._between = True
        self._flush_space()

    def _flush_space(self) -> None:
        """White space at the end of the text: content unless it belongs to a call."""
        if not self._had_call:
            self._out.extend(Content(space) for space in self._space)

    def _opening(self, tag: str) -> Steps[None]:
        """Read calls that begin without a tag at the beginning of the text; Broken if there are none."""
        return
        yield

    def _calls(self, tag: str) -> Steps[None]:
        """Read what follows ``tag``: calls, each through `start`, `arguments` and `end`."""
        raise NotImplementedError

    def _attempt(self, read: Callable[[str], Steps[None]], tag: str) -> Steps[None]:
        reader = self._reader
        reader.raw, self._settled = [tag], False
        try:
            yield from read(tag)
        except Broken:
            self._fail()
        except EndOfText:
            if self._open and (self._whole or self._finish_reason != "stop"):
                self.end("complete" if self._whole else "cut")
            else:
                self._fail()
        reader.raw = None

    def _fail(self) -> None:
        """Give up the call that is being read: its text, and that of no call before it, is content."""
        text, self._reader.raw = "".join(self._reader.raw or []), None
        if self._open:
            self.end("broken")
        self.content(text.lstrip(SPACE + ",;") if self._settled else text)  # separators belong to the call before

    def start(self, name: str, id: str | None = None) -> None:
        """A call begins. Broken if there is no such tool."""
        if name not in self.tools:
            raise Broken
        self._index += 1
        self._open, self._whole, self._settled = True, False, False
        self._out.append(ToolCallStart(self._index, name, id))

    def arguments(self, text: str, *, whole: bool = False) -> None:
        """A further piece of the open call's arguments. ``whole``: the last, so that only closing tags may be missing now."""
        self._whole = whole
        self._out.append(ToolCallArguments(self._index, text))

    def end(self, status: CallStatus = "complete") -> None:
        self._out.append(ToolCallEnd(self._index, status))
        self._open = False
        if status != "broken":
            self._had_call = self._settled = True
            if self._reader.raw is not None:
                self._reader.raw = []

    def content(self, text: str) -> None:
        """Text for the user. White space is held until it is clear whether a call follows it."""
        body = text.rstrip(SPACE)
        tail = text[len(body) :]
        if body:
            if self._had_call and not self._had_content:
                body = body.lstrip(SPACE)
            else:
                self._out.extend(Content(space) for space in self._space)
            self._space = []
            self._had_content = True
            self._out.append(Content(body))
        if tail:
            self._space.append(tail)

    def read_object(self) -> Steps[None]:
        """Read the open call's arguments where they are a JSON object, passing them on as they come; `end` is the caller's."""
        self._scanner = JsonScanner(objects_only=True)
        try:
            yield from self._reader.scan(self._scanner, self.arguments)
        finally:
            self._scanner = None
        self._whole = True

    def read_name(self) -> Steps[str]:
        """A tool's name out of letters, digits and "_-.", which the request offers. Broken if it is none."""
        name = yield from self._reader.run_of(NAME, MAX_NAME)
        if name not in self.tools:
            raise Broken
        return name
