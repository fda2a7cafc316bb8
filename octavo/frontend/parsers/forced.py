"""Answers that a grammar forces to be calls (tool_choice "required" or a named function): JSON without a model's own tags."""

from __future__ import annotations

from octavo.frontend.parsers.envelope import EnvelopeParser
from octavo.frontend.parsers.reader import Steps
from octavo.frontend.parsers.schema import ToolSet


class ForcedCallsParser(EnvelopeParser):
    """The answer is a list of calls, [{"name": ..., "parameters" or "arguments": {...}}, ...], or one such object.

    What stands after it is content.
    """

    def _opening(self, tag: str) -> Steps[None]:
        if (yield from self._reader.next_char()) == "[":
            yield from self.read_envelopes()
        else:
            yield from self.read_envelope(strict=True)


class ForcedCallParser(EnvelopeParser):
    """The answer is the arguments of one call of ``name``, which ``tools`` must hold."""

    def __init__(self, tools: ToolSet, name: str) -> None:
        super().__init__(tools)
        self._name = name

    def _opening(self, tag: str) -> Steps[None]:
        yield from self._reader.next_char()
        self.start(self._name)
        yield from self.read_object()
        self.end()
