"""What clients may send: one struct a request. Unknown fields are refused; so are known ones that cannot be honoured.

Three kinds of fields:
- honoured: they change the answer as documented;
- accepted without effect (``ACCEPTED``): OpenAI's clients send them, and leaving them out changes no token;
- refused by name (``REFUSED``): known, but not supported; null and the values that ask for nothing pass.
``null`` means "not set" everywhere, as it does for OpenAI.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from octavo.errors import RequestError

# Accepted without effect, and why leaving them out changes nothing here.
ACCEPTED: dict[str, str] = {
    "user": "names the end user, for OpenAI's abuse monitoring",
    "safety_identifier": "the same, newer",
    "metadata": "labels for OpenAI's dashboard",
    "store": "keeps the answer at OpenAI; nothing is stored here",
    "service_tier": "picks a price class at OpenAI; there is one here",
    "prompt_cache_key": "routes to a warm cache at OpenAI; the prefix cache here needs no key",
    "prompt_cache_retention": "how long OpenAI keeps a cache",
    "prompt_cache_options": "the same, newer",
}


def _is(*values: Any) -> Callable[[Any], bool]:
    return lambda value: value is None or any(value == v and type(value) is type(v) for v in values)


# field -> (which values ask for nothing and pass, what to say about the others)
REFUSED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "functions": (_is([]), "is not supported; it is OpenAI's old form of tools: send tools."),
    "function_call": (_is("none", "auto"), "is not supported; it is OpenAI's old form of tool_choice: send that."),
    "modalities": (_is(["text"]), 'is not supported, other than ["text"]: this model answers in text.'),
    "audio": (_is(), "is not supported: this model answers in text."),
    "prediction": (_is(), "is not supported; leave it out, the answer is the same."),
    "web_search_options": (_is(), "is not supported: this server does not search the web."),
    "moderation": (_is(), "is not supported: this server does not moderate."),
    "verbosity": (_is("medium"), 'is not supported, other than "medium"; ask for it in the prompt.'),
    "logits_processors": (_is([]), "is not supported: it would run code that a client names."),
    "mm_processor_kwargs": (_is({}), "is not supported: this model takes text only."),
    "media_io_kwargs": (_is({}), "is not supported: this model takes text only."),
    "prompt_embeds": (_is(), "is not supported; send a text or token ids as the prompt."),
    "kv_transfer_params": (_is({}), "is not supported: prompts and outputs run in the same engine."),
    "vllm_xargs": (_is({}), "is not supported: there are no extensions that would read it."),
    "suffix": (_is(""), "is not supported (fill in the middle); write the model's own infill tokens into the prompt."),
}


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """include_usage: a last chunk with the whole usage; continuous_usage_stats: the usage so far on every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None  # OpenAI pads its chunks against traffic analysis; only false is honoured


class GenerationRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields that chat and completions share. Those that are not OpenAI's have vLLM's names and meanings."""

    model: str | None = None  # None: the first served name
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # sampling; None: the model's own default (generation_config.json), else OpenAI's
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    max_tokens: int | None = None  # None: what is left of the context
    min_tokens: int | None = None
    logit_bias: dict[str, float] | None = None  # token id as a string -> -100 … 100
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    prompt_logprobs: int | None = None
    # the form of the answer, see structured.py; one at most
    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    # text
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None  # keep the prompt's last k tokens
    echo: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None  # log-probabilities name tokens "token_id:ID"
    detokenize: bool | None = None  # false: no text, for clients that take token ids
    # beam search
    use_beam_search: bool | None = None
    beam_width: int | None = None  # None: n
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    # scheduling
    priority: int | None = None  # lower runs first; needs --scheduling-policy priority
    cache_salt: str | None = None  # only requests with the same salt share prefix cache
    request_id: str | None = None
    # accepted without effect, see ACCEPTED
    user: str | None = None
    safety_identifier: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    # refused by name, see REFUSED
    logits_processors: Any = None
    kv_transfer_params: Any = None
    vllm_xargs: Any = None

    @property
    def streams(self) -> bool:
        return bool(self.stream)

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)


class CompletionRequest(GenerationRequest, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/completions. ``prompt``: a text, a list of texts, token ids, or a list of lists of token ids."""

    prompt: str | list[str | int | list[int]] | msgspec.UnsetType = msgspec.UNSET  # required; see completion_prompts
    logprobs: int | None = None
    best_of: int | None = None  # generate so many, give back the n with the best mean log-probability
    suffix: Any = None
    prompt_embeds: Any = None


class FunctionCall(msgspec.Struct, forbid_unknown_fields=True):
    """The fields behind ``arguments`` are clients' own: they put them into answers, and send them back without being asked."""

    name: str
    arguments: str | dict[str, Any]
    parsed_arguments: Any = None  # OpenAI's client for Node
    provider_specific_fields: Any = None  # LiteLLM


