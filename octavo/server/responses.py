"""POST /v1/responses: OpenAI's newer API over the same chat, stateless."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
from starlette.types import Scope

from octavo.frontend.logprob_buffer import entries_of
from octavo.frontend.outputs import RequestOutput
from octavo.frontend.parsers import Content
from octavo.server.answers import Step, StepReader, read_events
from octavo.server.chat_plan import chat_job
from octavo.server.errors import describe
from octavo.server.generation import EventStream, GenerationEndpoint, Job
from octavo.server.limits import decode
from octavo.server.logprobs import chat_logprobs
from octavo.server.responses_input import NAMES, ResponsesRequest, chat_request, responses_decoder
from octavo.server.responses_output import OutputItems, TypedEvent, frame, usage_json


class ResponsesEndpoint(GenerationEndpoint):
    id_prefix = "resp_"
    names = NAMES

    async def job(self, body: bytes, scope: Scope, start: float) -> Job:
        sent = decode(responses_decoder, body)
        request = chat_request(sent)
        job = await chat_job(request, self.context, self.response_id(request, scope), start)
        job.source = sent
        return job

    async def answer(self, job: Job) -> bytes:
        response = _Response(job, keep_broken=False)
        await read_events(job, response.steps, response.end)
        return msgspec.json.encode(response.body())

    async def stream(self, job: Job, events: EventStream) -> None:
        response = _Response(job, keep_broken=True)
        events.last_words = response.failed
        reader = StepReader(job)

        def frames_of(output: RequestOutput) -> bytes:
            first = b""
            if not events.started:  # not before: a schema that can't be kept is then a plain error
                begun = {"response": response.body("in_progress")}
                first = response.frames([("response.created", begun), ("response.in_progress", begun)])
            return first + response.frames_of(reader, output)

        await events.follow(job, frames_of, reader.ended)
        frames = response.frames(response.end())
        kind = f"response.{response.status}"
        await events.write(frames + response.frames([(kind, {"response": response.body()})]), more=False)


class _Response:
    """One response on its way: its items, status and sequence numbers."""

    def __init__(self, job: Job, *, keep_broken: bool) -> None:
        self.job = job
        self.sent: ResponsesRequest = job.source
        self.items = OutputItems(job.response_id, keep_broken=keep_broken)
        self.status = "completed"
        self.number = 0
        self.error: dict[str, Any] | None = None
        self.top_k = job.request.top_logprobs or 0 if job.params.logprobs is not None else None  # type: ignore[attr-defined]

    def steps(self, steps: list[Step]) -> Iterator[TypedEvent]:
        for step in steps:
            entries: list[msgspec.Raw] = []
            if self.top_k is not None:
                entries = [msgspec.Raw(shown) for shown in chat_logprobs(self.job.texts, entries_of(step.output), self.top_k)]
            yield from self.items.add(step.events, entries)
            if step.finish_reason == "length":
                self.status = "incomplete"
            elif step.finish_reason not in (None, "stop", "tool_calls"):
                self.status = "failed"
                self.error = {"code": "server_error", "message": f"The response ended early ({step.finish_reason})."}

    def frames_of(self, reader: StepReader, output: RequestOutput) -> bytes:
        event = reader.plain(output)
        if event is None:
            return self.frames(self.steps(reader.read(output)))
        if type(event) is not Content or self.top_k is not None or self.items.kind != "message":
            return self.frames(self.steps([Step(output.outputs[0], [event], None)]))
        self.number += 1
        return self.items.text_delta(event.text, self.number - 1)

    def end(self) -> Iterator[TypedEvent]:
        yield from self.items.close("completed" if self.status == "completed" else "incomplete")

    def frames(self, events: Iterable[TypedEvent]) -> bytes:
        parts = []
        for kind, fields in events:
            parts.append(frame(kind, fields, self.number))
            self.number += 1
        return b"".join(parts)

    def failed(self, error: BaseException) -> bytes:
        """The last event of a stream that fails."""
        message, status, _, code = describe(error)
        self.status = "failed"
        self.error = {"code": "server_error" if status >= 500 else code or "invalid_prompt", "message": message}
        events: list[TypedEvent] = [*self.end(), ("response.failed", {"response": self.body()})]
        return self.frames(events)

    def body(self, status: str | None = None) -> dict[str, Any]:
        """The response object; ``status`` "in_progress" at its beginning."""
        job, sent, params = self.job, self.sent, self.job.params
        text = msgspec.to_builtins(sent.text) if sent.text is not None else {}
        reasoning = sent.reasoning
        status = status or self.status
        return {
            "id": job.response_id,
            "object": "response",
            "created_at": job.created,
            "status": status,
            "background": False,
            "error": self.error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": sent.instructions,
            "max_output_tokens": sent.max_output_tokens,
            "model": job.model,
            "output": [dict(item) for item in self.items.items],
            "parallel_tool_calls": sent.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": reasoning.effort if reasoning else None, "summary": None},
            "store": False,
            "temperature": params.temperature,
            "text": {"format": text.get("format") or {"type": "text"}, "verbosity": text.get("verbosity")},
            "tool_choice": sent.tool_choice or "auto",
            "tools": sent.tools or [],
            "top_logprobs": sent.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None if status == "in_progress" else usage_json(job.usage()),
            "user": sent.user,
            "metadata": sent.metadata or {},
        }
