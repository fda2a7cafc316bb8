"""Structural tags: text that is free but for tags, whose content has a form. From JSON to a grammar.

Two spellings are read. The older one (OpenAI-compatible servers'):

    {"type": "structural_tag", "triggers": ["<function="],
     "structures": [{"begin": "<function=get_time>", "schema": {…}, "end": "</function>"}]}

and the newer, a tree of formats (XGrammar's): {"type": "structural_tag", "format": {"type": "triggered_tags", …}}.

A tag's trigger is found lazily: as soon as the output has it, one of its tags must follow. A special token that is written
in a tag stands for that token, since special tokens have no text that a model could write otherwise.
"""

from __future__ import annotations

import json
import re
from typing import Any

from octavo.frontend import json_schema
from octavo.frontend.grammars import _TEXT, OPTIONS, GrammarError, json_rule, lark_grammar, literal, regex_rule

MAX_DEPTH = 16


def tag_grammar(value: str, special_tokens: dict[str, int]) -> str:
    """The grammar of a structural tag. GrammarError with a pointer for what can't be read."""
    try:
        document = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"It is not JSON: {error}.") from None
    if not isinstance(document, dict):
        raise GrammarError("It must be a JSON object.")
    builder = _Builder(special_tokens)
    if document.get("format") is not None:
        _only(document, {"type", "format"}, "")
        return builder.finish(builder.build(document["format"], "/format", 0))
    _only(document, {"type", "structures", "triggers"}, "")
    tags = []
    for i, structure in enumerate(_items(document, "structures", "")):
        here = f"/structures/{i}"
        if not isinstance(structure, dict):
            raise GrammarError("A structure must be an object with begin, schema and end.", here)
        _only(structure, {"begin", "schema", "end"}, here)
        content = {"type": "json_schema", "json_schema": structure.get("schema", {})}
        tags.append({"type": "tag", "begin": structure.get("begin"), "content": content, "end": structure.get("end")})
    return builder.finish(builder.triggered_tags({"triggers": document.get("triggers"), "tags": tags}, "", 0))


