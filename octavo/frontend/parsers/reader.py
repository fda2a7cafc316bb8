"""A stream of text that parsers read as if all of it were there.

The governing idea: a parser is straight-line code in a generator. Where it needs text that has not come yet, it yields;
what it decides depends on the characters alone, never on how they were cut into pushes. So "streamed equals not
streamed" holds by construction; only the sizes of what is passed on differ. Primitives consume text as early as they
can: what stays in the buffer is bounded by the longest tag, and each character is looked at a bounded number of times.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, TypeVar

from octavo.frontend.parsers.events import Event

T = TypeVar("T")
Steps = Generator[None, None, T]
"""A parser's code: yields when it needs more text, returns a T."""

SPACE = " \t\r\n"
_SPACES = re.compile(r"[ \t\r\n]*")


class Broken(Exception):
    """The text is not what the format says. Nothing of the offending text has been consumed beyond what is recorded."""


class EndOfText(Exception):
    """The text ended where the format says that more must come."""


Special = Callable[[str], "re.Match[str] | None"]
"""Finds in a text what must be looked at."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Where a parser stands while text of one kind goes on: a piece with nothing ``special`` in it is one more ``event``.

    ``space_waits``: white space at its end is special, too.
    """

    special: Special
    event: Callable[[str], Event]
    space_waits: bool = False


class Tags:
    """A set of literal tags, none the beginning of another, to be searched for in a stream."""

    def __init__(self, *tags: str) -> None:
        if not tags or any(not tag for tag in tags) or any(a != b and b.startswith(a) for a in tags for b in tags):
            raise ValueError(f"tags must be non-empty, and none the beginning of another: {tags}")
        self.tags = tags
        self._search = re.compile("|".join(re.escape(tag) for tag in tags)).search
        first = re.compile("[" + "".join(re.escape(char) for char in sorted({tag[0] for tag in tags})) + "]")
        self._first = first.finditer
        self.special: Special = first.search
        """Finds a character that a tag begins with."""
        self._longest = max(map(len, tags))

    def find(self, text: str, at: int, limit: int | None = None) -> tuple[int, str]:
        """Where the first tag in ``text[at:]`` begins, and the tag; or where a suffix that may become one begins (else
        the end), and "". ``limit``: one that begins more characters after ``at`` need not be found (any place after that
        is the answer then), so that a bounded look costs a bounded time."""
        end = len(text) if limit is None else min(len(text), at + limit + self._longest)
        if found := self._search(text, at, end):
            return found.start(), found.group()
        for candidate in self._first(text, max(at, end - self._longest + 1), end):
            rest = text[candidate.start() : end]
            if any(tag.startswith(rest) for tag in self.tags):
                return candidate.start(), ""
        return end, ""


