"""Chat messages to a prompt, through the model's own jinja2 template.

The dialect is that of transformers' ``apply_chat_template``, which templates are written for. A template comes with a
model from elsewhere, so it runs in jinja's immutable sandbox, sees plain data only, and its work is bounded: see
``template_sandbox``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jinja2

from octavo.errors import ConfigError, RequestError
from octavo.frontend.template_sandbox import TemplateRaised, TemplateTooExpensive, compile_template, limited_render, uses_content_parts

_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize"})
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
_END_TAG = "OCTAVO_FINAL_MESSAGE_ENDS "  # its trailing space tells whether the template strips the message
_MAX_DEPTH = 100


class HasSpecialTokens(Protocol):
    """What of a tokenizer a template sees."""

    special_tokens: Mapping[str, str]


def read_chat_template(value: str) -> str:
    """The source that ``--chat-template`` names: a file's text, or ``value`` itself if it is a template. ConfigError if neither."""
    path = os.path.expanduser(value)
    if "\n" not in value and "\0" not in value and os.path.isfile(path):
        try:
            with open(path, encoding="utf-8") as file:
                return file.read()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"Cannot read the chat template {path}: {error}") from error
    if "{{" in value or "{%" in value:
        return value
    raise ConfigError(f"--chat-template {value!r} is neither an existing file nor a jinja2 template.")


