"""What chat and completions share: run a request's prompts on the engine, collect or stream, and end in one place.

A request has one or more prompts, each with n sequences; the choice of sequence i of prompt p has index p * n + i.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.errors import OctavoError, RequestError
from octavo.frontend.beam_search import BeamSearchParams, beam_generate
from octavo.frontend.inputs import Prompt
from octavo.frontend.logprob_buffer import entries_of
from octavo.frontend.mailbox import Outputs, Taker
from octavo.frontend.outputs import CompletionOutput, RequestOutput
from octavo.frontend.params import SamplingParams
from octavo.server import sse
from octavo.server.answers import PLAIN, AnswerPlan
from octavo.server.caps import check_logprobs_size, check_prompt_logprobs_size
from octavo.server.context import ServerContext
from octavo.server.errors import body_for, renamed, response_for
from octavo.server.limits import ChunkSink, ClientDisconnect, read_body
from octavo.server.schemas import GenerationRequest
from octavo.server.thinking import Thinking, TwoParts
from octavo.server.watch import DisconnectWatch
from octavo.types import TokenLogprobs


class GenerationError(OctavoError):
    """The engine gave up on a sequence (finish reason ``error``)."""


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int = 0


class CompletionTokensDetails(msgspec.Struct):
    reasoning_tokens: int = 0


class Usage(msgspec.Struct):
    """``completion_tokens_details`` is there where reasoning is told apart."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | msgspec.UnsetType = msgspec.UNSET


class PromptRun:
    """One prompt's run: where its choices start, and its times and counts, for usage and metrics."""

    __slots__ = ("base", "first", "last", "metrics", "num_cached", "num_generated", "open", "prompt", "start")

    def __init__(self, base: int, prompt: Prompt, metrics: Any, start: float, n: int) -> None:
        self.base = base
        self.prompt = prompt
        self.metrics = metrics
        self.start = start
        self.first = self.last = 0.0
        self.num_generated = [0] * n
        self.num_cached = 0
        self.open = n  # sequences that have not finished

    def observe(self, output: RequestOutput) -> None:
        """Count an output; called once for each, before it is written."""
        now = time.monotonic()
        new = 0
        if output.num_cached_tokens:
            self.num_cached = output.num_cached_tokens
        for choice in output.outputs:  # mostly one
            count = len(choice.token_ids)
            new += count
            self.num_generated[choice.index] += count
            if choice.finish_reason is not None:
                self._finished(choice, now)
        if not new:
            return
        if self.first:
            self.metrics.observe_inter_token((now - self.last) / new, new)
        else:
            self.first = now
            self.metrics.observe_first_token(now - self.start)
        self.last = now

    def _finished(self, choice: CompletionOutput, now: float) -> None:
        self.open -= 1
        first = self.first or now
        self.metrics.observe_finished(
            choice.finish_reason, now - self.start, len(self.prompt.token_ids), self.num_generated[choice.index], now - first
        )
        if choice.finish_reason == "error":
            raise GenerationError(str(choice.stop_reason or "the engine failed on this request"))

    def close(self) -> None:
        """Count what never finished as aborted."""
        for _ in range(self.open):
            self.metrics.observe_finished("abort", 0.0, 0, 0)
        self.open = 0


