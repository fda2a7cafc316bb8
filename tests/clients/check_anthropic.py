"""Anthropic's Python client: messages, its stream helper, tools, thinking, structured output, count_tokens."""

from __future__ import annotations

import json
import threading
from typing import Any

import anthropic
from anthropic.types import Message, MessageTokensCount, RawMessageStreamEvent
from harness import MOCK_MODEL, Target, check, main, refused, same, strictly
from pydantic import BaseModel, Field

ASK: Any = [{"role": "user", "content": "What is the capital of France? Answer briefly."}]
CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 30}}, "required": ["city"], "additionalProperties": False}
WEATHER: Any = {"name": "get_weather", "description": "The weather.", "input_schema": CITY}
TIME: Any = {"name": "get_time", "input_schema": {"type": "object", "properties": {}}}


class Person(BaseModel):
    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=150)


def client(t: Target, **options: Any) -> anthropic.Anthropic:
    return anthropic.Anthropic(**{"base_url": t.url, "api_key": t.key, "max_retries": 0, "timeout": 60, **options})


@check()
def messages(t: Target) -> None:
    fields: Any = dict(model=t.model, max_tokens=12, messages=ASK, system="Be brief.", extra_body={"temperature": 0})
    raw = client(t).messages.with_raw_response.create(**fields)
    strictly(raw.http_response.content, Message)
    answer = raw.parse()
    assert answer.content[0].text and answer.stop_reason in ("end_turn", "max_tokens") and answer.usage.output_tokens <= 12
    assert answer._request_id, "the client shows the header request-id"
    texts = ""
    for event in client(t).messages.create(**fields, stream=True):
        strictly(event.model_dump_json(exclude_unset=True), RawMessageStreamEvent)
        if event.type == "content_block_delta":
            texts += event.delta.text
    same(texts, answer.content[0].text)


@check()
def stream_helper(t: Target) -> None:
    with client(t).messages.stream(model=t.model, max_tokens=12, messages=ASK, extra_body={"temperature": 0}) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    same(final.content[0].text, text)
    assert final.usage.input_tokens + final.usage.cache_read_input_tokens > 5 and final.usage.output_tokens <= 12


@check()
async def asynchronously(t: Target) -> None:
    async with anthropic.AsyncAnthropic(base_url=t.url, api_key=t.key, max_retries=0, timeout=60) as c:
        answer = await c.messages.create(model=t.model, max_tokens=5, messages=ASK, stop_sequences=["\n\n"])
        assert answer.role == "assistant"
        async with c.messages.stream(model=t.model, max_tokens=5, messages=ASK) as stream:
            assert await stream.get_final_text() is not None


@check()
def auth_token(t: Target) -> None:
    """Authorization: Bearer in place of x-api-key."""
    c = anthropic.Anthropic(base_url=t.url, api_key=None, auth_token=t.key, max_retries=0)
    assert c.messages.create(model=t.model, max_tokens=2, messages=ASK).content


@check()
def count_tokens(t: Target) -> None:
    count = client(t).messages.count_tokens(model=t.model, messages=ASK)
    strictly(count.model_dump_json(exclude_unset=True), MessageTokensCount)
    usage = client(t).messages.create(model=t.model, max_tokens=1, messages=ASK).usage
    same(count.input_tokens, usage.input_tokens + usage.cache_read_input_tokens)
    assert client(t).messages.count_tokens(model=t.model, messages=ASK, tools=[WEATHER]).input_tokens > count.input_tokens


