"""OpenAI's Python client: chat, responses, completions, embeddings, models; synchronous and not, streamed and not."""

from __future__ import annotations

import json
import threading
from enum import Enum
from typing import Any

import openai
from harness import MOCK_MODEL, Target, check, main, refused, same, strictly
from openai.types import Completion, CreateEmbeddingResponse, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, Field

ASK: Any = [{"role": "user", "content": "What is the capital of France? Answer briefly."}]
CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 30}}, "required": ["city"], "additionalProperties": False}
WEATHER: Any = {"type": "function", "function": {"name": "get_weather", "description": "The weather.", "parameters": CITY, "strict": True}}
TIME: Any = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}}
FORCED: Any = {"type": "function", "function": {"name": "get_weather"}}


class Mood(str, Enum):
    good = "good"
    bad = "bad"


class Person(BaseModel):
    """With what pydantic makes $defs, $ref, enum and anyOf with null of."""

    class Pet(BaseModel):
        name: str = Field(max_length=10)

    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=150)
    mood: Mood
    pet: Pet | None
    scores: list[float] = Field(max_length=2)


class GetWeather(BaseModel):
    """The weather of a city."""

    city: str = Field(max_length=30)


def client(t: Target, **options: Any) -> openai.OpenAI:
    return openai.OpenAI(**{"base_url": t.url + "/v1", "api_key": t.key, "max_retries": 0, "timeout": 60, **options})


def mock(t: Target) -> openai.OpenAI:
    return client(t, base_url=t.mock_url + "/v1")


# -- chat ---------------------------------------------------------------------------------------------------------------


@check()
def chat(t: Target) -> None:
    raw = client(t).chat.completions.with_raw_response.create(model=t.model, messages=ASK, temperature=0, max_completion_tokens=12)
    assert raw.headers["x-request-id"] and raw.headers["content-type"] == "application/json"
    strictly(raw.content, ChatCompletion)
    answer = raw.parse()
    assert answer.choices[0].message.content and answer.model == t.model and answer.id.startswith("chatcmpl-")
    same(answer._request_id, raw.headers["x-request-id"])
    assert answer.usage.completion_tokens <= 12
    same(answer.usage.total_tokens, answer.usage.prompt_tokens + answer.usage.completion_tokens)