class Reader:
    """The text that has come and was not yet consumed, and the primitives to consume it.

    ``raw``: while it is a list, all that is consumed is recorded there, for a call that turns out to be broken.
    """

    __slots__ = ("at", "closed", "raw", "text")

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.closed = False
        self.raw: list[str] | None = None

    def feed(self, text: str) -> None:
        self.text = self.text[self.at :] + text if self.at < len(self.text) else text
        self.at = 0

    def take_to(self, end: int) -> str:
        """Consume ``text[at:end]``."""
        chunk = self.text[self.at : end]
        self.at = end
        if self.raw is not None:
            self.raw.append(chunk)
        return chunk

    def peek(self) -> Steps[str]:
        """The next character, not consumed. EndOfText if there is none."""
        while self.at >= len(self.text):
            if self.closed:
                raise EndOfText
            yield
        return self.text[self.at]

    def spaces(self) -> Steps[None]:
        """Consume white space, and wait for what follows it; stops quietly at the end of the text."""
        while True:
            match = _SPACES.match(self.text, self.at)
            self.take_to(match.end() if match else self.at)
            if self.at < len(self.text) or self.closed:
                return
            yield

    def next_char(self) -> Steps[str]:
        """Consume white space; the character after it, not consumed. EndOfText if there is none."""
        yield from self.spaces()
        return (yield from self.peek())

    def accept(self, *literals: str, closing: bool = False) -> Steps[str]:
        """Consume the one of ``literals`` that comes next and return it, or return "" and consume nothing.

        If one is the beginning of another, the longer must stand first. ``closing``: at the end of the text the beginning
        of a literal counts as the literal (the last that it fits); for tags whose absence changes nothing, so that half of
        one is not shown to the user.
        """
        longest = max(map(len, literals))
        while True:
            here = self.text[self.at : self.at + longest]
            pending = ""
            for literal in literals:
                if here.startswith(literal):
                    return self.take_to(self.at + len(literal))
                if literal.startswith(here):
                    pending = literal
                    if not self.closed:
                        break
            if not pending:
                return ""
            if self.closed:
                if closing and here:
                    self.take_to(len(self.text))
                    return pending
                return ""
            yield

    def expect(self, *literals: str) -> Steps[str]:
        """`accept`, but Broken if something else comes, and EndOfText if the text ends before that is clear."""
        found = yield from self.accept(*literals)
        if not found:
            rest = self.text[self.at : self.at + max(map(len, literals))]
            if any(literal.startswith(rest) for literal in literals):
                raise EndOfText
            raise Broken
        return found

    def until(self, tags: Tags, emit: Callable[[str], Any], *, in_value: bool = False) -> Steps[str]:
        """Pass text to ``emit`` up to the first of ``tags``; consume and return the tag, or return "" at the end of the text.

        What could have become a tag is passed on at the end of the text; ``in_value``: it is not, and EndOfText is raised.
        """
        while True:
            start, tag = tags.find(self.text, self.at)
            if self.closed and not tag and not in_value:
                start = len(self.text)
            if start > self.at:
                emit(self.take_to(start))
            if tag:
                self.take_to(start + len(tag))
                return tag
            if self.closed:
                self.take_to(len(self.text))
                if in_value:
                    raise EndOfText
                return ""
            yield

    def rest(self, emit: Callable[[str], Any]) -> Steps[None]:
        """Pass all text to ``emit``, to its end."""
        while True:
            if self.at < len(self.text):
                emit(self.take_to(len(self.text)))
            if self.closed:
                return
            yield

    def collect(self, tags: Tags, limit: int) -> Steps[tuple[str, str]]:
        """(text before the first of ``tags``, the tag), both consumed. Broken if the text is longer than ``limit``."""
        parts: list[str] = []
        room = limit
        while True:
            start, tag = tags.find(self.text, self.at, room)
            if start - self.at > room:
                self.take_to(self.at + room)
                raise Broken
            room -= start - self.at
            parts.append(self.take_to(start))
            if tag:
                self.take_to(start + len(tag))
                return "".join(parts), tag
            if self.closed:
                raise EndOfText
            yield

    def run_of(self, chars: re.Pattern[str], limit: int) -> Steps[str]:
        """Consume the longest run of text that ``chars`` (a class with "*") matches, and wait for what follows it.

        Broken if it is longer than ``limit``; EndOfText if nothing follows.
        """
        parts: list[str] = []
        room = limit
        while True:
            match = chars.match(self.text, self.at, self.at + room + 1)
            end = match.end() if match else self.at
            if end - self.at > room:
                self.take_to(self.at + room)
                raise Broken
            room -= end - self.at
            parts.append(self.take_to(end))
            if self.at < len(self.text):
                return "".join(parts)
            if self.closed:
                raise EndOfText
            yield

    def scan(self, scanner: Scanner, emit: Callable[[str], Any], limit: int | None = None) -> Steps[None]:
        """Consume one value with ``scanner``, passing what it makes of it to ``emit`` as it comes. Broken if it is none, or
        longer than ``limit``."""
        room = limit
        while True:
            yield from self.peek()
            text = self.text if room is None else self.text[: self.at + room]
            out: list[str] = []
            try:
                end = scanner.feed(text, self.at, out)
            except Broken:
                self.take_to(scanner.at)
                emit("".join(out))
                raise
            if room is not None:
                room -= end - self.at
            self.take_to(end)
            if out:
                emit("".join(out))
            if scanner.done:
                return
            if room == 0:
                raise Broken


class Scanner:
    """Recognizes one value, in pieces, and writes it as JSON. See ``scan.py``."""

    done: bool
    at: int
    """When Broken was raised: where in the text."""

    def feed(self, text: str, at: int, out: list[str]) -> int:
        """Read ``text[at:]``, append JSON to ``out``; where the value ends, or the text's end if it does not. Broken if it is none."""
        raise NotImplementedError