@dataclass(slots=True)
class Choice:
    """All that one sequence gave, for an answer that is not streamed."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def mean_logprob(self) -> float:
        """Of its tokens; needs log-probabilities. A choice without tokens is as likely as can be."""
        values = [entry.logprobs[0] for entry in self.logprobs]
        return sum(values) / len(values) if values else 0.0

    def add(self, output: CompletionOutput) -> None:
        self.texts.append(output.text)
        self.token_ids.extend(output.token_ids)
        self.logprobs += entries_of(output)
        if output.finish_reason is not None:
            self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason


@dataclass
class Job:
    """One HTTP request on its way: everything that is known before the engine starts."""

    context: ServerContext
    request: GenerationRequest
    response_id: str
    model: str
    prompts: list[Prompt]
    params: SamplingParams
    start: float  # time.monotonic() of its arrival
    beams: BeamSearchParams | None = None  # search instead of sampling; params then says what both have
    runs: dict[str, PromptRun] = field(default_factory=dict)  # by the engine's request id
    prompt_logprobs: dict[int, list[Any]] = field(default_factory=dict)  # by prompt
    created: int = field(default_factory=lambda: int(time.time()))
    plan: AnswerPlan = PLAIN  # how answers are read
    thinking: Thinking | None = None  # how reasoning is bounded
    reasoning_tokens: int = 0  # so far
    source: Any = None  # the client's own request, on routes that translate theirs into chat

    def __post_init__(self) -> None:
        self.texts = self.context.texts_as_ids if self.request.return_tokens_as_token_ids else self.context.texts
        for prompt in self.prompts:
            self.context.engine.check_prompt(prompt.token_ids, self.params)
        self.context.check_healthy()
        self.context.check_queue(len(self.prompts))
        streams, params, lengths = self.request.streams, self.params, [len(prompt.token_ids) for prompt in self.prompts]
        if not streams:
            left = self.context.engine.max_model_len - min(lengths)
            check_logprobs_size(self.num_choices, left if params.max_tokens is None else min(params.max_tokens, left), params.logprobs)
        # With an echo, a stream has them too, a prompt's at a time.
        asked = "logprobs" if self.request.prompt_logprobs is None else "prompt_logprobs"
        check_prompt_logprobs_size(max(lengths) if streams else sum(lengths), params.prompt_logprobs, asked)

    @property
    def textless(self) -> bool:
        """Whether no output has text, so that nothing may wait for it."""
        return self.context.engine.tokenizer is None or not self.params.detokenize

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.params.n

    def prompt_of(self, choice: int) -> Prompt:
        return self.prompts[choice // self.params.n]

    def outputs(self, taker: Taker | None = None) -> AsyncIterator[RequestOutput]:
        """Start the engine on all prompts. Closing the iterator aborts what still runs.

        ``taker``: the short way of outputs, where there is one: of a single prompt that the engine runs by itself.
        """
        n = self.params.n
        streams = []
        for i, prompt in enumerate(self.prompts):
            request_id = self.context.engine_request_id(self.response_id)
            self.runs[request_id] = PromptRun(i * n, prompt, self.context.metrics, self.start, n)
            if self.thinking is not None:
                streams += self._in_two_parts(prompt, request_id, self.thinking)
            else:
                streams.append(self._run(prompt, request_id, taker if len(self.prompts) == 1 else None))
        return streams[0] if len(streams) == 1 else merge(streams)

    def _run(self, prompt: Prompt, request_id: str, taker: Taker | None) -> AsyncIterator[RequestOutput]:
        engine, request = self.context.engine, self.request
        common: dict[str, Any] = {
            "request_id": request_id,
            "priority": request.priority or 0,
            "cache_salt": request.cache_salt,
            "prompt": prompt.text,
        }
        if self.beams is None:
            return engine.generate(prompt.token_ids, self.params, taker=taker, **common)
        return beam_generate(engine, prompt.token_ids, self.beams, prompt_logprobs=self.params.prompt_logprobs, **common)

    def _in_two_parts(self, prompt: Prompt, request_id: str, thinking: Thinking) -> list[AsyncIterator[RequestOutput]]:
        """Each sequence on its own, for each ends its reasoning at its own time."""
        options = {"priority": self.request.priority or 0, "cache_salt": self.request.cache_salt}
        parts = (
            TwoParts(self.context.engine, self.texts, prompt.token_ids, self.params, thinking, request_id, i) for i in range(self.params.n)
        )
        return [part.outputs(**options) for part in parts]

    async def collect(self) -> list[Choice]:
        choices = [Choice() for _ in range(self.num_choices)]
        async with aclosing(self.outputs()) as outputs:
            async for output in outputs:
                run = self.runs[output.request_id]
                run.observe(output)
                if output.prompt_logprobs is not None:
                    self.prompt_logprobs[run.base // self.params.n] = output.prompt_logprobs
                for choice in output.outputs:
                    choices[run.base + choice.index].add(choice)
        return choices

    def close(self) -> None:
        for run in self.runs.values():
            run.close()

    def usage(self) -> Usage:
        prompt = sum(len(p.token_ids) for p in self.prompts)
        completion = sum(sum(run.num_generated) for run in self.runs.values())
        cached = sum(run.num_cached for run in self.runs.values())
        details = CompletionTokensDetails(self.reasoning_tokens) if self.plan.parsers.reasoning is not None else msgspec.UNSET
        return Usage(prompt, completion, prompt + completion, PromptTokensDetails(cached), details)


async def merge(streams: list[AsyncIterator[RequestOutput]]) -> AsyncIterator[RequestOutput]:
    """Outputs of several streams as they come. The queue is short: a slow client holds the streams back."""
    queue: asyncio.Queue[RequestOutput | BaseException | None] = asyncio.Queue(maxsize=16)

    async def pump(stream: AsyncIterator[RequestOutput]) -> None:
        try:
            async with aclosing(stream):  # type: ignore[type-var]
                async for output in stream:
                    await queue.put(output)
        except Exception as error:  # noqa: BLE001 (whatever it is, the client gets an answer)
            await queue.put(error)
        else:
            await queue.put(None)

    tasks = [asyncio.create_task(pump(stream)) for stream in streams]
    try:
        left = len(tasks)
        while left:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                left -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class EventStream:
    """The response of a stream: the head goes out with the first event, so what fails before is a plain error.

    ``send`` goes through all middleware; ``send_chunk`` is the connection's own, for what comes once a token.
    """

    def __init__(self, send: Send, send_chunk: Send, sink: ChunkSink | None = None) -> None:
        self.send = send
        self.send_chunk = send_chunk
        self.sink = sink  # a shorter way still, while nothing is in it
        self.started = False
        self.last_words: Callable[[BaseException], bytes] | None = None  # what a stream says that fails; None: OpenAI's error event

    async def follow(self, job: Job, frames_of: Callable[[RequestOutput], bytes], ended: Callable[[], bool] | None = None) -> None:
        """Run the job and write the frames of its outputs as they come; until it ends, or ``ended`` says that it may.

        The usual output is written where it is received, without this task's waking: the connection has room and there is
        nothing to wait for.
        """
        sink = self.sink

        def take(outputs: Outputs) -> bool:
            if not self.started or sink is None or not sink.ready():
                return False
            if frames := frames_of(outputs.drain()):
                sink.put(frames)
            return ended is None or not ended()

        async with aclosing(job.outputs(take)) as outputs:  # type: ignore[type-var]
            async for output in outputs:
                if frames := frames_of(output):
                    await self.write(frames)
                if ended is not None and ended():
                    break

    async def write(self, data: bytes, *, more: bool = True) -> None:
        if self.started and more and self.sink is not None and self.sink.ready():
            self.sink.put(data)
            return
        if not self.started:
            self.started = True
            await self.send({"type": "http.response.start", "status": 200, "headers": list(sse.HEADERS)})
        await self.send_chunk({"type": "http.response.body", "body": data, "more_body": more})


class GenerationEndpoint:
    """An ASGI application for one route. Subclasses say how a body becomes a job and a job an answer.

    Whatever way a request ends (finished, refused, client gone, engine dead, shutdown), it ends in ``__call__``.
    """

    id_prefix = ""
    names: Mapping[str, str] = {}  # of chat's fields on this route, for error messages

    def __init__(self, context: ServerContext) -> None:
        self.context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = time.monotonic()
        events = EventStream(send, scope.get("octavo.send", send), scope.get("octavo.sink"))
        try:
            body = await read_body(scope, receive, self.context.options.max_body_size)
            async with DisconnectWatch(receive) as watch:
                try:
                    await self._serve(body, scope, receive, events, start)
                finally:
                    watch.close()
            if watch.disconnected:
                scope["octavo.disconnected"] = True
        except ClientDisconnect:
            scope["octavo.disconnected"] = True
        except asyncio.CancelledError:  # not the client: the server stops and does not wait any longer
            await self._fail(RequestError("The server is shutting down.", status=503, code="shutting_down"), scope, receive, events)
        except Exception as error:  # noqa: BLE001 (whatever it is, the client gets an answer)
            await self._fail(error, scope, receive, events)

    async def _serve(self, body: bytes, scope: Scope, receive: Receive, events: EventStream, start: float) -> None:
        if not self.context.engine.roles.generates:
            raise RequestError(self.context.engine.roles.why_not_generate(), code="unsupported_task")
        job = await self.job(body, scope, start)
        try:
            if job.request.streams:
                await self.stream(job, events)
            else:
                answer = await self.answer(job)
                response = Response(answer, media_type="application/json")
                await response(scope, receive, events.send)
        finally:
            job.close()
            scope["octavo.usage"] = job.usage()

    async def _fail(self, error: BaseException, scope: Scope, receive: Receive, events: EventStream) -> None:
        if isinstance(error, RequestError) and self.names:
            error = renamed(error, self.names)
        if events.started:
            last = events.last_words(error) if events.last_words is not None else sse.event(body_for(error))
            await events.write(last, more=False)
        else:
            await self.refusal(error)(scope, receive, events.send)

    def refusal(self, error: BaseException) -> Response:
        """The answer to a request that failed before anything was said."""
        return response_for(error)

    def response_id(self, request: GenerationRequest, scope: Scope) -> str:
        return self.id_prefix + (request.request_id or scope["octavo.request_id"])

    async def job(self, body: bytes, scope: Scope, start: float) -> Job:
        raise NotImplementedError

    async def answer(self, job: Job) -> bytes:
        raise NotImplementedError

    async def stream(self, job: Job, events: EventStream) -> None:
        raise NotImplementedError
