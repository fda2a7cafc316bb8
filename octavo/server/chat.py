"""Chat answers as OpenAI's API has them, whole and as chunks, where all of the text is content (else: chat_answers.py)."""

from __future__ import annotations

from typing import Any

import msgspec

from octavo.frontend.logprob_buffer import entries_of
from octavo.frontend.outputs import CompletionOutput, RequestOutput
from octavo.server import sse
from octavo.server.generation import Choice, Job
from octavo.server.logprobs import chat_logprobs, chat_object, chat_object_of_one
from octavo.server.prompts import text_content
from octavo.server.schemas import ChatRequest


def echoed_text(request: ChatRequest) -> str:
    """With ``echo`` the answer starts with the last message, which is the assistant's."""
    return (text_content(request.messages[-1].content, "messages[-1].content") or "") if request.echo else ""


def chat_choice(job: Job, request: ChatRequest, index: int, choice: Choice, echo: str) -> dict[str, Any]:
    message = {"role": "assistant", "content": echo + "".join(choice.texts), "refusal": None}
    return chat_result(job, request, index, choice, message)


def chat_result(job: Job, request: ChatRequest, index: int, choice: Choice, message: dict[str, Any]) -> dict[str, Any]:
    """One entry of ``choices``, around its message."""
    logprobs = None
    if request.logprobs:
        logprobs = msgspec.Raw(chat_object(chat_logprobs(job.texts, choice.logprobs, request.top_logprobs or 0)))
    result: dict[str, Any] = {
        "index": index,
        "message": message,
        "logprobs": logprobs,
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
    }
    if request.return_token_ids:
        result["token_ids"] = choice.token_ids
    return result


class ChatWriter:
    """Turns outputs into frames: first the role, then texts that are never empty, last the finish reason.

    Log-probabilities and token ids of tokens that have no text yet (a part of a character, a held-back stop string)
    wait for the next frame of their choice.
    """

    def __init__(self, job: Job) -> None:
        request: ChatRequest = job.request  # type: ignore[assignment]
        self.job = job
        self.frames = sse.ChatFrames(job.response_id, job.created, job.model, request.include_usage)
        self.echo = echoed_text(request)
        self.top_k = request.top_logprobs or 0
        self.wants_logprobs = bool(request.logprobs)
        self.wants_ids = bool(request.return_token_ids)
        self.wants_usage = request.continuous_usage
        self.textless = job.textless
        self.plain = not (self.wants_ids or self.wants_usage or self.textless)  # frames have texts and log-probabilities at most
        n = job.num_choices
        self.begun = [False] * n
        self.waiting_logprobs: list[list[bytes]] = [[] for _ in range(n)]
        self.waiting_ids: list[list[int]] = [[] for _ in range(n)]

    def frames_of(self, output: RequestOutput) -> bytes:
        if self.plain and len(output.outputs) == 1:  # the hot path: one sequence, a text and nothing else
            choice = output.outputs[0]
            if choice.finish_reason is None and self.begun[choice.index]:
                return self._text(choice)
        parts: list[bytes] = []
        for choice in output.outputs:
            index = choice.index
            if not self.begun[index]:
                self._begin(index, parts)
            if self.plain:
                parts.append(self._text(choice))
            else:
                self._detailed(index, choice, parts)
            if choice.finish_reason is not None:
                self._finish(index, choice, parts)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _begin(self, index: int, parts: list[bytes]) -> None:
        self.begun[index] = True
        top = {"prompt_token_ids": self.job.prompts[0].token_ids} if self.wants_ids else None
        parts.append(self._frame(index, {"role": "assistant", "content": ""}, None, {}, top))
        if self.echo:
            parts.append(self._frame(index, {"content": self.echo}, None, {}))

    def _text(self, choice: CompletionOutput) -> bytes:
        """The frame of a text; nothing if it is empty."""
        logprobs = None
        if self.wants_logprobs:
            entries = entries_of(choice)
            if len(entries) == 1 and choice.text and not self.waiting_logprobs[choice.index]:
                logprobs = chat_object_of_one(self.job.texts, entries[0], self.top_k)
            else:
                self._wait(choice.index, choice)
                logprobs = self._take_logprobs(choice.index) if choice.text else None
        return self.frames.text(choice.index, choice.text, logprobs) if choice.text else b""

    def _detailed(self, index: int, choice: CompletionOutput, parts: list[bytes]) -> None:
        self._wait(index, choice)
        if choice.text:
            parts.append(self._frame(index, {"content": choice.text}, self._take_logprobs(index), self._take_ids(index)))
        elif self.textless and choice.token_ids:
            parts.append(self._frame(index, {}, self._take_logprobs(index), self._take_ids(index)))

    def _wait(self, index: int, choice: CompletionOutput) -> None:
        if self.wants_logprobs:
            self.waiting_logprobs[index] += chat_logprobs(self.job.texts, entries_of(choice), self.top_k)
        if self.wants_ids:
            self.waiting_ids[index] += choice.token_ids

    def _finish(self, index: int, choice: CompletionOutput, parts: list[bytes]) -> None:
        extra = {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason, **self._take_ids(index)}
        parts.append(self._frame(index, {}, self._take_logprobs(index), extra))

    def _frame(
        self, index: int, delta: dict[str, Any], logprobs: bytes | None, extra: dict[str, Any], top: dict[str, Any] | None = None
    ) -> bytes:
        fields = {"delta": delta, "logprobs": None if logprobs is None else msgspec.Raw(logprobs), "finish_reason": None, **extra}
        return self.frames.choice(index, fields, top=top, usage=self.job.usage() if self.wants_usage else None)

    def _take_logprobs(self, index: int) -> bytes | None:
        waiting = self.waiting_logprobs[index]
        if not waiting:
            return None
        self.waiting_logprobs[index] = []
        return chat_object(waiting)

    def _take_ids(self, index: int) -> dict[str, Any]:
        if not self.wants_ids:
            return {}
        waiting, self.waiting_ids[index] = self.waiting_ids[index], []
        return {"token_ids": waiting}
