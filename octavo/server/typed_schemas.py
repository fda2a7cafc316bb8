"""The shapes of what /v1/responses and /v1/messages answer and stream, for the API's description: a test holds real answers to them."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from octavo.server.answer_schemas import TokenLogprob

ItemStatus = Literal["in_progress", "completed", "incomplete"]

# -- /v1/responses --------------------------------------------------------------------------------------------------------


class OutputText(msgspec.Struct, tag_field="type", tag="output_text"):
    text: str
    annotations: list[Any]
    logprobs: list[TokenLogprob]


class ReasoningText(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    text: str


Part = OutputText | ReasoningText


class MessageItem(msgspec.Struct, tag_field="type", tag="message"):
    id: str
    role: Literal["assistant"]
    content: list[OutputText]
    status: ItemStatus


class ReasoningItem(msgspec.Struct, tag_field="type", tag="reasoning"):
    id: str
    summary: list[Any]
    content: list[ReasoningText]
    status: ItemStatus


class FunctionCallItem(msgspec.Struct, tag_field="type", tag="function_call"):
    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus


Item = MessageItem | ReasoningItem | FunctionCallItem


class InputTokensDetails(msgspec.Struct):
    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(msgspec.Struct):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(msgspec.Struct):
    code: str
    message: str


class IncompleteDetails(msgspec.Struct):
    reason: Literal["max_output_tokens"]


class ResponseReasoning(msgspec.Struct):
    effort: str | None
    summary: None


class ResponseText(msgspec.Struct):
    format: dict[str, Any]
    verbosity: str | None


class ResponseObject(msgspec.Struct):
    """The answer of /v1/responses. What the request said stands in it again."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: Literal[False]
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    model: str
    output: list[Item]
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: ResponseReasoning
    store: Literal[False]
    temperature: float
    text: ResponseText
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
    user: str | None
    metadata: dict[str, Any]


class _Event(msgspec.Struct, tag_field="type", kw_only=True):
    sequence_number: int


class ResponseCreated(_Event, tag="response.created"):
    response: ResponseObject


class ResponseInProgress(_Event, tag="response.in_progress"):
    response: ResponseObject


class ResponseCompleted(_Event, tag="response.completed"):
    response: ResponseObject


class ResponseIncomplete(_Event, tag="response.incomplete"):
    response: ResponseObject


class ResponseFailed(_Event, tag="response.failed"):
    response: ResponseObject


class ItemAdded(_Event, tag="response.output_item.added"):
    output_index: int
    item: Item


class ItemDone(_Event, tag="response.output_item.done"):
    output_index: int
    item: Item


class _ItemEvent(_Event, kw_only=True):
    item_id: str
    output_index: int


class _PartEvent(_ItemEvent, kw_only=True):
    content_index: int


class PartAdded(_PartEvent, tag="response.content_part.added"):
    part: Part


class PartDone(_PartEvent, tag="response.content_part.done"):
    part: Part


class TextDelta(_PartEvent, tag="response.output_text.delta"):
    delta: str
    logprobs: list[TokenLogprob]


class TextDone(_PartEvent, tag="response.output_text.done"):
    text: str
    logprobs: list[TokenLogprob]


class ReasoningDelta(_PartEvent, tag="response.reasoning_text.delta"):
    delta: str


class ReasoningDone(_PartEvent, tag="response.reasoning_text.done"):
    text: str


class ArgumentsDelta(_ItemEvent, tag="response.function_call_arguments.delta"):
    delta: str


class ArgumentsDone(_ItemEvent, tag="response.function_call_arguments.done"):
    name: str
    arguments: str


ResponseEvent = (
    ResponseCreated
    | ResponseInProgress
    | ResponseCompleted
    | ResponseIncomplete
    | ResponseFailed
    | ItemAdded
    | ItemDone
    | PartAdded
    | PartDone
    | TextDelta
    | TextDone
    | ReasoningDelta
    | ReasoningDone
    | ArgumentsDelta
    | ArgumentsDone
)

# -- /v1/messages ---------------------------------------------------------------------------------------------------------


class TextBlock(msgspec.Struct, tag_field="type", tag="text"):
    text: str


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking"):
    """``signature`` proves nothing here."""

    thinking: str
    signature: str


class ToolUseBlock(msgspec.Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


Block = TextBlock | ThinkingBlock | ToolUseBlock
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class MessageUsage(msgspec.Struct):
    """``input_tokens`` does not count those that were cached."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class AnthropicMessage(msgspec.Struct, tag_field="type", tag="message"):
    """The answer of /v1/messages."""

    id: str
    role: Literal["assistant"]
    model: str
    content: list[Block]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class MessageStart(msgspec.Struct, tag_field="type", tag="message_start"):
    message: AnthropicMessage


class BlockStart(msgspec.Struct, tag_field="type", tag="content_block_start"):
    index: int
    content_block: Block


class BlockTextDelta(msgspec.Struct, tag_field="type", tag="text_delta"):
    text: str


class BlockThinkingDelta(msgspec.Struct, tag_field="type", tag="thinking_delta"):
    thinking: str


class BlockSignatureDelta(msgspec.Struct, tag_field="type", tag="signature_delta"):
    signature: str


class BlockInputDelta(msgspec.Struct, tag_field="type", tag="input_json_delta"):
    partial_json: str


class BlockDelta(msgspec.Struct, tag_field="type", tag="content_block_delta"):
    index: int
    delta: BlockTextDelta | BlockThinkingDelta | BlockSignatureDelta | BlockInputDelta


class BlockStop(msgspec.Struct, tag_field="type", tag="content_block_stop"):
    index: int


class MessageEnd(msgspec.Struct):
    stop_reason: StopReason | None
    stop_sequence: str | None


class MessageDelta(msgspec.Struct, tag_field="type", tag="message_delta"):
    delta: MessageEnd
    usage: MessageUsage


class MessageStop(msgspec.Struct, tag_field="type", tag="message_stop"):
    pass


class Ping(msgspec.Struct, tag_field="type", tag="ping"):
    pass


class AnthropicErrorDetail(msgspec.Struct):
    type: str
    message: str


class AnthropicError(msgspec.Struct, tag_field="type", tag="error"):
    """How /v1/messages says what was wrong, and the last event of a stream that fails."""

    error: AnthropicErrorDetail


MessageEvent = MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop | Ping | AnthropicError


class CountedTokens(msgspec.Struct):
    input_tokens: int
