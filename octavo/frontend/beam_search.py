"""Beam search on top of the engine: every step each beam asks it for the log-probabilities of its next token.

The engine knows nothing of beams. A step is one request a beam, of one token; the prefix cache holds what the beams share,
so a step runs at most a block of tokens a beam. The rules (which candidates go on, when the search ends, how lengths are
weighed) are those of transformers' ``generate(num_beams=…, do_sample=False)``, so that both find the same sequences.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Collection, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from octavo.errors import RequestError
from octavo.frontend.detokenizer import Detokenizer
from octavo.frontend.outputs import CompletionOutput, Logprob, RequestOutput
from octavo.frontend.params import SamplingParams

MAX_BEAM_WIDTH = 32  # a step's candidates are its square, some times over, and are sorted on the event loop
_WORST = -math.inf


class BeamSearchParams(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """How to search. Values are checked on construction; RequestError (a ValueError) names the field.

    beam_width: beams that go on after each step. n: how many of the sequences found come back, best first (None: all).
    max_tokens: length of the outputs (None: what is left of the context). A sequence is ranked by the sum of its
    tokens' log-probabilities divided by length ** length_penalty. early_stopping: True ends when beam_width sequences have
    ended; False also asks whether a running one could still be better at its present length; "never" goes on until none
    could be better at any length. ignore_eos: sequences end at max_tokens only. logprobs k: as in SamplingParams.
    """

    beam_width: int = 4
    n: int | None = None
    max_tokens: int | None = 16
    ignore_eos: bool = False
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    temperature: float = 0.0
    logprobs: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        width = self.beam_width
        if isinstance(width, bool) or not isinstance(width, int) or not 1 <= width <= MAX_BEAM_WIDTH:
            raise RequestError(f"beam_width must be an integer from 1 to {MAX_BEAM_WIDTH}, got {width!r}.", param="beam_width")
        if self.n is not None and (isinstance(self.n, bool) or not isinstance(self.n, int) or not 1 <= self.n <= width):
            raise RequestError(f"n must be from 1 to beam_width ({width}), got {self.n!r}.", param="n")
        if self.early_stopping not in (True, False, "never"):
            raise RequestError(f'early_stopping must be true, false or "never", got {self.early_stopping!r}.', param="early_stopping")
        penalty = self.length_penalty
        if isinstance(penalty, bool) or not isinstance(penalty, (int, float)) or not -10 <= penalty <= 10:
            raise RequestError(f"length_penalty must be a number from -10 to 10, got {penalty!r}.", param="length_penalty")
        if self.temperature != 0:
            raise RequestError(f"beam search does not sample: temperature must be 0, got {self.temperature!r}.", param="temperature")
        if self.max_tokens is not None and (isinstance(self.max_tokens, bool) or self.max_tokens < 1):
            raise RequestError(f"beam search needs max_tokens of at least 1, got {self.max_tokens!r}.", param="max_tokens")
        self.sampling()  # checks the rest

    def sampling(self, **changes: Any) -> SamplingParams:
        """Those of the parameters that sampling has too: for checks of prompts, and for the answer's texts."""
        fields: dict[str, Any] = {
            "n": self.n or self.beam_width,
            "max_tokens": self.max_tokens,
            "temperature": 0.0,
            "logprobs": self.logprobs,
            "ignore_eos": self.ignore_eos,
            "skip_special_tokens": self.skip_special_tokens,
            "spaces_between_special_tokens": self.spaces_between_special_tokens,
            "include_stop_str_in_output": self.include_stop_str_in_output,
        }
        return SamplingParams(**{**fields, **changes})


@dataclass(slots=True)
class Beam:
    """A sequence on the way: output tokens, the sum of their log-probabilities, and what each position offered."""

    token_ids: list[int] = field(default_factory=list)
    total: float = 0.0
    positions: list[dict[int, Logprob]] = field(default_factory=list)
    score: float = _WORST  # of an ended one: total / length ** length_penalty
    by_eos: bool = False

    def extended(self, token: int, total: float, position: dict[int, Logprob] | None) -> Beam:
        return Beam([*self.token_ids, token], total, self.positions if position is None else [*self.positions, position])


