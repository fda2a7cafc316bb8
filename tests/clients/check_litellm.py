"""litellm: its openai/ and anthropic/ providers for completion, streams, tools, structured output, embedding; rerank."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # no look-up of prices in the network
import litellm
from harness import MOCK_MODEL, Target, check, main, refused, same
from pydantic import BaseModel, Field

ASK = [{"role": "user", "content": "What is the capital of France? Answer briefly."}]
CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 30}}, "required": ["city"], "additionalProperties": False}
WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "The weather.", "parameters": CITY}}
TIME = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}}


class City(BaseModel):
    name: str = Field(max_length=20)
    population: int = Field(ge=0, le=9999)


def openai(t: Target, **options: Any) -> dict[str, Any]:
    fields = {"model": f"openai/{t.model}", "api_base": t.url + "/v1", "api_key": t.key, "temperature": 0, "max_tokens": 60}
    return {**fields, "messages": ASK, "num_retries": 0, "max_retries": 0, **options}


@check()
def completion(t: Target) -> None:
    answer = litellm.completion(**openai(t, max_tokens=12))
    assert answer.choices[0].message.content and 0 < answer.usage.completion_tokens <= 12
    same(asyncio.run(litellm.acompletion(**openai(t, max_tokens=12))).choices[0].message.content, answer.choices[0].message.content)


@check()
def streamed(t: Target) -> None:
    whole = litellm.completion(**openai(t, max_tokens=12))
    chunks = list(litellm.completion(**openai(t, max_tokens=12), stream=True, stream_options={"include_usage": True}))
    same("".join(c.choices[0].delta.content or "" for c in chunks if c.choices), whole.choices[0].message.content)
    rebuilt = litellm.stream_chunk_builder(chunks, messages=ASK)
    same(rebuilt.usage.completion_tokens, whole.usage.completion_tokens)


@check()
def forced_tool(t: Target) -> None:
    choice = {"type": "function", "function": {"name": "get_weather"}}
    answer = litellm.completion(**openai(t, tools=[WEATHER], tool_choice=choice))
    call = answer.choices[0].message.tool_calls[0]
    same((call.function.name, list(json.loads(call.function.arguments))), ("get_weather", ["city"]))
    history = [*ASK, answer.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    assert litellm.completion(**openai(t, tools=[WEATHER], messages=history, max_tokens=5)).choices


@check("mock_url")
def several_tools_and_reasoning(t: Target) -> None:
    fields = openai(t, model=f"openai/{MOCK_MODEL}", api_base=t.mock_url + "/v1", tools=[WEATHER, TIME], max_tokens=500)
    message = litellm.completion(**fields).choices[0].message
    same([c.function.name for c in message.tool_calls], ["get_weather", "get_time"])
    same(message.reasoning_content.strip(), "the city")
    rebuilt = litellm.stream_chunk_builder(list(litellm.completion(**fields, stream=True)), messages=ASK).choices[0].message
    same([c.function.arguments for c in rebuilt.tool_calls], [c.function.arguments for c in message.tool_calls])
    results = [{"role": "tool", "tool_call_id": c.id, "content": "21"} for c in message.tool_calls]
    same(litellm.completion(**{**fields, "messages": [*ASK, message, *results]}).choices[0].message.content, "It is sunny.")


@check()
def structured_output(t: Target) -> None:
    answer = litellm.completion(**openai(t, response_format=City))
    assert City.model_validate_json(answer.choices[0].message.content)


@check()
def anthropic_provider(t: Target) -> None:
    fields = {**openai(t, max_tokens=8), "model": f"anthropic/{t.model}", "api_base": t.url}
    answer = litellm.completion(**fields)
    assert answer.choices[0].message.content and answer.usage.completion_tokens <= 8
    chunks = list(litellm.completion(**fields, stream=True))
    same("".join(c.choices[0].delta.content or "" for c in chunks if c.choices), answer.choices[0].message.content)
    answer = litellm.completion(**{**fields, "max_tokens": 60}, tools=[WEATHER], tool_choice="required")
    same(answer.choices[0].message.tool_calls[0].function.name, "get_weather")


@check()
def responses(t: Target) -> None:
    fields = openai(t)
    for name in ("messages", "max_tokens", "num_retries", "max_retries"):
        del fields[name]
    answer = litellm.responses(**fields, input="What is the capital of France?", max_output_tokens=8)
    assert answer.output and answer.usage.output_tokens <= 8


@check()
def text_completion(t: Target) -> None:
    fields = openai(t, model=f"text-completion-openai/{t.model}", max_tokens=5)
    del fields["messages"]
    assert litellm.text_completion(**fields, prompt="Once upon a time").choices[0].text


@check()
def embedding(t: Target) -> None:
    answer = litellm.embedding(model=f"openai/{t.embed_model}", api_base=t.embed_url + "/v1", api_key=t.key, input=["hello", "world"])
    same(len(answer.data), 2)
    assert answer.usage.prompt_tokens >= 2 and abs(sum(x * x for x in answer.data[0]["embedding"]) - 1) < 1e-3


@check()
def rerank(t: Target) -> None:
    documents = ["Bread is baked in ovens.", "Paris is the capital of France."]
    for provider, path in (("jina_ai", "/v1/rerank"), ("cohere", "/v2/rerank")):
        answer = litellm.rerank(
            model=f"{provider}/{t.embed_model}",
            api_base=t.embed_url + path,
            api_key=t.key,
            query="capital of France?",
            documents=documents,
            top_n=2,
        )
        same([r["index"] for r in answer.results], [1, 0])


@check()
def errors(t: Target) -> None:
    refused(litellm.AuthenticationError, lambda: litellm.completion(**openai(t, api_key="no")))
    refused(litellm.NotFoundError, lambda: litellm.completion(**openai(t, model="openai/nope")))
    error = refused(litellm.BadRequestError, lambda: litellm.completion(**openai(t, top_p=3)))
    assert "top_p" in str(error)
    long = [{"role": "user", "content": "word " * 50000}]
    refused(litellm.ContextWindowExceededError, lambda: litellm.completion(**openai(t, messages=long)))


@check("limited_url")
def rate_limit(t: Target) -> None:
    fields = openai(t, model=f"openai/{MOCK_MODEL}", api_base=t.limited_url + "/v1", max_tokens=2000)
    stream = litellm.completion(**fields, stream=True)
    next(iter(stream))
    refused(litellm.RateLimitError, lambda: litellm.completion(**fields))
    stream.completion_stream.close()


if __name__ == "__main__":
    main("litellm", "openai")