class ToolCall(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A call that an earlier answer made; it goes into the template. ``index`` comes from joined stream deltas."""

    id: str | None = None
    type: str = "function"
    function: FunctionCall
    index: int | None = None
    provider_specific_fields: Any = None


Content = str | list[str | dict[str, Any]]


class SystemMessage(msgspec.Struct, tag_field="role", tag="system", kw_only=True, forbid_unknown_fields=True):
    content: Content
    name: str | None = None


class DeveloperMessage(msgspec.Struct, tag_field="role", tag="developer", kw_only=True, forbid_unknown_fields=True):
    content: Content
    name: str | None = None


class UserMessage(msgspec.Struct, tag_field="role", tag="user", kw_only=True, forbid_unknown_fields=True):
    content: Content
    name: str | None = None


class AssistantMessage(msgspec.Struct, tag_field="role", tag="assistant", kw_only=True, forbid_unknown_fields=True):
    """An earlier answer, as clients dump it: with nulls for what it did not have, and with ``parsed`` and
    ``provider_specific_fields``, which are their own and say nothing that the others don't."""

    content: Content | None = None
    name: str | None = None
    refusal: str | None = None
    tool_calls: list[ToolCall] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    annotations: Any = None
    audio: Any = None
    function_call: Any = None
    parsed: Any = None
    provider_specific_fields: Any = None


class ToolMessage(msgspec.Struct, tag_field="role", tag="tool", kw_only=True, forbid_unknown_fields=True):
    content: Content
    tool_call_id: str | None = None
    name: str | None = None


Message = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage


class FunctionDefinition(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``strict`` is accepted: forced calls always keep to the schema; others are as good as the model."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: str = "function"
    function: FunctionDefinition | None = None
    custom: Any = None  # of the type "custom", which is refused by name


class ChatRequest(GenerationRequest, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/chat/completions."""

    messages: list[Message]
    max_completion_tokens: int | None = None  # the newer name of max_tokens
    logprobs: bool | None = None
    top_logprobs: int | None = None
    # template
    add_generation_prompt: bool | None = None  # None: unless continue_final_message
    continue_final_message: bool | None = None
    chat_template: str | None = None  # needs --trust-request-chat-template
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None  # for templates that read them
    # reasoning
    reasoning_effort: str | None = None  # for the template; bounds the thinking of models whose template knows no effort
    thinking_token_budget: int | None = None  # most tokens of reasoning; then its end is forced
    include_reasoning: bool | None = None  # false: it is generated and counted, but not sent
    # tools
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None  # false: at most one call
    # refused by name
    mm_processor_kwargs: Any = None
    media_io_kwargs: Any = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None
    moderation: Any = None
    verbosity: Any = None


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /tokenize: ``prompt``, or ``messages`` with the template's options."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None  # None: true for a prompt, false for messages
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: str | None = None
    tokens: list[int]


completion_decoder = msgspec.json.Decoder(CompletionRequest)
chat_decoder = msgspec.json.Decoder(ChatRequest)
tokenize_decoder = msgspec.json.Decoder(TokenizeRequest)
detokenize_decoder = msgspec.json.Decoder(DetokenizeRequest)


def check_refused(request: GenerationRequest) -> None:
    """RequestError for a field that is known but not supported, unless its value asks for nothing."""
    for name in request.__struct_fields__:
        if name in REFUSED:
            passes, hint = REFUSED[name]
            if not passes(getattr(request, name)):
                raise RequestError(f"{name} {hint}", param=name, code="unsupported_field")


_TRUNCATIONS = "top_k, top_p and min_p are what there is."
# Fields of other programs and of the other route -> what to do.
_ELSEWHERE: dict[str, str] = {
    "messages": "messages go to /v1/chat/completions.",
    "prompt": "a prompt goes to /v1/completions; chat takes messages.",
    "input": "send messages (/v1/chat/completions) or a prompt (/v1/completions).",
    "inputs": "send messages (/v1/chat/completions) or a prompt (/v1/completions).",
    "n_predict": "did you mean 'max_tokens'?",
    "num_predict": "did you mean 'max_tokens'?",
    "max_length": "did you mean 'max_tokens'?",
    "do_sample": "leave it out; temperature 0 takes the likeliest token, anything above it samples.",
    "num_ctx": "the context is set when the server starts: --max-model-len.",
    "options": "sampling fields stand beside the others, not in an object.",
    "parameters": "sampling fields stand beside the others, not in an object.",
    "best_of": "it belongs to /v1/completions; here n gives so many answers.",
    "guided_decoding_backend": "leave it out, there is one backend.",
    "guided_whitespace_pattern": "leave it out; white space in JSON is bounded.",
    "enable_thinking": 'send chat_template_kwargs: {"enable_thinking": true or false}.',
    "think": 'send chat_template_kwargs: {"enable_thinking": true or false}, or reasoning_effort.',
    "separate_reasoning": "leave it out; reasoning is told apart where --reasoning-parser or the model says how.",
    "format": "send response_format or structured_outputs.",
    "json_schema": "send response_format or structured_outputs.",
    "regex": 'send structured_outputs: {"regex": …}.',
    "ebnf": 'send structured_outputs: {"grammar": …}.',
    "grammar": 'send structured_outputs: {"grammar": …}.',
    "cache_prompt": "leave it out; equal beginnings of prompts are always cached.",
    "keep_alive": "leave it out; the model stays loaded.",
    "truncation_side": "leave it out; truncate_prompt_tokens keeps the end of a prompt.",
    "typical_p": _TRUNCATIONS,
    "top_a": _TRUNCATIONS,
    "mirostat": _TRUNCATIONS,
    "lora_path": "serve a merged checkpoint; adapters are not supported.",
    "extra_body": "it is an argument of the openai client; over HTTP its fields stand beside the others.",
}


def unknown_field_hint(name: str, schema: Any) -> str:
    """What to do about a field that a schema does not have. ``schema`` None: nothing is known about the place."""
    if schema is not None and name in _ELSEWHERE:
        return _ELSEWHERE[name]
    known = getattr(schema, "__struct_fields__", ())
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]!r}?" if near else "remove it, this server would not honour it."
