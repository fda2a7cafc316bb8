"""DeepSeek's tool calls: JSON arguments between special tokens."""

from __future__ import annotations

from octavo.frontend.parsers.base import MAX_NAME, ToolParser
from octavo.frontend.parsers.reader import SPACE, Broken, Steps, Tags

_SEPARATOR = Tags("<｜tool▁sep｜>")
_LINE_END = Tags("\n")


class DeepSeekV3Parser(ToolParser):
    """DeepSeek V3 and R1: each call is <｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME, a line break, the arguments as a block
    of ```json, <｜tool▁call▁end｜>; V3.1: <｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>. All of an answer's calls
    stand between <｜tool▁calls▁begin｜> and <｜tool▁calls▁end｜>."""

    markers = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>")
    tags = Tags("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>")

    def _calls(self, tag: str) -> Steps[None]:
        reader = self._reader
        if tag == "<｜tool▁calls▁begin｜>":
            yield from reader.spaces()
            yield from reader.expect("<｜tool▁call▁begin｜>")
        while True:
            yield from self._call()
            yield from reader.spaces()
            following = yield from reader.accept("<｜tool▁call▁begin｜>", "<｜tool▁calls▁end｜>", closing=True)
            if following != "<｜tool▁call▁begin｜>":
                return

    def _call(self) -> Steps[None]:
        reader = self._reader
        kind, _ = yield from reader.collect(_SEPARATOR, MAX_NAME)
        if (yield from reader.next_char()) == "{":
            self.start(kind.strip(SPACE))
            yield from self.read_object()
        else:
            name, _ = yield from reader.collect(_LINE_END, MAX_NAME)
            yield from reader.spaces()
            yield from reader.accept("```json", "```")
            if (yield from reader.next_char()) != "{":
                raise Broken
            self.start(name.strip(SPACE))
            yield from self.read_object()
            yield from reader.spaces()
            yield from reader.accept("```", closing=True)
        self.end()
        yield from reader.spaces()
        yield from reader.accept("<｜tool▁call▁end｜>", closing=True)
