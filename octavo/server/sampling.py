"""From a request's fields to ``SamplingParams``: the model's defaults, the server's caps, every id checked."""

from __future__ import annotations

from typing import Any

from octavo.errors import RequestError
from octavo.frontend.beam_search import BeamSearchParams
from octavo.frontend.params import SamplingParams, check_ids
from octavo.server.caps import check_sizes
from octavo.server.context import ServerContext
from octavo.server.schemas import ACCEPTED, REFUSED, AssistantMessage, ChatRequest, CompletionRequest, GenerationRequest, check_refused
from octavo.server.structured import requested_output

# Copied under the same name when the client set them.
_SAME_NAME = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "bad_words",
    "allowed_token_ids",
    "prompt_logprobs",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "detokenize",
)
# What a model may bring defaults for (generation_config.json).
_MODEL_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def check_request(request: GenerationRequest, context: ServerContext) -> None:
    """RequestError for fields that are refused, capped, or make no sense together."""
    check_refused(request)
    check_sizes(request, context.engine.vocab_size)
    options = context.options
    if request.stream_options is not None and not request.stream:
        raise RequestError("stream_options need stream: true.", param="stream_options")
    if request.stream_options is not None and request.stream_options.include_obfuscation:
        raise RequestError("include_obfuscation is not supported; set it to false.", param="stream_options.include_obfuscation")
    if request.n is not None and request.n > options.max_n:
        raise RequestError(f"n must be at most {options.max_n} (--max-n), got {request.n}.", param="n")
    if request.prompt_logprobs is not None:
        check_logprobs("prompt_logprobs", request.prompt_logprobs, options.max_logprobs)
        if request.stream:
            raise RequestError("prompt_logprobs are not available in a stream; ask with stream: false.", param="prompt_logprobs")
    context.check_priority(request.priority)


def check_logprobs(name: str, value: int, limit: int) -> None:
    if value < 0 or value > limit:
        raise RequestError(f"{name} must be at least 0 and at most {limit} (--max-logprobs), got {value}.", param=name)


def sampling_params(
    request: GenerationRequest, context: ServerContext, *, max_tokens: int | None, logprobs: int | None, **extra: Any
) -> SamplingParams:
    """Checked parameters. ``max_tokens`` None: what is left of the context. ``extra`` overrides fields."""
    fields: dict[str, Any] = {"n": 1 if request.n is None else request.n, "max_tokens": max_tokens, "logprobs": logprobs}
    defaults = getattr(context.engine.model_config, "generation_defaults", None) or {}
    for name in _MODEL_DEFAULTS:
        if defaults.get(name) is not None:
            fields[name] = defaults[name]
    for name in _SAME_NAME:
        value = getattr(request, name)
        if value is not None:
            fields[name] = value
    if request.logit_bias:
        fields["logit_bias"] = _logit_bias(request.logit_bias)
    fields["structured_outputs"] = requested_output(request)
    fields.update(extra)
    params = SamplingParams(**fields)
    vocab_size = context.engine.vocab_size
    for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
        check_ids(name, getattr(params, name) or (), vocab_size)
    return params


def _logit_bias(sent: dict[str, float]) -> dict[int, float]:
    bias: dict[int, float] = {}
    for key, value in sent.items():
        digits = key.removeprefix("-")
        if not (digits.isascii() and digits.isdigit() and len(digits) < 19):
            raise RequestError(f"logit_bias: keys are token ids, got {key[:80]!r}.", param="logit_bias")
        bias[int(key)] = value
    return bias


def chat_params(request: ChatRequest, context: ServerContext) -> SamplingParams:
    check_request(request, context)
    if request.top_logprobs is not None:
        if not request.logprobs:
            raise RequestError("top_logprobs need logprobs: true.", param="top_logprobs")
        check_logprobs("top_logprobs", request.top_logprobs, context.options.max_logprobs)
    if request.echo and not (request.messages and isinstance(request.messages[-1], AssistantMessage)):
        raise RequestError("echo gives back the beginning of an answer; the last message must be the assistant's.", param="echo")
    max_tokens = request.max_completion_tokens
    if max_tokens is None:
        max_tokens = request.max_tokens
    elif request.max_tokens is not None and request.max_tokens != max_tokens:
        raise RequestError(
            f"max_completion_tokens ({max_tokens}) and its older name max_tokens ({request.max_tokens}) differ; send one.",
            param="max_completion_tokens",
        )
    if max_tokens is not None and max_tokens < 0 and request.max_completion_tokens is not None:
        raise RequestError(f"max_completion_tokens must be at least 0, got {max_tokens}.", param="max_completion_tokens")
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    return sampling_params(request, context, max_tokens=max_tokens, logprobs=logprobs)


