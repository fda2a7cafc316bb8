"""/v1/responses with the real client, and every object against the client's own types."""

from __future__ import annotations

import json

import httpx
import openai
import pydantic
import pytest
from openai.types.responses import Response, ResponseStreamEvent

from octavo.server.mock import FakeChatTemplate, MockEngine

MODEL = "mock-model"
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False},
    "strict": True,
}
TIME = {"type": "function", "name": "get_time", "parameters": {}, "strict": False}
CALLS = 'I look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>\n' + (
    '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
)
THOUGHT = "<think>\nthe city\n</think>\n\n"
EVENT = pydantic.TypeAdapter(ResponseStreamEvent)


@pytest.fixture
def say(start_server):
    def start(answer, *, marks="<tool_call><think></think>", **options):
        engine = MockEngine(template=FakeChatTemplate(marks))
        engine.says = answer if callable(answer) else lambda prompt, index, params: answer
        return start_server(engine, **options)

    return start


def events_of(running, **body) -> list[dict]:
    answer = httpx.post(running.url + "/v1/responses", json={"model": MODEL, "stream": True, **body}, timeout=60)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    blocks = answer.text.split("\n\n")
    assert blocks.pop() == ""
    events = []
    for block in blocks:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        EVENT.validate_python(event)
        events.append(event)
    assert [e["sequence_number"] for e in events] == list(range(len(events)))
    return events


def answer_of(running, **body) -> dict:
    answer = httpx.post(running.url + "/v1/responses", json={"model": MODEL, **body}, timeout=60)
    assert answer.status_code == 200, answer.text
    Response.model_validate(answer.json())
    return answer.json()


def without_ids(items: list[dict]) -> list[dict]:
    return [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in items]


def both(running, **body) -> tuple[dict, list[dict]]:
    """Answer and events, which say the same."""
    answer, events = answer_of(running, **body), events_of(running, **body)
    last = events[-1]["response"]
    assert events[-1]["type"] == f"response.{answer['status']}"
    assert without_ids(last["output"]) == without_ids(answer["output"])
    assert last["usage"]["output_tokens"] == answer["usage"]["output_tokens"]
    assert last["incomplete_details"] == answer["incomplete_details"]
    rebuild(events)
    return answer, events


def rebuild(events: list[dict]) -> None:
    """The deltas of every item add up to what its done events, and the last response, say."""
    assert [e["type"] for e in events[:2]] == ["response.created", "response.in_progress"]
    assert events[0]["response"]["status"] == "in_progress" and events[0]["response"]["output"] == []
    items: list[dict] = []
    texts: list[str] = []
    for event in events[2:-1]:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(items) and event["item"]["status"] == "in_progress"
            items.append(event["item"])
            texts.append("")
            continue
        assert event["output_index"] == len(items) - 1
        if "item_id" in event:
            assert event["item_id"] == items[-1]["id"]
        if kind.endswith(".delta"):
            assert event["delta"]
            texts[-1] += event["delta"]
        elif kind in ("output_text.done", "reasoning_text.done", "content_part.done"):
            assert (event["part"]["text"] if "part" in event else event["text"]) == texts[-1]
        elif kind == "function_call_arguments.done":
            assert event["arguments"] == texts[-1]
        elif kind == "output_item.done":
            items[-1] = event["item"]
    assert items == events[-1]["response"]["output"]


def test_text(say):
    running = say("Hello caf\u00e9.")
    answer, events = both(running, input="hi", instructions="Be brief.", metadata={"a": "b"}, store=True, temperature=0.5)
    assert answer["status"] == "completed" and answer["id"].startswith("resp_") and answer["store"] is False
    assert answer["output"][0]["content"][0]["text"] == "Hello caf\u00e9." and answer["metadata"] == {"a": "b"}
    assert answer["temperature"] == 0.5 and answer["instructions"] == "Be brief."
    assert running.engine.last_request["prompt"].startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>")
    kinds = [e["type"].removeprefix("response.") for e in events]
    assert kinds[:5] == ["created", "in_progress", "output_item.added", "content_part.added", "output_text.delta"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]


def test_incomplete(say):
    answer, events = both(say("word " * 50), input="hi", max_output_tokens=20)
    assert answer["status"] == "incomplete" and answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert answer["output"][0]["status"] == "incomplete" and answer["usage"]["output_tokens"] == 20
    assert events[-1]["type"] == "response.incomplete"


