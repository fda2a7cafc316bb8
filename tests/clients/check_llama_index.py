"""llama-index: OpenAILike for chat, completion, streams, tools and structured output; OpenAILikeEmbedding."""

from __future__ import annotations

import asyncio
import os
from typing import Any

os.environ.setdefault("TIKTOKEN_CACHE_DIR", "")
import openai
from harness import MOCK_MODEL, Target, check, main, refused, same
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, Field

ASK = [ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content="What is the capital of France?")]


class City(BaseModel):
    """A city."""

    name: str = Field(max_length=20)
    population: int = Field(ge=0, le=9999)


def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


def get_time() -> str:
    """The time."""
    return "noon"


WEATHER, TIME = FunctionTool.from_defaults(get_weather), FunctionTool.from_defaults(get_time)


def llm(t: Target, **options: Any) -> OpenAILike:
    fields = dict(model=t.model, api_base=t.url + "/v1", api_key=t.key, is_chat_model=True, is_function_calling_model=True)
    return OpenAILike(**{**fields, "temperature": 0, "max_tokens": 60, "max_retries": 0, "context_window": 2048, **options})


@check()
def chat(t: Target) -> None:
    answer = llm(t, max_tokens=12).chat(ASK)
    assert answer.message.content and answer.raw.usage.completion_tokens <= 12
    same(list(llm(t, max_tokens=12).stream_chat(ASK))[-1].message.content, answer.message.content)
    same(asyncio.run(llm(t, max_tokens=12).achat(ASK)).message.content, answer.message.content)


@check()
def complete(t: Target) -> None:
    for is_chat in (False, True):
        model = llm(t, is_chat_model=is_chat, max_tokens=6)
        same(list(model.stream_complete("Once upon a time"))[-1].text, model.complete("Once upon a time").text)


@check()
def forced_tool(t: Target) -> None:
    model = llm(t)
    answer = model.chat_with_tools([WEATHER], chat_history=ASK, tool_required=True)
    call = model.get_tool_calls_from_response(answer)[0]
    same((call.tool_name, list(call.tool_kwargs)), ("get_weather", ["city"]))
    last = list(model.stream_chat_with_tools([WEATHER], chat_history=ASK, tool_required=True))[-1]
    same(model.get_tool_calls_from_response(last)[0].tool_kwargs, call.tool_kwargs)


@check("mock_url")
def several_tools(t: Target) -> None:
    model = llm(t, model=MOCK_MODEL, api_base=t.mock_url + "/v1", max_tokens=500)
    answer = model.chat_with_tools([WEATHER, TIME], chat_history=ASK, allow_parallel_tool_calls=True)
    calls = model.get_tool_calls_from_response(answer)
    same([(c.tool_name, c.tool_kwargs) for c in calls], [("get_weather", {"city": "Oslo"}), ("get_time", {})])
    results = [ChatMessage(role="tool", content="21", additional_kwargs={"tool_call_id": c.tool_id}) for c in calls]
    same(model.chat([*ASK, answer.message, *results]).message.content, "It is sunny.")


@check()
def structured_output(t: Target) -> None:
    assert isinstance(llm(t).as_structured_llm(City).chat(ASK).raw, City)  # by a forced tool
    formatted = llm(t, should_use_structured_outputs=True)
    assert isinstance(formatted.as_structured_llm(City).chat(ASK).raw, City)


@check()
def embeddings(t: Target) -> None:
    model = OpenAILikeEmbedding(model_name=t.embed_model, api_base=t.embed_url + "/v1", api_key=t.key, max_retries=0)
    many = model.get_text_embedding_batch(["hello", "the sea"])
    assert max(abs(a - b) for a, b in zip(many[0], model.get_text_embedding("hello"), strict=True)) < 1e-5
    assert asyncio.run(model.aget_query_embedding("hello"))


@check()
def errors(t: Target) -> None:
    refused(openai.AuthenticationError, lambda: llm(t, api_key="no").chat(ASK))
    refused(openai.NotFoundError, lambda: llm(t, model="nope").chat(ASK))
    same(refused(openai.BadRequestError, lambda: llm(t, additional_kwargs={"top_p": 3}).chat(ASK)).param, "top_p")


if __name__ == "__main__":
    main("llama-index-llms-openai-like", "llama-index-embeddings-openai-like", "llama-index-core")
