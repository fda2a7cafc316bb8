"""POST /v1/completions: text in, text out, with the legacy log-probabilities."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.types import Scope

from octavo.frontend.inputs import Prompt
from octavo.frontend.logprob_buffer import entries_of, to_entry
from octavo.frontend.outputs import CompletionOutput, RequestOutput
from octavo.server import sse
from octavo.server.generation import Choice, EventStream, GenerationEndpoint, Job
from octavo.server.limits import decode
from octavo.server.logprobs import LegacyLists, LegacyLogprobs, prompt_logprobs_json
from octavo.server.prompts import completion_prompts
from octavo.server.sampling import beam_params, completion_params
from octavo.server.schemas import CompletionRequest, completion_decoder


class CompletionEndpoint(GenerationEndpoint):
    id_prefix = "cmpl-"

    async def job(self, body: bytes, scope: Scope, start: float) -> Job:
        request = decode(completion_decoder, body)
        model = self.context.check_model(request.model)
        params = completion_params(request, self.context)
        prompts = await completion_prompts(request, self.context)
        return Job(
            self.context, request, self.response_id(request, scope), model, prompts, params, start, beams=beam_params(request, params)
        )

    async def answer(self, job: Job) -> bytes:
        request: CompletionRequest = job.request  # type: ignore[assignment]
        found = await job.collect()
        n = (request.n or 1) if request.best_of is not None else job.params.n
        per_prompt = [best_choices(found[i : i + job.params.n], n) for i in range(0, len(found), job.params.n)]
        choices = [completion_choice(job, p * n + i, p, choice) for p, best in enumerate(per_prompt) for i, choice in enumerate(best)]
        return msgspec.json.encode(
            {
                "id": job.response_id,
                "object": "text_completion",
                "created": job.created,
                "model": job.model,
                "choices": choices,
                "usage": job.usage(),
            }
        )

    async def stream(self, job: Job, events: EventStream) -> None:
        writer = CompletionWriter(job)

        def frames_of(output: RequestOutput) -> bytes:
            run = job.runs[output.request_id]
            run.observe(output)
            return writer.frames_of(output, run.base)

        await events.follow(job, frames_of)
        last = sse.DONE
        if job.request.include_usage:
            last = writer.frames.usage(job.usage()) + last
        await events.write(last, more=False)


def prompt_text(job: Job, prompt: Prompt) -> str:
    """The prompt as ``echo`` gives it back: what the client sent, or the text of its token ids."""
    if prompt.text is not None:
        return prompt.text
    if job.texts.tokenizer is None:
        return ""
    return job.texts.tokenizer.decode(prompt.token_ids, skip_special_tokens=job.params.skip_special_tokens)


class Echo:
    """What ``echo`` puts before the output of a choice: the prompt's text and, if asked, its log-probabilities."""

    def __init__(self, job: Job, prompt: Prompt, prompt_logprobs: list[Any] | None) -> None:
        request: CompletionRequest = job.request  # type: ignore[assignment]
        self.text = prompt_text(job, prompt) if request.echo else ""
        self.legacy: LegacyLogprobs | None = None
        self.logprobs: LegacyLists | None = None
        if request.logprobs is not None:
            self.legacy = LegacyLogprobs(job.texts, request.logprobs, skip_special_tokens=job.params.skip_special_tokens)
            if request.echo:
                positions = zip(prompt.token_ids, prompt_logprobs or ())
                entries = [None if position is None else to_entry(token, position) for token, position in positions]
                self.logprobs = self.legacy.add(prompt.token_ids, entries, text=self.text)


def best_choices(choices: list[Choice], n: int) -> list[Choice]:
    """``best_of``: the n with the highest mean log-probability, best first; all as they are when there are just n."""
    return choices if len(choices) == n else sorted(choices, key=Choice.mean_logprob, reverse=True)[:n]


def completion_choice(job: Job, index: int, prompt: int, choice: Choice) -> dict[str, Any]:
    request: CompletionRequest = job.request  # type: ignore[assignment]
    prompt_logprobs = job.prompt_logprobs.get(prompt)
    echo = Echo(job, job.prompts[prompt], prompt_logprobs)
    logprobs = None
    if echo.legacy is not None:
        lists = echo.logprobs or LegacyLists()
        lists.extend(echo.legacy.add(choice.token_ids, choice.logprobs))
        logprobs = msgspec.Raw(lists.json())
    result: dict[str, Any] = {
        "index": index,
        "text": echo.text + "".join(choice.texts),
        "logprobs": logprobs,
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
    }
    if request.prompt_logprobs is not None:
        result["prompt_logprobs"] = prompt_logprobs_json(job.texts, prompt_logprobs)
    if request.return_token_ids:
        result["prompt_token_ids"] = job.prompts[prompt].token_ids
        result["token_ids"] = choice.token_ids
    return result