def completion_params(request: CompletionRequest, context: ServerContext) -> SamplingParams:
    check_request(request, context)
    if request.logprobs is not None:
        check_logprobs("logprobs", request.logprobs, context.options.max_logprobs)
    extra: dict[str, Any] = {}
    logprobs = request.logprobs
    n = 1 if request.n is None else request.n
    if request.best_of is not None and request.best_of != n:
        _check_best_of(request, n, context.options.max_n)
        extra["n"] = request.best_of
        logprobs = logprobs or 0
    if request.echo and request.logprobs is not None:
        extra["prompt_logprobs"] = max(request.logprobs, request.prompt_logprobs or 0)
    return sampling_params(request, context, max_tokens=request.max_tokens, logprobs=logprobs, **extra)


def _check_best_of(request: CompletionRequest, n: int, limit: int) -> None:
    best_of = request.best_of or 0
    if n < 1:
        raise RequestError(f"n must be at least 1, got {n}.", param="n")
    if not n <= best_of <= limit:
        raise RequestError(f"best_of must be at least n ({n}) and at most {limit} (--max-n), got {best_of}.", param="best_of")
    if request.stream:
        raise RequestError("best_of chooses when all have ended, so it cannot be streamed; ask with stream: false.", param="best_of")


# With beam search a request may set these, …
_WITH_BEAMS = {
    *("model", "messages", "prompt", "n", "max_tokens", "max_completion_tokens", "logprobs", "top_logprobs", "prompt_logprobs", "echo"),
    *("use_beam_search", "beam_width", "length_penalty", "early_stopping", "ignore_eos", "stream", "include_stop_str_in_output", "seed"),
    *("skip_special_tokens", "spaces_between_special_tokens", "add_special_tokens", "truncate_prompt_tokens"),
    *("return_token_ids", "return_tokens_as_token_ids", "priority", "cache_salt", "request_id", "add_generation_prompt"),
    *("continue_final_message", "chat_template", "chat_template_kwargs", "documents", "reasoning_effort"),
}
# … and others only to what changes nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "temperature": (0,),
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_tokens": (0,),
    "detokenize": (True,),
    "tool_choice": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "parallel_tool_calls": (True, False),
    "include_reasoning": (True,),
}


def beam_params(request: GenerationRequest, params: SamplingParams) -> BeamSearchParams | None:
    """How to search, or None for a request that samples. RequestError names a field that does not go with either."""
    if not request.use_beam_search:
        for name, default in (("beam_width", None), ("length_penalty", 1), ("early_stopping", False)):
            if getattr(request, name) not in (None, default):
                raise RequestError(f"{name} needs use_beam_search: true.", param=name)
        return None
    for name in request.__struct_fields__:
        value = getattr(request, name)
        known = name in _WITH_BEAMS or name in ACCEPTED or name in REFUSED
        if value is None or value == [] or value == {} or known or value in _NEUTRAL.get(name, ()):
            continue
        hint = f"set it to {_NEUTRAL[name][0]} or leave it out" if name in _NEUTRAL else "leave it out"
        raise RequestError(f"{name} does not go with use_beam_search (it searches for the likeliest answer); {hint}.", param=name)
    beams = BeamSearchParams(
        beam_width=params.n if request.beam_width is None else request.beam_width,
        n=params.n,
        max_tokens=params.max_tokens,
        ignore_eos=params.ignore_eos,
        length_penalty=1.0 if request.length_penalty is None else request.length_penalty,
        early_stopping=False if request.early_stopping is None else request.early_stopping,
        logprobs=params.logprobs,
        skip_special_tokens=params.skip_special_tokens,
        spaces_between_special_tokens=params.spaces_between_special_tokens,
        include_stop_str_in_output=params.include_stop_str_in_output,
    )
    if request.stream:
        raise RequestError(
            "Beam search knows its answer when it is over, so it cannot be streamed; ask with stream: false.", param="stream"
        )
    return beams
