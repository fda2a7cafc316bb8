"""The cases, in the order of docs/conformance.md. Text and logprobs here; the rest in ``tool_cases`` and ``load_cases``."""

from __future__ import annotations

import math
from itertools import chain
from typing import Any

from octavo.conformance import load_cases, tool_cases
from octavo.conformance.client import Server, Skipped, expect
from octavo.conformance.run import Case

PROMPT = "The sea is deep and the octopus who lives in it"
QUESTION = "Name three animals that live in the sea."


def stop_strings(server: Server) -> str:
    """Slices of the known greedy output as stops: they end the text, and nothing of them is ever sent."""
    whole = server.complete(PROMPT, max_tokens=40)["choices"][0]["text"]
    tried = 0
    for size in (7, 8, 9, 10):
        for start in range(3, min(len(whole) - size, 60), 9):
            stop = whole[start : start + size]
            expected = whole[: whole.index(stop)]
            answer = server.complete(PROMPT, max_tokens=40, stop=stop)["choices"][0]
            expect(answer["text"] == expected, f"stop {stop!r}: the text is {answer['text']!r} instead of {expected!r}")
            expect(answer["finish_reason"] == "stop", f"stop {stop!r}: finish_reason is {answer['finish_reason']!r}")
            chunks = server.stream_complete(PROMPT, max_tokens=40, stop=[stop])
            joined = "".join(choice["text"] for choice in _choices(chunks))
            expect(joined == expected, f"stop {stop!r}, stream: the text is {joined!r} instead of {expected!r}")
            reason = _choices(chunks)[-1]["finish_reason"]
            expect(reason == "stop", f"stop {stop!r}, stream: finish_reason is {reason!r}")
            tried += 1
    if not tried:
        raise Skipped(f"the greedy output is too short: {whole!r}")
    return f"{tried} stops"


