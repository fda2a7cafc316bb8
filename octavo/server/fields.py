"""What each field of a request does here, as data: docs/compatibility.md and /openapi.json are made from it.

The schemas say which fields there are, ``ACCEPTED`` and ``REFUSED`` which of them have no effect or are refused; what is left
is supported, and has its line here. A test holds the three together, and to the fields that the APIs' own clients know.
``ACCEPTED`` and ``REFUSED`` of schemas.py are of chat and its kin; other APIs have their own, ``*_OF`` here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from octavo.server import messages_input, responses_input
from octavo.server.schemas import ACCEPTED, REFUSED

Status = Literal["supported", "accepted", "refused"]

# Of OpenAI's request schemas; other fields are vLLM's, or our own.
OPENAI_CHAT = frozenset(
    "audio frequency_penalty function_call functions logit_bias logprobs max_completion_tokens max_tokens messages metadata modalities "
    "model moderation n parallel_tool_calls prediction presence_penalty prompt_cache_key prompt_cache_options prompt_cache_retention "
    "reasoning_effort response_format safety_identifier seed service_tier stop store stream stream_options temperature tool_choice tools "
    "top_logprobs top_p user verbosity web_search_options".split()
)
OPENAI_COMPLETIONS = frozenset(
    "best_of echo frequency_penalty logit_bias logprobs max_tokens model n presence_penalty prompt seed stop stream stream_options suffix "
    "temperature top_p user".split()
)
OPENAI_EMBEDDINGS = frozenset("dimensions encoding_format input model user".split())
OPENAI_RESPONSES = frozenset(
    "access_programs background background_options context_management conversation image include input instructions max_output_tokens "
    "max_tool_calls metadata model moderation parallel_tool_calls previous_response_id prompt prompt_cache_key prompt_cache_options "
    "prompt_cache_retention reasoning safety_identifier service_tier store stream stream_options temperature text tool_choice tools "
    "top_logprobs top_p truncation user".split()
)
ANTHROPIC_COUNT = frozenset(
    "cache_control context_management mcp_servers messages model output_config speed system thinking tool_choice tools".split()
)
ANTHROPIC_MESSAGES = ANTHROPIC_COUNT | frozenset(
    "container diagnostics inference_geo max_tokens metadata service_tier stop_sequences stream temperature top_k top_p".split()
)
# Fields of the API that a route comes from. Only schemas of such APIs are here.
OFFICIAL = {
    "ChatRequest": OPENAI_CHAT,
    "CompletionRequest": OPENAI_COMPLETIONS,
    "EmbeddingsRequest": OPENAI_EMBEDDINGS,
    "ResponsesRequest": OPENAI_RESPONSES,
    "MessagesRequest": ANTHROPIC_MESSAGES,
    "CountTokensRequest": ANTHROPIC_COUNT,
}

_NO_EFFECT = "No effect on a model that does not reason, or whose reasoning is not read: clients send it to every model."
_BEGINNING = "Use the first k tokens of longer texts; -1: as many as fit."

SUPPORTED: dict[str, str] = {
    "model": "One of the served names; without it the first. Another name is a 404 that lists them.",
    "stream": "Server-sent events, closed by [DONE].",
    "stream_options": "include_usage: a last chunk with the usage; continuous_usage_stats: usage so far on every chunk; "
    "include_obfuscation: only false.",
    "n": "Choices per prompt, up to --max-n.",
    "temperature": "0 is greedy. Default: the model's generation_config.json, else 1.",
    "top_p": "In (0, 1].",
    "top_k": "0 or -1 keeps all.",
    "min_p": "In [0, 1], relative to the likeliest token.",
    "presence_penalty": "-2 to 2, over output tokens.",
    "frequency_penalty": "-2 to 2, over output tokens.",
    "repetition_penalty": "Above 0, over prompt and output tokens; 1 is off.",
    "seed": "The same request and seed give the same tokens, whatever else runs.",
    "stop": "A text, or up to 16; left out of the answer, and never sent in a stream.",
    "stop_token_ids": "Token ids that end the answer; stop_reason names the one.",
    "include_stop_str_in_output": "Leave the stop text in the answer.",
    "ignore_eos": "Go on after the end-of-sequence token.",
    "max_tokens": "Most output tokens; without it what is left of the context.",
    "min_tokens": "No end before so many output tokens.",
    "logit_bias": "Token id (as a string) to -100 … 100, at most 1024 of them; an id out of the vocabulary is a 400 that names it.",
    "bad_words": "Texts that are never generated.",
    "allowed_token_ids": "Nothing else is generated. Up to as many ids as the vocabulary has.",
    "prompt_logprobs": "Log-probabilities of the prompt's tokens, up to --max-logprobs alternatives each; not in a stream.",
    "skip_special_tokens": "Default true.",
    "spaces_between_special_tokens": "Default true; matters to tokenizers that put spaces there.",
    "add_special_tokens": "Completions: default true. Chat: default false, for templates write them.",
    "truncate_prompt_tokens": "Keep the prompt's last k tokens; -1: what the context holds beside the answer.",
    "echo": "Completions: the prompt comes first, with logprobs its tokens' too; max_tokens 0 only scores it. "
    "Chat: with continue_final_message, the message that is continued comes first.",
    "return_token_ids": "prompt_token_ids and token_ids beside the texts.",
    "return_tokens_as_token_ids": 'Log-probabilities name tokens as "token_id:ID".',
    "detokenize": "false: no text, for clients that take token ids.",
    "use_beam_search": "The n likeliest sequences, as transformers' beam search finds them. Not in a stream; sampling fields are refused.",
    "beam_width": "Beams of the search, up to 32; without it n.",
    "length_penalty": "Beam search: sequences are ranked by sum of log-probabilities / length ** length_penalty. Default 1.",
    "early_stopping": 'Beam search: true, false or "never", as in transformers.',
    "priority": "Lower runs first; needs --scheduling-policy priority.",
    "cache_salt": "Only requests with the same salt share prefix cache.",
    "request_id": "Becomes part of the answer's id, before the header X-Request-Id.",
    "prompt": "A text, a list of texts, token ids, or a list of lists of token ids.",
    "CompletionRequest.logprobs": "The k likeliest tokens of each position, up to --max-logprobs (OpenAI: 5).",
    "best_of": "Generate so many, give back the n with the best mean log-probability; not in a stream.",
    "messages": "Roles system, developer, user, assistant and tool, with names and tool calls; content as text or as text parts. "
    "Other parts (images, audio, files) are refused by name. What clients add to answers (parsed, parsed_arguments, "
    "provider_specific_fields) may come back, and has no effect. A message's name is handed to the template; many show it to the model "
    "for tool results only, or never, and then it has no effect: write it into the content.",
    "max_completion_tokens": "The newer name of max_tokens.",
    "ChatRequest.logprobs": "true: each token's log-probability, with its bytes.",
    "top_logprobs": "So many alternatives a token, up to --max-logprobs; needs logprobs.",
    "add_generation_prompt": "Whether the template ends with the beginning of an answer; default true.",
    "continue_final_message": "Go on with the last message, which is the assistant's.",
    "chat_template": "Another template; needs --trust-request-chat-template, for a template is a program.",
    "chat_template_kwargs": "Variables for the template. One that it does not read has no effect; names of its own variables "
    "(messages, tools …) are refused.",
    "documents": "For templates that read them; refused for others.",
    "reasoning_effort": f"Handed to templates that know the word; for others it bounds the reasoning's tokens. {_NO_EFFECT}",
    "thinking_token_budget": "Most tokens of reasoning; then its end is forced. Refused where the model's reasoning can't be read.",
    "include_reasoning": f"false: reasoning is generated and counted, but not sent. {_NO_EFFECT}",
    "tools": "Functions that the model may call.",
    "tool_choice": "none, auto, required, or a named function.",
    "parallel_tool_calls": "false: at most one call.",
    "response_format": "text, json_object, or json_schema (always strict).",
    "structured_outputs": "The answer's form in vLLM's way: one of json, regex, choice, grammar, structural_tag …",
    "guided_json": "The older name of structured_outputs.json.",
    "guided_regex": "The older name of structured_outputs.regex.",
    "guided_choice": "The older name of structured_outputs.choice.",
    "guided_grammar": "The older name of structured_outputs.grammar.",
    "return_token_strs": "The tokens' texts too.",
    "input": "A text, a list of up to 2,048 texts, token ids, or a list of lists of token ids.",
    "encoding_format": "float, or base64 of little-endian float32.",
    "dimensions": "So many first components, normalized after that; up to the model's size.",
    "normalize": "Default: as the model does.",
    "query": "The text that documents are compared with.",
    "RerankRequest.documents": "Up to 2,048 texts, or objects with text.",
    "top_n": "Only so many of the most similar documents.",
    "return_documents": "The documents beside their scores; default true, for /v2/rerank false.",
    "max_tokens_per_doc": "Use the first k tokens of longer texts.",
    "text_1": "One text, or as many as text_2; token ids as well.",
    "text_2": "The texts to compare with.",
    "EmbeddingsRequest.truncate_prompt_tokens": _BEGINNING,
    "EmbeddingsRequest.add_special_tokens": "Default true.",
    "RerankRequest.truncate_prompt_tokens": _BEGINNING,
    "RerankRequest.add_special_tokens": "Default true.",
    "ScoreRequest.truncate_prompt_tokens": _BEGINNING,
    "ScoreRequest.add_special_tokens": "Default true.",
    "tokens": "Token ids.",
    "ResponsesRequest.input": "A text, or items: messages of text parts, function_call, function_call_output, reasoning. "
    "Others are refused by name.",
    "instructions": "A system message before the input.",
    "ResponsesRequest.tools": "Functions that the model may call; tools that OpenAI runs are refused by name.",
    "ResponsesRequest.tool_choice": "none, auto, required, a named function, or allowed_tools.",
    "text": "format: text, json_object, or json_schema (always strict); verbosity: only medium.",
    "max_output_tokens": "Most output tokens; without it what is left of the context. There is no least number.",
    "ResponsesRequest.top_logprobs": 'So many alternatives a token, up to --max-logprobs; needs include: ["message.output_text.logprobs"].',
    "include": "message.output_text.logprobs; reasoning.encrypted_content is taken, and there is none. Others are refused.",
    "reasoning": "effort as reasoning_effort of chat; summary, generate_summary and context have no effect: reasoning is given whole. "
    f"{_NO_EFFECT}",
    "ResponsesRequest.stop_token_ids": "Token ids that end the answer.",
    "ResponsesRequest.stream": "Server-sent events with OpenAI's types; the last is response.completed, .incomplete or .failed.",
    "ResponsesRequest.stream_options": "include_obfuscation: only false; the usage is always in the last event.",
    "ResponsesRequest.metadata": "Given back in the response; nothing is stored.",
    "MessagesRequest.messages": "Roles user, assistant and system; text, tool_use, tool_result and thinking blocks. "
    "Images and documents are refused by name. A last message of the assistant's is continued.",
    "system": "A text, or text blocks.",
    "MessagesRequest.tools": "Tools with an input_schema; those that Anthropic runs are refused by name.",
    "MessagesRequest.tool_choice": "auto, any, tool or none; disable_parallel_tool_use: at most one call.",
    "thinking": "enabled with budget_tokens, adaptive, or disabled; without it the model's thoughts are not shown. "
    f"display: omitted leaves them out. {_NO_EFFECT}",
    "output_config": "effort as reasoning_effort of chat (xhigh and max are high), without effect where that is; format: a json_schema, "
    "always kept.",
    "MessagesRequest.max_tokens": "Most output tokens.",
    "stop_sequences": "Up to 16 texts that end the answer; left out of it.",
    "MessagesRequest.stream": "Server-sent events with Anthropic's types.",
    "MessagesRequest.temperature": "0 is greedy; above 1 is taken, too.",
}
for _name in ("messages", "tools", "tool_choice"):
    SUPPORTED[f"CountTokensRequest.{_name}"] = SUPPORTED[f"MessagesRequest.{_name}"]

# Fields of other APIs than chat's that have no effect, and why. What is of the same name elsewhere says nothing here.
ACCEPTED_OF: dict[str, dict[str, str]] = {
    "ResponsesRequest": {name: why for name, why in ACCEPTED.items() if name != "metadata"}
    | {"user": "names the end user, for OpenAI's abuse monitoring; given back in the response"},
    "CountTokensRequest": {
        "cache_control": "marks what Anthropic's cache keeps; the prefix cache here needs no marks",
    },
    "MessagesRequest": {
        "cache_control": "marks what Anthropic's cache keeps; the prefix cache here needs no marks",
        "metadata": "names the end user, for Anthropic's abuse monitoring",
        "service_tier": "picks a price class at Anthropic; there is one here",
        "inference_geo": "picks a region at Anthropic; this server is where it is",
        "diagnostics": "asks why Anthropic's cache was missed; usage.cache_read_input_tokens says what was cached here",
    },
}
_REFUSED_HINTS = {name: hint for name, (_, hint) in REFUSED.items()}
REFUSED_OF: dict[str, dict[str, str]] = {
    "ResponsesRequest": {
        **responses_input.REFUSED,
        "truncation": 'is not supported, other than "disabled": shorten the input yourself.',
    },
    "CountTokensRequest": {name: why for name, why in messages_input.REFUSED.items() if name != "container"},
    "MessagesRequest": messages_input.REFUSED,
}
for _name in ("CountTokensRequest", "MessagesRequest"):
    REFUSED_OF[_name] = {**REFUSED_OF[_name], "speed": 'is not supported, other than "standard".'}


# Bounds as JSON schema has them, for /openapi.json; the checks themselves are SamplingParams' and BeamSearchParams'.
_NATURAL = {"minimum": 0}
RANGES: dict[str, dict[str, float]] = {
    "n": {"minimum": 1},
    "best_of": {"minimum": 1},
    "temperature": _NATURAL,
    "top_p": {"exclusiveMinimum": 0, "maximum": 1},
    "top_k": {"minimum": -1, "maximum": 2**31 - 1},
    "min_p": {"minimum": 0, "maximum": 1},
    "presence_penalty": {"minimum": -2, "maximum": 2},
    "frequency_penalty": {"minimum": -2, "maximum": 2},
    "repetition_penalty": {"exclusiveMinimum": 0},
    "seed": {"minimum": -(2**63), "maximum": 2**63 - 1},
    "max_tokens": _NATURAL,
    "max_completion_tokens": _NATURAL,
    "max_output_tokens": _NATURAL,
    "min_tokens": _NATURAL,
    "prompt_logprobs": _NATURAL,
    "logprobs": _NATURAL,
    "top_logprobs": _NATURAL,
    "truncate_prompt_tokens": {"minimum": -1},
    "beam_width": {"minimum": 1, "maximum": 32},
    "dimensions": {"minimum": 1},
    "top_n": {"minimum": 1},
    "max_tokens_per_doc": {"minimum": 1},
    "length_penalty": {"minimum": -10, "maximum": 10},
}


@dataclass(frozen=True)
class Field:
    """``note``: what it does, why it has no effect, or what is said to those who send it. ``official``: see OFFICIAL."""

    name: str
    status: Status
    note: str
    official: bool


def field_of(schema: Any, name: str) -> Field | None:
    """None for a schema or a field that has no line."""
    owner = getattr(schema, "__name__", "")
    accepted = ACCEPTED_OF.get(owner, ACCEPTED)
    refused = REFUSED_OF.get(owner, _REFUSED_HINTS)
    official = name in OFFICIAL.get(owner, ())
    if name in accepted:
        return Field(name, "accepted", f"{accepted[name]}.", official)
    if name in refused:
        return Field(name, "refused", refused[name], official)
    note = SUPPORTED.get(f"{owner}.{name}") or SUPPORTED.get(name)
    return None if note is None else Field(name, "supported", note, official)


def field_note(schema: Any, name: str) -> str | None:
    """The line of a field with its status, or None for a schema or a field that has none."""
    field = field_of(schema, name)
    if field is None:
        return None
    return {"supported": "", "accepted": "Accepted without effect: ", "refused": "Refused: "}[field.status] + field.note


def fields_of(schema: Any) -> list[Field]:
    """Every field of a request struct, in its order. KeyError for one that has no line."""
    result = []
    for name in schema.__struct_fields__:
        field = field_of(schema, name)
        if field is None:
            raise KeyError(f"{schema.__name__}.{name} has no line in octavo/server/fields.py")
        result.append(field)
    return result
