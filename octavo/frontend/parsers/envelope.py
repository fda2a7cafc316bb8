"""Formats in which a call is a JSON object that holds the name and the arguments: hermes, llama3_json, mistral."""

from __future__ import annotations

import json
import re
from typing import Any, ClassVar

from octavo.frontend.parsers.base import MAX_NAME, ToolParser
from octavo.frontend.parsers.reader import Broken, Reader, Steps, Tags
from octavo.frontend.parsers.scan import JsonScanner, as_json

_ARGUMENTS = frozenset({"arguments", "parameters"})
_KNOWN = _ARGUMENTS | {"name", "type", "id"}
_CALL_ID = re.compile(r"[\w\-]*")


def _ignore(text: str) -> None:
    pass


def read_string(reader: Reader, limit: int) -> Steps[str]:
    """A JSON string that is next; its value. Broken if something else comes or its text is longer than ``limit``."""
    if (yield from reader.next_char()) != '"':
        raise Broken
    parts: list[str] = []
    yield from reader.scan(JsonScanner(), parts.append, limit)
    return json.loads("".join(parts))


class EnvelopeParser(ToolParser):
    """Reads {"name": ..., "arguments" or "parameters": {...}}, in any order of keys.

    Arguments are passed on as they come once the name is known; arguments that come before it are held until then. The
    arguments may also be a JSON string that holds the object, or null. A call without arguments is one with {}.
    """

    def read_envelope(self, *, strict: bool) -> Steps[None]:
        """One object. ``strict`` (where nothing but its keys tells a call from an answer in JSON): a key that calls don't have
        is Broken at once, and arguments must be there."""
        reader = self._reader
        name: str | None = None
        call_id: str | None = None
        held: list[str] | None = None
        begun = False
        yield from reader.expect("{")
        if (yield from reader.next_char()) != "}":
            while True:
                key = yield from read_string(reader, MAX_NAME)
                if strict and key not in _KNOWN:
                    raise Broken
                yield from reader.spaces()
                yield from reader.expect(":")
                char = yield from reader.next_char()
                if key == "name" and name is None:
                    name = yield from read_string(reader, MAX_NAME)
                    if name not in self.tools:
                        raise Broken
                    if held is not None:
                        self.start(name, call_id)
                        begun = True
                        self.arguments("".join(held), whole=True)
                elif key in _ARGUMENTS and not begun and held is None:
                    if char == "{" and name is not None:
                        self.start(name, call_id)
                        begun = True
                        yield from self.read_object()
                    else:
                        held = yield from self._hold_arguments()
                        if name is not None:
                            self.start(name, call_id)
                            begun = True
                            self.arguments("".join(held), whole=True)
                elif key == "id" and char == '"':
                    call_id = yield from read_string(reader, MAX_NAME)
                else:
                    yield from reader.scan(JsonScanner(), _ignore)
                if (yield from reader.next_char()) == "}":
                    break
                yield from reader.expect(",")
        if name is None or (strict and not begun):
            raise Broken
        yield from reader.expect("}")
        if not begun:
            self.start(name, call_id)
            self.arguments("{}")
        self.end()

    def _hold_arguments(self) -> Steps[list[str]]:
        """Arguments that can't be passed on while they come. Broken if they are neither an object, null nor a string of JSON."""
        held: list[str] = []
        char = yield from self._reader.next_char()
        yield from self._reader.scan(JsonScanner(), held.append)
        if char == "{":
            return held
        if char == "n":
            return ["{}"]
        if char == '"':
            inner = json.loads("".join(held))
            value = as_json(JsonScanner(objects_only=True), inner) if inner.strip() else "{}"
            if value is not None:
                return [value]
        raise Broken

    def read_envelopes(self) -> Steps[None]:
        """A list of objects."""
        reader = self._reader
        yield from reader.expect("[")
        while True:
            yield from reader.spaces()
            yield from self.read_envelope(strict=False)
            if (yield from reader.next_char()) == "]":
                yield from reader.expect("]")
                return
            yield from reader.expect(",")


class HermesParser(EnvelopeParser):
    """Hermes 2 Pro and Qwen 2.5/3: <tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number, anywhere."""

    tags = Tags("<tool_call>")

    def _calls(self, tag: str) -> Steps[None]:
        reader = self._reader
        yield from reader.next_char()
        while True:
            yield from self.read_envelope(strict=False)
            yield from reader.spaces()
            if (yield from reader.accept("</tool_call>", closing=True)):
                return
            if reader.at >= len(reader.text) or reader.text[reader.at] != "{":
                return


class LlamaJsonParser(EnvelopeParser):
    """Llama 3.1-3.3: {"name": ..., "parameters": {...}} as the whole answer, or after <|python_tag|>; several with ";"."""

    markers: ClassVar[tuple[str, ...]] = ("<|python_tag|>",)
    tags = Tags("<|python_tag|>")

    def _opening(self, tag: str) -> Steps[None]:
        char = yield from self._reader.next_char()
        if char != "{":
            raise Broken
        yield from self._objects(strict=True)

    def _calls(self, tag: str) -> Steps[None]:
        yield from self._reader.next_char()
        yield from self._objects(strict=False)

    def _objects(self, *, strict: bool) -> Steps[None]:
        reader = self._reader
        while True:
            yield from self.read_envelope(strict=strict)
            yield from reader.spaces()
            if (yield from reader.accept(";")):
                yield from reader.spaces()
            yield from reader.accept("<|python_tag|>", closing=True)
            if (yield from reader.next_char()) != "{":
                return


class MistralParser(EnvelopeParser):
    """Mistral, by tokenizer version (mistral-common): v3-v7 [TOOL_CALLS][{"name", "arguments", "id"}, ...];
    v11 [TOOL_CALLS]name[CALL_ID]id[ARGS]{...}; v13 [TOOL_CALLS]name[ARGS]{...}; the tag again for each further call."""

    markers: ClassVar[tuple[str, ...]] = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
    tags = Tags("[TOOL_CALLS]")

    def _calls(self, tag: str) -> Steps[None]:
        char = yield from self._reader.next_char()
        if char == "[":
            yield from self.read_envelopes()
        elif char == "{":
            yield from self.read_envelope(strict=False)
        else:
            yield from self._named()

    def _named(self) -> Steps[None]:
        reader = self._reader
        call_id: Any = None
        name = yield from self.read_name()
        yield from reader.spaces()
        if (yield from reader.accept("[CALL_ID]")):
            call_id = yield from reader.run_of(_CALL_ID, MAX_NAME)
            yield from reader.spaces()
        yield from reader.accept("[ARGS]")
        if (yield from reader.next_char()) != "{":
            raise Broken
        self.start(name, call_id)
        yield from self.read_object()
        self.end()
