"""POST /v1/responses, what comes in: the request's schema, and the chat request that it stands for.

Nothing is stored here, so a conversation is sent whole each time: its items are messages, function calls and their outputs.
"""

from __future__ import annotations

from typing import Any

import msgspec

from octavo.errors import RequestError
from octavo.server.items import check_known, string_of
from octavo.server.schemas import (
    AssistantMessage,
    ChatRequest,
    DeveloperMessage,
    FunctionCall,
    FunctionDefinition,
    Message,
    StreamOptions,
    SystemMessage,
    Tool,
    ToolCall,
    ToolMessage,
    UserMessage,
)

# Sampling and other fields beside OpenAI's, with the meaning that they have for chat.
EXTRAS = (
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "min_tokens",
    "logit_bias",
    "chat_template_kwargs",
    "thinking_token_budget",
    "priority",
    "cache_salt",
    "request_id",
)
LOGPROBS = "message.output_text.logprobs"
# What clients ask to have included -> does nothing here, because there is nothing of the kind, or because it is always there.
INCLUDE = (LOGPROBS, "reasoning.encrypted_content")


class Reasoning(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``summary``: reasoning is given whole, as the item's content; there are no summaries of it."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None
    context: str | None = None


class TextConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ResponsesRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: str | None = None
    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    reasoning: Reasoning | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    truncation: str | None = None
    # accepted without effect
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    user: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    # refused by name, see REFUSED
    previous_response_id: str | None = None
    conversation: Any = None
    background: bool | None = None
    prompt: Any = None
    max_tool_calls: int | None = None
    context_management: Any = None
    moderation: Any = None
    background_options: Any = None
    image: Any = None
    access_programs: Any = None
    # EXTRAS
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    logit_bias: dict[str, float] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    thinking_token_budget: int | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None


responses_decoder = msgspec.json.Decoder(ResponsesRequest)

REFUSED = {
    "previous_response_id": "is not supported: this server stores no responses; send the whole conversation as input.",
    "conversation": "is not supported: this server stores no conversations; send the whole conversation as input.",
    "background": "is not supported: this server stores no responses; stream instead.",
    "prompt": "is not supported: this server stores no prompts; send instructions and input.",
    "max_tool_calls": "is not supported: this server runs no tools itself.",
    "context_management": "is not supported: shorten the input yourself.",
    "moderation": "is not supported: this server does not moderate.",
    "background_options": "is not supported: this server stores no responses; stream instead.",
    "image": "is not supported: this model answers in text.",
    "access_programs": "is not supported: there are none here.",
}
# The chat request's fields as this route names them, for error messages.
NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "logprobs": "top_logprobs",
    "verbosity": "text.verbosity",
}


def chat_request(request: ResponsesRequest) -> ChatRequest:
    """RequestError, naming the field, for what can't be honoured."""
    for name, hint in REFUSED.items():
        if getattr(request, name):
            raise RequestError(f"{name} {hint}", param=name, code="unsupported_field")
    if request.truncation not in (None, "disabled"):
        raise RequestError('truncation is not supported, other than "disabled": shorten the input yourself.', param="truncation")
    for name in request.include or ():
        if name not in INCLUDE:
            raise RequestError(f"include: {name[:80]!r} is not supported; it takes {', '.join(INCLUDE)}.", param="include")
    wants_logprobs = LOGPROBS in (request.include or ())
    if request.top_logprobs and not wants_logprobs:
        raise RequestError(f"top_logprobs needs include: [{LOGPROBS!r}].", param="top_logprobs")
    text = request.text or TextConfig()
    return ChatRequest(
        model=request.model,
        messages=_messages(request),
        stream=request.stream,
        stream_options=request.stream_options,
        tools=[_tool(tool, f"tools[{i}]") for i, tool in enumerate(request.tools or ())] or None,
        tool_choice=_tool_choice(request.tool_choice),
        parallel_tool_calls=request.parallel_tool_calls,
        response_format=_format(text.format),
        verbosity=text.verbosity,
        max_completion_tokens=request.max_output_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        logprobs=wants_logprobs or None,
        top_logprobs=request.top_logprobs if wants_logprobs else None,
        reasoning_effort=request.reasoning.effort if request.reasoning is not None else None,
        **{name: getattr(request, name) for name in EXTRAS},
    )


def _format(value: dict[str, Any] | None) -> dict[str, Any] | None:
    """``text.format`` as chat's ``response_format``, whose schema lies one level deeper."""
    if value is None or value.get("type") != "json_schema":
        return value
    return {"type": "json_schema", "json_schema": {key: item for key, item in value.items() if key != "type"}}


def _tool(tool: dict[str, Any], where: str) -> Tool:
    kind = tool.get("type")
    if kind != "function":
        shown = repr(kind) if isinstance(kind, str) else "without a type"
        raise RequestError(
            f"{where}: a tool {shown[:80]} is not supported; this server runs no tools itself and takes functions only.",
            param=f"{where}.type",
        )
    fields = {key: item for key, item in tool.items() if key != "type"}
    try:
        return Tool(function=msgspec.convert(fields, FunctionDefinition))
    except msgspec.ValidationError as error:
        raise RequestError(f"{where}: {error}.".replace("`", "'"), param=where) from None