class _Builder:
    """Rules of a grammar, made from the leaves up; a format becomes the text of an expression."""

    def __init__(self, special_tokens: dict[str, int]) -> None:
        self.special_tokens = special_tokens
        names = sorted(special_tokens, key=len, reverse=True)
        self.special = re.compile("(" + "|".join(map(re.escape, names)) + ")") if names else None
        self.rules: list[str] = []
        self.grammars: list[dict[str, str]] = []

    def finish(self, start: str) -> str:
        main = OPTIONS + f"start: {start}\n" + "\n".join(self.rules)
        if not self.grammars:
            return main
        return json.dumps({"grammars": [{"name": "main", "lark_grammar": main}, *self.grammars]})

    def rule(self, body: str, attribute: str = "") -> str:
        name = f"r{len(self.rules)}"
        self.rules.append(f"{name}{attribute}: {body}")
        return name

    def literal(self, text: str) -> str:
        """A sequence of texts and special tokens; "" gives an empty one."""
        parts = self.special.split(text) if self.special else [text]
        return " ".join(f"<[{self.special_tokens[p]}]>" if p in self.special_tokens else literal(p) for p in parts if p) or '""'

    def has_special(self, text: str) -> bool:
        return self.special is not None and self.special.search(text) is not None

    def build(self, form: Any, here: str, depth: int) -> str:
        if not isinstance(form, dict) or not isinstance(form.get("type"), str):
            raise GrammarError("A format must be an object with a type.", here)
        if depth > MAX_DEPTH:
            raise GrammarError(f"Formats are nested more than {MAX_DEPTH} levels deep.", here)
        method = _FORMATS.get(form["type"])
        if method is None:
            known = ", ".join(sorted(_FORMATS))
            raise GrammarError(f"The format {form['type'][:80]!r} is not supported; there are {known}.", f"{here}/type")
        return method(self, form, here, depth)

    def const_string(self, form: dict[str, Any], here: str, depth: int) -> str:
        _only(form, {"type", "value"}, here)
        return self.literal(_text(form, "value", here))

    def json_schema(self, form: dict[str, Any], here: str, depth: int) -> str:
        _only(form, {"type", "json_schema"}, here)
        schema = form.get("json_schema")
        try:
            json_schema.parse(json.dumps(schema))
        except json_schema.SchemaError as error:
            key = "json_schema" if here.startswith("/format") else "schema"  # in the older spelling it stands beside begin and end
            raise GrammarError(str(error), f"{here}/{key}{error.pointer}") from None
        return self.rule(json_rule(schema))

    def regex(self, form: dict[str, Any], here: str, depth: int) -> str:
        _only(form, {"type", "pattern"}, here)
        return self.rule(regex_rule(_text(form, "pattern", here)))

    def grammar(self, form: dict[str, Any], here: str, depth: int) -> str:
        _only(form, {"type", "grammar"}, here)
        name = f"g{len(self.grammars)}"
        self.grammars.append({"name": name, "lark_grammar": lark_grammar(_text(form, "grammar", here))})
        return f"@{name}"

    def any_text(self, form: dict[str, Any], here: str, depth: int) -> str:
        _only(form, {"type"}, here)
        return self.rule(_TEXT)

    def sequence(self, form: dict[str, Any], here: str, depth: int) -> str:
        _only(form, {"type", "elements"}, here)
        elements = _items(form, "elements", here)
        return " ".join(self.rule(self.build(e, f"{here}/elements/{i}", depth + 1)) for i, e in enumerate(elements))

    def either(self, form: dict[str, Any], here: str, depth: int) -> str:
        _only(form, {"type", "elements"}, here)
        elements = _items(form, "elements", here)
        return "(" + " | ".join(self.rule(self.build(e, f"{here}/elements/{i}", depth + 1)) for i, e in enumerate(elements)) + ")"

    def tag(self, form: Any, here: str, depth: int) -> str:
        begin, rest = self._tag(form, here, depth)
        return f"{self.literal(begin)} {rest}" if begin else rest

    def _tag(self, form: Any, here: str, depth: int) -> tuple[str, str]:
        """(what the tag begins with, the expression of the rest)."""
        if not isinstance(form, dict):
            raise GrammarError("A tag must be an object with begin, content and end.", here)
        _only(form, {"type", "begin", "content", "end"}, here)
        begin, end, content = _text(form, "begin", here), _text(form, "end", here), form.get("content")
        if isinstance(content, dict) and content.get("type") == "any_text" and end and not self.has_special(end):
            _only(content, {"type"}, f"{here}/content")
            return begin, self.rule(f"{_TEXT} {literal(end)}", "[lazy]")  # the text ends where the end first stands
        body = self.build(content, f"{here}/content" if here.startswith("/format") else here, depth + 1)
        return begin, f"{body} {self.literal(end)}" if end else body

    def tags_with_separator(self, form: dict[str, Any], here: str, depth: int) -> str:
        _only(form, {"type", "tags", "separator", "at_least_one", "stop_after_first"}, here)
        tags = _items(form, "tags", here)
        one = self.rule(" | ".join(self.rule(self.tag(t, f"{here}/tags/{i}", depth + 1)) for i, t in enumerate(tags)))
        separator = self.literal(_text(form, "separator", here))
        many = one if form.get("stop_after_first") else f"{one} ({separator} {one})*"
        return many if form.get("at_least_one") else f"({many})?"

    def triggered_tags(self, form: dict[str, Any], here: str, depth: int) -> str:
        _only(form, {"type", "triggers", "tags", "at_least_one", "stop_after_first"}, here)
        triggers = _items(form, "triggers", here)
        for i, trigger in enumerate(triggers):
            if not isinstance(trigger, str) or not trigger:
                raise GrammarError("A trigger must be a text that is not empty.", f"{here}/triggers/{i}")
        seen: dict[str, str] = {}
        options = []
        for i, tag in enumerate(_items(form, "tags", here)):
            place = f"{here}/tags/{i}" if "type" in form else f"{here}/structures/{i}"
            begin, rest = self._tag(tag, place, depth + 1)
            trigger = next((t for t in triggers if begin.startswith(t)), None)
            if trigger is None:
                raise GrammarError(f"The tag begins with {begin[:80]!r}, and with none of the triggers.", f"{place}/begin")
            if trigger not in seen:
                attribute = "" if self.has_special(trigger) else "[lazy]"
                text = self.rule(_TEXT) if attribute == "" else _TEXT
                seen[trigger] = self.rule(f"{text} {self.literal(trigger)}", attribute)
            after = begin[len(trigger) :]
            options.append(self.rule(f"{seen[trigger]} {self.literal(after) if after else ''} {rest}"))
        tags, text = "(" + " | ".join(options) + ")", self.rule(_TEXT)
        if form.get("stop_after_first"):
            return tags if form.get("at_least_one") else f"({tags} | {text})"
        return f"{tags}{'+' if form.get('at_least_one') else '*'} {text}"


_FORMATS = {
    "const_string": _Builder.const_string,
    "json_schema": _Builder.json_schema,
    "regex": _Builder.regex,
    "grammar": _Builder.grammar,
    "any_text": _Builder.any_text,
    "sequence": _Builder.sequence,
    "or": _Builder.either,
    "tag": _Builder.tag,
    "tags_with_separator": _Builder.tags_with_separator,
    "triggered_tags": _Builder.triggered_tags,
}


def _only(form: dict[str, Any], known: set[str], here: str) -> None:
    for key, value in form.items():
        if key not in known and value not in (None, [], False):
            raise GrammarError(f"The field {key[:80]!r} is not supported here; there are {', '.join(sorted(known))}.", f"{here}/{key}")


def _text(form: dict[str, Any], key: str, here: str) -> str:
    value = form.get(key)
    if not isinstance(value, str):
        raise GrammarError(f"{key} must be a text.", f"{here}/{key}")
    return value


def _items(form: dict[str, Any], key: str, here: str) -> list[Any]:
    value = form.get(key)
    if not isinstance(value, list) or not value:
        raise GrammarError(f"{key} must be a list that is not empty.", f"{here}/{key}")
    return value
