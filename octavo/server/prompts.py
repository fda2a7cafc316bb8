"""From what the client sent to token ids: chat messages through the template, texts through the tokenizer."""

from __future__ import annotations

from typing import Any

import msgspec

from octavo.errors import RequestError
from octavo.frontend.inputs import Prompt, truncate_prompt
from octavo.frontend.tool_prompt import with_tools_as_text
from octavo.server.context import INLINE_CHARS, ServerContext
from octavo.server.schemas import (
    AssistantMessage,
    ChatRequest,
    CompletionRequest,
    Content,
    DeveloperMessage,
    Message,
    TokenizeRequest,
    ToolMessage,
)

MAX_CHOICES = 8192  # prompts times n

# ---------------------------------------------------------------------------------------------------------------------
# completions


async def completion_prompts(request: CompletionRequest, context: ServerContext) -> list[Prompt]:
    """The prompts of a request, in order. RequestError for an empty list, mixed kinds, or no tokenizer."""
    if isinstance(request.prompt, msgspec.UnsetType):
        raise RequestError("Field 'prompt' is missing.", param="prompt", code="missing_field")
    items = _split_prompt(request.prompt)
    if not items:
        raise RequestError("prompt must not be empty.", param="prompt")
    limit = context.options.max_prompts_per_request
    if len(items) > limit:
        raise RequestError(f"prompt takes at most {limit} prompts (--max-prompts-per-request), got {len(items)}.", param="prompt")
    name = "n" if request.best_of is None else "best_of"
    if len(items) * (getattr(request, name) or 1) > MAX_CHOICES:
        count = getattr(request, name)
        raise RequestError(f"prompts times {name} must be at most {MAX_CHOICES}, got {len(items)} times {count}.", param=name)
    if isinstance(items[0], str):
        special = request.add_special_tokens is not False
        token_ids = await encode(context, items, special)  # type: ignore[arg-type]
        prompts = [Prompt(text, ids) for ids, text in zip(token_ids, items)]  # type: ignore[arg-type]
    else:
        if request.add_special_tokens:
            raise RequestError("add_special_tokens works on texts; this prompt is token ids.", param="add_special_tokens")
        prompts = [Prompt(None, ids) for ids in items]  # type: ignore[arg-type]
    keep = tokens_to_keep(request.truncate_prompt_tokens, request.max_tokens, context)
    if not all(prompt.token_ids for prompt in prompts):
        raise RequestError("prompt must not be empty.", param="prompt")
    return [truncate_prompt(prompt, keep) for prompt in prompts]


