"""Reading a chat answer: its text in, content, reasoning and tool calls out; for one answer, streamed or not.

``AnswerPlan`` is made once a request and says how; ``AnswerReader`` reads one choice. Chat, responses and messages all read
answers here, so they say the same of the same text.
"""

from __future__ import annotations

import secrets
import string
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from octavo.frontend.logprob_buffer import entries_of
from octavo.frontend.outputs import CompletionOutput, RequestOutput
from octavo.frontend.parsers import (
    Content,
    Event,
    Message,
    OutputParser,
    Reasoning,
    ToolCallEnd,
    ToolCallStart,
    assemble,
    make_forced_parser,
    make_parser,
)
from octavo.frontend.parsers.reasoning import Beginning
from octavo.frontend.parsers.registry import markers_of
from octavo.server.forced_tools import ForcedCall
from octavo.server.model_parsers import ModelParsers
from octavo.server.tools import NO_TOOLS, ToolUse
from octavo.types import TokenLogprobs

if TYPE_CHECKING:
    from octavo.server.generation import Job

_LETTERS = string.ascii_letters + string.digits


@dataclass(frozen=True)
class AnswerPlan:
    """How the answers of one request are read. ``prompt``: the rendered prompt's text, for how they begin."""

    parsers: ModelParsers = field(default_factory=ModelParsers)
    tools: ToolUse = NO_TOOLS
    forced: ForcedCall | None = None
    include_reasoning: bool = True
    whole_calls: bool = False
    prompt: str | None = None
    beginning: Beginning | None = None  # of the answer; None: as the prompt's end says

    @property
    def reads(self) -> bool:
        """Whether there is anything to read but text."""
        return bool(self.parsers.reasoning or self.tools.callable)

    @property
    def markers(self) -> tuple[str, ...]:
        """Special tokens that must stay in the text for the parsers to see them."""
        forced_or_none = self.forced is not None or not self.tools.callable
        return markers_of(None if forced_or_none else self.parsers.tool_calls, self.parsers.reasoning)

    def parser(self) -> OutputParser | None:
        """A fresh parser for one choice; None if all of the text is content."""
        if not self.reads:
            return None
        if self.forced is not None:
            return make_forced_parser(
                self.forced.name, self.parsers.reasoning, tools=self.tools.callable, prompt=self.prompt, beginning=self.beginning
            )
        return make_parser(
            self.parsers.tool_calls,
            self.parsers.reasoning,
            tools=self.tools.callable,
            prompt=self.prompt,
            beginning=self.beginning,
            whole_calls=self.whole_calls,
        )


PLAIN = AnswerPlan()


def new_call_id(parser: str | None) -> str:
    """Ids as the model's template wants them: Mistral's are nine letters and digits, others may be anything."""
    if parser == "mistral":
        return "".join(secrets.choice(_LETTERS) for _ in range(9))
    return "call_" + secrets.token_hex(12)


class AnswerReader:
    """Reads one choice. ``finish_reason`` is set once the answer has ended: the engine's, or "tool_calls"."""

    def __init__(self, plan: AnswerPlan) -> None:
        self.plan = plan
        self.finish_reason: str | None = None
        self.called = False  # at least one call is complete
        self.reasoning_tokens = 0
        self._parser = plan.parser()

    def plain(self, output: CompletionOutput) -> Event | None:
        """The one event of an output that only goes on with what came before, as nearly all do; None, and nothing is done, for others."""
        if output.finish_reason is not None or self.finish_reason is not None or not output.text:
            return None
        if self._parser is None:
            return Content(output.text)
        event = self._parser.plain(output.text)
        if type(event) is Reasoning:
            if not self.plan.include_reasoning:
                return None
            self.reasoning_tokens += len(output.token_ids)
        return event

    def read(self, output: CompletionOutput) -> list[Event]:
        """What a further output of the choice holds. Sets its finish reason to "stop" where the answer ends before the engine does."""
        if self.finish_reason is not None:
            return []
        if self._parser is None:
            self.finish_reason = output.finish_reason
            return [Content(output.text)] if output.text else []
        thinks = self._parser.in_reasoning
        events = self._parser.push(output.text) if output.text else []
        if thinks and self._parser.in_reasoning:  # the tags are no part of it
            self.reasoning_tokens += len(output.token_ids)
        if output.finish_reason is not None:
            events = events + self._parser.finish(output.finish_reason)
        events = self._checked(events)
        if self.called and not self.plan.tools.parallel:
            output.finish_reason = output.finish_reason or "stop"
            self.finish_reason = "tool_calls"
        elif output.finish_reason is not None:
            self.finish_reason = "tool_calls" if self.called and output.finish_reason == "stop" else output.finish_reason
        return events

    def _checked(self, events: list[Event]) -> list[Event]:
        """Without reasoning that was not asked for and what follows the only call that may be made; calls have ids."""
        out: list[Event] = []
        for event in events:
            if isinstance(event, ToolCallStart):
                event.id = event.id or new_call_id(self.plan.parsers.tool_calls)
            elif isinstance(event, Reasoning) and not self.plan.include_reasoning:
                continue
            out.append(event)
            if isinstance(event, ToolCallEnd) and event.status == "complete":
                self.called = True
                if not self.plan.tools.parallel:
                    break
        return out


