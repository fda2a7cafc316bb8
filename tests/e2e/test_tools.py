"""Tools and reasoning with the demo model through a real server: forced calls, bounded thinking, and all three APIs."""

from __future__ import annotations

import json
from collections.abc import Iterator

import anthropic
import httpx
import jsonschema
import openai
import pytest

from tests.e2e.server import RunningServer

MODEL = "SmolLM2-135M-Instruct"
CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 40}}, "required": ["city"], "additionalProperties": False}
WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "The weather of a city.", "parameters": CITY}}
TIME = {"type": "function", "function": {"name": "get_time", "description": "The time."}}
SAY = {
    "type": "function",
    "function": {"name": "say", "parameters": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}},
}


def is_valid(schema: dict, value: object) -> bool:
    return jsonschema.Draft202012Validator(schema).is_valid(value)


ASK = [{"role": "user", "content": "What is the weather in Oslo?"}]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    running = RunningServer("--max-model-len", "2048", "--served-model-name", MODEL)
    yield running
    assert running.healthy() and running.metric("vllm:num_requests_running") == 0
    assert running.stop() == 0


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def ask(client: openai.OpenAI, **fields) -> tuple[str, list[tuple[str, str]], str | None]:
    """(finish reason, calls, content) of an answer, which its stream equals."""
    fields = {"model": MODEL, "messages": ASK, "temperature": 0, "max_tokens": 64, **fields}
    choice = client.chat.completions.create(**fields).choices[0]
    whole = [(c.function.name, c.function.arguments) for c in choice.message.tool_calls or ()]
    calls: list[list[str]] = []
    content, reason = "", None
    for chunk in client.chat.completions.create(**fields, stream=True):
        content += chunk.choices[0].delta.content or ""
        reason = chunk.choices[0].finish_reason or reason
        for call in chunk.choices[0].delta.tool_calls or ():
            if call.index == len(calls):
                calls.append([call.function.name, ""])
            calls[call.index][1] += call.function.arguments
    assert [tuple(call) for call in calls] == whole and reason == choice.finish_reason
    assert (content or None) == (choice.message.content or None)
    return choice.finish_reason, whole, choice.message.content


@pytest.mark.parametrize("parallel", [False, True])
def test_case_8_a_required_call_that_is_cut(client, parallel):
    long = [{"role": "user", "content": "Say a very long text about the sea, many sentences."}]
    reason, calls, content = ask(client, messages=long, tools=[SAY], tool_choice="required", parallel_tool_calls=parallel, max_tokens=16)
    assert reason == "length" and content is None and calls and calls[0][0] == "say"


@pytest.mark.parametrize("tool", [TIME, {"type": "function", "function": {"name": "get_time", "parameters": {}}}])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_time"}}])
def test_case_9_a_forced_call_without_parameters(client, tool, choice):
    reason, calls, _ = ask(client, tools=[tool], tool_choice=choice, parallel_tool_calls=False)
    assert reason == "tool_calls" and len(calls) == 1 and json.loads(calls[0][1]) == {}


def test_forced_calls_keep_to_the_schema(client):
    for temperature, seed in ((0, 1), (1.5, 2)):
        fields = {"tools": [WEATHER, TIME], "temperature": temperature, "seed": seed, "max_tokens": 60}
        reason, calls, _ = ask(client, tool_choice={"type": "function", "function": {"name": "get_weather"}}, **fields)
        if reason == "tool_calls":
            assert is_valid(CITY, json.loads(calls[0][1]))
        reason, calls, _ = ask(client, tool_choice="required", parallel_tool_calls=False, **fields)
        assert calls and calls[0][0] in ("get_weather", "get_time")
        if reason == "tool_calls":
            schema = CITY if calls[0][0] == "get_weather" else {"const": {}}
            assert is_valid(schema, json.loads(calls[0][1]))


def test_auto_and_logprobs(client):
    fields = {"model": MODEL, "messages": ASK, "temperature": 0, "max_tokens": 12, "tools": [WEATHER], "logprobs": True}
    answer = client.chat.completions.create(**fields)
    entries = answer.choices[0].logprobs.content
    assert len(entries) == answer.usage.completion_tokens
    streamed = []
    for chunk in client.chat.completions.create(**fields, stream=True):
        if chunk.choices[0].logprobs:
            streamed += chunk.choices[0].logprobs.content
    assert [e.token for e in streamed] == [e.token for e in entries]


def test_responses_and_messages(client, server):
    tool = {"type": "function", "name": "get_weather", "description": "The weather of a city.", "parameters": CITY, "strict": True}
    answer = client.responses.create(model=MODEL, input=ASK[0]["content"], tools=[tool], tool_choice="required", temperature=0)
    calls = [item for item in answer.output if item.type == "function_call"]
    assert calls and is_valid(CITY, json.loads(calls[0].arguments))
    with client.responses.stream(model=MODEL, input="Say hello.", max_output_tokens=12, temperature=0) as stream:
        kinds = [event.type for event in stream]
    assert kinds[-1] in ("response.completed", "response.incomplete")
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as claude:
        tools = [{"name": "get_weather", "description": "The weather of a city.", "input_schema": CITY}]
        fields = {"model": MODEL, "max_tokens": 60, "messages": ASK, "extra_body": {"temperature": 0}}  # newer clients have no such field
        message = claude.messages.create(**fields, tools=tools, tool_choice={"type": "tool", "name": "get_weather"})
        assert message.stop_reason == "tool_use" and is_valid(CITY, message.content[0].input)
        with claude.messages.stream(**{**fields, "max_tokens": 16}) as stream:
            text = "".join(stream.text_stream)
        assert text and text == claude.messages.create(**{**fields, "max_tokens": 16}).content[0].text


def test_thinking_is_bounded():
    """The model is said to think from the start, as DeepSeek's do; its thinking ends after so many tokens, and it answers."""
    running = RunningServer("--max-model-len", "1024", "--reasoning-parser", "deepseek_r1", "--served-model-name", MODEL)
    try:
        body = {"messages": ASK, "temperature": 0, "max_tokens": 60, "thinking_token_budget": 12, "return_token_ids": True}
        answer = httpx.post(running.url + "/v1/chat/completions", json=body, timeout=60).json()
        choice = answer["choices"][0]
        assert choice["message"]["reasoning_content"] and choice["message"]["content"]
        assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 12
        assert answer["usage"]["completion_tokens"] == len(choice["token_ids"]) <= 60
        free = httpx.post(running.url + "/v1/chat/completions", json={**body, "thinking_token_budget": None}, timeout=60).json()
        assert free["choices"][0]["token_ids"][:12] == choice["token_ids"][:12]  # until then nothing is changed
        assert free["choices"][0]["message"]["reasoning"].startswith(choice["message"]["reasoning"])
        forced = {**body, "tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "get_weather"}}}
        call = httpx.post(running.url + "/v1/chat/completions", json=forced, timeout=60).json()["choices"][0]
        assert call["message"]["reasoning"] and call["message"]["tool_calls"][0]["function"]["arguments"].lstrip().startswith("{")
    finally:
        assert running.stop() == 0
