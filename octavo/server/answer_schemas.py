"""The shapes of what is answered, for the API's description: a test holds real answers to them.

Answers are written as dicts and byte templates where they are made (once a token, some of them); these structs describe
them, and decode them for clients of ours.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from octavo.server.generation import Usage

FinishReason = Literal["stop", "length", "abort", "tool_calls", "function_call"]


class PromptLogprob(msgspec.Struct):
    logprob: float
    rank: int | None
    decoded_token: str


# One entry a position of the prompt: token id (as a string) -> its log-probability; null for the first.
PromptLogprobs = list[dict[str, PromptLogprob] | None]


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[TokenLogprob]
    refusal: None = None


class AnswerFunction(msgspec.Struct):
    name: str
    arguments: str


class AnswerToolCall(msgspec.Struct):
    id: str
    type: Literal["function"]
    function: AnswerFunction


class AnswerMessage(msgspec.Struct, omit_defaults=True):
    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    tool_calls: list[AnswerToolCall] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class ChatChoice(msgspec.Struct):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: int | str | None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatCompletion(msgspec.Struct):
    """The answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class DeltaFunction(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class DeltaToolCall(msgspec.Struct):
    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: DeltaFunction | None = None


class Delta(msgspec.Struct):
    role: Literal["assistant"] | msgspec.UnsetType = msgspec.UNSET
    content: str | None | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[DeltaToolCall] | msgspec.UnsetType = msgspec.UNSET
    reasoning_content: str | None | msgspec.UnsetType = msgspec.UNSET
    reasoning: str | None | msgspec.UnsetType = msgspec.UNSET


class ChunkChoice(msgspec.Struct):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None | msgspec.UnsetType = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatCompletionChunk(msgspec.Struct):
    """An event of a streamed chat; the last event is the word [DONE], or an error object if the stream failed."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | None | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class LegacyLogprobLists(msgspec.Struct):
    """Parallel lists, an entry a token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: LegacyLogprobLists | None
    finish_reason: FinishReason
    stop_reason: int | str | None
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class TextCompletion(msgspec.Struct):
    """The answer of /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage


class TextChunkChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: LegacyLogprobLists | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class TextCompletionChunk(msgspec.Struct):
    """An event of a streamed completion; the last event is the word [DONE], or an error object if the stream failed."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChunkChoice]
    usage: Usage | None | msgspec.UnsetType = msgspec.UNSET


class ModelCard(msgspec.Struct):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int


class ModelList(msgspec.Struct):
    object: Literal["list"]
    data: list[ModelCard]


class Tokenized(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(msgspec.Struct):
    prompt: str


class Health(msgspec.Struct):
    status: Literal["ok"]


class Version(msgspec.Struct):
    version: str


class Load(msgspec.Struct):
    server_load: int


OpenApiDocument = dict[str, Any]