def test_calls_and_reasoning(say):
    running = say(THOUGHT + CALLS)
    answer, events = both(running, input="weather?", tools=[WEATHER, TIME])
    assert [item["type"] for item in answer["output"]] == ["reasoning", "message", "function_call", "function_call"]
    reasoning, message, first, second = answer["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "the city"}] and reasoning["summary"] == []
    assert message["content"][0]["text"].strip() == "I look."
    assert (first["name"], json.loads(first["arguments"])) == ("get_weather", {"city": "Oslo"}) and first["call_id"]
    assert (second["name"], second["arguments"]) == ("get_time", "{}")
    assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    assert sum(e["type"] == "response.function_call_arguments.delta" for e in events) > 3
    assert "tools=" in running.engine.last_request["prompt"]


def test_cut_call(say):
    answer, _ = both(say(CALLS.partition("\n")[2]), input="weather?", tools=[WEATHER], max_output_tokens=60)
    assert answer["status"] == "incomplete" and answer["output"][-1]["status"] == "incomplete"


def test_broken_call(say):
    text = '<tool_call>\n{"name": "get_weather", "arguments": {"city": oops}}\n</tool_call>'
    running = say(text)
    answer, events = answer_of(running, input="w", tools=[WEATHER]), events_of(running, input="w", tools=[WEATHER])
    rebuild(events)
    assert [item["type"] for item in answer["output"]] == ["message"] and answer["output"][0]["content"][0]["text"] == text
    shown, said = events[-1]["response"]["output"]  # the stream had shown a call by then
    assert shown["status"] == "incomplete" and said["content"][0]["text"] == text


@pytest.mark.parametrize(
    ("choice", "mode"),
    [
        ("required", None),
        ({"type": "function", "name": "get_weather"}, "get_weather"),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get_weather"}]}, None),
    ],
)
def test_forced(say, choice, mode):
    call = '{"city": "Oslo"}' if mode else '[{"name": "get_weather", "parameters": {"city": "Oslo"}}]'
    running = say(lambda prompt, index, params: call if params.structured_outputs else "no", marks="<tool_call>")
    answer, _ = both(running, input="w", tools=[WEATHER, TIME], tool_choice=choice)
    assert [(i["name"], i["arguments"]) for i in answer["output"]] == [("get_weather", '{"city": "Oslo"}')]


def test_conversation(say):
    """What a client that keeps the conversation itself sends back: the output's own items, and the results."""
    running = say(THOUGHT + CALLS)
    first = answer_of(running, input="weather?", tools=[WEATHER, TIME])
    calls = [item for item in first["output"] if item["type"] == "function_call"]
    items = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "weather?"}]},
        *first["output"],
        {"type": "function_call_output", "call_id": calls[0]["call_id"], "output": "sun"},
        {"type": "function_call_output", "call_id": calls[1]["call_id"], "output": [{"type": "input_text", "text": "noon"}]},
        {"role": "user", "content": "and?"},
    ]
    answer_of(running, input=items, tools=[WEATHER, TIME])
    prompt = running.engine.last_request["prompt"]
    assert "<|im_start|>system\nBe brief.<|im_end|>" in prompt
    assert (
        '<|im_start|>assistant\nI look.<tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}}</tool_call>'
        '<tool_call>{"name": "get_time", "arguments": {}}</tool_call><|im_end|>\n'
        "<|im_start|>tool\nsun<|im_end|>\n<|im_start|>tool\nnoon<|im_end|>\n<|im_start|>user\nand?<|im_end|>"
    ) in prompt.replace("I look.\n", "I look.")


def test_logprobs(say):
    running = say(THOUGHT + "It rains.")
    answer, events = both(running, input="w", include=["message.output_text.logprobs"], top_logprobs=2)
    part = answer["output"][1]["content"][0]
    assert "".join(e["token"] for e in part["logprobs"]).strip() == "It rains." and len(part["logprobs"][0]["top_logprobs"]) == 2
    sent = [e for event in events if event["type"] == "response.output_text.delta" for e in event["logprobs"]]
    assert sent == part["logprobs"]