def _split_prompt(prompt: str | list[Any]) -> list[str] | list[list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    kinds = {type(item) for item in prompt}
    if len(kinds) > 1:
        raise RequestError("prompt mixes kinds; send a text, a list of texts, token ids, or a list of lists of token ids.", param="prompt")
    return [prompt] if kinds == {int} else prompt


def tokens_to_keep(asked: int | None, max_tokens: int | None, context: ServerContext) -> int | None:
    """``truncate_prompt_tokens``; -1 is what the context holds beside the answer (one token of it, if that has no limit)."""
    if asked is None or asked >= 1:
        return asked
    if asked == -1:
        return max(1, context.engine.max_model_len - (1 if max_tokens is None else max_tokens))
    raise RequestError(
        f"truncate_prompt_tokens must be at least 1, or -1 for what the context holds, got {asked}.", param="truncate_prompt_tokens"
    )


async def encode(context: ServerContext, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
    tokenizer = context.engine.tokenizer
    if tokenizer is None:
        raise RequestError("This server has no tokenizer (--skip-tokenizer-init): send the prompt as token ids.", param="prompt")
    return await context.off_loop(
        sum(map(len, texts)), lambda: [tokenizer.encode(text, add_special_tokens=add_special_tokens) for text in texts]
    )


# ---------------------------------------------------------------------------------------------------------------------
# chat


async def chat_prompt(request: ChatRequest | TokenizeRequest, context: ServerContext, tools: list[dict[str, Any]] | None = None) -> Prompt:
    """Messages through the chat template to text and token ids. RequestError names the message that cannot be used.

    ``tools``: those that the prompt offers (`ToolUse.offered`).
    """
    tokenizer = context.engine.tokenizer
    template = await request_template(request.chat_template, context) if request.chat_template is not None else context.engine.chat_template
    if tokenizer is None:
        raise RequestError("This server has no tokenizer (--skip-tokenizer-init), so it cannot chat; use /v1/completions with token ids.")
    if template is None:
        raise RequestError("This model has no chat template; start the server with --chat-template, or use /v1/completions.")
    continue_final = bool(request.continue_final_message)
    if continue_final and request.add_generation_prompt:
        raise RequestError("add_generation_prompt and continue_final_message exclude each other; set one.", param="add_generation_prompt")
    add_prompt = not continue_final if request.add_generation_prompt is None else request.add_generation_prompt
    if not request.messages:
        raise RequestError("messages must not be empty.", param="messages")
    knows_developer = "developer" in (getattr(template, "source", None) or getattr(tokenizer, "chat_template", None) or "")
    messages = [template_message(message, f"messages[{i}]", knows_developer) for i, message in enumerate(request.messages)]
    _name_results(messages)
    if context.parsers.text_tools and (tools or any("tool_calls" in m or m["role"] == "tool" for m in messages)):
        messages, tools = with_tools_as_text(messages, tools), None
    variables = _template_variables(request, getattr(template, "whole_source", None) or "")
    if documents := getattr(request, "documents", None):
        if "documents" not in (getattr(template, "source", None) or ""):
            raise RequestError("documents: this model's chat template has no place for them; write them into a message.", param="documents")
        variables["documents"] = documents
    special = bool(request.add_special_tokens)

    def work() -> Prompt:
        text = template.render(
            messages, tools=tools or None, add_generation_prompt=add_prompt, continue_final_message=continue_final, **variables
        )
        return Prompt(text, tokenizer.encode(text, add_special_tokens=special))

    size = sum(len(m["content"] or "") for m in messages) + 64 * len(messages) + 512 * len(tools or ())
    if request.chat_template_kwargs or request.chat_template is not None or documents:
        size += INLINE_CHARS  # what a template makes of them is not known: never on the loop
    prompt = await context.off_loop(size, work)
    if isinstance(request, ChatRequest):
        max_tokens = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
        return truncate_prompt(prompt, tokens_to_keep(request.truncate_prompt_tokens, max_tokens, context))
    return prompt


MAX_TEMPLATE_CHARS = 256 * 1024  # of a template in a request


async def request_template(source: str, context: ServerContext) -> Any:
    """The compiled template that a request brought. RequestError where the server does not take any, or for a broken one."""
    if not context.options.trust_request_chat_template:
        raise RequestError(
            "chat_template is refused in requests (a template is a program); start the server with --chat-template, or with "
            "--trust-request-chat-template.",
            param="chat_template",
            code="unsupported_field",
        )
    if len(source) > MAX_TEMPLATE_CHARS:
        raise RequestError(f"chat_template has {len(source)} characters; at most {MAX_TEMPLATE_CHARS} are taken.", param="chat_template")
    found = context.templates.get(source)
    if found is None:
        found = await context.off_loop(max(len(source), INLINE_CHARS), context.compile_template, source)
    return found


_RESERVED_VARIABLES = {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "self"}


def _template_variables(request: ChatRequest | TokenizeRequest, source: str) -> dict[str, Any]:
    variables = dict(request.chat_template_kwargs or {})
    for name in variables.keys() & _RESERVED_VARIABLES:
        raise RequestError(f"chat_template_kwargs must not set {name!r}; the request has a field for it.", param="chat_template_kwargs")
    effort = getattr(request, "reasoning_effort", None)
    if effort is not None:
        variables.setdefault("reasoning_effort", effort)
        if effort == "none" and "enable_thinking" in source:
            variables.setdefault("enable_thinking", False)
    return variables


def template_message(message: Message, where: str, knows_developer: bool) -> dict[str, Any]:
    """The dict that templates expect. A developer message is a system message to templates that don't know the role."""
    role = message.__struct_config__.tag
    if isinstance(message, DeveloperMessage) and not knows_developer:
        role = "system"
    result: dict[str, Any] = {"role": role, "content": text_content(message.content, f"{where}.content")}
    if message.name is not None:
        result["name"] = message.name
    if isinstance(message, ToolMessage) and message.tool_call_id is not None:
        result["tool_call_id"] = message.tool_call_id
    if isinstance(message, AssistantMessage):
        _add_assistant_fields(message, result, where)
    return result


def _name_results(messages: list[dict[str, Any]]) -> None:
    """Some templates want the function's name beside a result; OpenAI's clients send the call's id alone."""
    names: dict[str, str] = {}
    for message in messages:
        for call in message.get("tool_calls", ()):
            names[call["id"]] = call["function"]["name"]
        if message["role"] == "tool" and "name" not in message and message.get("tool_call_id") in names:
            message["name"] = names[message["tool_call_id"]]


def _add_assistant_fields(message: AssistantMessage, result: dict[str, Any], where: str) -> None:
    for name in ("audio", "function_call", "annotations"):
        if getattr(message, name):
            raise RequestError(f"{where}.{name} is not supported: this server takes text only.", param=f"{where}.{name}")
    if message.content is None and message.refusal is not None:
        result["content"] = message.refusal
    elif message.content is None and not message.tool_calls:
        raise RequestError(f"{where}: an assistant message needs content or tool_calls.", param=f"{where}.content")
    reasoning = message.reasoning_content if message.reasoning_content is not None else message.reasoning
    if reasoning is not None:
        result["reasoning_content"] = reasoning
    if message.tool_calls:
        result["tool_calls"] = [_tool_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(message.tool_calls)]


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    """Templates write arguments as JSON themselves, so they want an object, where OpenAI's API has a string."""
    if call.type != "function":
        raise RequestError(f"{where}.type must be 'function', got {call.type!r}.", param=f"{where}.type")
    arguments = call.function.arguments
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments or "{}")
        except (ValueError, RecursionError):
            raise RequestError(f"{where}.function.arguments is not valid JSON.", param=f"{where}.function.arguments") from None
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def text_content(content: Content | None, where: str) -> str | None:
    """One string of a message's content; several text parts are joined by line breaks. Other parts are refused by name."""
    if content is None or isinstance(content, str):
        return content
    texts: list[str] = []
    for i, part in enumerate(content):
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = part.get("type")
        if kind not in ("text", "refusal"):
            shown = repr(kind) if isinstance(kind, str) else "without a type"
            raise RequestError(
                f"{where}[{i}]: content {shown[:80]} is not supported; this model takes text only.", param=f"{where}[{i}].type"
            )
        text = part.get(kind)
        if not isinstance(text, str):
            raise RequestError(f"{where}[{i}].{kind} must be a string.", param=f"{where}[{i}].{kind}")
        for name in part.keys() - {"type", kind, "cache_control"}:
            raise RequestError(f"Unknown field {name[:80]!r} in {where}[{i}].", param=f"{where}[{i}]", code="unknown_field")
        texts.append(text)
    return "\n".join(texts)