def _tool_choice(choice: Any) -> Any:
    """Chat has the function's name one level deeper."""
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "function" and "function" not in choice:
        return {"type": "function", "function": {"name": choice.get("name")}}
    if choice.get("type") == "allowed_tools" and "allowed_tools" not in choice:
        tools = choice.get("tools")
        nested = [_tool_choice(tool) for tool in tools] if isinstance(tools, list) else tools
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": nested}}
    if choice.get("type") not in ("function", "allowed_tools"):
        raise RequestError(
            f"tool_choice of type {str(choice.get('type'))[:80]!r} is not supported; this server takes functions only.", param="tool_choice"
        )
    return choice


# ---------------------------------------------------------------------------------------------------------------------
# items


def _messages(request: ResponsesRequest) -> list[Message]:
    messages: list[Message] = [SystemMessage(content=request.instructions)] if request.instructions else []
    items = [{"role": "user", "content": request.input}] if isinstance(request.input, str) else request.input
    if not items:
        raise RequestError("input must be a text or a list of items, and not empty.", param="input")
    reader = _Items(messages)
    for i, item in enumerate(items):
        reader.add(item, f"input[{i}]")
    return messages


class _Items:
    """Puts items into messages: an assistant's reasoning, text and calls are items here, and one message for templates."""

    def __init__(self, messages: list[Message]) -> None:
        self.messages = messages
        self.names: dict[str, str] = {}  # of functions, by call
        self.thought: str | None = None  # of the assistant's message that comes next
        self.calling: AssistantMessage | None = None  # the message that a further call belongs to

    def add(self, item: dict[str, Any], where: str) -> None:
        kind = item.get("type", "message" if "role" in item else None)
        if kind == "message":
            self._message(item, where)
        elif kind == "function_call":
            self._call(item, where)
        elif kind == "function_call_output":
            self._output(item, where)
        elif kind == "reasoning":
            self.thought = "\n".join(_texts(item.get("content") or item.get("summary") or [], f"{where}.content")) or None
            self.calling = None
        elif kind == "item_reference":
            raise RequestError(f"{where}: this server stores no items; send the item itself.", param=where)
        else:
            shown = repr(kind) if isinstance(kind, str) else "without a type"
            raise RequestError(
                f"{where}: an item {shown[:80]} is not supported; it takes message, function_call, function_call_output and reasoning.",
                param=f"{where}.type",
            )

    def _message(self, item: dict[str, Any], where: str) -> None:
        role, content = item.get("role"), item.get("content")
        check_known(item, ("type", "role", "content", "id", "status", "phase", "name"), where)
        text = content if isinstance(content, str) else "\n".join(_texts(content, f"{where}.content"))
        if role == "assistant":
            self._assistant(text)
            return
        self.calling, self.thought = None, None
        kinds = {"user": UserMessage, "system": SystemMessage, "developer": DeveloperMessage}
        if not isinstance(role, str) or role not in kinds:
            raise RequestError(f"{where}.role must be user, assistant, system or developer, got {str(role)[:80]!r}.", param=f"{where}.role")
        self.messages.append(kinds[role](content=text))

    def _assistant(self, text: str | None) -> AssistantMessage:
        message = AssistantMessage(content=text, reasoning_content=self.thought)
        self.thought, self.calling = None, message
        self.messages.append(message)
        return message

    def _call(self, item: dict[str, Any], where: str) -> None:
        check_known(item, ("type", "id", "call_id", "name", "arguments", "status", "namespace", "caller", "parsed_arguments"), where)
        call_id, name, arguments = (string_of(item, key, where) for key in ("call_id", "name", "arguments"))
        self.names[call_id] = name
        message = self.calling or self._assistant(None)
        call = ToolCall(id=call_id, function=FunctionCall(name, arguments))
        message.tool_calls = [*(message.tool_calls or ()), call]

    def _output(self, item: dict[str, Any], where: str) -> None:
        check_known(item, ("type", "id", "call_id", "output", "status", "name", "namespace", "caller"), where)
        call_id = string_of(item, "call_id", where)
        if call_id not in self.names:
            raise RequestError(f"{where}.call_id {call_id[:80]!r} is of no function_call before it.", param=f"{where}.call_id")
        output = item.get("output")
        text = output if isinstance(output, str) else "\n".join(_texts(output, f"{where}.output"))
        self.calling, self.thought = None, None
        self.messages.append(ToolMessage(content=text, tool_call_id=call_id, name=self.names[call_id]))


_TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


def _texts(parts: Any, where: str) -> list[str]:
    if not isinstance(parts, list):
        raise RequestError(f"{where} must be a string or a list of parts.", param=where)
    texts = []
    for i, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, dict) else None
        if kind not in (*_TEXT_PARTS, "refusal"):
            shown = repr(kind) if isinstance(kind, str) else "without a type"
            message = f"{where}[{i}]: content {shown[:80]} is not supported; this model takes text only."
            raise RequestError(message, param=f"{where}[{i}].type")
        if not isinstance(text, str):
            raise RequestError(f"{where}[{i}] needs a text.", param=f"{where}[{i}].text")
        texts.append(text)
    return texts
