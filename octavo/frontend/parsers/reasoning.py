"""Reasoning between tags at the beginning of an answer: <think>...</think>.

Where an answer begins depends on the prompt: some templates end with the opening tag, and some, told not to think, with
both. So a parser is told the prompt, and looks at its end alone: what users write in their messages can't matter.

White space around the reasoning is dropped; content that no reasoning precedes is passed on untouched.
"""

from __future__ import annotations

import re
from typing import ClassVar, Literal

from octavo.frontend.parsers.base import TextParser
from octavo.frontend.parsers.events import Content, Reasoning
from octavo.frontend.parsers.reader import SPACE, Steps, Stretch, Tags

Beginning = Literal["open", "closed", "detect"]
"""The answer begins within reasoning, after it, or with the opening tag if it has any."""


_REST = Stretch(re.compile("(?!)").search, Content)  # nothing is special


class ReasoningParser(TextParser):
    """Yields Reasoning up to the closing tag, then Content. Text that ends before the closing tag is all reasoning.

    ``prompt``: the rendered prompt, or its end. ``beginning`` overrules what it says (e.g. when the caller continues a
    message of its own).
    """

    start_tag: ClassVar[str] = "<think>"
    end_tag: ClassVar[str] = "</think>"
    default: ClassVar[Beginning] = "detect"

    def __init__(self, prompt: str | None = None, *, beginning: Beginning | None = None) -> None:
        super().__init__()
        self.beginning: Beginning = beginning or self._look_at(prompt[-256:] if prompt else "")
        self.in_reasoning = self.beginning == "open"
        self._end = Tags(self.end_tag)
        self._space: list[str] = []
        self._begun = False
        self._over = False  # all that comes is content

    def _look_at(self, prompt_end: str) -> Beginning:
        prompt_end = prompt_end.rstrip(SPACE)
        if prompt_end.endswith(self.start_tag):
            return "open"
        return "closed" if prompt_end.endswith(self.end_tag) else self.default

    def _run(self) -> Steps[None]:
        reader = self._reader
        if self.beginning != "closed":
            reader.raw = []
            yield from reader.spaces()
            found = yield from reader.accept(self.start_tag)
            raw, reader.raw = reader.raw, None
            if found or self.beginning == "open":
                self.in_reasoning = True
                ended = yield from reader.until(self._end, self._reason)
                self.in_reasoning = not ended
                yield from reader.spaces()
            else:
                self._out.extend(Content(part) for part in raw)
        self._over = True
        yield from reader.rest(lambda text: self._out.append(Content(text)))

    def _standing(self) -> Stretch | None:
        if self._over:
            return _REST
        if self.in_reasoning and self._begun and not self._space:
            return Stretch(self._end.special, Reasoning, True)
        return None

    def _reason(self, text: str) -> None:
        body = text.rstrip(SPACE)
        tail = text[len(body) :]
        if body:
            if self._begun:
                self._out.extend(Reasoning(space) for space in self._space)
            else:
                body = body.lstrip(SPACE)
            self._begun, self._space = True, []
            self._out.append(Reasoning(body))
        if tail:
            self._space.append(tail)


class DeepSeekR1Reasoning(ReasoningParser):
    """DeepSeek R1 and its distilled models: the answer is within reasoning from the start, whether or not it repeats <think>."""

    default = "open"


class Qwen3Reasoning(ReasoningParser):
    """Qwen3: the model writes <think> itself, or the prompt does; with enable_thinking=false the prompt holds an empty block."""


class GlmReasoning(ReasoningParser):
    """GLM-4.5 and later: as Qwen3."""


class MistralReasoning(ReasoningParser):
    """Magistral and Ministral 3: [THINK]...[/THINK]."""

    markers = ("[THINK]", "[/THINK]")
    start_tag = "[THINK]"
    end_tag = "[/THINK]"
