"""POST /v1/chat/completions."""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

import msgspec
from starlette.types import Scope

from octavo.server import sse
from octavo.server.answers import read_answers, read_steps
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
        async with aclosing(job.outputs()) as outputs:  # type: ignore[type-var]
            async for output in outputs:
                job.runs[output.request_id].observe(output)
                if frames := writer.frames_of(output):
                    await events.write(frames)
        return writer.frames

    async def _stream_read(self, job: Job, events: EventStream) -> sse.ChatFrames:
        writer = ReadChatWriter(job)
        async with aclosing(read_steps(job)) as all_steps:  # type: ignore[type-var]
            async for steps in all_steps:
                if frames := writer.frames_of_steps(steps):
                    await events.write(frames)
        return writer.frames
