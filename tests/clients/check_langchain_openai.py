"""langchain-openai: ChatOpenAI over chat and over responses, bind_tools, with_structured_output, OpenAIEmbeddings."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest import mock

import openai
import tiktoken
from harness import MOCK_MODEL, Target, check, main, refused, same
from langchain_core.messages import AIMessageChunk, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel, Field

ASK = [SystemMessage("Be brief."), HumanMessage("What is the capital of France?")]


@tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


@tool
def get_time() -> str:
    """The time."""
    return "noon"


class City(BaseModel):
    """A city."""

    name: str = Field(max_length=20)
    population: int = Field(ge=0, le=9999)


def chat(t: Target, **options: Any) -> ChatOpenAI:
    fields = {"base_url": t.url + "/v1", "api_key": t.key, "model": t.model, "temperature": 0, "max_tokens": 60, "max_retries": 0}
    return ChatOpenAI(**{**fields, **options})


@check()
def invoke(t: Target) -> None:
    answer = chat(t, max_tokens=12).invoke(ASK)
    assert answer.content and answer.usage_metadata["output_tokens"] <= 12 and answer.response_metadata["model_name"] == t.model
    same(asyncio.run(chat(t, max_tokens=12).ainvoke(ASK)).content, answer.content)


@check()
def stream(t: Target) -> None:
    whole = chat(t, max_tokens=12).invoke(ASK)
    total: AIMessageChunk | None = None
    for chunk in chat(t, max_tokens=12, stream_usage=True).stream(ASK):
        total = chunk if total is None else total + chunk
    same(total.content, whole.content)
    same(total.usage_metadata["output_tokens"], whole.usage_metadata["output_tokens"])


@check()
def batch_and_logprobs(t: Target) -> None:
    answers = chat(t, max_tokens=4).bind(logprobs=True, top_logprobs=2).batch([ASK, ASK])
    same(answers[0].content, answers[1].content)
    assert answers[0].response_metadata["logprobs"]["content"]


@check()
def responses_api(t: Target) -> None:
    model = chat(t, use_responses_api=True, max_tokens=12)
    answer = model.invoke(ASK)
    assert answer.text and answer.usage_metadata["output_tokens"] <= 12
    total: AIMessageChunk | None = None
    for chunk in model.stream(ASK):
        total = chunk if total is None else total + chunk
    same(total.text, answer.text)
    assert isinstance(chat(t, use_responses_api=True).with_structured_output(City).invoke(ASK), City)


@check()
def tools(t: Target) -> None:
    bound = chat(t).bind_tools([get_weather], tool_choice="get_weather", strict=True)
    answer = bound.invoke(ASK)
    call = answer.tool_calls[0]
    same((call["name"], list(call["args"])), ("get_weather", ["city"]))
    total: AIMessageChunk | None = None
    for chunk in bound.stream(ASK):
        total = chunk if total is None else total + chunk
    same(total.tool_calls[0]["args"], call["args"])
    result = get_weather.invoke(call)
    assert isinstance(result, ToolMessage)
    assert chat(t, max_tokens=5).bind_tools([get_weather]).invoke([*ASK, answer, result]) is not None


@check("mock_url")
def several_tools(t: Target) -> None:
    for responses in (False, True):
        model = chat(t, base_url=t.mock_url + "/v1", model=MOCK_MODEL, max_tokens=500, use_responses_api=responses)
        bound = model.bind_tools([get_weather, get_time])
        answer = bound.invoke(ASK)
        same([(c["name"], c["args"]) for c in answer.tool_calls], [("get_weather", {"city": "Oslo"}), ("get_time", {})])
        results = [{"get_weather": get_weather, "get_time": get_time}[c["name"]].invoke(c) for c in answer.tool_calls]
        same(bound.invoke([*ASK, answer, *results]).text.strip(), "It is sunny.")


@check()
def structured_output(t: Target) -> None:
    for method in ("json_schema", "function_calling"):
        assert isinstance(chat(t).with_structured_output(City, method=method).invoke(ASK), City)
    raw = chat(t).with_structured_output(City, method="json_schema", strict=True, include_raw=True).invoke(ASK)
    assert raw["parsing_error"] is None
    last = list(chat(t).with_structured_output(City).stream(ASK))[-1]
    assert isinstance(last, City)


@check()
def text_completion(t: Target) -> None:
    model = OpenAI(base_url=t.url + "/v1", api_key=t.key, model=t.model, temperature=0, max_tokens=5, max_retries=0)
    same("".join(model.stream("Once upon a time")), model.invoke("Once upon a time"))


@check()
def embeddings(t: Target) -> None:
    """With check_embedding_ctx_length, its default, it sends token ids: those of OpenAI's tokenizer, which no other model has."""
    fields: Any = dict(base_url=t.embed_url + "/v1", api_key=t.key, model=t.embed_model, max_retries=0)
    model = OpenAIEmbeddings(**fields, check_embedding_ctx_length=False)
    vectors = model.embed_documents(["hello world", "the sea"])
    one = model.embed_query("hello world")
    assert max(abs(a - b) for a, b in zip(vectors[0], one, strict=True)) < 1e-5
    # Its own tokenizer is a download; one whose tokens are bytes takes the same way.
    encoding = tiktoken.Encoding("bytes", pat_str=r"(?s:.)", mergeable_ranks={bytes([i]): i for i in range(256)}, special_tokens={})
    with mock.patch.object(tiktoken, "encoding_for_model", lambda name: encoding):
        model = OpenAIEmbeddings(**fields, embedding_ctx_length=100)
        vectors = model.embed_documents(["hello world", "the sea " * 40])  # the second in parts, whose mean it takes
    ids = list(b"hello world")
    assert max(abs(a - b) for a, b in zip(vectors[0], model.client.create(model=t.embed_model, input=ids).data[0].embedding)) < 1e-5
    assert abs(sum(x * x for x in vectors[1]) - 1) < 1e-3


@check()
def errors(t: Target) -> None:
    refused(openai.AuthenticationError, lambda: chat(t, api_key="no").invoke(ASK))
    refused(openai.NotFoundError, lambda: chat(t, model="nope").invoke(ASK))
    same(refused(openai.BadRequestError, lambda: chat(t, top_p=3).invoke(ASK)).param, "top_p")
    same(refused(openai.BadRequestError, lambda: list(chat(t, top_p=3).stream(ASK))).param, "top_p")


if __name__ == "__main__":
    main("langchain-openai", "openai")
