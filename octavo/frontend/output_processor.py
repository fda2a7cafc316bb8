"""Tokens to text: turns the engine's deltas of one request into what the caller sees.

The engine learns nothing of text. A stop string is found here, and the sequence is then aborted there; what the engine
generated past the match is dropped.
"""

from __future__ import annotations

import time
from typing import Any

from octavo.frontend.detokenizer import Detokenizer
from octavo.frontend.logprob_buffer import LogprobBuffer, to_logprob_dict
from octavo.frontend.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from octavo.frontend.params import SamplingParams
from octavo.frontend.stop import StopChecker
from octavo.types import FinishReason, TokenDelta, TokenLogprobs


class SequenceOutput:
    """One continuation: detokenizer, stop strings, and what has not been handed to the caller yet."""

    __slots__ = (
        "index", "params", "tokenizer", "detokenizer", "checker", "text", "token_ids", "logprobs", "cumulative_logprob",
        "finish_reason", "stop_reason", "num_tokens", "dirty",
    )  # fmt: skip

    def __init__(self, index: int, params: SamplingParams, tokenizer: Any | None) -> None:
        self.index = index
        self.params = params
        self.tokenizer = tokenizer if params.detokenize else None  # of log-probabilities' tokens, too
        self.detokenizer = None
        self.checker = None
        if tokenizer is not None and params.detokenize:
            self.detokenizer = Detokenizer(
                tokenizer,
                skip_special_tokens=params.skip_special_tokens,
                spaces_between_special_tokens=params.spaces_between_special_tokens,
                kept=params.kept_special_tokens or (),
                whole=params.structured_outputs is not None,
            )
            if params.stop:
                self.checker = StopChecker(params.stop, params.include_stop_str_in_output)
        self.text: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: LogprobBuffer | None = None if params.logprobs is None else LogprobBuffer()
        self.cumulative_logprob: float | None = None if params.logprobs is None else 0.0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.num_tokens = 0
        self.dirty = False

    def push(self, delta: TokenDelta) -> bool:
        """Take in a delta; True when a stop string ended the sequence here, before the engine knows."""
        if self.finish_reason is not None:
            return False
        self.dirty = True
        tokens = delta.token_ids
        # The token that ended the sequence has no text of its own unless the caller wants the stop kept.
        stopped = delta.finish_reason == "stop" and not delta.ends_in_text
        hidden = 1 if stopped and tokens and not self.params.include_stop_str_in_output else 0
        if self.checker is None:
            self._take(tokens, delta.logprobs)
            if self.detokenizer is not None:
                self._emit(self.detokenizer.push(tokens[: len(tokens) - hidden] if hidden else tokens))
                if delta.finish_reason is not None:
                    self._emit(self.detokenizer.finish())
        elif self._push_checked(tokens, delta, hidden):
            return delta.finish_reason is None
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
            self.stop_reason = delta.stop_reason
        return False

    def _push_checked(self, tokens: list[int], delta: TokenDelta, hidden: int) -> bool:
        """Token by token, so that token_ids end with the token that completed the stop string."""
        assert self.detokenizer is not None and self.checker is not None
        for i, token in enumerate(tokens):
            self._take([token], delta.logprobs[i : i + 1] if delta.logprobs else None)
            if hidden and i == len(tokens) - 1:
                break
            # A stop string counts only once min_tokens are there, as the stop tokens do.
            if self._matched(self.detokenizer.push([token])):
                return True
        if delta.finish_reason is not None:
            if self._matched(self.detokenizer.finish()):
                return True
            self._emit(self.checker.finish())
        return False

    def _matched(self, text: str) -> bool:
        if not text:
            return False
        assert self.checker is not None
        emit, matched = self.checker.push(text, armed=self.num_tokens >= self.params.min_tokens)
        self._emit(emit)
        if matched is None:
            return False
        self.finish_reason, self.stop_reason = "stop", matched
        return True

    def _emit(self, text: str) -> None:
        if text:
            self.text.append(text)

    def _take(self, tokens: list[int], logprobs: list[TokenLogprobs] | None) -> None:
        self.token_ids.extend(tokens)
        self.num_tokens += len(tokens)
        if self.logprobs is not None and logprobs:
            self.logprobs.extend(logprobs)
            for entry in logprobs:
                self.cumulative_logprob = (self.cumulative_logprob or 0.0) + entry.logprobs[0]

    def drain(self) -> CompletionOutput:
        """What came since the last drain."""
        output = CompletionOutput(
            self.index,
            "".join(self.text),
            self.token_ids,
            self.cumulative_logprob,
            None if self.logprobs is None else self.logprobs.drain(self.tokenizer),
            self.finish_reason,
            self.stop_reason,
        )
        self.text = []
        self.token_ids = []
        self.dirty = False
        return output


class RequestOutputs:
    """One request: its sequences, and the deltas that wait for the caller."""

    __slots__ = (
        "request_id",
        "prompt",
        "prompt_token_ids",
        "sequences",
        "tokenizer",
        "prompt_logprobs",
        "num_cached_tokens",
        "metrics",
        "error",
        "error_status",
    )

    def __init__(
        self, request_id: str, prompt: str | None, prompt_token_ids: list[int], params: SamplingParams, tokenizer: Any | None
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.tokenizer = tokenizer
        self.sequences = [SequenceOutput(i, params, tokenizer) for i in range(params.n)]
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self.num_cached_tokens = 0
        self.metrics = RequestMetrics(time.time())
        self.error: str | None = None
        self.error_status = 500

    @property
    def finished(self) -> bool:
        return all(s.finish_reason is not None for s in self.sequences)

    def push(self, delta: TokenDelta) -> bool:
        """Take in a delta of this request; True when its sequence must be aborted in the engine (a stop string)."""
        now = time.time()
        if delta.token_ids:
            if self.metrics.first_token_time is None:
                self.metrics.first_token_time = now
            self.metrics.last_token_time = now
        if delta.num_cached_tokens:
            self.num_cached_tokens = delta.num_cached_tokens
        if delta.error is not None:
            self.error, self.error_status = delta.error, delta.error_status
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = [None, *(to_logprob_dict(e, self.tokenizer) for e in delta.prompt_logprobs)]
        stopped = self.sequences[delta.index].push(delta)
        if (stopped or delta.finish_reason is not None) and self.finished:
            self.metrics.finished_time = now
        return stopped

    def drain(self) -> RequestOutput:
        """Everything new since the last drain, as deltas."""
        output = RequestOutput(
            self.request_id,
            self.prompt,
            self.prompt_token_ids,
            [s.drain() for s in self.sequences if s.dirty],
            self.finished,
            self.prompt_logprobs,
            self.num_cached_tokens,
            self.metrics,
        )
        self.prompt_logprobs = None
        return output
