"""What a caller may ask of sampling: the public ``SamplingParams``, with the field names that vLLM's users know."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any

import msgspec

from octavo.errors import RequestError
from octavo.frontend.structured import structured_output
from octavo.types import TokenParams

MAX_TOP_K = 2**31 - 1
MAX_STOP_STRINGS = 16
MAX_BIAS_ENTRIES = 1024
MAX_BAD_WORDS = 1024


_BOOLEANS = ("ignore_eos", "detokenize", "skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output")


class SamplingParams(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """How to sample one request. Values are checked on construction; RequestError (a ValueError) names the field.

    temperature: 0 is greedy. top_p in (0, 1]; top_k: 0 or -1 keeps all; min_p in [0, 1], relative to the best token.
    presence_penalty and frequency_penalty in [-2, 2], over output tokens; repetition_penalty > 0, over prompt and
    output. seed: the same request and seed give the same tokens, whatever else runs. max_tokens None: what is left of
    the context. min_tokens: no end before. logprobs k: the sampled token's and the k best (-1: the whole vocabulary).
    stop: strings that end the output and are left out of it, unless include_stop_str_in_output.
    kept_special_tokens: ids that skip_special_tokens leaves in the text (a parser's marks).
    structured_outputs: the form that the output must have; a StructuredOutput, a StructuredOutputsParams or such a dict.
    bad_words: strings never generated. allowed_token_ids: nothing else is generated. logit_bias: token id -> added.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    kept_special_tokens: list[int] | None = None
    include_stop_str_in_output: bool = False
    truncate_prompt_tokens: int | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    logit_bias: dict[int, float] | None = None
    structured_outputs: Any = None  # a StructuredOutput, once checked

    def __post_init__(self) -> None:
        _check_int("n", self.n, 1, None)
        _check_number("presence_penalty", self.presence_penalty, -2, 2)
        _check_number("frequency_penalty", self.frequency_penalty, -2, 2)
        _check_number("repetition_penalty", self.repetition_penalty, 0, None, open_low=True)
        _check_number("temperature", self.temperature, 0, None)
        _check_number("top_p", self.top_p, 0, 1, open_low=True)
        _check_int("top_k", self.top_k, -1, MAX_TOP_K)
        _check_number("min_p", self.min_p, 0, 1)
        if self.seed is not None:
            _check_int("seed", self.seed, -(2**63), 2**63 - 1)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 0, None)
        _check_int("min_tokens", self.min_tokens, 0, None)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens}).", param="min_tokens")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), -1, None)
        if self.truncate_prompt_tokens is not None:
            _check_int("truncate_prompt_tokens", self.truncate_prompt_tokens, 1, None)
        self._check_lists()
        self.structured_outputs = structured_output(self.structured_outputs)

    def _check_lists(self) -> None:
        """Strings, ids and biases; the switches that they depend on."""
        if isinstance(self.stop, str):
            self.stop = [self.stop]
        for word_list, limit in (("stop", MAX_STOP_STRINGS), ("bad_words", MAX_BAD_WORDS)):
            words = getattr(self, word_list)
            if words is None:
                continue
            if not isinstance(words, (list, tuple)) or not all(isinstance(w, str) for w in words):
                raise RequestError(f"{word_list} must be a list of strings.", param=word_list)
            if any(not w for w in words):
                raise RequestError(f"{word_list} must not contain an empty string.", param=word_list)
            if len(words) > limit:
                raise RequestError(f"{word_list} takes at most {limit} strings, got {len(words)}.", param=word_list)
        for name in _BOOLEANS:
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} must be true or false, got {getattr(self, name)!r}.", param=name)
        for name in ("stop_token_ids", "allowed_token_ids", "kept_special_tokens"):
            ids = getattr(self, name)
            if ids is not None and not isinstance(ids, (list, tuple)):
                raise RequestError(f"{name} must be a list of token ids, got {ids!r}.", param=name)
        if self.logit_bias is not None and not isinstance(self.logit_bias, dict):
            raise RequestError(f"logit_bias must map token ids to numbers, got {self.logit_bias!r}.", param="logit_bias")
        if self.stop and not self.detokenize:
            raise RequestError("stop strings need detokenize=True; use stop_token_ids instead.", param="stop")
        if self.logit_bias and len(self.logit_bias) > MAX_BIAS_ENTRIES:
            raise RequestError(f"logit_bias takes at most {MAX_BIAS_ENTRIES} entries, got {len(self.logit_bias)}.", param="logit_bias")
        if self.logit_bias:
            for token, bias in self.logit_bias.items():
                if isinstance(bias, bool) or not isinstance(bias, (int, float)) or not math.isfinite(bias) or not -100 <= bias <= 100:
                    raise RequestError(f"logit_bias[{token}] must be between -100 and 100, got {bias}.", param="logit_bias")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise RequestError("allowed_token_ids must not be empty.", param="allowed_token_ids")

    def to_token_params(
        self,
        *,
        prompt_len: int,
        max_model_len: int,
        vocab_size: int,
        eos_token_ids: Collection[int],
        encode_bad_word: Callable[[str], list[list[int]]] | None = None,
        grammar: str | None = None,
    ) -> TokenParams:
        """Resolve against a prompt and a model into what the engine takes.

        ``encode_bad_word`` gives the token sequences that spell a word (with and without a leading space).
        ``grammar``: ``structured_outputs``, checked and compiled (see grammar.py).
        Raises RequestError for ids outside of the vocabulary.
        """
        check_ids("stop_token_ids", self.stop_token_ids or (), vocab_size)
        check_ids("logit_bias", self.logit_bias or (), vocab_size)
        check_ids("allowed_token_ids", self.allowed_token_ids or (), vocab_size)
        left = max_model_len - prompt_len
        max_tokens = left if self.max_tokens is None else min(self.max_tokens, left)
        bad_words: list[tuple[int, ...]] = []
        if self.bad_words:
            if encode_bad_word is None:
                raise RequestError("bad_words need a tokenizer, and this model was started without one.", param="bad_words")
            for word in self.bad_words:
                bad_words.extend(tuple(ids) for ids in encode_bad_word(word) if ids)
        self._check_allowed(bad_words, eos_token_ids)
        return TokenParams(
            n=self.n,
            max_tokens=max_tokens,
            min_tokens=min(self.min_tokens, max_tokens),
            temperature=float(self.temperature),
            top_p=float(self.top_p),
            top_k=0 if self.top_k <= 0 or self.top_k >= vocab_size else self.top_k,
            min_p=float(self.min_p),
            presence_penalty=float(self.presence_penalty),
            frequency_penalty=float(self.frequency_penalty),
            repetition_penalty=float(self.repetition_penalty),
            seed=self.seed,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            eos_token_ids=() if self.ignore_eos else tuple(eos_token_ids),
            logit_bias=dict(self.logit_bias) if self.logit_bias else None,
            allowed_token_ids=tuple(self.allowed_token_ids) if self.allowed_token_ids else None,
            bad_words_token_ids=tuple(bad_words),
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            grammar=grammar,
        )

    def _check_allowed(self, bad_words: list[tuple[int, ...]], eos_token_ids: Collection[int]) -> None:
        """RequestError if other parameters forbid all of ``allowed_token_ids``: a token must come, and it would be a forbidden one."""
        if self.allowed_token_ids is None:
            return
        allowed = set(self.allowed_token_ids).difference(ids[0] for ids in bad_words if len(ids) == 1)
        if not allowed:
            raise RequestError("bad_words forbid all of allowed_token_ids, so nothing could be generated.", param="allowed_token_ids")
        if self.min_tokens and allowed <= {*eos_token_ids, *(self.stop_token_ids or ())}:
            raise RequestError(
                f"allowed_token_ids has only tokens that end the output, and min_tokens {self.min_tokens} forbids those at first; "
                "allow other tokens, too, or leave out min_tokens.",
                param="allowed_token_ids",
            )

    def clone(self) -> SamplingParams:
        return msgspec.structs.replace(self)


def check_ids(name: str, ids: Any, vocab_size: int) -> None:
    """Raise RequestError for a token id that is not an integer in [0, vocab_size)."""
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            raise RequestError(f"{name}: token id {token} is not in the vocabulary (0 to {vocab_size - 1}).", param=name)


def _check_int(name: str, value: Any, low: int, high: int | None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} must be an integer, got {value!r}.", param=name)
    _check_range(name, value, low, high, False)


def _check_number(name: str, value: Any, low: float, high: float | None, open_low: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise RequestError(f"{name} must be a finite number, got {value!r}.", param=name)
    _check_range(name, value, low, high, open_low)


def _check_range(name: str, value: float, low: float, high: float | None, open_low: bool) -> None:
    if value < low or (open_low and value == low) or (high is not None and value > high):
        bound = f"greater than {low}" if open_low else f"at least {low}"
        if high is not None:
            bound += f" and at most {high}"
        raise RequestError(f"{name} must be {bound}, got {value}.", param=name)