@check()
def chat_streamed(t: Target) -> None:
    fields: Any = dict(model=t.model, messages=ASK, temperature=0, max_tokens=12)
    whole = client(t).chat.completions.create(**fields)
    stream = client(t).chat.completions.create(**fields, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    for chunk in chunks:
        strictly(chunk.model_dump_json(exclude_unset=True), ChatCompletionChunk)
    same("".join(c.choices[0].delta.content or "" for c in chunks if c.choices), whole.choices[0].message.content)
    same([c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason], [whole.choices[0].finish_reason])
    same(chunks[-1].choices, [])
    same(chunks[-1].usage.completion_tokens, whole.usage.completion_tokens)


@check()
def chat_options(t: Target) -> None:
    answer = client(t).chat.completions.create(
        model=t.model, messages=ASK, max_tokens=5, n=2, seed=1, logprobs=True, top_logprobs=2, stop=["\n\n"], user="u", metadata={"a": "b"},
        store=False, presence_penalty=0.1, frequency_penalty=0.1, logit_bias={"5": -100}, extra_body={"top_k": 20, "min_p": 0.05},
    )  # fmt: skip
    strictly(answer.model_dump_json(exclude_unset=True), ChatCompletion)
    same([c.index for c in answer.choices], [0, 1])
    entry = answer.choices[0].logprobs.content[0]
    assert entry.logprob <= 0 and bytes(entry.bytes) and len(entry.top_logprobs) == 2


@check()
async def chat_async(t: Target) -> None:
    async with openai.AsyncOpenAI(base_url=t.url + "/v1", api_key=t.key, max_retries=0, timeout=60) as c:
        answer = await c.chat.completions.create(model=t.model, messages=ASK, temperature=0, max_tokens=8)
        text = ""
        async for chunk in await c.chat.completions.create(model=t.model, messages=ASK, temperature=0, max_tokens=8, stream=True):
            text += chunk.choices[0].delta.content or ""
        same(text, answer.choices[0].message.content)
        async with c.chat.completions.stream(model=t.model, messages=ASK, temperature=0, max_tokens=8) as stream:
            final = await stream.get_final_completion()
        same(final.choices[0].message.content, text)


@check()
def stream_is_closed_early(t: Target) -> None:
    with client(t) as c:
        for _ in range(3):
            with c.chat.completions.create(model=t.model, messages=ASK, max_tokens=200, stream=True) as stream:
                next(iter(stream))
        assert c.chat.completions.create(model=t.model, messages=ASK, max_tokens=2).choices


# -- tools --------------------------------------------------------------------------------------------------------------


@check()
def forced_tool(t: Target) -> None:
    for choice in (FORCED, "required"):
        fields: Any = dict(model=t.model, messages=ASK, tools=[WEATHER], tool_choice=choice, temperature=0, max_tokens=60)
        answer = client(t).chat.completions.create(**fields, parallel_tool_calls=False)
        strictly(answer.model_dump_json(exclude_unset=True), ChatCompletion)
        call = answer.choices[0].message.tool_calls[0]
        same(call.function.name, "get_weather")
        assert list(json.loads(call.function.arguments)) == ["city"] and call.id and call.type == "function"
        messages = [*ASK, answer.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
        after = client(t).chat.completions.create(model=t.model, messages=messages, tools=[WEATHER], max_tokens=5)
        assert after.choices[0].message.role == "assistant"


@check()
def forced_tool_streamed(t: Target) -> None:
    tool = openai.pydantic_function_tool(GetWeather)
    choice: Any = {"type": "function", "function": {"name": "GetWeather"}}
    with client(t).chat.completions.stream(
        model=t.model, messages=ASK, tools=[tool], tool_choice=choice, temperature=0, max_tokens=60
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds, kinds
    call = final.choices[0].message.tool_calls[0].function
    assert isinstance(call.parsed_arguments, GetWeather)
    parsed = client(t).chat.completions.parse(model=t.model, messages=ASK, tools=[tool], tool_choice=choice, temperature=0, max_tokens=60)
    message = parsed.choices[0].message
    same(message.tool_calls[0].function.parsed_arguments, call.parsed_arguments)
    for sent in (message, message.model_dump()):  # as it is, and with what the client has put into it
        history: Any = [*ASK, sent, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}]
        assert client(t).chat.completions.create(model=t.model, messages=history, max_tokens=3).choices


@check("mock_url")
def parallel_tools_and_reasoning(t: Target) -> None:
    fields: Any = dict(model=MOCK_MODEL, messages=ASK, tools=[WEATHER, TIME])
    answer = mock(t).chat.completions.create(**fields)
    strictly(answer.model_dump_json(exclude_unset=True), ChatCompletion)
    message = answer.choices[0].message
    same([c.function.name for c in message.tool_calls], ["get_weather", "get_time"])
    same(json.loads(message.tool_calls[0].function.arguments), {"city": "Oslo"})
    assert message.reasoning_content.strip() == "the city" and answer.choices[0].finish_reason == "tool_calls"
    with mock(t).chat.completions.stream(**{**fields, "tools": [WEATHER]}) as stream:  # helpers want strict tools only
        final = stream.get_final_completion()
    assert final.choices[0].message.tool_calls[0].function.parsed_arguments == {"city": "Oslo"}
    for chunk in mock(t).chat.completions.create(**fields, stream=True):
        strictly(chunk.model_dump_json(exclude_unset=True), ChatCompletionChunk)
    history = [*ASK, message, *({"role": "tool", "tool_call_id": c.id, "content": "21"} for c in message.tool_calls)]
    after = mock(t).chat.completions.create(**{**fields, "messages": history})
    same(after.choices[0].message.content, "It is sunny.")


# -- structured output ----------------------------------------------------------------------------------------------------


@check()
def parse_a_pydantic_model(t: Target) -> None:
    c = client(t)
    fields: Any = dict(model=t.model, messages=ASK, temperature=0, max_tokens=200, response_format=Person)
    parsed = c.chat.completions.parse(**fields).choices[0].message.parsed
    assert isinstance(parsed, Person)
    with c.chat.completions.stream(**fields) as stream:
        for _ in stream:
            pass
        same(stream.get_final_completion().choices[0].message.parsed, parsed)
    refused(openai.LengthFinishReasonError, lambda: c.chat.completions.parse(**{**fields, "max_tokens": 3}))


@check()
def json_object(t: Target) -> None:
    schema: Any = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
    answer = client(t).chat.completions.create(model=t.model, messages=ASK, max_tokens=60, response_format=schema)
    same(list(json.loads(answer.choices[0].message.content)), ["city"])


# -- responses ------------------------------------------------------------------------------------------------------------


@check()
def responses(t: Target) -> None:
    c = client(t)
    fields: Any = dict(model=t.model, input="What is the capital of France?", instructions="Be brief.", temperature=0, max_output_tokens=12)
    raw = c.responses.with_raw_response.create(**fields)
    strictly(raw.content, Response)
    answer = raw.parse()
    assert answer.output_text and answer.usage.output_tokens <= 12
    texts, last = "", None
    for event in c.responses.create(**fields, stream=True):
        strictly(event.model_dump_json(exclude_unset=True), ResponseStreamEvent)
        texts += event.delta if event.type == "response.output_text.delta" else ""
        last = event
    same(texts, answer.output_text)
    assert last.type in ("response.completed", "response.incomplete") and last.response.usage.output_tokens == answer.usage.output_tokens
    with c.responses.stream(**fields) as stream:
        for _ in stream:
            pass
        if last.type == "response.completed":
            same(stream.get_final_response().output_text, texts)
    answer = c.responses.create(**{**fields, "input": [*ASK, *answer.output, {"role": "user", "content": "And of Italy?"}]})
    assert answer.output


@check()
def responses_parsed(t: Target) -> None:
    c = client(t)
    fields: Any = dict(model=t.model, input="Tell me about Anna.", temperature=0, max_output_tokens=200)
    parsed = c.responses.parse(**fields, text_format=Person)
    assert isinstance(parsed.output_parsed, Person)
    with c.responses.stream(**fields, text_format=Person) as stream:
        for _ in stream:
            pass
        same(stream.get_final_response().output_parsed, parsed.output_parsed)
    tool: Any = openai.pydantic_function_tool(GetWeather)
    choice: Any = {"type": "function", "name": "GetWeather"}
    answer = c.responses.parse(**fields, tools=[tool], tool_choice=choice)
    assert isinstance(answer.output[0].parsed_arguments, GetWeather)
    items = [{"role": "user", "content": "x"}, *(i.model_dump(exclude={"parsed_arguments"}, exclude_none=True) for i in answer.output)]
    items.append({"type": "function_call_output", "call_id": answer.output[0].call_id, "output": "sunny"})
    assert c.responses.create(model=t.model, input=items, max_output_tokens=8).output


@check("mock_url")
def responses_with_tools_and_reasoning(t: Target) -> None:
    fields: Any = dict(model=MOCK_MODEL, input="weather?", tools=[{"type": "function", **WEATHER["function"]}])
    answer = mock(t).responses.create(**fields)
    strictly(answer.model_dump_json(exclude_unset=True), Response)
    same([i.type for i in answer.output][0], "reasoning")
    assert {"function_call"} <= {i.type for i in answer.output}
    for event in mock(t).responses.create(**fields, stream=True):
        strictly(event.model_dump_json(exclude_unset=True), ResponseStreamEvent)


# -- the others -----------------------------------------------------------------------------------------------------------


@check()
def completions(t: Target) -> None:
    fields: Any = dict(model=t.model, prompt=["Once upon", "The sea"], temperature=0, max_tokens=6, logprobs=2)
    raw = client(t).completions.with_raw_response.create(**fields)
    strictly(raw.content, Completion)
    texts = ["", ""]
    for chunk in client(t).completions.create(**fields, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    same(texts, [c.text for c in sorted(raw.parse().choices, key=lambda c: c.index)])


@check()
def models(t: Target) -> None:
    page = client(t).models.list()
    assert t.model in [m.id for m in page]
    strictly(page.data[0].model_dump_json(), Model)
    same(client(t).models.retrieve(t.model).id, t.model)


@check()
def embeddings(t: Target) -> None:
    c = client(t, base_url=t.embed_url + "/v1")
    base64 = c.embeddings.create(model=t.embed_model, input=["hello", "world"])  # the client asks for base64 by itself
    plain = c.embeddings.create(model=t.embed_model, input=["hello", "world"], encoding_format="float")
    strictly(plain.model_dump_json(exclude_unset=True), CreateEmbeddingResponse)
    for a, b in zip(base64.data, plain.data, strict=True):
        assert max(abs(x - y) for x, y in zip(a.embedding, b.embedding, strict=True)) < 1e-6
    same(len(c.embeddings.create(model=t.embed_model, input="hello", dimensions=16).data[0].embedding), 16)
    assert c.embeddings.create(model=t.embed_model, input=[[101, 102], [103]]).usage.prompt_tokens == 3


# -- errors ---------------------------------------------------------------------------------------------------------------


@check()
def errors(t: Target) -> None:
    c = client(t)
    create = c.chat.completions.create
    error = refused(openai.AuthenticationError, lambda: client(t, api_key="wrong").models.list())
    same(error.code, "invalid_api_key")
    error = refused(openai.NotFoundError, lambda: create(model="gpt-nope", messages=ASK))
    same((error.code, error.param), ("model_not_found", "model"))
    error = refused(openai.BadRequestError, lambda: create(model=t.model, messages=ASK, temperature=-1))
    same((error.param, error.type), ("temperature", "invalid_request_error"))
    error = refused(openai.BadRequestError, lambda: create(model=t.model, messages=ASK, stream=True, extra_body={"nonsense": 1}))
    same((error.param, error.code), ("nonsense", "unknown_field"))
    assert error.request_id
    error = refused(openai.BadRequestError, lambda: c.responses.create(model=t.model, input="x", previous_response_id="resp_1"))
    same(error.param, "previous_response_id")
    text: Any = {"format": {"type": "json_schema", "name": "x", "schema": {"type": "nothing"}}}
    error = refused(openai.BadRequestError, lambda: c.responses.create(model=t.model, input="x", text=text, stream=True))
    assert error.param.startswith("text.format.schema"), error
    error = refused(openai.BadRequestError, lambda: c.completions.create(model=t.model, prompt="x", suffix="y"))
    same(error.param, "suffix")
    image: Any = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x.png"}}]}]
    assert "messages[0]" in refused(openai.BadRequestError, lambda: create(model=t.model, messages=image)).param
    error = refused(openai.BadRequestError, lambda: create(model=t.model, messages=[{"role": "user", "content": "word " * 50000}]))
    same(error.code, "context_length_exceeded")
    refused(openai.NotFoundError, lambda: client(t, base_url=t.url).models.list())


@check("limited_url")
def retries(t: Target) -> None:
    """429 with Retry-After: without retries an error, with them the client waits and gets its answer."""
    patient = client(t, base_url=t.limited_url + "/v1", max_retries=10)
    hasty = client(t, base_url=t.limited_url + "/v1")
    stream = hasty.chat.completions.create(model=MOCK_MODEL, messages=ASK, max_tokens=2000, stream=True)
    next(iter(stream))
    error = refused(openai.RateLimitError, lambda: hasty.chat.completions.create(model=MOCK_MODEL, messages=ASK, max_tokens=2))
    assert int(error.response.headers["retry-after"]) >= 1 and error.type == "rate_limit_error"
    threading.Timer(0.5, stream.close).start()
    assert patient.chat.completions.create(model=MOCK_MODEL, messages=ASK, max_tokens=2).choices


if __name__ == "__main__":
    main("openai")
