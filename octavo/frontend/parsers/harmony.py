"""gpt-oss: the harmony format (github.com/openai/harmony, docs/format.md), in which everything is a message on a channel.

analysis is reasoning; final is content; commentary is content too (the preamble to calls, for the user to see); a message
with a recipient (to=functions.NAME) is a tool call. So one parser splits off both reasoning and calls.
"""

from __future__ import annotations

import re

from octavo.frontend.parsers.base import TextParser, ToolParser
from octavo.frontend.parsers.events import Content, Event, Reasoning
from octavo.frontend.parsers.reader import Broken, EndOfText, Steps, Stretch, Tags
from octavo.frontend.parsers.schema import ToolSet

_MAX_HEADER = 512
_HEADER = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>")
_ENDS = ("<|end|>", "<|return|>", "<|call|>")
_HEADER_END = Tags("<|message|>")
_BODY_END = Tags(*_ENDS, "<|start|>", "<|channel|>")
_OUTSIDE = Tags(*_ENDS, *_HEADER)
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")


class HarmonyParser(ToolParser):
    """Text outside of messages is content. Messages of one kind are put together with a line break.

    A header that the end of the text cuts is dropped. A call of a tool that the request does not offer is content, header
    and all; without tools every call is.
    """

    markers = (*_HEADER, *_ENDS)

    def __init__(self, tools: ToolSet | None = None) -> None:
        super().__init__(tools)
        self.in_reasoning = False
        self._following = ""  # the tag that ended a message by beginning the next
        self._had_reasoning = self._separate = False
        self._in_body = False  # of a message that is no call

    def push(self, text: str) -> list[Event]:
        return TextParser.push(self, text)  # messages are split without tools, too

    def _run(self) -> Steps[None]:
        reader = self._reader
        while True:
            tag, self._following = self._following, ""
            if not tag:
                yield from reader.spaces()
                tag = yield from reader.accept(*_HEADER, closing=True)
            if not tag:
                # The recipient may stand where the role does, which the prompt ends with: "assistant to=functions.f".
                tag = yield from reader.accept("to=functions.")
            if not tag:
                self._separate = False
                tag = yield from reader.until(_OUTSIDE, self.content)
                if not tag:
                    break
            if tag not in _ENDS:
                yield from self._attempt(self._message, tag)
                self.in_reasoning = False
        self._flush_space()

    def _standing(self) -> Stretch | None:
        if not self._in_body or self._separate:
            return super()._standing()
        if self.in_reasoning:
            return Stretch(_BODY_END.special, Reasoning) if self._had_reasoning else None
        return Stretch(_BODY_END.special, Content, True) if self._had_content and not self._space else None

    def _message(self, tag: str) -> Steps[None]:
        reader = self._reader
        header = tag
        if tag != "<|message|>":
            try:
                header += (yield from reader.collect(_HEADER_END, _MAX_HEADER))[0]
            except EndOfText:
                return
        if recipient := _RECIPIENT.search(header):
            yield from self._call(recipient.group(1))
            return
        reader.raw = None
        channel = _CHANNEL.search(header)
        self.in_reasoning = channel is not None and channel.group(1) == "analysis"
        self._separate = self._had_reasoning if self.in_reasoning else self._had_content
        self._in_body = True
        tag = yield from reader.until(_BODY_END, self._reason if self.in_reasoning else self._say)
        self._in_body = False
        self._following = tag if tag in _HEADER else ""

    def _call(self, recipient: str) -> Steps[None]:
        reader = self._reader
        name = recipient.removeprefix("functions.")
        if name not in self.tools:
            raise Broken
        yield from reader.spaces()
        ended = yield from reader.accept(*_ENDS)
        if ended or (reader.closed and reader.at == len(reader.text) and self._finish_reason == "stop"):
            self.start(name)
            self.arguments("{}")
            self.end()
            return
        if (yield from reader.peek()) != "{":
            raise Broken
        self.start(name)
        yield from self.read_object()
        self.end()
        yield from reader.spaces()
        yield from reader.accept(*_ENDS, closing=True)

    def _reason(self, text: str) -> None:
        self._out.append(Reasoning("\n" + text if self._separate else text))
        self._had_reasoning, self._separate = True, False

    def _say(self, text: str) -> None:
        self.content("\n" + text if self._separate else text)
        self._separate = False
