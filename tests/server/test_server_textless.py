"""A server without a tokenizer (--skip-tokenizer-init): tokens have no text, and are streamed when they come all the same."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from octavo.bench.stream import EventStream
from octavo.frontend.outputs import RequestOutput
from octavo.server.mock import MockEngine
from tests.server.conftest import Running, running_server


class TextlessEngine(MockEngine):
    """As AsyncLLM is without a tokenizer."""

    def __init__(self) -> None:
        super().__init__(tick_s=0.01, length=2000)
        self.tokenizer = self.chat_template = None

    async def generate(self, *args: Any, **named: Any) -> AsyncIterator[RequestOutput]:  # type: ignore[override]
        named["taker"] = None  # which would have the texts
        async for output in super().generate(*args, **named):
            yield replace(output, outputs=[replace(choice, text="") for choice in output.outputs])


@pytest.fixture(scope="module")
def textless() -> Iterator[Running]:
    with running_server(TextlessEngine()) as running:
        yield running


def raw_stream(running: Running, **fields: Any) -> bytes:
    body = {"prompt": [1, 2, 3], "max_tokens": 8, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}} | fields
    answer = httpx.post(f"{running.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.content


@pytest.mark.parametrize("fields", [{}, {"return_token_ids": True}, {"logprobs": 2}, {"n": 2}], ids=str)
def test_tokens_are_streamed_as_they_come(textless: Running, fields: dict[str, Any]) -> None:
    raw = raw_stream(textless, **fields)
    chunks = [json.loads(line[6:]) for line in raw.decode().splitlines() if line.startswith("data: {")]
    for index in range(fields.get("n", 1)):
        choices = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert all(c["text"] == "" for c in choices)
        assert [c["finish_reason"] for c in choices] == [None] * (len(choices) - 1) + ["length"]
        assert len(choices) >= 4, "the tokens were held back"
        if fields.get("return_token_ids"):
            assert sum(len(c["token_ids"]) for c in choices) == 8 and choices[-1]["token_ids"] == []
        if fields.get("logprobs"):
            assert sum(len(c["logprobs"]["tokens"]) for c in choices if c["logprobs"]) == 8
    assert chunks[-1]["usage"]["completion_tokens"] == 8 * fields.get("n", 1)


def test_the_benchmark_counts_each_of_them(textless: Running) -> None:
    events = EventStream()
    events.feed(raw_stream(textless), 1.0)
    assert 4 <= len(events.arrivals) <= 8 and (events.output_tokens, events.done) == (8, True)
