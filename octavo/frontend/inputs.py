"""Prompts as callers write them, turned into checked token ids."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from octavo.errors import RequestError
from octavo.frontend.params import SamplingParams


@dataclass(slots=True)
class Prompt:
    """One prompt: its text, None if token ids were all that came, and its token ids."""

    text: str | None
    token_ids: list[int]


def parse_prompts(prompts: Any, tokenizer: Any | None) -> list[Prompt]:
    """A text, token ids, a dict with ``prompt`` or ``prompt_token_ids``, or a list of these.

    Raises RequestError for anything else, naming what came.
    """
    if isinstance(prompts, (str, dict)) or _is_token_ids(prompts):
        prompts = [prompts]
    if not isinstance(prompts, Sequence):
        raise RequestError(f"prompts must be a text, token ids, a dict, or a list of these; got {type(prompts).__name__}.", param="prompt")
    return [_parse_prompt(p, tokenizer) for p in prompts]


def _parse_prompt(prompt: Any, tokenizer: Any | None) -> Prompt:
    if isinstance(prompt, dict):
        unknown = set(prompt) - {"prompt", "prompt_token_ids"}
        if unknown:
            raise RequestError(
                f"A prompt dict takes 'prompt' or 'prompt_token_ids', not {', '.join(sorted(map(repr, unknown)))}.", param="prompt"
            )
        if prompt.get("prompt_token_ids") is not None:
            return Prompt(prompt.get("prompt"), _token_ids(prompt["prompt_token_ids"]))
        prompt = prompt.get("prompt")
    if isinstance(prompt, str):
        if tokenizer is None:
            raise RequestError("A text prompt needs a tokenizer, and skip_tokenizer_init is set: pass prompt_token_ids.", param="prompt")
        return Prompt(prompt, tokenizer.encode(prompt))
    if _is_token_ids(prompt) or prompt == []:
        return Prompt(None, list(prompt))
    raise RequestError(f"A prompt must be a text, a list of token ids or a dict; got {type(prompt).__name__}.", param="prompt")


def _token_ids(value: Any) -> list[int]:
    """Plain integers out of a list, a tuple or an array. Raises RequestError for anything else."""
    try:
        if any(isinstance(token, bool) for token in value):
            raise TypeError
        return [operator.index(token) for token in value]
    except TypeError:
        raise RequestError("prompt_token_ids must be a list of integers.", param="prompt") from None


def _is_token_ids(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) > 0 and all(isinstance(t, int) and not isinstance(t, bool) for t in value)


def truncate_prompt(prompt: Prompt, keep: int | None) -> Prompt:
    """The last ``keep`` (at least 1) tokens without the text, which does not stand for them; the prompt itself if it has no more."""
    if keep is None or len(prompt.token_ids) <= keep:
        return prompt
    return Prompt(None, prompt.token_ids[-keep:])


def check_prompt(
    token_ids: list[int], params: SamplingParams, *, max_model_len: int, vocab_size: int, max_num_seqs: int | None = None
) -> None:
    """Raise RequestError for an empty prompt, an id outside of the vocabulary, one too long for the context, or too large an n."""
    if max_num_seqs is not None and params.n > max_num_seqs:
        raise RequestError(
            f"n is {params.n}, but at most {max_num_seqs} sequences can run at the same time; ask for fewer (or raise --max-num-seqs).",
            param="n",
        )
    if not token_ids:
        raise RequestError("The prompt is empty: give at least one token.", param="prompt")
    if min(token_ids) < 0 or max(token_ids) >= vocab_size:
        bad = next(t for t in token_ids if not 0 <= t < vocab_size)
        raise RequestError(f"The prompt's token id {bad} is not in the vocabulary (0 to {vocab_size - 1}).", param="prompt")
    room = max_model_len - len(token_ids)
    if room < (0 if params.max_tokens == 0 else 1):
        raise RequestError(
            # LiteLLM and others know this error by OpenAI's words "this model's maximum context length is".
            f"The prompt has {len(token_ids)} tokens, and this model's maximum context length is {max_model_len} tokens, "
            "which leaves no room for an answer. Shorten the prompt.",
            param="prompt",
            code="context_length_exceeded",
        )
