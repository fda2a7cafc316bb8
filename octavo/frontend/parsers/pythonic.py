"""Llama 4: a list of calls in Python's syntax, [f(a=1), g(b="x")]."""

from __future__ import annotations

import re

from octavo.frontend.parsers.base import MAX_NAME
from octavo.frontend.parsers.envelope import EnvelopeParser
from octavo.frontend.parsers.reader import Broken, Steps, Tags
from octavo.frontend.parsers.scan import PythonScanner, escaped

_KEYWORD = re.compile(r"\w*")


class Llama4PythonicParser(EnvelopeParser):
    """The list as the beginning of the answer, or between <|python_start|> and <|python_end|>.

    Arguments are keywords with literals as values. Llama 4 at times writes Llama 3's JSON instead, which is read too.
    """

    markers = ("<|python_start|>", "<|python_end|>")
    tags = Tags("<|python_start|>")

    def _opening(self, tag: str) -> Steps[None]:
        if (yield from self._reader.next_char()) == "{":
            yield from self.read_envelope(strict=True)
        else:
            yield from self._list()

    def _calls(self, tag: str) -> Steps[None]:
        if (yield from self._reader.next_char()) == "{":
            yield from self.read_envelope(strict=False)
        else:
            yield from self._list()
        yield from self._reader.spaces()
        yield from self._reader.accept("<|python_end|>", closing=True)

    def _list(self) -> Steps[None]:
        reader = self._reader
        yield from reader.expect("[")
        while True:
            yield from reader.spaces()
            yield from self._call()
            if (yield from reader.next_char()) != "]":
                yield from reader.expect(",")
                if (yield from reader.next_char()) != "]":
                    continue
            yield from reader.expect("]")
            return

    def _call(self) -> Steps[None]:
        reader = self._reader
        name = yield from self.read_name()
        yield from reader.spaces()
        yield from reader.expect("(")
        self.start(name)
        first = True
        while (yield from reader.next_char()) != ")":
            keyword = yield from reader.run_of(_KEYWORD, MAX_NAME)
            yield from reader.spaces()
            yield from reader.expect("=")
            if not keyword:
                raise Broken
            self.arguments(f'{"{" if first else ", "}"{escaped(keyword)}": ')
            first = False
            yield from reader.scan(PythonScanner(), self.arguments)
            if (yield from reader.next_char()) != ")":
                yield from reader.expect(",")
        yield from reader.expect(")")
        self.arguments("{}" if first else "}", whole=True)
        self.end()