class CompletionWriter:
    """Turns outputs into frames. The last text of a choice and its finish reason share a frame.

    Log-probabilities and token ids of tokens that have no text yet wait for the next frame of their choice. Without a
    tokenizer (or with detokenize: false) no token ever has text, so each output is a frame with an empty one, and the
    finish reason has its own: clients see tokens when they come, also those that asked for nothing but the stream.
    """

    def __init__(self, job: Job) -> None:
        request: CompletionRequest = job.request  # type: ignore[assignment]
        self.job = job
        self.frames = sse.CompletionFrames(job.response_id, job.created, job.model, request.include_usage)
        self.wants_echo = bool(request.echo)
        self.wants_logprobs = request.logprobs is not None
        self.wants_ids = bool(request.return_token_ids)
        self.wants_usage = request.continuous_usage
        self.textless = job.textless
        self.plain = not (self.wants_logprobs or self.wants_ids or self.wants_usage or self.wants_echo)
        n = job.num_choices
        self.echoes: list[Echo | None] = [None] * n
        self.prompt_logprobs: dict[int, list[Any]] = {}
        self.waiting_logprobs: list[LegacyLists | None] = [None] * n
        self.waiting_ids: list[list[int]] = [[] for _ in range(n)]

    def frames_of(self, output: RequestOutput, base: int) -> bytes:
        if output.prompt_logprobs is not None:
            self.prompt_logprobs[base] = output.prompt_logprobs
        parts: list[bytes] = []
        for choice in output.outputs:
            index = base + choice.index
            if not self.plain:
                self._detailed(index, base, choice, parts)
                continue
            if self.textless and choice.token_ids:
                parts.append(self.frames.text(index, ""))
            if choice.finish_reason is not None:
                parts.append(self._frame(index, choice.text, None, self._ending(choice)))
            elif choice.text:
                parts.append(self.frames.text(index, choice.text))
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _detailed(self, index: int, base: int, choice: CompletionOutput, parts: list[bytes]) -> None:
        echo = self.echoes[index]
        if echo is None:
            echo = self.echoes[index] = Echo(self.job, self.job.prompt_of(index), self.prompt_logprobs.get(base))
            if self.wants_echo or self.wants_ids:
                extra = {"prompt_token_ids": self.job.prompt_of(index).token_ids, "token_ids": []} if self.wants_ids else {}
                parts.append(self._frame(index, echo.text, echo.logprobs, extra))
        if echo.legacy is not None and choice.token_ids:
            lists = echo.legacy.add(choice.token_ids, entries_of(choice))
            if (waiting := self.waiting_logprobs[index]) is None:
                self.waiting_logprobs[index] = lists
            else:
                waiting.extend(lists)
        if self.wants_ids:
            self.waiting_ids[index] += choice.token_ids
        if self.textless and choice.token_ids:
            self._flush(index, "", {}, parts)
        if choice.text or choice.finish_reason is not None:
            self._flush(index, choice.text, self._ending(choice) if choice.finish_reason is not None else {}, parts)

    def _flush(self, index: int, text: str, extra: dict[str, Any], parts: list[bytes]) -> None:
        """A frame with all that waited for one."""
        if self.wants_ids:
            extra["token_ids"], self.waiting_ids[index] = self.waiting_ids[index], []
        waiting, self.waiting_logprobs[index] = self.waiting_logprobs[index], None
        if extra or self.wants_usage:
            parts.append(self._frame(index, text, waiting, extra))
        else:
            parts.append(self.frames.text(index, text, None if waiting is None else waiting.json()))

    def _ending(self, choice: CompletionOutput) -> dict[str, Any]:
        return {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}

    def _frame(self, index: int, text: str, logprobs: LegacyLists | None, extra: dict[str, Any]) -> bytes:
        fields = {"text": text, "logprobs": None if logprobs is None else msgspec.Raw(logprobs.json()), "finish_reason": None, **extra}
        return self.frames.choice(index, fields, usage=self.job.usage() if self.wants_usage else None)
