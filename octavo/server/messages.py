"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API over the same chat."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope

from octavo.frontend.outputs import RequestOutput
from octavo.frontend.parsers import Content
from octavo.server.answers import Step, StepReader, read_events
from octavo.server.chat_plan import chat_job
from octavo.server.generation import EventStream, GenerationEndpoint, GenerationError, Job
from octavo.server.limits import decode
from octavo.server.messages_errors import anthropic_last_words, anthropic_refusal
from octavo.server.messages_input import NAMES, chat_request, count_decoder, messages_decoder
from octavo.server.messages_output import STOP_REASONS, ContentBlocks, TypedEvent, frame, usage_json
from octavo.server.prompts import chat_prompt
from octavo.server.tools import tool_use


class MessagesEndpoint(GenerationEndpoint):
    id_prefix = "msg_"
    names = NAMES

    async def job(self, body: bytes, scope: Scope, start: float) -> Job:
        request = chat_request(decode(messages_decoder, body), self.context)
        return await chat_job(request, self.context, self.response_id(request, scope), start)

    async def answer(self, job: Job) -> bytes:
        message = _Message(job, keep_broken=False)
        await read_events(job, message.steps, message.blocks.close)
        return msgspec.json.encode(message.body())

    async def stream(self, job: Job, events: EventStream) -> None:
        message = _Message(job, keep_broken=True)
        events.last_words = anthropic_last_words
        reader = StepReader(job)

        def frames_of(output: RequestOutput) -> bytes:
            event = reader.plain(output)
            if type(event) is Content and message.blocks.kind == "text":
                return message.blocks.text_delta(event.text)
            steps = reader.read(output) if event is None else [Step(output.outputs[0], [event], None)]
            frames = [frame(event) for event in message.steps(steps)]
            if not events.started:  # not before: how much of the prompt was cached is known with the first token
                frames = [frame({"type": "message_start", "message": message.beginning()}), frame({"type": "ping"}), *frames]
            return b"".join(frames)

        await events.follow(job, frames_of, reader.ended)
        last = b"".join(frame(event) for event in message.ending())
        await events.write(last, more=False)

    def refusal(self, error: BaseException) -> Response:
        return anthropic_refusal(error)


class CountTokensEndpoint(MessagesEndpoint):
    """How many tokens a request's prompt has; nothing runs."""

    async def _serve(self, body: bytes, scope: Scope, receive: Receive, events: EventStream, start: float) -> None:
        request = chat_request(decode(count_decoder, body), self.context)
        self.context.check_model(request.model)
        prompt = await chat_prompt(request, self.context, tool_use(request).offered)
        answer = msgspec.json.encode({"input_tokens": len(prompt.token_ids)})
        await Response(answer, media_type="application/json")(scope, receive, events.send)


class _Message:
    """One message on its way."""

    def __init__(self, job: Job, *, keep_broken: bool) -> None:
        self.job = job
        self.blocks = ContentBlocks(keep_broken=keep_broken)
        self.stop_reason: str | None = None
        self.stop_sequence: str | None = None

    def steps(self, steps: list[Step]) -> Iterator[TypedEvent]:
        for step in steps:
            yield from self.blocks.add(step.events)
            if step.finish_reason is None:
                continue
            if step.finish_reason not in STOP_REASONS:
                raise GenerationError(f"The answer ended early ({step.finish_reason}).")
            self.stop_reason = STOP_REASONS[step.finish_reason]
            if step.finish_reason == "stop" and isinstance(step.output.stop_reason, str):
                self.stop_reason, self.stop_sequence = "stop_sequence", step.output.stop_reason

    def beginning(self) -> dict[str, Any]:
        return {**self.body(), "content": [], "stop_reason": None, "stop_sequence": None}

    def ending(self) -> Iterator[TypedEvent]:
        yield from self.blocks.close()
        delta = {"stop_reason": self.stop_reason, "stop_sequence": self.stop_sequence}
        yield {"type": "message_delta", "delta": delta, "usage": usage_json(self.job.usage())}
        yield {"type": "message_stop"}

    def body(self) -> dict[str, Any]:
        return {
            "id": self.job.response_id,
            "type": "message",
            "role": "assistant",
            "model": self.job.model,
            "content": self.blocks.blocks,
            "stop_reason": self.stop_reason,
            "stop_sequence": self.stop_sequence,
            "usage": usage_json(self.job.usage()),
        }
