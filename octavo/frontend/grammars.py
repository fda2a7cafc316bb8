"""From what a client asks for to llguidance's grammar language (a dialect of Lark).

All of this runs in the worker process (grammar_worker.py), for what clients send may be built to take long.

Grammars are compiled with ``no_forcing``: where only one text can follow, the model still chooses how to cut it into tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from octavo.frontend import json_schema
from octavo.frontend.json_schema import SchemaError

OPTIONS = '%llguidance {"no_forcing": true}\n'
# Between the parts of a JSON text: nothing, a space or two, or a line break and its indentation. A model that is free to
# write more may write nothing else until its limit.
WHITESPACE = r"(\r?\n[ \t]{0,64}|[ \t]{1,2})"
_TEXT = r"/(.|\n)*/"
_UNHEEDED = re.compile(r"^\s*[!?]?[\w.-]+\s*\[[^\]\n]*\b(temperature|stop|max_tokens)\s*=", re.MULTILINE)


class GrammarError(ValueError):
    """What is wrong, for the client. ``pointer``: where in a JSON document, or ""."""

    def __init__(self, message: str, pointer: str = "") -> None:
        super().__init__(message)
        self.pointer = pointer


Compiles = Callable[[str], str]  # a grammar -> "" if it compiles, else why not


def to_grammar(kind: str, value: str, compiles: Compiles, special_tokens: dict[str, int]) -> str:
    """The grammar of a ``StructuredOutput``, compiled once to see that it can be. GrammarError says why not.

    ``special_tokens``: text -> id, for structural tags in which they are written.
    """
    if kind in ("json_object", "json_schema"):
        try:
            schema = {"type": "object"} if kind == "json_object" else json_schema.parse(value)
        except SchemaError as error:
            raise GrammarError(str(error), error.pointer) from None
        grammar = OPTIONS + "start: " + json_rule(schema)
        if why := compiles(grammar):
            raise _located(schema, why, compiles)
        return grammar
    if kind == "structural_tag":
        from octavo.frontend.structural_tags import tag_grammar

        grammar = tag_grammar(value, special_tokens)
    else:
        grammar = {"regex": regex_grammar, "choice": choice_grammar, "grammar": lark_grammar}[kind](value)
    if why := compiles(grammar):
        raise GrammarError(why)
    return grammar


def json_rule(schema: Any) -> str:
    """A rule's body that matches JSON texts of a (checked) schema."""
    if schema is True:
        schema = {}
    if schema is False:
        raise GrammarError("The schema is false: it allows nothing.")
    return "%json " + json.dumps({**schema, "x-guidance": {"whitespace_pattern": WHITESPACE}}, ensure_ascii=False)


def regex_rule(pattern: str) -> str:
    """A terminal's body that matches what the whole of a regular expression does."""
    from llguidance import regex_to_lark

    if not pattern:
        return '""'
    # A line break would end the rule; one that is escaped stands for itself.
    on_one_line = re.sub(r"(\\*)\n", lambda m: m[1] + ("n" if len(m[1]) % 2 else "\\n"), pattern)
    return "/" + regex_to_lark(on_one_line, "d") + "/"


def regex_grammar(pattern: str) -> str:
    return OPTIONS + "start: " + regex_rule(pattern)


def choice_grammar(value: str) -> str:
    choices = json.loads(value)
    return OPTIONS + "start: CHOICE\nCHOICE: " + " | ".join(literal(text) for text in choices)


def literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def lark_grammar(text: str) -> str:
    """A Lark grammar, or one in llama.cpp's GBNF, as llguidance's."""
    from llguidance.gbnf_to_lark import gbnf_to_lark, is_lark_syntax

    if not is_lark_syntax(text):
        if "::=" not in text:
            raise GrammarError("The grammar is neither Lark (with a rule start: …) nor GBNF (with a rule root ::= …).")
        try:
            text = gbnf_to_lark(text)
        except RecursionError:
            raise GrammarError("The grammar is nested too deeply.") from None
        except Exception as error:  # noqa: BLE001 (the converter raises plain exceptions)
            raise GrammarError(f"The grammar can't be read as GBNF: {error}") from None
    if found := _UNHEEDED.search(text):
        raise GrammarError(f"The rule option {found[1]}= is not supported; leave it out.")
    return text.rstrip() + "\n" + OPTIONS  # behind it, so that the lines that messages name are the client's


def _located(schema: Any, why: str, compiles: Compiles, most: int = 400) -> GrammarError:
    """The error with a pointer to the innermost schema, and the keyword in it, without which the whole would compile.

    Each schema is compiled by itself, as a reference into the whole.
    """
    if schema is False:
        return GrammarError("The schema is false: it allows nothing.")
    place = json_schema.Place(schema, "", 0)
    tries = 0

    def fails(document: Any, pointer: str) -> str:
        nonlocal tries
        tries += 1
        return compiles(OPTIONS + "start: " + json_rule({"$defs": {"whole": document}, "$ref": "#/$defs/whole" + pointer}))

    whole = _moved(schema, "#/$defs/whole")
    deeper = True
    while deeper and tries < most:
        deeper = False
        for inner in json_schema.children(place):
            if isinstance(inner.schema, dict) and "$ref" not in inner.schema and tries < most and (reason := fails(whole, inner.pointer)):
                place, why, deeper = inner, reason, True
                break
    if isinstance(place.schema, dict):
        for key in place.schema:
            if len(place.schema) == 1 or (tries < most and not fails(_without(whole, place.pointer, key), place.pointer)):
                return GrammarError(why, f"{place.pointer}/{json_schema.escape(key)}")
    return GrammarError(why, place.pointer)


def _moved(schema: Any, to: str) -> Any:
    """A copy of the document whose references lead to where it is put."""
    if isinstance(schema, list):
        return [_moved(item, to) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {k: to + v[1:] if k == "$ref" and isinstance(v, str) else _moved(v, to) for k, v in schema.items() if k != "$id"}


def _without(document: Any, pointer: str, key: str) -> Any:
    """A copy of the document in which the schema at the pointer lacks a keyword."""
    if not pointer:
        return {k: v for k, v in document.items() if k != key}
    head, _, rest = pointer[1:].partition("/")
    head = head.replace("~1", "/").replace("~0", "~")
    rest = "/" + rest if rest else ""
    if isinstance(document, list):
        return [_without(v, rest, key) if i == int(head) else v for i, v in enumerate(document)]
    return {k: _without(v, rest, key) if k == head else v for k, v in document.items()}