@dataclass(slots=True)
class Step:
    """What one output added to one choice."""

    output: CompletionOutput
    events: list[Event]
    finish_reason: str | None


class StepReader:
    """Reads a job's outputs as they come. It has ``ended`` when no choice can say any more."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.readers = [AnswerReader(job.plan) for _ in range(job.num_choices)]

    def plain(self, output: RequestOutput) -> Event | None:
        """The one event of an output that brings one choice further text and nothing else. None, and nothing is done, for others.

        The hot path of `read`.
        """
        if len(output.outputs) != 1 or output.prompt_logprobs is not None:
            return None
        choice = output.outputs[0]
        event = self.readers[choice.index].plain(choice)
        if event is not None:
            if type(event) is Reasoning:
                self._count_reasoning()
            self.job.runs[output.request_id].observe(output)
        return event

    def read(self, output: RequestOutput) -> list[Step]:
        readers, steps = self.readers, []
        for choice in output.outputs:
            reader = readers[choice.index]
            if reader.finish_reason is None:
                steps.append(Step(choice, reader.read(choice), reader.finish_reason))
        if len(steps) != len(output.outputs):
            output.outputs = [step.output for step in steps]  # what goes on after an answer's end is not counted
        job = self.job
        self._count_reasoning()
        job.runs[output.request_id].observe(output)
        if output.prompt_logprobs is not None:
            job.prompt_logprobs[0] = output.prompt_logprobs
        return steps

    def _count_reasoning(self) -> None:
        if self.job.plan.parsers.reasoning is not None:
            self.job.reasoning_tokens = sum(reader.reasoning_tokens for reader in self.readers)

    def ended(self) -> bool:
        for reader in self.readers:
            if reader.finish_reason is None:
                return False
        return True


async def read_steps(job: Job) -> AsyncIterator[list[Step]]:
    """Run the job and read its outputs as they come; ends early when no choice can say any more."""
    reader = StepReader(job)
    async with aclosing(job.outputs()) as outputs:  # type: ignore[type-var]
        async for output in outputs:
            yield reader.read(output)
            if reader.ended():
                break


async def read_events(job: Job, events_of: Callable[[list[Step]], Iterable[object]], last: Callable[[], Iterable[object]]) -> None:
    """Run the job to its end for an answer in one piece. The events of its steps, and the ``last`` ones, are made as for a stream
    and dropped: the answer is what their maker put together meanwhile."""
    async with aclosing(read_steps(job)) as all_steps:  # type: ignore[type-var]
        async for steps in all_steps:
            deque(events_of(steps), maxlen=0)
    deque(last(), maxlen=0)


@dataclass(slots=True)
class Answer:
    """One whole choice, read."""

    message: Message
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int]
    logprobs: list[TokenLogprobs]


async def read_answers(job: Job) -> list[Answer]:
    """Run the job to its end."""
    events: list[list[Event]] = [[] for _ in range(job.num_choices)]
    answers = [Answer(Message(None), None, None, [], []) for _ in range(job.num_choices)]
    async with aclosing(read_steps(job)) as all_steps:  # type: ignore[type-var]
        async for steps in all_steps:
            for step in steps:
                answer, output = answers[step.output.index], step.output
                events[output.index] += step.events
                answer.token_ids += output.token_ids
                answer.logprobs += entries_of(output)
                if step.finish_reason is not None:
                    answer.finish_reason, answer.stop_reason = step.finish_reason, output.stop_reason
    for answer, found in zip(answers, events):
        answer.message = assemble(found)
    return answers
