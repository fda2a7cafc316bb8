"""Tokens to text: turns the engine's deltas of one request into what the caller sees.

The engine learns nothing of text. A stop string is found here, and the sequence is then aborted there; what the engine
generated past the match is dropped. Where no stop string is looked for, nobody needs the text before the caller does: it is decoded
when it is drained, all at once (tokens decoded one by one cost the host more than all else that it does for them).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from octavo.frontend.detokenizer import Detokenizer
from octavo.frontend.logprob_buffer import LogprobBuffer, to_logprob_dict
from octavo.frontend.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from octavo.frontend.params import SamplingParams
from octavo.frontend.stop import StopChecker
from octavo.types import FinishReason, TokenDelta, TokenLogprobs

TOKEN_BYTES = 100  # of a token that waits for its reader: two objects and their places in lists


class SequenceOutput:
    """One continuation: detokenizer, stop strings, and what has not been handed to the caller yet."""

    __slots__ = (
        "index", "params", "tokenizer", "decode", "finish_text", "checker", "text", "token_ids", "logprobs", "cumulative_logprob",
        "finish_reason", "stop_reason", "num_tokens", "num_hidden", "dirty",
    )  # fmt: skip

    def __init__(self, index: int, params: SamplingParams, tokenizer: Any | None) -> None:
        self.index = index
        self.params = params
        self.tokenizer = tokenizer if params.detokenize else None  # of log-probabilities' tokens, too
        self.decode: Callable[[list[int]], str] | None = None
        self.checker = None
        if tokenizer is not None and params.detokenize:
            detokenizer = Detokenizer(
                tokenizer,
                skip_special_tokens=params.skip_special_tokens,
                spaces_between_special_tokens=params.spaces_between_special_tokens,
                kept=params.kept_special_tokens or (),
                whole=params.structured_outputs is not None,
            )
            self.decode, self.finish_text = detokenizer.push, detokenizer.finish
            if params.stop:
                self.checker = StopChecker(params.stop, params.include_stop_str_in_output)
        self.text: list[str] = []  # with stop strings: what is certain
        self.token_ids: list[int] = []
        self.logprobs: LogprobBuffer | None = None if params.logprobs is None else LogprobBuffer()
        self.cumulative_logprob: float | None = None if params.logprobs is None else 0.0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.num_tokens = 0
        self.num_hidden = 0  # tokens at the end that have no text
        self.dirty = False

    def push(self, delta: TokenDelta) -> bool:
        """Take in a delta; True when a stop string ended the sequence here, before the engine knows."""
        if self.finish_reason is not None:
            return False
        self.dirty = True
        if delta.finish_reason == "stop" and delta.token_ids and not (delta.ends_in_text or self.params.include_stop_str_in_output):
            self.num_hidden = 1  # the token that ended the sequence, which is text only for callers who want the stop kept
        if self.checker is None:
            self._take(delta.token_ids, delta.logprobs)
        elif self._push_checked(delta):
            return delta.finish_reason is None
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
            self.stop_reason = delta.stop_reason
        return False

    def _push_checked(self, delta: TokenDelta) -> bool:
        """Token by token, so that token_ids end with the token that completed the stop string."""
        assert self.decode is not None and self.checker is not None
        tokens = delta.token_ids
        for i, token in enumerate(tokens):
            self._take([token], delta.logprobs[i : i + 1] if delta.logprobs else None)
            if self.num_hidden and i == len(tokens) - 1:
                break
            # A stop string counts only once min_tokens are there, as the stop tokens do.
            if self._matched(self.decode([token])):
                return True
        if delta.finish_reason is not None:
            if self._matched(self.finish_text()):
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
        self.token_ids += tokens
        self.num_tokens += len(tokens)
        if self.logprobs is not None and logprobs:
            self.logprobs.extend(logprobs)
            for entry in logprobs:
                self.cumulative_logprob = (self.cumulative_logprob or 0.0) + entry.logprobs[0]

    @property
    def unread_bytes(self) -> int:
        """About what waits for the reader: an id and a piece of text a token, and log-probabilities."""
        return TOKEN_BYTES * len(self.token_ids) + (0 if self.logprobs is None else self.logprobs.num_bytes)

    def drain(self) -> CompletionOutput:
        """What came since the last drain."""
        output = CompletionOutput(
            self.index,
            self._drain_text(),
            self.token_ids,
            self.cumulative_logprob,
            None if self.logprobs is None else self.logprobs.drain(self.tokenizer),
            self.finish_reason,
            self.stop_reason,
        )
        self.token_ids = []
        self.dirty = False
        return output

    def _drain_text(self) -> str:
        """The text of what came since the last drain. That of ``token_ids`` is made here, unless stop strings were looked for in it."""
        if self.decode is None:
            return ""
        if self.checker is not None:
            text, self.text = "".join(self.text), []
            return text
        if self.finish_reason is None:
            return self.decode(self.token_ids)
        return self.decode(self.token_ids[: len(self.token_ids) - self.num_hidden]) + self.finish_text()


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
        "_open",
    )

    def __init__(
        self, request_id: str, prompt: str | None, prompt_token_ids: list[int], params: SamplingParams, tokenizer: Any | None
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.tokenizer = tokenizer
        self.sequences = [SequenceOutput(i, params, tokenizer) for i in range(params.n)]
        self._open = params.n  # sequences that have not finished
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self.num_cached_tokens = 0
        self.metrics = RequestMetrics(time.time())
        self.error: str | None = None
        self.error_status = 500

    @property
    def finished(self) -> bool:
        return self._open == 0

    @property
    def dirty(self) -> bool:
        """Whether there is anything new."""
        return any([s.dirty for s in self.sequences])

    @property
    def unread_bytes(self) -> int:
        return sum(s.unread_bytes for s in self.sequences)

    def push(self, delta: TokenDelta, now: float | None = None) -> bool:
        """Take in a delta of this request, which came at ``now`` (``time.time()``).

        True when its sequence must be aborted in the engine (a stop string).
        """
        if now is None:
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
        sequence = self.sequences[delta.index]
        was_open = sequence.finish_reason is None
        stopped = sequence.push(delta)
        if was_open and sequence.finish_reason is not None:
            self._open -= 1
            if not self._open:
                self.metrics.finished_time = now
        return stopped

    def drain(self) -> RequestOutput:
        """Everything new since the last drain, as deltas."""
        sequences = self.sequences
        if len(sequences) == 1:
            new = [sequences[0].drain()] if sequences[0].dirty else []
        else:
            new = [s.drain() for s in sequences if s.dirty]
        output = RequestOutput(
            self.request_id,
            self.prompt,
            self.prompt_token_ids,
            new,
            self._open == 0,
            self.prompt_logprobs,
            self.num_cached_tokens,
            self.metrics,
        )
        self.prompt_logprobs = None
        return output