class ChatTemplate:
    """A compiled chat template. Thread-safe; ``render`` is work for a worker thread, not for an event loop.

    ``source`` is the template's text, or several by name ("default", "tool_use": the latter serves requests with tools),
    or None for a model without one, whose ``render`` refuses. ConfigError names the line of a syntax error.

    ``content_format`` is "openai" if the template goes through the parts of a message's content itself, else "string":
    then text parts are joined with line breaks to one string first.
    """

    def __init__(self, source: str | Mapping[str, str] | None, tokenizer: HasSpecialTokens | None = None) -> None:
        sources = {"default": source} if isinstance(source, str) else dict(source or {})
        self._special_tokens = dict(tokenizer.special_tokens) if tokenizer is not None else {}
        self._templates: dict[str, jinja2.Template] = {}
        self._part_rules: dict[str, tuple[bool, bool]] = {}
        for name, text in sources.items():
            try:
                self._templates[name] = compile_template(text)
                self._part_rules[name] = uses_content_parts(text)
            except jinja2.TemplateSyntaxError as error:
                raise ConfigError(f"The chat template {name!r} has a syntax error in line {error.lineno}: {error.message}") from error
            except (jinja2.TemplateError, RecursionError, MemoryError) as error:
                raise ConfigError(f"The chat template {name!r} cannot be compiled: {error}") from error
        self._sources = sources
        self._argument_texts: dict[str, bool] = {}  # by template; see _wants_argument_texts

    @property
    def source(self) -> str | None:
        """The default template's text, or None."""
        return self._sources.get("default")

    @property
    def whole_source(self) -> str:
        """The texts of all templates, for those who look for marks in them."""
        return "\n".join(self._sources.values())

    @property
    def takes_tools(self) -> bool:
        """Whether a template says anything about tools; without, they would be ignored."""
        return "tool_use" in self._sources or "tools" in (self.source or "")

    @property
    def content_format(self) -> str:
        return "openai" if self._part_rules.get("default", (False, False))[0] else "string"

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt's text. Encode it with ``add_special_tokens=False``: templates write BOS themselves.

        ``template_kwargs`` (a request's ``chat_template_kwargs``) and ``kwargs`` are variables for the template; they
        can't replace the arguments above. ``continue_final_message``: the prompt ends where the last message's content
        ends, for the model to go on with it; ``add_generation_prompt`` must be False then.

        RequestError (400) for messages that the template refuses (its own words are passed on), for one that it fails on,
        and for work beyond the bounds. The messages given are not changed.
        """
        variables = {**(template_kwargs or {}), **kwargs}
        for name in variables:
            if name in _RESERVED or name in self._special_tokens:
                raise RequestError(
                    f"chat_template_kwargs must not set {name!r}: it has its own place in the request.", param="chat_template_kwargs"
                )
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt exclude each other: set add_generation_prompt to false.",
                param="continue_final_message",
            )
        name = self._choose(bool(tools))
        chat = [self._message(message, i, name) for i, message in enumerate(messages)]
        if not chat:
            raise RequestError("messages must not be empty.", param="messages")
        final = _mark_end(chat) if continue_final_message else None
        prompt = self._render(
            name,
            {
                **self._special_tokens,
                **_plain(variables, "chat_template_kwargs"),
                "messages": chat,
                "tools": _plain(tools, "tools"),
                "documents": _plain(documents, "documents"),
                "add_generation_prompt": add_generation_prompt,
            },
        )
        return prompt if final is None else _cut_at_end(prompt, final)

    def _choose(self, with_tools: bool) -> str:
        if with_tools and "tool_use" in self._templates:
            return "tool_use"
        if "default" in self._templates:
            return "default"
        if self._templates:
            raise RequestError(
                f"The model has chat templates named {', '.join(sorted(self._templates))} but no default one; "
                "choose one with --chat-template.",
                param="messages",
            )
        raise RequestError(
            "The model has no chat template, so it can't take chat messages. Give one with --chat-template FILE "
            "(offline: LLM(chat_template=…)), or use completions.",
            param="messages",
        )

    def _message(self, message: Mapping[str, Any], index: int, name: str) -> dict[str, Any]:
        """A fresh, plain copy of one message in the form that the template expects."""
        where = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise RequestError(f"{where} must be an object with a role and a content.", param="messages")
        # A key whose value is null is left out: templates test for the key, and would write "None".
        copy = {key: _plain(value, where) for key, value in message.items() if value is not None}
        if not isinstance(copy.get("role"), str):
            raise RequestError(f"{where}.role must be a string.", param="messages")
        if "content" in copy:
            copy["content"] = _content(copy["content"], where, *self._part_rules[name])
        if isinstance(copy.get("tool_calls"), list):
            as_text = self._wants_argument_texts(name)
            copy["tool_calls"] = [_call_with_text(call) if as_text else _parsed_call(call) for call in copy["tool_calls"]]
        reasoning = next((copy[key] for key in _REASONING_FIELDS if key in copy), None)
        if reasoning is not None:  # templates read one of two names, clients send any of three
            copy = {"thinking": reasoning, **copy, "reasoning_content": reasoning}
        return copy

    def _wants_argument_texts(self, name: str) -> bool:
        """Whether the template puts a call's arguments into the prompt as they are, so that they must be JSON text.

        Most templates want the object and write its JSON, or its members, themselves; some (DeepSeek's) join the arguments
        to other text. Which it is, a trial with one call tells, for each template once.
        """
        if name not in self._argument_texts:
            self._argument_texts[name] = not self._trial(name, {"city": "Oslo"}) and self._trial(name, '{"city": "Oslo"}')
        return self._argument_texts[name]

    def _trial(self, name: str, arguments: Any) -> bool:
        """Whether a call with these arguments comes out as JSON or as bare members, neither failing nor as Python's dict."""
        call = {"id": "abcdefghi", "type": "function", "function": {"name": "look", "arguments": arguments}}
        takes_parts, takes_strings = self._part_rules[name]
        chat = [
            {"role": "user", "content": _content("a", "", takes_parts, takes_strings)},
            {"role": "assistant", "content": _content("", "", takes_parts, takes_strings), "tool_calls": [call]},
            {"role": "tool", "name": "look", "tool_call_id": "abcdefghi", "content": _content("b", "", takes_parts, takes_strings)},
        ]
        tool = {"type": "function", "function": {"name": "look", "description": "", "parameters": {"type": "object", "properties": {}}}}
        variables = {**self._special_tokens, "messages": chat, "tools": [tool], "documents": None, "add_generation_prompt": True}
        try:
            text = self._render(name, variables)
        except RequestError:
            return False
        escaped = '\\"city' in text and '"city' not in text.replace('\\"city', "")
        return "Oslo" in text and "{'city'" not in text and not escaped

    def _render(self, name: str, variables: dict[str, Any]) -> str:
        template = self._templates[name]
        try:
            return limited_render(template, variables)
        except TemplateRaised as error:
            raise RequestError(f"The chat template refuses these messages: {error.message}", param="messages") from error
        except TemplateTooExpensive as error:
            message = f"The chat template was stopped{_line(template, error)}: {error.message}"
        except jinja2.exceptions.SecurityError as error:
            message = f"The chat template tried something that its sandbox forbids{_line(template, error)}: {error.message}"
        except jinja2.UndefinedError as error:
            message = f"The chat template needs a value that the request doesn't give{_line(template, error)}: {error.message}"
        except (RecursionError, MemoryError) as error:
            message = f"The chat template takes too much memory{_line(template, error)}: {type(error).__name__}"
        except Exception as error:  # noqa: BLE001, a template can raise whatever Python's operators and filters can
            message = f"The chat template failed on these messages{_line(template, error)}: {type(error).__name__}: {error}"
        raise RequestError(message, param="messages")


def _line(template: jinja2.Template, error: BaseException) -> str:
    """ " (line 12)" of the template for an error out of its compiled code."""
    trace, line = error.__traceback__, None
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == template.filename:
            line = template.get_corresponding_lineno(trace.tb_lineno)
        trace = trace.tb_next
    return "" if line is None else f" (line {line})"


def _plain(value: Any, where: str, depth: int = 0) -> Any:
    """A copy of JSON-like data in exact built-in types: nothing with methods of its own may reach a template."""
    kind = type(value)
    if value is None or kind in (str, int, float, bool):
        return value
    if depth > _MAX_DEPTH:
        raise RequestError(f"{where} is nested deeper than {_MAX_DEPTH} levels.", param=where.partition("[")[0])
    if isinstance(value, Mapping):
        return {_plain(key, where, depth + 1): _plain(item, where, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, where, depth + 1) for item in value]
    if isinstance(value, str):
        return str.__str__(value)
    if callable(dump := getattr(value, "model_dump", None)):  # the OpenAI client's objects
        return _plain(dump(), where, depth + 1)
    raise RequestError(f"{where} holds a {kind.__name__}, which is not JSON-like data.", param=where.partition("[")[0])


def _content(content: Any, where: str, takes_parts: bool, takes_strings: bool) -> Any:
    """A message's content as the template wants it: a string, or a list of parts."""
    if isinstance(content, str):
        return content if takes_strings or not takes_parts else [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise RequestError(f"{where}.content must be a string or a list of content parts.", param="messages")
    texts = []
    for i, part in enumerate(content):
        if isinstance(part, str):
            part = {"type": "text", "text": part}
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("refusal" if kind == "refusal" else "text") if kind in ("text", "input_text", "output_text", "refusal") else None
        if not isinstance(text, str):
            raise RequestError(
                f"{where}.content[{i}]: a part of type {kind!r} is not supported; this model takes text parts "
                '({"type": "text", "text": "..."}).',
                param="messages",
            )
        texts.append(text)
    return [{"type": "text", "text": text} for text in texts] if takes_parts else "\n".join(texts)


def _parsed_call(call: Any) -> Any:
    """A tool call with its arguments as an object: clients send them as a JSON string, templates want the object."""
    function = call.get("function") if isinstance(call, dict) else None
    if isinstance(function, dict) and isinstance(function.get("arguments"), str):
        try:
            arguments = json.loads(function["arguments"] or "{}")
        except ValueError:
            return call  # what the model wrote was cut short or broken: the template shows it as it is
        if isinstance(arguments, dict):
            return {**call, "function": {**function, "arguments": arguments}}
    return call


def _call_with_text(call: Any) -> Any:
    """The reverse of `_parsed_call`."""
    function = call.get("function") if isinstance(call, dict) else None
    if isinstance(function, dict) and isinstance(function.get("arguments"), dict):
        return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}
    return call


def _mark_end(chat: list[dict[str, Any]]) -> str:
    """Put the tag behind the last message's text; returns that text."""
    content = chat[-1].get("content")
    if content is None or content == []:
        raise RequestError("continue_final_message is set, but the last message has no text to continue.", param="continue_final_message")
    holder, key = (content[-1], "text") if isinstance(content, list) else (chat[-1], "content")
    text = holder[key]
    holder[key] = text + _END_TAG
    return text


def _cut_at_end(prompt: str, final: str) -> str:
    at = prompt.rfind(_END_TAG.strip())
    if at < 0 or final.strip() not in prompt:
        raise RequestError(
            "continue_final_message is set, but the chat template doesn't write the last message as it is, so it can't be continued.",
            param="continue_final_message",
        )
    kept = prompt[:at]
    return kept if prompt.startswith(_END_TAG, at) else kept.rstrip()  # a template that strips messages strips this one