def _choices(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [choice for chunk in chunks for choice in chunk["choices"]]


def empty_deltas(server: Server) -> None:
    """A streamed chat has an empty content in its first chunk only, whatever is held back for a stop."""
    for stop in (None, ["never to be seen"], [" the"], ["e", "a"], ["\n"]):
        choices = _choices(server.stream_chat(QUESTION, max_tokens=30, stop=stop))
        first = choices[0]["delta"]
        expect(first.get("role") == "assistant", f"stop {stop}: the first chunk is {first}")
        contents = [choice["delta"].get("content") for choice in choices]
        expect("" not in contents[1:], f"stop {stop}: chunk {contents[1:].index('') + 1 if '' in contents[1:] else 0} has an empty content")
        whole = server.chat(QUESTION, max_tokens=30, stop=stop)["choices"][0]
        joined = "".join(text for text in contents if text)
        expect(joined == whole["message"]["content"], f"stop {stop}: {joined!r} streamed, {whole['message']['content']!r} at once")
        expect(choices[-1]["finish_reason"] == whole["finish_reason"], f"stop {stop}: the finish reasons differ")


def text_offsets(server: Server) -> None:
    """With echo and logprobs in a stream, every token's text_offset is the length of the text before it."""
    for prompt in (PROMPT, " leading space", "na\u00efve caf\u00e9"):
        choices = _choices(server.stream_complete(prompt, echo=True, logprobs=1, max_tokens=5))
        text = "".join(choice["text"] for choice in choices)
        expect(text.startswith(prompt), f"the echo is {text[: len(prompt)]!r} instead of {prompt!r}")
        parts = [choice["logprobs"] for choice in choices if choice.get("logprobs")]
        tokens = list(chain.from_iterable(part["tokens"] for part in parts))
        offsets = list(chain.from_iterable(part["text_offset"] for part in parts))
        expect(tokens and len(tokens) == len(offsets), f"{len(tokens)} tokens have {len(offsets)} offsets")
        for token, start, end in zip(tokens, offsets, [*offsets[1:], len(text)]):
            fits = token.startswith("bytes:") or text[start:end] == token
            expect(fits, f"token {token!r} has the offset {start}, where the text is {text[start:end]!r}")
        whole = server.complete(prompt, echo=True, logprobs=1, max_tokens=5)["choices"][0]["logprobs"]
        expect(whole["text_offset"] == offsets, "the offsets differ between stream and non-stream")


def echo_alone(server: Server) -> None:
    """echo with max_tokens 0 gives the prompt back and generates nothing."""
    for extra in ({}, {"logprobs": 1}, {"n": 2}):
        answer = server.complete(PROMPT, echo=True, max_tokens=0, **extra)
        texts = [choice["text"] for choice in answer["choices"]]
        expect(texts == [PROMPT] * extra.get("n", 1), f"{extra}: the texts are {texts}")
        expect(answer["usage"]["completion_tokens"] == 0, f"completion_tokens is {answer['usage']['completion_tokens']}")
        chunks = server.stream_complete(PROMPT, echo=True, max_tokens=0, stream_options={"include_usage": True}, **extra)
        joined = "".join(choice["text"] for choice in _choices(chunks) if choice["index"] == 0)
        expect(joined == PROMPT, f"{extra}: the streamed text is {joined!r}")
        expect(chunks[-1]["usage"]["completion_tokens"] == 0, f"the stream's usage is {chunks[-1].get('usage')}")


def finite_logprobs(server: Server) -> None:
    """Log-probabilities are finite JSON numbers, also of tokens that sampling has ruled out."""
    for fields in ({"top_k": 1}, {"top_k": 1, "logprobs": 5}):
        answer = server.complete(PROMPT, **{"echo": True, "logprobs": 1, "max_tokens": 5, **fields, "temperature": 1})
        logprobs = answer["choices"][0]["logprobs"]
        numbers = [x for x in logprobs["token_logprobs"] if x is not None]
        numbers += [x for top in logprobs["top_logprobs"] if top for x in top.values()]
        expect(numbers, "there are no log-probabilities")
        bad = [x for x in numbers if not math.isfinite(x) or x > 0]
        expect(not bad, f"log-probabilities {bad[:3]}")


def chat_logprobs(server: Server) -> None:
    """logprobs without top_logprobs: an empty list and the token's bytes."""
    answer = server.chat(QUESTION, logprobs=True, max_tokens=8)
    entries = answer["choices"][0]["logprobs"]["content"]
    count = answer["usage"]["completion_tokens"]
    expect(count - 1 <= len(entries) <= count, f"{len(entries)} entries for {count} tokens")  # the end token may be left out
    for entry in entries:
        expect(entry["top_logprobs"] == [], f"top_logprobs is {entry['top_logprobs']}")
        expect(isinstance(entry["bytes"], list), f"bytes is {entry['bytes']!r}")
    text = b"".join(bytes(entry["bytes"]) for entry in entries).decode(errors="replace")
    content = answer["choices"][0]["message"]["content"]
    expect(text.startswith(content.rstrip("\ufffd")), f"the bytes spell {text!r}, the text is {content!r}")


def unknown_bias(server: Server) -> str | None:
    """logit_bias for an id that is not in the vocabulary is refused, by its number."""
    known = False
    for path, fields in (("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]})):
        for stream in (False, True):
            for token in ("191222", "999999999"):
                answer = server.post(path, {**fields, "stream": stream, "max_tokens": 1, "logit_bias": {token: -100}})
                if token == "191222" and answer.status == 200:
                    known = True  # some vocabularies are that large
                    continue
                answer.refused(400, token)
    return "the vocabulary has 191222; checked with 999999999" if known else None


def prompt_logprobs(server: Server) -> None:
    """The same numbers whatever is in the prefix cache: overlapping prompts forwards, then backwards."""
    base = "Octopuses have three hearts and blue blood, and they are known to be clever. " * 4
    prompts = [base[:size] for size in (60, 150, 151, 230, 300)]

    def numbers(prompt: str) -> Any:
        answer = server.post("/v1/completions", {"prompt": prompt, "temperature": 0, "max_tokens": 1, "prompt_logprobs": 1})
        if answer.status == 400 and "prompt_logprobs" in answer.body.decode(errors="replace"):
            raise Skipped("the server has no prompt_logprobs")
        found = answer.ok()["choices"][0].get("prompt_logprobs")
        if found is None:
            raise Skipped("the server has no prompt_logprobs")
        return found

    forwards = [numbers(prompt) for prompt in prompts]
    backwards = [numbers(prompt) for prompt in reversed(prompts)]
    for i, (first, second) in enumerate(zip(forwards, reversed(backwards))):
        expect(first == second, f"prompt {i} has other numbers the second time")


CASES: tuple[Case, ...] = (
    Case("1", "stop strings over several tokens, stream and not", stop_strings),
    Case("2", "only a stream's first chunk is empty", empty_deltas),
    Case("3", "text_offset in a stream with echo", text_offsets),
    Case("4", "echo with max_tokens 0", echo_alone),
    Case("5", "log-probabilities are finite", finite_logprobs),
    Case("6", "chat logprobs without top_logprobs", chat_logprobs),
    Case("7", "logit_bias of an unknown token", unknown_bias),
    Case("8", "a forced tool call that is cut short", tool_cases.cut_short),
    Case("9", "a forced call of a tool without parameters", tool_cases.no_parameters),
    Case("10", "prompt_logprobs do not depend on the cache", prompt_logprobs),
    Case("11", "absurd requests are refused, quickly", load_cases.absurd_requests),
    Case("12", "clients that vanish free what they held", load_cases.vanishing_clients),
    Case("13", "a long prompt does not stop a stream", load_cases.long_prompt),
    Case("14", "a schema keyword that is not supported", tool_cases.unsupported_keywords),
    Case("15", "a wrong model name", load_cases.wrong_model),
)
