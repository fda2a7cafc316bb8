"""Requests of hostile_load.py that are more than sampling: answers of a form, forced calls, beam search, embeddings.

Each is a ``Case`` with a check of its own: an answer that is whole must have the form it was asked for, one that was cut may end
anywhere. Models with random weights seldom find an end, so forms are small enough to be finished in some of the answers.
"""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Body = dict[str, Any]
Check = Callable[[dict[str, Any]], "str | None"]
COMPLETIONS, CHAT, EMBEDDINGS = "/v1/completions", "/v1/chat/completions", "/v1/embeddings"
LETTERS = "abcdefghijklmnopqrstuvwxyz"
# What a server says that does not offer something with this model; any other refusal is a problem.
NOT_OFFERED = re.compile(
    r"needs a tokenizer|has no tokenizer|is not supported for this model|has no chat template|can't force calls|only generates text"
)


@dataclass(frozen=True)
class Case:
    """A request. ``status``: what must come; ``leaves_after``: seconds until its client goes away; ``check``: what is wrong with
    its answer, or None (for a request that has none of its own, the caller knows)."""

    name: str
    body: Body
    status: int = 200
    leaves_after: float | None = None
    path: str = COMPLETIONS
    check: Check | None = None


class Forms:
    """Makes them, the same for the same ``rng``. ``ids``: so many random token ids; ``context``: the longest sequence in tokens."""

    def __init__(self, rng: random.Random, ids: Callable[[int], list[int]], context: int) -> None:
        self.rng, self.ids, self.context = rng, ids, context
        self.makers: dict[str, Callable[[], Case]] = {
            "json schema": self.schema, "regex": self.regex, "choice": self.choice, "large grammar": self.grammar,
            "forced call": self.call, "beam search": self.beams, "embeddings": self.embeddings,
        }  # fmt: skip

    def word(self, least: int = 3, most: int = 9) -> str:
        return "".join(self.rng.choices(LETTERS, k=self.rng.randint(least, most)))

    def formed(self, name: str, whole: Callable[[str], bool], **fields: Any) -> Case:
        """A completion whose text must satisfy ``whole`` if it has ended by itself."""
        n_out, stream = self.rng.choice((4, 60, 200)), self.rng.random() < 0.3
        n_in = min(self.rng.choice((2, 30, 400)), self.context - n_out - 1)
        body = {"prompt": self.ids(max(n_in, 1)), "max_tokens": n_out, "temperature": self.rng.choice((0, 1.0)), "stream": stream, **fields}
        if stream:
            body["stream_options"] = {"include_usage": True}
        elif self.rng.random() < 0.3:
            body |= {"n": 4, "temperature": 1.0, "logprobs": 5}

        def check(answer: dict[str, Any]) -> str | None:
            choices = answer["choices"]
            if len(choices) != body.get("n", 1):
                return f"{len(choices)} choices"
            for choice in choices:
                if choice["finish_reason"] not in ("stop", "length"):
                    return f"finish reason {choice['finish_reason']}"
                if choice["finish_reason"] == "stop" and not whole(choice["text"]):
                    return f"the answer has not its form: {choice['text'][:200]!r}"
            return None

        return Case(name, body, check=check)

    def schema(self) -> Case:
        names = [self.word() for _ in range(self.rng.choice((1, 3, 40)))]
        kinds: list[Body] = [{"type": "integer"}, {"type": "boolean"}, {"type": "string", "maxLength": 5}, {"enum": ["a", 1, None]}]
        kinds.append({"type": "array", "items": {"type": "integer"}, "maxItems": 3})
        properties = {name: self.rng.choice(kinds) for name in names}
        schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}

        def whole(text: str) -> bool:
            found = json.loads(text)
            return isinstance(found, dict) and set(found) == set(names) and len(found) == len(set(names))

        return self.formed("json schema", lambda text: _parses(text) and whole(text), response_format={
            "type": "json_schema", "json_schema": {"name": "answer", "schema": schema},
        })  # fmt: skip

    def regex(self) -> Case:
        pattern = self.rng.choice((r"[0-9]{1,3}(\.[0-9]{1,3}){3}", rf"({self.word()}|{self.word()})+", r"[^\x00]{5,30}", r"(a|b){1,20}c"))
        return self.formed("regex", lambda text: re.fullmatch(pattern, text) is not None, structured_outputs={"regex": pattern})

    def choice(self) -> Case:
        texts = sorted({self.word() + self.rng.choice(("", " ünï", " 漢字", "\n")) for _ in range(self.rng.choice((2, 50, 3000)))})
        return self.formed("choice", texts.__contains__, structured_outputs={"choice": texts})

    def grammar(self) -> Case:
        """Another one each time, so that it is compiled; in half of them with nested rules."""
        words = {self.word() for _ in range(self.rng.choice((200, 2000)))}
        listed = " | ".join(f'"{word}"' for word in sorted(words))
        if self.rng.random() < 0.5:
            grammar = f'start: word (" " word){{0,5}}\nword: {listed}'
            return self.formed("large grammar", lambda text: set(text.split(" ")) <= words, structured_outputs={"grammar": grammar})
        grammar = f'root ::= item\nitem ::= word | "(" item ")" | "[" item "]"\nword ::= {listed}'
        return self.formed("large grammar", lambda text: _nested(text) in words, structured_outputs={"grammar": grammar})

    def call(self) -> Case:
        name, field = "f_" + self.word(), self.word()
        parameters = {"type": "object", "properties": {field: {"type": "string", "maxLength": 8}}, "required": [field]}
        tools = [{"type": "function", "function": {"name": name, "description": "Does it.", "parameters": parameters}}]
        forced: Any = self.rng.choice(("required", {"type": "function", "function": {"name": name}}))
        body = {"messages": [{"role": "user", "content": " ".join(self.word() for _ in range(20))}], "tools": tools, "tool_choice": forced}
        body |= {"max_tokens": self.rng.choice((5, 80, 200)), "temperature": self.rng.choice((0, 1.0))}

        def check(answer: dict[str, Any]) -> str | None:
            (choice,) = answer["choices"]
            if choice["finish_reason"] == "length":
                return None
            if choice["finish_reason"] != "tool_calls":
                return f"finish reason {choice['finish_reason']}"
            for called in choice["message"]["tool_calls"]:
                if called["function"]["name"] != name or set(json.loads(called["function"]["arguments"])) != {field}:
                    return f"not the forced call: {called}"
            return None

        return Case("forced call", body, path=CHAT, check=check)

    def beams(self) -> Case:
        n, n_out = self.rng.choice((1, 4)), self.rng.choice((1, 12))
        n_in = max(1, min(self.rng.choice((1, 50, 600)), self.context - n_out - 1))
        body = {"prompt": self.ids(n_in), "max_tokens": n_out, "n": n, "use_beam_search": True, "beam_width": self.rng.choice((4, 8))}
        body |= {"temperature": 0, "ignore_eos": True, "logprobs": 1}

        def check(answer: dict[str, Any]) -> str | None:
            choices, used = answer["choices"], answer["usage"]["completion_tokens"]
            if len(choices) != n or used != n * n_out:
                return f"{len(choices)} sequences of {used} tokens together"
            scores = [math.fsum(choice["logprobs"]["token_logprobs"]) for choice in choices]
            return None if all(a >= b - 1e-3 for a, b in zip(scores, scores[1:], strict=False)) else f"not the best first: {scores}"

        return Case("beam search", body, check=check)

    def embeddings(self) -> Case:
        count = self.rng.choice((1, 3, 30))
        texts = [self.ids(self.rng.choice((1, 20, min(500, self.context - 1)))) for _ in range(count)]

        def check(answer: dict[str, Any]) -> str | None:
            vectors = [item["embedding"] for item in answer["data"]]
            if len(vectors) != count or len({len(vector) for vector in vectors}) != 1:
                return f"{len(vectors)} vectors of {sorted({len(v) for v in vectors})} components for {count} texts"
            lengths = [math.sqrt(math.fsum(x * x for x in vector)) for vector in vectors]
            return None if all(abs(length - 1) < 1e-2 for length in lengths) else f"lengths {lengths}"  # NaN is not near 1 either

        return Case("embeddings", {"input": texts, "encoding_format": "float"}, path=EMBEDDINGS, check=check)

    def bad(self) -> list[Case]:
        """Each with the kind of request that a server must offer to refuse it in this way."""

        def completion(**structured: Any) -> Body:
            return {"prompt": self.ids(4), "max_tokens": 4, "structured_outputs": structured}

        tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
        chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
        return [
            Case("json schema", completion(json={"type": "nonsense"}), 400), Case("json schema", completion(json={"not": {}}), 400),
            Case("regex", completion(regex="(" * self.rng.choice((1, 20_000))), 400), Case("choice", completion(choice=[]), 400),
            Case("large grammar", completion(grammar="start: (" + self.word()), 400),
            Case("large grammar", completion(grammar='start: x\nx: x'), 400),
            Case("forced call", {**chat, "tools": [tool], "tool_choice": {"type": "function", "function": {"name": "g"}}}, 400, path=CHAT),
            Case("forced call", {**chat, "tool_choice": "required"}, 400, path=CHAT),
            Case("beam search", {"prompt": self.ids(4), "use_beam_search": True, "beam_width": 10**6}, 400),
            Case("embeddings", {"input": []}, 400, path=EMBEDDINGS),
            Case("embeddings", {"input": [self.ids(self.context + 1)]}, 400, path=EMBEDDINGS),
        ]  # fmt: skip


def _parses(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _nested(text: str) -> str:
    """What is within brackets that are properly nested; "" if they are not."""
    pairs = {"(": ")", "[": "]"}
    while text and text[0] in pairs:
        if text[-1] != pairs[text[0]]:
            return ""
        text = text[1:-1]
    return text
