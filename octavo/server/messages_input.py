"""POST /v1/messages, what comes in: Anthropic's schema, and the chat request that it stands for."""

from __future__ import annotations

from typing import Any

import msgspec

from octavo.errors import RequestError
from octavo.server.context import ServerContext
from octavo.server.items import check_known, string_of
from octavo.server.schemas import (
    AssistantMessage,
    ChatRequest,
    FunctionCall,
    FunctionDefinition,
    Message,
    SystemMessage,
    Tool,
    ToolCall,
    ToolMessage,
    UserMessage,
)

# Fields beside Anthropic's, with the meaning that they have for chat; so has chat_template_kwargs.
EXTRAS = ("min_p", "repetition_penalty", "seed", "priority", "cache_salt", "request_id")


class InputMessage(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    role: str
    content: str | list[dict[str, Any]]


class MessagesTool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``strict`` as for chat; the fields after it are accepted without effect."""

    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    cache_control: Any = None
    eager_input_streaming: bool | None = None
    input_examples: Any = None
    allowed_callers: Any = None
    defer_loading: bool | None = None


class Thinking(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: str
    budget_tokens: int | None = None
    display: str | None = None


class OutputConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    effort: str | None = None
    format: dict[str, Any] | None = None


class CountTokensRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/messages/count_tokens, and what it shares with messages."""

    model: str | None = None
    messages: list[InputMessage]
    system: str | list[dict[str, Any]] | None = None
    tools: list[MessagesTool] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # accepted without effect: the prefix cache needs no marks
    cache_control: Any = None
    # refused by name
    mcp_servers: Any = None
    context_management: Any = None
    speed: str | None = None


class MessagesRequest(CountTokensRequest, kw_only=True, forbid_unknown_fields=True):
    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    # accepted without effect
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    inference_geo: str | None = None
    diagnostics: Any = None
    # refused by name
    container: Any = None
    # EXTRAS
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None


messages_decoder = msgspec.json.Decoder(MessagesRequest)
count_decoder = msgspec.json.Decoder(CountTokensRequest)

REFUSED = {
    "mcp_servers": "is not supported: this server runs no tools itself.",
    "context_management": "is not supported: shorten the messages yourself.",
    "container": "is not supported: this server runs no code.",
}
# The chat request's fields as this route names them, for error messages.
NAMES = {
    "stop": "stop_sequences",
    "response_format.json_schema": "output_config.format",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "thinking_token_budget": "thinking.budget_tokens",
}


def chat_request(request: CountTokensRequest, context: ServerContext) -> ChatRequest:
    """RequestError, naming the field, for what can't be honoured. A last message of the assistant's is continued."""
    for name, hint in REFUSED.items():
        if getattr(request, name, None):
            raise RequestError(f"{name} {hint}", param=name, code="unsupported_field")
    if request.speed not in (None, "standard"):
        raise RequestError('speed is not supported, other than "standard".', param="speed")
    messages = _messages(request)
    chat = ChatRequest(
        model=request.model,
        messages=messages,
        tools=[_tool(tool, f"tools[{i}]") for i, tool in enumerate(request.tools or ())] or None,
        chat_template_kwargs=request.chat_template_kwargs,
    )
    last = messages[-1] if messages else None
    if isinstance(last, AssistantMessage) and not last.tool_calls:
        chat.continue_final_message = True
    _choose_tools(request.tool_choice, chat)
    _think(request, chat, context)
    if request.output_config is not None and request.output_config.format is not None:
        chat.response_format = _format(request.output_config.format)
    if isinstance(request, MessagesRequest):
        chat.max_tokens, chat.stream, chat.stop = request.max_tokens, request.stream, request.stop_sequences or None
        chat.temperature, chat.top_p, chat.top_k = request.temperature, request.top_p, request.top_k
        for name in EXTRAS:
            setattr(chat, name, getattr(request, name))
    return chat


def _tool(tool: MessagesTool, where: str) -> Tool:
    if tool.type not in (None, "custom"):
        raise RequestError(
            f"{where}.type {tool.type[:80]!r} is not supported; this server runs no tools itself and takes custom ones only.",
            param=f"{where}.type",
        )
    if tool.input_schema is None:
        raise RequestError(f"Field 'input_schema' is missing in {where}.", param=f"{where}.input_schema", code="missing_field")
    return Tool(function=FunctionDefinition(name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict))


def _choose_tools(choice: dict[str, Any] | None, chat: ChatRequest) -> None:
    if choice is None:
        return
    kind = choice.get("type")
    if kind == "tool":
        chat.tool_choice = {"type": "function", "function": {"name": choice.get("name")}}
    elif kind in ("auto", "any", "none"):
        chat.tool_choice = {"auto": "auto", "any": "required", "none": "none"}[kind]
    else:
        raise RequestError(f"tool_choice.type must be auto, any, tool or none, got {str(kind)[:80]!r}.", param="tool_choice.type")
    if choice.get("disable_parallel_tool_use"):
        chat.parallel_tool_calls = False


def _think(request: CountTokensRequest, chat: ChatRequest, context: ServerContext) -> None:
    """Thinking must be asked for. A model that can't be told not to thinks all the same, and its thoughts are not shown.

    A budget is the most that may be spent, so models that don't think keep it.
    """
    thinking, effort = request.thinking, request.output_config.effort if request.output_config is not None else None
    chat.reasoning_effort = "high" if effort in ("xhigh", "max") else effort
    kind = thinking.type if thinking is not None else "disabled"
    if kind not in ("enabled", "adaptive", "disabled"):
        raise RequestError(f"thinking.type must be enabled, adaptive or disabled, got {kind[:80]!r}.", param="thinking.type")
    source = getattr(context.engine.chat_template, "whole_source", None) or ""
    if "enable_thinking" in source:
        chat.chat_template_kwargs = {"enable_thinking": kind != "disabled", **(chat.chat_template_kwargs or {})}
    chat.include_reasoning = kind != "disabled" and (thinking is None or thinking.display != "omitted")
    if thinking is not None and kind == "enabled":
        if thinking.budget_tokens is None:
            raise RequestError("thinking.budget_tokens is missing.", param="thinking.budget_tokens", code="missing_field")
        if thinking.budget_tokens < 0:
            raise RequestError(f"thinking.budget_tokens must be at least 0, got {thinking.budget_tokens}.", param="thinking.budget_tokens")
        if context.parsers.reasoning is not None:
            chat.thinking_token_budget = thinking.budget_tokens


def _format(value: dict[str, Any]) -> dict[str, Any]:
    if value.get("type") != "json_schema" or not isinstance(value.get("schema"), dict):
        raise RequestError("output_config.format must be a json_schema with a schema.", param="output_config.format")
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": value["schema"], "strict": True}}


# ---------------------------------------------------------------------------------------------------------------------
# messages


def _messages(request: CountTokensRequest) -> list[Message]:
    messages: list[Message] = []
    if request.system:
        messages.append(SystemMessage(content=_text(request.system, "system")))
    names: dict[str, str] = {}  # of tools, by use
    for i, message in enumerate(request.messages):
        where = f"messages[{i}]"
        blocks = [{"type": "text", "text": message.content}] if isinstance(message.content, str) else message.content
        if message.role == "user":
            _add_user(messages, blocks, names, where)
        elif message.role == "assistant":
            messages.append(_assistant(blocks, names, where))
        elif message.role == "system":
            messages.append(SystemMessage(content=_text(blocks, f"{where}.content")))
        else:
            raise RequestError(f"{where}.role must be user or assistant, got {message.role[:80]!r}.", param=f"{where}.role")
    return messages


def _add_user(messages: list[Message], blocks: list[dict[str, Any]], names: dict[str, str], where: str) -> None:
    """Results of tools are messages of their own for templates; they come before what the user says."""
    texts = []
    for i, block in enumerate(blocks):
        at = f"{where}.content[{i}]"
        if block.get("type") == "tool_result":
            check_known(block, ("type", "tool_use_id", "content", "is_error", "cache_control", "toolset_name"), at)
            use = string_of(block, "tool_use_id", at)
            if use not in names:
                raise RequestError(f"{at}.tool_use_id {use[:80]!r} is of no tool_use before it.", param=f"{at}.tool_use_id")
            content = _text(block.get("content") or "", f"{at}.content")
            content = f"Error: {content}" if block.get("is_error") else content
            messages.append(ToolMessage(content=content, tool_call_id=use, name=names[use]))
        else:
            texts.append(_block_text(block, at))
    if texts or not blocks:
        messages.append(UserMessage(content="\n".join(texts)))


def _assistant(blocks: list[dict[str, Any]], names: dict[str, str], where: str) -> AssistantMessage:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for i, block in enumerate(blocks):
        at = f"{where}.content[{i}]"
        kind = block.get("type")
        if kind == "tool_use":
            check_known(block, ("type", "id", "name", "input", "cache_control", "caller", "toolset_name"), at)
            use, name, arguments = string_of(block, "id", at), string_of(block, "name", at), block.get("input")
            if not isinstance(arguments, dict):
                raise RequestError(f"{at}.input must be an object.", param=f"{at}.input")
            names[use] = name
            calls.append(ToolCall(id=use, function=FunctionCall(name, arguments)))
        elif kind == "thinking":
            thoughts.append(string_of(block, "thinking", at))
        elif kind != "redacted_thinking":  # that is of another server, and says nothing to this model
            texts.append(_block_text(block, at))
    content = "".join(texts) if texts or not calls else None
    return AssistantMessage(content=content, tool_calls=calls or None, reasoning_content="\n".join(thoughts) or None)


def _text(content: str | list[Any], where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{where} must be a text or a list of blocks.", param=where)
    return "\n".join(_block_text(block, f"{where}[{i}]") for i, block in enumerate(content))


def _block_text(block: Any, where: str) -> str:
    kind = block.get("type") if isinstance(block, dict) else None
    if kind != "text":
        shown = repr(kind) if isinstance(kind, str) else "without a type"
        raise RequestError(f"{where}: a block {shown[:80]} is not supported here; this model takes text only.", param=f"{where}.type")
    check_known(block, ("type", "text", "cache_control", "citations", "parsed_output"), where)
    if block.get("citations"):
        raise RequestError(f"{where}.citations is not supported.", param=f"{where}.citations")
    return string_of(block, "text", where)