class BeamSearch:
    """The search over one prompt, without I/O: ask ``prompts`` with ``step_params``, ``advance`` with the answers, until ``done``.

    max_tokens: resolved, at least 1.  vocab_size: bounds how many candidates there are.
    """

    def __init__(
        self, prompt_token_ids: list[int], params: BeamSearchParams, *, max_tokens: int, eos_token_ids: Collection[int], vocab_size: int
    ) -> None:
        self.prompt_token_ids = prompt_token_ids
        self.params = params
        self.max_tokens = max_tokens
        self.eos = frozenset(() if params.ignore_eos else eos_token_ids)
        # So many that beam_width remain even if each beam's ends of sequence are all among the best.
        self.num_candidates = max(2, 1 + len(self.eos)) * params.beam_width
        self.beams = [Beam()]
        self.ended: list[Beam] = []  # best first, at most beam_width
        self.done = False
        self.step_params = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            logprobs=min(max(self.num_candidates, params.logprobs or 0), vocab_size),
            ignore_eos=True,
            detokenize=False,
        )

    @property
    def prompts(self) -> list[list[int]]:
        """What each running beam is, prompt and output."""
        return [self.prompt_token_ids + beam.token_ids for beam in self.beams]

    def advance(self, positions: Sequence[dict[int, Logprob]]) -> None:
        """``positions[i]``: token id -> log-probability of what may follow beam i, the best ``step_params.logprobs`` of them."""
        width, params = self.params.beam_width, self.params
        candidates = [
            (beam.total + entry.logprob, i, token)
            for i, (beam, position) in enumerate(zip(self.beams, positions, strict=True))
            for token, entry in position.items()
        ]
        candidates.sort(key=lambda c: (-c[0], c[1], c[2]))
        del candidates[self.num_candidates :]
        length = len(self.beams[0].token_ids) + 1
        at_limit = length >= self.max_tokens
        running: list[Beam] = []
        ended = list(self.ended)
        for place, (total, i, token) in enumerate(candidates):
            by_eos = token in self.eos
            beam = self.beams[i].extended(token, total, positions[i] if params.logprobs is not None else None)
            if not by_eos and not at_limit:
                if len(running) < width:
                    running.append(beam)
            elif place < width:  # candidates beyond the best are there to go on with, not to end
                beam.score, beam.by_eos = total / length**params.length_penalty, by_eos
                ended.append(beam)
        ended.sort(key=lambda b: -b.score)  # stable: of equal ones the older stays first
        self.ended = ended[:width]
        self.beams = running
        enough = params.early_stopping is True and len(self.ended) == width
        self.done = not running or enough or not self._can_improve(length)

    def _can_improve(self, length: int) -> bool:
        """Whether the best running beam may still beat the worst ended one."""
        params = self.params
        if len(self.ended) < params.beam_width:
            return True
        if params.early_stopping == "never" and params.length_penalty > 0:
            length = self.max_tokens
        return self.beams[0].total / length**params.length_penalty > self.ended[-1].score

    def outputs(self, tokenizer: Any | None) -> list[CompletionOutput]:
        """The sequences found, best first. An end-of-sequence token counts, and has no text."""
        return [self._output(i, beam, tokenizer) for i, beam in enumerate(self.ended[: self.params.n or self.params.beam_width])]

    def _output(self, index: int, beam: Beam, tokenizer: Any | None) -> CompletionOutput:
        params = self.params
        hidden = 1 if beam.by_eos and not params.include_stop_str_in_output else 0
        text = _text(beam.token_ids[: len(beam.token_ids) - hidden], tokenizer, params)
        logprobs = None
        if params.logprobs is not None:
            pairs = zip(beam.token_ids, beam.positions, strict=True)
            logprobs = [_cut(position, token, params.logprobs, tokenizer) for token, position in pairs]
        return CompletionOutput(index, text, beam.token_ids, beam.total, logprobs, "stop" if beam.by_eos else "length", None)


