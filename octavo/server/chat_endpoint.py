"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.types import Scope

from octavo.frontend.outputs import RequestOutput
from octavo.server import sse
from octavo.server.answers import StepReader, read_answers
from octavo.server.chat import ChatWriter, chat_choice, echoed_text
from octavo.server.chat_answers import ReadChatWriter, read_choice
from octavo.server.chat_plan import chat_job
from octavo.server.generation import EventStream, GenerationEndpoint, Job
from octavo.server.limits import decode
from octavo.server.logprobs import prompt_logprobs_json
from octavo.server.schemas import ChatRequest, chat_decoder


class ChatEndpoint(GenerationEndpoint):
    """Answers in which nothing but text is looked for go straight through; the others are read first."""

    id_prefix = "chatcmpl-"

    async def job(self, body: bytes, scope: Scope, start: float) -> Job:
        request = decode(chat_decoder, body)
        return await chat_job(request, self.context, self.response_id(request, scope), start)

    async def answer(self, job: Job) -> bytes:
        request: ChatRequest = job.request  # type: ignore[assignment]
        echo = echoed_text(request)
        if job.plan.reads:
            choices = [read_choice(job, request, i, answer, echo) for i, answer in enumerate(await read_answers(job))]
        else:
            choices = [chat_choice(job, request, i, choice, echo) for i, choice in enumerate(await job.collect())]
        answer: dict[str, Any] = {
            "id": job.response_id,
            "object": "chat.completion",
            "created": job.created,
            "model": job.model,
            "choices": choices,
            "usage": job.usage(),
        }
        if request.prompt_logprobs is not None:
            answer["prompt_logprobs"] = prompt_logprobs_json(job.texts, job.prompt_logprobs.get(0))
        if request.return_token_ids:
            answer["prompt_token_ids"] = job.prompts[0].token_ids
        return msgspec.json.encode(answer)

    async def stream(self, job: Job, events: EventStream) -> None:
        frames = await (self._stream_read(job, events) if job.plan.reads else self._stream_plain(job, events))
        last = frames.usage(job.usage()) + sse.DONE if job.request.include_usage else sse.DONE
        await events.write(last, more=False)

    async def _stream_plain(self, job: Job, events: EventStream) -> sse.ChatFrames:
        writer = ChatWriter(job)

        def frames_of(output: RequestOutput) -> bytes:
            job.runs[output.request_id].observe(output)
            return writer.frames_of(output)

        await events.follow(job, frames_of)
        return writer.frames

    async def _stream_read(self, job: Job, events: EventStream) -> sse.ChatFrames:
        writer, reader = ReadChatWriter(job), StepReader(job)

        def frames_of(output: RequestOutput) -> bytes:
            event = reader.plain(output)
            return writer.frames_of_steps(reader.read(output)) if event is None else writer.frames_of_event(output.outputs[0], event)

        await events.follow(job, frames_of, reader.ended)
        return writer.frames
