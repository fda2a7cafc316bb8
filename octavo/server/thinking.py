"""Bounds on reasoning, by running a sequence in two parts: up to the end of its reasoning, and from there on.

The engine knows nothing of reasoning. Where a budget is used up, the sequence is aborted, and goes on as a new request whose
prompt is the old one, the tokens so far, and the tokens that end a reasoning. So does one whose answer must have a form
(a forced call, a JSON schema), for reasoning is free. The prefix cache makes the second part cheap; the client sees one answer,
and every token is counted once. The tokens that end the reasoning are part of the answer, with the log-probability 0.

Penalties of the second part take the first for a prompt: presence and frequency penalties begin anew after a forced end.
"""

from __future__ import annotations

import codecs
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from octavo.errors import RequestError
from octavo.frontend.outputs import CompletionOutput, Logprob, RequestOutput
from octavo.frontend.params import SamplingParams
from octavo.frontend.parsers import REASONING_PARSERS, Content
from octavo.frontend.parsers.reasoning import Beginning, ReasoningParser
from octavo.server.logprobs import TokenTexts

# reasoning_effort -> most tokens of reasoning, for models whose template does not know the word. "high" and above: no bound.
EFFORT_BUDGETS = {"none": 0, "minimal": 512, "low": 1024, "medium": 4096}

_HARMONY_ANSWER = "<|channel|>final<|message|>"


@dataclass(frozen=True)
class Thinking:
    """How a request's reasoning is bounded. ``budget``: most tokens, or None. ``form``: what the answer after it must be, or None."""

    parser: str
    prompt: str | None
    budget: int | None
    form: Any
    beginning: Beginning | None = None


def thinking_of(
    parser: str | None, prompt: str | None, budget: int | None, form: Any, beginning: Beginning | None = None
) -> Thinking | None:
    """None where one part does: nothing to bound, or no reasoning to come. RequestError for a budget that can't be kept."""
    if budget is not None and budget < 0:
        raise RequestError(f"thinking_token_budget must be at least 0, got {budget}.", param="thinking_token_budget")
    if parser is None or (budget is None and form is None):
        return None
    thinking = Thinking(parser, prompt, budget, form, beginning)
    return None if Watch(thinking, None).state == "over" else thinking


@dataclass(frozen=True, slots=True)
class Cut:
    """The first part ends after ``keep`` tokens; ``text`` leads over to the second."""

    keep: int
    text: str


class Watch:
    """Follows a sequence's tokens to where its first part ends."""

    def __init__(self, thinking: Thinking, texts: TokenTexts | None) -> None:
        kind = REASONING_PARSERS[thinking.parser]
        self.thinking = thinking
        self.texts = texts
        self.harmony = not issubclass(kind, ReasoningParser)
        self.parser: Any = kind(thinking.prompt, beginning=thinking.beginning) if issubclass(kind, ReasoningParser) else kind()
        beginning = getattr(self.parser, "beginning", "detect")
        states: dict[str, Literal["undecided", "inside", "over"]] = {"open": "inside", "closed": "over"}
        self.state: Literal["undecided", "inside", "over"] = states.get(beginning, "undecided")
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.seen = 0  # tokens
        self.spent = 0  # those within reasoning

    def at_start(self) -> Cut | None:
        return Cut(0, self.ending()) if self.state == "inside" and self.thinking.budget == 0 else None

    def ending(self) -> str:
        """The text that ends a reasoning."""
        return "<|end|><|start|>assistant" + _HARMONY_ANSWER if self.harmony else f"\n{self.parser.end_tag}\n\n"

    def feed(self, token_ids: list[int]) -> Cut | None:
        assert self.texts is not None
        for token in token_ids:
            self.seen += 1
            events = self.parser.push(self.decoder.decode(self.texts.raw(token)))
            if cut := self._after(events):
                return cut
            if self.state == "over":
                break
        return None

    def _after(self, events: list[Any]) -> Cut | None:
        budget, form = self.thinking.budget, self.thinking.form
        if self.state == "undecided":
            if self.parser.in_reasoning:
                self.state = "inside"
                return Cut(self.seen, self.ending()) if budget == 0 else None
            if any(isinstance(event, Content) for event in events):
                self.state = "over"  # there is no reasoning; what came instead is no answer of the form
                return Cut(0, _HARMONY_ANSWER if self.harmony else "") if form is not None else None
        elif not self.parser.in_reasoning:
            self.state = "over"
            return Cut(self.seen, "<|start|>assistant" + _HARMONY_ANSWER if self.harmony else "") if form is not None else None
        else:
            self.spent += 1
            if budget is not None and self.spent >= budget:
                return Cut(self.seen, self.ending())
        return None

    def at_end(self) -> Cut | None:
        """The model ended by itself (its last token is the end of the sequence) and has not given an answer of the form yet."""
        if self.thinking.form is None or self.state == "over":
            return None
        if self.state == "undecided":
            return Cut(0, _HARMONY_ANSWER if self.harmony else "")
        return Cut(self.seen - 1, self.ending())