def test_formats(say):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
    running = say(lambda prompt, index, params: '{"a": 1}' if params.structured_outputs else "no", marks="<tool_call>")
    answer, _ = both(running, input="w", text={"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}})
    assert answer["output"][0]["content"][0]["text"] == '{"a": 1}' and answer["text"]["format"]["name"] == "x"
    answer, _ = both(running, input="w", text={"format": {"type": "json_object"}})
    assert answer["output"][0]["content"][0]["text"] == '{"a": 1}'


REFUSALS = [
    ({"previous_response_id": "resp_1"}, "previous_response_id", "stores no responses"),
    ({"conversation": "conv_1"}, "conversation", "stores no conversations"),
    ({"background": True}, "background", "stream"),
    ({"truncation": "auto"}, "truncation", "disabled"),
    ({"include": ["file_search_call.results"]}, "include", "not supported"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "functions only"),
    ({"tools": [{"type": "function"}]}, "tools[0]", "name"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice", "not among"),
    ({"tool_choice": {"type": "web_search_preview"}}, "tool_choice", "functions only"),
    ({"input": []}, "input", "empty"),
    ({"input": None}, "input", "empty"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]", "stores no items"),
    ({"input": [{"type": "computer_call"}]}, "input[0].type", "not supported"),
    ({"input": [{"role": "king", "content": "x"}]}, "input[0].role", "king"),
    ({"input": [{"role": "user", "content": 3}]}, "input[0].content", "string"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0].type", "text only"),
    ({"input": [{"role": "user", "content": "x", "mood": 1}]}, "input[0].mood", "Unknown"),
    ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, "input[0].call_id", "no function_call"),
    ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{"}]}, None, "not valid JSON"),
    ({"max_output_tokens": -1}, "max_output_tokens", "at least 0"),
    ({"top_logprobs": 3}, "top_logprobs", "include"),
    ({"text": {"verbosity": "low"}}, "text.verbosity", "not supported"),
    ({"text": {"format": {"type": "yaml"}}}, "text.format", ""),
    ({"nonsense": 1}, "nonsense", "Unknown"),
    ({"model": "gpt-4"}, "model", "does not exist"),
]


@pytest.mark.parametrize(("fields", "param", "words"), REFUSALS, ids=lambda v: json.dumps(v)[:50] if isinstance(v, dict) else None)
@pytest.mark.parametrize("stream", [False, True])
def test_refusals(http, fields, param, words, stream):
    answer = http.post("/v1/responses", json={"model": MODEL, "input": "x", "stream": stream, **fields})
    error = answer.json()["error"]
    assert answer.status_code == (404 if param == "model" else 400) and words in error["message"], error
    if param is not None:
        assert error["param"].startswith(param), error


def test_a_stream_that_fails(start_server):
    engine = MockEngine(tick_s=0.01, length=500)
    running = start_server(engine)
    engine.fail_after = 5
    events = events_of(running, input="x")
    assert events[-1]["type"] == "response.failed"
    response = events[-1]["response"]
    assert response["status"] == "failed" and response["error"]["code"] == "server_error" and response["error"]["message"]
    assert response["output"][0]["status"] == "incomplete"


# -- the real client -----------------------------------------------------------------------------------------------------


def test_openai_client(say):
    running = say(THOUGHT + CALLS)
    with openai.OpenAI(base_url=running.url + "/v1", api_key="none", max_retries=0) as client:
        answer = client.responses.create(model=MODEL, input="weather?", tools=[WEATHER, TIME])
        assert answer.output_text.strip() == "I look." and answer.output[2].name == "get_weather"
        follow_up = [
            {"role": "user", "content": "weather?"},
            *answer.output,
            {"type": "function_call_output", "call_id": answer.output[2].call_id, "output": "sun"},
        ]
        client.responses.create(model=MODEL, input=follow_up, tools=[WEATHER, TIME])
        with client.responses.stream(model=MODEL, input="weather?", tools=[WEATHER, TIME]) as stream:
            kinds = [event.type for event in stream]
            final = stream.get_final_response()
        assert kinds[-1] == "response.completed" and final.output[2].arguments == '{"city": "Oslo"}'
        with pytest.raises(openai.BadRequestError, match="stores no responses"):
            client.responses.create(model=MODEL, input="x", previous_response_id="resp_1")


async def test_openai_async_client(say):
    async with openai.AsyncOpenAI(base_url=say("Hello there.").url + "/v1", api_key="none") as client:
        text = ""
        async for event in await client.responses.create(model=MODEL, input="hi", stream=True):
            text += event.delta if event.type == "response.output_text.delta" else ""
        assert text == "Hello there." == (await client.responses.create(model=MODEL, input="hi")).output_text


def test_openai_client_parses(say):
    class Answer(pydantic.BaseModel):
        a: int

    running = say(lambda prompt, index, params: '{"a": 1}' if params.structured_outputs else "no", marks="<tool_call>")
    with openai.OpenAI(base_url=running.url + "/v1", api_key="none", max_retries=0) as client:
        assert client.responses.parse(model=MODEL, input="x", text_format=Answer).output_parsed == Answer(a=1)
