"""Chat answers that have been read: reasoning and tool calls as OpenAI's API has them, whole and as chunks."""

from __future__ import annotations

from typing import Any

from octavo.frontend.outputs import CompletionOutput
from octavo.frontend.parsers import Content, Event, Reasoning, ToolCall, ToolCallArguments, ToolCallStart
from octavo.server.answers import Answer, Step
from octavo.server.chat import ChatWriter, chat_result
from octavo.server.generation import Choice, Job
from octavo.server.schemas import ChatRequest


def read_choice(job: Job, request: ChatRequest, index: int, answer: Answer, echo: str) -> dict[str, Any]:
    """One entry of ``choices``."""
    choice = Choice([], answer.token_ids, answer.logprobs, answer.finish_reason, answer.stop_reason)
    message: dict[str, Any] = {"role": "assistant", "content": answer.message.content, "refusal": None}
    if echo:
        message["content"] = echo + (message["content"] or "")
    if job.plan.parsers.reasoning is not None:
        message["reasoning_content"] = message["reasoning"] = answer.message.reasoning
    if answer.message.tool_calls:
        message["tool_calls"] = [_call(call) for call in answer.message.tool_calls]
    return chat_result(job, request, index, choice, message)


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


class ReadChatWriter(ChatWriter):
    """Turns steps into frames, an event a frame. A call's first frame has its id and name, the others its arguments.

    Log-probabilities and token ids of tokens that no event came of yet wait for the choice's next frame, so all are sent once.
    """

    def frames_of_event(self, output: CompletionOutput, event: Event) -> bytes:
        """Of a step that has one event and does not end its choice. The hot path."""
        if not self.plain or self.wants_logprobs or not self.begun[output.index]:
            return self.frames_of_steps([Step(output, [event], None)])
        if type(event) is Content:
            return self.frames.text(output.index, event.text)
        parts: list[bytes] = []
        self._event(output.index, event, parts)
        return parts[0]

    def frames_of_steps(self, steps: list[Step]) -> bytes:
        parts: list[bytes] = []
        for step in steps:
            index = step.output.index
            if not self.begun[index]:
                self._begin(index, parts)
            self._wait(index, step.output)
            for event in step.events:
                self._event(index, event, parts)
            if step.finish_reason is not None:
                step.output.finish_reason = step.finish_reason
                self._finish(index, step.output, parts)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _event(self, index: int, event: Event, parts: list[bytes]) -> None:
        if self.plain and isinstance(event, Content):
            parts.append(self.frames.text(index, event.text, self._take_logprobs(index)))
        elif self.plain and not self.wants_logprobs and isinstance(event, ToolCallArguments):
            parts.append(self.frames.arguments(index, event.index, event.text))
        elif self.plain and not self.wants_logprobs and isinstance(event, Reasoning):
            parts.append(self.frames.reasoning(index, event.text))
        elif (delta := _delta(event)) is not None:
            parts.append(self._frame(index, delta, self._take_logprobs(index), self._take_ids(index)))


def _delta(event: Event) -> dict[str, Any] | None:
    if isinstance(event, Content):
        return {"content": event.text}
    if isinstance(event, Reasoning):
        return {"reasoning_content": event.text, "reasoning": event.text}
    if isinstance(event, ToolCallStart):
        call = {"index": event.index, "id": event.id, "type": "function", "function": {"name": event.name, "arguments": ""}}
        return {"tool_calls": [call]}
    if isinstance(event, ToolCallArguments):
        return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}
    return None