class TwoParts:
    """One sequence in two parts; `outputs` yields what one request would have."""

    def __init__(
        self, engine: Any, texts: TokenTexts, prompt: list[int], params: SamplingParams, thinking: Thinking, request_id: str, index: int
    ) -> None:
        self.engine = engine
        self.texts = texts
        self.prompt = prompt
        self.thinking = thinking
        self.request_id = request_id
        self.index = index
        seed = params.seed if params.seed is None or not index else params.seed + index
        self.params = msgspec.structs.replace(params, n=1, seed=seed)
        self.produced: list[int] = []
        self.emitted = 0  # characters

    async def outputs(self, **options: Any) -> AsyncIterator[RequestOutput]:
        """``options``: of the engine's ``generate``."""
        options = {"arrival_time": time.time(), **options}  # the second part has the first one's place in the queue
        watch = Watch(self.thinking, self.texts)
        cut = watch.at_start()
        if cut is None:
            first = msgspec.structs.replace(self.params, structured_outputs=None) if self.thinking.form is not None else self.params
            held: list[RequestOutput] = []
            async with aclosing(
                self.engine.generate(self.prompt, first, request_id=f"{self.request_id}-{self.index}a", **options)
            ) as outputs:
                async for output in outputs:
                    choice = output.outputs[0]
                    if watch.state != "over":
                        cut = watch.feed(choice.token_ids)
                        if cut is None and choice.finish_reason == "stop" and choice.stop_reason is None:
                            cut = watch.at_end()
                        if cut is not None and self._ends_before(cut, choice):
                            cut = None
                    if cut is not None:
                        if cut.keep:
                            for earlier in held:
                                yield self._own(earlier)
                        yield self._cut_off(output, cut)
                        break
                    held.append(output)
                    if watch.state == "undecided" and choice.finish_reason is None:
                        continue
                    for earlier in held:
                        yield self._own(earlier)
                    held = []
                    if choice.finish_reason is not None:
                        return
        if cut is None:
            return
        async with aclosing(self._second(cut, options)) as rest:
            async for output in rest:
                yield output

    def _ends_before(self, cut: Cut, choice: CompletionOutput) -> bool:
        """Whether the sequence ended by itself before or at the cut: by its length, a stop string, an error."""
        if choice.finish_reason is None or (choice.finish_reason == "stop" and choice.stop_reason is None):
            return False
        return cut.keep >= len(self.produced) + len(choice.token_ids) or choice.finish_reason in ("abort", "error")

    def _own(self, output: RequestOutput) -> RequestOutput:
        choice = output.outputs[0]
        self.produced += choice.token_ids
        self.emitted += len(choice.text)
        output.request_id, choice.index = self.request_id, self.index
        return output

    def _cut_off(self, output: RequestOutput, cut: Cut) -> RequestOutput:
        """The part of an output before the cut, as the answer's."""
        choice = output.outputs[0]
        keep = max(cut.keep - len(self.produced), 0) if cut.keep else 0
        kept = choice.token_ids[:keep]
        text = self._text(self.produced + kept)[self.emitted :] if cut.keep else ""
        logprobs = None if choice.logprobs is None else choice.logprobs[:keep]
        self.produced += kept
        output.request_id, output.finished = self.request_id, False
        output.outputs = [CompletionOutput(self.index, text, kept, None, logprobs)]
        return output

    def _text(self, token_ids: list[int]) -> str:
        tokenizer, params = self.texts.tokenizer, self.params
        if not params.skip_special_tokens:
            return tokenizer.decode(token_ids, skip_special_tokens=False)
        hidden = self.texts.special.difference(params.kept_special_tokens or ())
        return tokenizer.decode([token for token in token_ids if token not in hidden], skip_special_tokens=False)

    async def _second(self, cut: Cut, options: dict[str, Any]) -> AsyncIterator[RequestOutput]:
        forced = self.texts.tokenizer.encode(cut.text, add_special_tokens=False) if cut.text else []
        room = self.engine.max_model_len - len(self.prompt) - len(self.produced)
        if self.params.max_tokens is not None:
            room = min(room, self.params.max_tokens - len(self.produced))
        ended = room <= len(forced)
        if forced or ended:
            forced = forced[: max(room, 0)]
            text = cut.text if not ended else self._text(forced)
            logprobs = None if self.params.logprobs is None else [{token: Logprob(0.0, 1)} for token in forced]
            choice = CompletionOutput(self.index, text, forced, None, logprobs, "length" if ended else None)
            yield RequestOutput(self.request_id, None, self.prompt, [choice], ended)
        if ended:
            return
        so_far = self.produced + forced
        params = msgspec.structs.replace(
            self.params,
            max_tokens=None if self.params.max_tokens is None else self.params.max_tokens - len(so_far),
            min_tokens=max(self.params.min_tokens - len(so_far), 0),
            prompt_logprobs=None,
        )
        request_id = f"{self.request_id}-{self.index}b"
        async with aclosing(self.engine.generate(self.prompt + so_far, params, request_id=request_id, **options)) as outputs:
            async for output in outputs:
                output.request_id, output.num_cached_tokens = self.request_id, 0
                output.outputs[0].index = self.index
                yield output