@check()
def forced_tool(t: Target) -> None:
    for choice in ({"type": "tool", "name": "get_weather"}, {"type": "any", "disable_parallel_tool_use": True}):
        fields: Any = dict(model=t.model, max_tokens=60, messages=ASK, tools=[WEATHER], tool_choice=choice, extra_body={"temperature": 0})
        answer = client(t).messages.create(**fields)
        strictly(answer.model_dump_json(exclude_unset=True), Message)
        use = answer.content[0]
        same((use.type, use.name, list(use.input), answer.stop_reason), ("tool_use", "get_weather", ["city"], "tool_use"))
        with client(t).messages.stream(**fields) as stream:
            same(stream.get_final_message().content[0].input, use.input)
        result: Any = {"type": "tool_result", "tool_use_id": use.id, "content": "sunny"}
        history = [*ASK, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
        assert client(t).messages.create(model=t.model, max_tokens=5, messages=history, tools=[WEATHER]).content


@check("mock_url")
def tools_and_thinking(t: Target) -> None:
    c = client(t, base_url=t.mock_url)
    fields: Any = dict(model=MOCK_MODEL, max_tokens=2000, messages=ASK, tools=[WEATHER, TIME])
    fields["thinking"] = {"type": "enabled", "budget_tokens": 1024}
    answer = c.messages.create(**fields)
    strictly(answer.model_dump_json(exclude_unset=True), Message)
    same([b.type for b in answer.content if b.type != "text"], ["thinking", "tool_use", "tool_use"])
    with c.messages.stream(**fields) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_message()
    assert {"thinking", "input_json", "signature", "content_block_stop"} <= kinds, kinds
    uses = [b for b in final.content if b.type == "tool_use"]
    same([(u.name, u.input) for u in uses], [("get_weather", {"city": "Oslo"}), ("get_time", {})])
    for event in c.messages.create(**fields, stream=True):
        strictly(event.model_dump_json(exclude_unset=True), RawMessageStreamEvent)
    results = [{"type": "tool_result", "tool_use_id": u.id, "content": [{"type": "text", "text": "21"}]} for u in uses]
    history = [*ASK, {"role": "assistant", "content": final.content}, {"role": "user", "content": results}]
    same(c.messages.create(**{**fields, "messages": history}).content[-1].text, "It is sunny.")


@check()
def structured_output(t: Target) -> None:
    config: Any = {"format": {"type": "json_schema", "schema": CITY}}
    answer = client(t).messages.create(model=t.model, max_tokens=60, messages=ASK, output_config=config, extra_body={"temperature": 0})
    same(list(json.loads(answer.content[0].text)), ["city"])
    if hasattr(client(t).messages, "parse"):
        parsed = client(t).messages.parse(model=t.model, max_tokens=100, messages=ASK, output_format=Person, extra_body={"temperature": 0})
        assert isinstance(parsed.parsed_output, Person)


@check()
def errors(t: Target) -> None:
    create = client(t).messages.create
    error = refused(
        anthropic.AuthenticationError, lambda: client(t, api_key="no").messages.create(model=t.model, max_tokens=1, messages=ASK)
    )
    same(error.body["error"]["type"], "authentication_error")
    error = refused(anthropic.NotFoundError, lambda: create(model="nope", max_tokens=1, messages=ASK))
    same(error.body["error"]["type"], "not_found_error")
    error = refused(anthropic.BadRequestError, lambda: create(model=t.model, max_tokens=1, messages=ASK, extra_body={"temperature": -1}))
    assert "temperature" in str(error) and error.request_id
    error = refused(anthropic.BadRequestError, lambda: create(model=t.model, max_tokens=-1, messages=ASK))
    assert "max_tokens" in str(error)
    config: Any = {"format": {"type": "json_schema", "schema": {"type": "nothing"}}}
    error = refused(anthropic.BadRequestError, lambda: create(model=t.model, max_tokens=9, messages=ASK, stream=True, output_config=config))
    assert "output_config.format.schema" in str(error)
    image: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
    assert "messages[0].content[0]" in str(
        refused(anthropic.BadRequestError, lambda: create(model=t.model, max_tokens=1, messages=[{"role": "user", "content": [image]}]))
    )
    refused(anthropic.BadRequestError, lambda: create(model=t.model, max_tokens=1, messages=ASK, stream=True, extra_body={"nonsense": 1}))


@check("limited_url")
def retries(t: Target) -> None:
    patient, hasty = client(t, base_url=t.limited_url, max_retries=10), client(t, base_url=t.limited_url)
    stream = hasty.messages.create(model=MOCK_MODEL, max_tokens=2000, messages=ASK, stream=True)
    next(iter(stream))
    error = refused(anthropic.RateLimitError, lambda: hasty.messages.create(model=MOCK_MODEL, max_tokens=2, messages=ASK))
    same((error.body["type"], error.body["error"]["type"]), ("error", "rate_limit_error"))
    assert int(error.response.headers["retry-after"]) >= 1
    threading.Timer(0.5, stream.close).start()
    assert patient.messages.create(model=MOCK_MODEL, max_tokens=2, messages=ASK).content


if __name__ == "__main__":
    main("anthropic")