def _text(token_ids: list[int], tokenizer: Any | None, params: BeamSearchParams) -> str:
    if tokenizer is None:
        return ""
    if params.spaces_between_special_tokens:
        return tokenizer.decode(token_ids, skip_special_tokens=params.skip_special_tokens)
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens, spaces_between_special_tokens=False)
    return detokenizer.push(token_ids) + detokenizer.finish()


def _cut(position: dict[int, Logprob], token: int, count: int, tokenizer: Any | None) -> dict[int, Logprob]:
    """The chosen token first, then the ``count`` best, best first; with their texts, which the search has no use for."""
    best = sorted(position, key=lambda t: position[t].rank or 0)[: len(position) if count < 0 else count]
    texts = {t: tokenizer.decode([t], skip_special_tokens=False) if tokenizer is not None else None for t in (token, *best)}
    return {t: Logprob(position[t].logprob, position[t].rank, text) for t, text in texts.items()}


def start_search(
    prompt_token_ids: list[int], params: BeamSearchParams, *, eos_token_ids: Collection[int], vocab_size: int, max_model_len: int
) -> BeamSearch:
    """A search, its length bound by the context. The prompt must have been checked."""
    left = max_model_len - len(prompt_token_ids)
    return BeamSearch(
        prompt_token_ids,
        params,
        max_tokens=left if params.max_tokens is None else min(params.max_tokens, left),
        eos_token_ids=eos_token_ids,
        vocab_size=vocab_size,
    )


async def beam_generate(
    engine: Any,
    prompt_token_ids: list[int],
    params: BeamSearchParams,
    *,
    request_id: str,
    priority: int = 0,
    cache_salt: str | None = None,
    prompt: str | None = None,
    prompt_logprobs: int | None = None,
) -> AsyncIterator[RequestOutput]:
    """One output with every sequence, when the search is over. ``engine``: ``AsyncLLM``. Closing the iterator ends the search.

    Raises what ``engine.generate`` raises.
    """
    engine.check_prompt(prompt_token_ids, params.sampling())
    search = start_search(
        prompt_token_ids,
        params,
        eos_token_ids=getattr(engine.model_config, "eos_token_ids", ()),
        vocab_size=engine.vocab_size,
        max_model_len=engine.max_model_len,
    )
    first: RequestOutput | None = None
    arrived = time.time()  # each step keeps the search's place in the queue, or a busy engine would never finish it
    step = 0

    async def ask(token_ids: list[int], beam: int) -> RequestOutput:
        step_params = search.step_params
        if step == 0 and prompt_logprobs is not None:
            step_params = msgspec.structs.replace(step_params, prompt_logprobs=prompt_logprobs)
        options: dict[str, Any] = {"priority": priority, "cache_salt": cache_salt, "arrival_time": arrived}
        stream = engine.generate(token_ids, step_params, request_id=f"{request_id}-{step}.{beam}", **options)
        result: RequestOutput | None = None
        async with aclosing(stream):
            async for output in stream:
                if result is None or output.outputs and output.outputs[0].logprobs:
                    result = output
        assert result is not None
        return result

    while not search.done:
        answers = await _all([ask(token_ids, i) for i, token_ids in enumerate(search.prompts)])
        first = first or answers[0]
        search.advance([answer.outputs[0].logprobs[0] for answer in answers])
        step += 1
    assert first is not None
    yield RequestOutput(
        request_id,
        prompt,
        prompt_token_ids,
        search.outputs(engine.tokenizer),
        True,
        first.prompt_logprobs,
        first.num_cached_tokens,
        first.metrics,
    )


async def _all(coroutines: list[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Results in order; when one fails, or we are cancelled, the others are ended before anything is raised."""
    tasks = [asyncio.ensure_future(c) for c in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
