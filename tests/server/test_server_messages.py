"""/v1/messages with the real client, and every object against the client's own types."""

from __future__ import annotations

import json

import anthropic
import httpx
import pydantic
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from hypothesis import given
from hypothesis import strategies as st

from octavo.server.messages_output import whole_part
from octavo.server.mock import FakeChatTemplate, MockEngine

MODEL = "mock-model"
HELLO = [{"role": "user", "content": "weather?"}]
WEATHER = {
    "name": "get_weather",
    "description": "The weather.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
TIME = {"name": "get_time", "input_schema": {"type": "object"}}
CALLS = 'I look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>\n' + (
    '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
)
THOUGHT = "<think>\nthe city\n</think>\n\n"
EVENT = pydantic.TypeAdapter(RawMessageStreamEvent)


@pytest.fixture
def say(start_server):
    def start(answer, *, marks="<tool_call><think></think>", **options):
        engine = MockEngine(template=FakeChatTemplate(marks))
        engine.says = answer if callable(answer) else lambda prompt, index, params: answer
        return start_server(engine, **options)

    return start


def post(running, path="/v1/messages", **body) -> dict:
    answer = httpx.post(running.url + path, json={"model": MODEL, "max_tokens": 300, "messages": HELLO, **body}, timeout=60)
    assert answer.status_code == 200, answer.text
    Message.model_validate(answer.json())
    return answer.json()


def events_of(running, **body) -> list[dict]:
    body = {"model": MODEL, "max_tokens": 300, "messages": HELLO, "stream": True, **body}
    answer = httpx.post(running.url + "/v1/messages", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    blocks = answer.text.split("\n\n")
    assert blocks.pop() == ""
    events = []
    for block in blocks:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        if event["type"] not in ("ping", "error"):
            EVENT.validate_python(event)
        events.append(event)
    return events


def rebuilt(events: list[dict]) -> dict:
    """The message that a stream adds up to, by Anthropic's rules."""
    assert events[0]["type"] == "message_start" and events[-1]["type"] == "message_stop" and events[-2]["type"] == "message_delta"
    message = events[0]["message"]
    assert message["content"] == [] and message["stop_reason"] is None
    blocks, opened, partial = message["content"], False, ""
    for event in events[1:-2]:
        if event["type"] == "content_block_start":
            assert not opened and event["index"] == len(blocks)
            opened, partial = True, ""
            blocks.append(event["content_block"])
        elif event["type"] == "content_block_delta":
            assert opened and event["index"] == len(blocks) - 1
            delta = event["delta"]
            if delta["type"] == "input_json_delta":
                partial += delta["partial_json"]
            else:
                key = delta["type"].removesuffix("_delta")
                blocks[-1][key] += delta[key]
        elif event["type"] == "content_block_stop":
            assert opened and event["index"] == len(blocks) - 1
            opened = False
            if blocks[-1]["type"] == "tool_use":
                blocks[-1]["input"] = whole_part(partial)
    assert not opened
    return {**message, **events[-2]["delta"], "usage": {**message["usage"], **events[-2]["usage"]}}


def both(running, **body) -> dict:
    """The message, which the stream adds up to as well."""
    whole, events = post(running, **body), events_of(running, **body)
    stream = rebuilt(events)

    def comparable(message: dict) -> dict:
        blocks = [{k: v for k, v in block.items() if k != "id"} for block in message["content"]]
        return {**message, "id": None, "content": blocks, "usage": message["usage"]["output_tokens"]}

    assert comparable(stream) == comparable(whole)
    assert whole["usage"]["input_tokens"] + whole["usage"]["cache_read_input_tokens"] == (
        stream["usage"]["input_tokens"] + stream["usage"]["cache_read_input_tokens"]
    )
    return whole


def test_text(say):
    running = say("Hello caf\u00e9.")
    message = both(running, system="Be brief.", temperature=0.5, top_k=5, metadata={"user_id": "u"})
    assert message["content"] == [{"type": "text", "text": "Hello caf\u00e9."}] and message["stop_reason"] == "end_turn"
    assert message["id"].startswith("msg_") and message["role"] == "assistant" and message["stop_sequence"] is None
    assert running.engine.last_params.top_k == 5
    assert running.engine.last_request["prompt"].startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nweather?")


def test_ends(say):
    running = say("one two three four")
    assert both(running, max_tokens=5)["stop_reason"] == "max_tokens"
    stopped = both(running, stop_sequences=["three"])
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "three")
    assert stopped["content"][0]["text"] == "one two "


def test_tools(say):
    running = say(CALLS, marks="<tool_call>")
    message = both(running, tools=[WEATHER, TIME])
    text, first, second = message["content"]
    assert text["text"].strip() == "I look." and message["stop_reason"] == "tool_use"
    assert (first["type"], first["name"], first["input"]) == ("tool_use", "get_weather", {"city": "Oslo"}) and first["id"]
    assert (second["name"], second["input"]) == ("get_time", {})
    single = both(running, tools=[WEATHER, TIME], tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert [block["type"] for block in single["content"]] == ["text", "tool_use"]
    none = both(running, tools=[WEATHER, TIME], tool_choice={"type": "none"})
    assert [block["type"] for block in none["content"]] == ["text"]


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_forced(say, choice):
    call = '{"city": "Oslo"}' if choice["type"] == "tool" else '[{"name": "get_weather", "parameters": {"city": "Oslo"}}]'
    running = say(lambda prompt, index, params: call if params.structured_outputs else "no", marks="<tool_call>")
    message = both(running, tools=[WEATHER, TIME], tool_choice=choice)
    assert [(b["name"], b["input"]) for b in message["content"]] == [("get_weather", {"city": "Oslo"})]


def test_cut_and_broken_calls(say):
    running = say(CALLS.partition("\n")[2])
    message = both(running, tools=[WEATHER], max_tokens=60)
    assert message["stop_reason"] == "max_tokens" and message["content"][0]["input"] == {}
    text = '<tool_call>\n{"name": "get_weather", "arguments": {"a": 1, "city": oops}}\n</tool_call>'
    running = say(text)
    assert post(running, tools=[WEATHER])["content"] == [{"type": "text", "text": text}]
    stream = rebuilt(events_of(running, tools=[WEATHER]))
    assert stream["content"][0]["input"] == {"a": 1} and stream["content"][1]["text"] == text and stream["stop_reason"] == "end_turn"


def test_thinking(say):
    running = say(THOUGHT + "It rains.")
    message = both(running, thinking={"type": "enabled", "budget_tokens": 100})
    assert message["content"][0] == {"type": "thinking", "thinking": "the city", "signature": "octavo"}
    assert message["content"][1]["text"] == "It rains."
    for off in ({}, {"thinking": {"type": "disabled"}}, {"thinking": {"type": "adaptive", "display": "omitted"}}):
        assert [b["type"] for b in both(running, **off)["content"]] == ["text"]
    thinker = say(lambda p, i, params: "Done." if p.endswith("</think>\n\n") else "<think>\n" + "word " * 90 + "\n</think>\n\nFree.")
    message = both(thinker, thinking={"type": "enabled", "budget_tokens": 9})
    assert message["content"][1]["text"] == "Done."
    plain = say("Hello.", marks="")
    assert both(plain, thinking={"type": "enabled", "budget_tokens": 1024})["content"][0]["text"] == "Hello."
    qwen = say("Hello.", marks="<think>enable_thinking")
    both(qwen)
    assert "[enable_thinking=False]" in qwen.engine.last_request["prompt"]
    both(qwen, thinking={"type": "adaptive"})
    assert "[enable_thinking=True]" in qwen.engine.last_request["prompt"]


def test_conversation(say):
    """What a client sends back: the message's own blocks, and the results."""
    running = say(THOUGHT + CALLS)
    first = post(running, tools=[WEATHER, TIME], thinking={"type": "adaptive"})
    uses = [block["id"] for block in first["content"] if block["type"] == "tool_use"]
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "weather?", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": first["content"]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": uses[0], "content": [{"type": "text", "text": "sun"}]},
                {"type": "tool_result", "tool_use_id": uses[1], "content": "no clock", "is_error": True},
                {"type": "text", "text": "and?"},
            ],
        },
    ]
    post(running, messages=messages, tools=[WEATHER, TIME], system=[{"type": "text", "text": "Be brief."}])
    prompt = running.engine.last_request["prompt"]
    assert (
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}}</tool_call>'
        '<tool_call>{"name": "get_time", "arguments": {}}</tool_call><|im_end|>\n'
        "<|im_start|>tool\nsun<|im_end|>\n<|im_start|>tool\nError: no clock<|im_end|>\n<|im_start|>user\nand?<|im_end|>"
    ) in prompt


def test_prefill(say):
    running = say(" a time.")
    message = both(running, messages=[*HELLO, {"role": "assistant", "content": "Once upon"}])
    assert message["content"][0]["text"] == " a time." and running.engine.last_request["prompt"].endswith("assistant\nOnce upon")
    thinker = say(" a time.", marks="<think></think>", reasoning_parser="deepseek_r1")  # would think from the start
    message = both(thinker, messages=[*HELLO, {"role": "assistant", "content": "Once upon"}])
    assert message["content"][0] == {"type": "text", "text": " a time."}


def test_output_format(say):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
    running = say(lambda prompt, index, params: '{"a": 1}' if params.structured_outputs else "no", marks="<tool_call>")
    message = both(running, output_config={"format": {"type": "json_schema", "schema": schema}})
    assert message["content"][0]["text"] == '{"a": 1}'


def test_count_tokens(say):
    running = say("x")
    path = running.url + "/v1/messages/count_tokens"
    count = httpx.post(path, json={"model": MODEL, "messages": HELLO}).json()
    message = post(running)
    assert count == {"input_tokens": message["usage"]["input_tokens"] + message["usage"]["cache_read_input_tokens"]}
    more = httpx.post(path, json={"model": MODEL, "messages": HELLO, "tools": [WEATHER], "system": "s"}).json()
    assert more["input_tokens"] > count["input_tokens"] + 50
    assert httpx.post(path, json={"model": MODEL}).json()["type"] == "error"


def user(*blocks) -> dict:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


REFUSALS = [
    ({"max_tokens": None}, 400, "max_tokens"),
    ({"max_tokens": -1}, 400, "max_tokens"),
    ({"messages": []}, 400, "empty"),
    ({"messages": [{"role": "king", "content": "x"}]}, 400, "king"),
    (user({"type": "image", "source": {}}), 400, "'image'"),
    (user({"type": "tool_result", "tool_use_id": "x", "content": "y"}), 400, "no tool_use"),
    (user({"type": "text", "text": "x", "mood": 1}), 400, "mood"),
    (user({"type": "text"}), 400, "string"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, 400, "web_search"),
    ({"tools": [{"name": "f"}]}, 400, "input_schema"),
    ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "x"}}, 400, "not among"),
    ({"tool_choice": {"type": "some"}}, 400, "auto, any"),
    ({"thinking": {"type": "enabled"}}, 400, "budget_tokens"),
    ({"thinking": {"type": "deep"}}, 400, "adaptive"),
    ({"mcp_servers": [{}]}, 400, "mcp_servers"),
    ({"temperature": -1}, 400, "temperature"),
    ({"nonsense": 1}, 400, "nonsense"),
    ({"model": "claude"}, 404, "does not exist"),
]


@pytest.mark.parametrize(("fields", "status", "words"), REFUSALS, ids=lambda v: json.dumps(v)[:50] if isinstance(v, dict) else None)
@pytest.mark.parametrize("stream", [False, True])
def test_refusals(http, fields, status, words, stream):
    answer = http.post("/v1/messages", json={"model": MODEL, "max_tokens": 5, "messages": HELLO, "stream": stream, **fields})
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert body["type"] == "error" and words in body["error"]["message"], body
    assert body["error"]["type"] == {400: "invalid_request_error", 404: "not_found_error"}[status]


def test_a_stream_that_fails(start_server):
    engine = MockEngine(tick_s=0.01, length=500)
    running = start_server(engine)
    engine.fail_after = 5
    events = events_of(running)
    assert events[-1]["type"] == "error" and events[-1]["error"]["type"] == "overloaded_error"


def test_keys(start_server):
    running = start_server(api_key=("secret",))
    body = {"model": MODEL, "max_tokens": 5, "messages": HELLO}

    def status(headers: list[tuple[str, str]], path="/v1/messages"):
        return httpx.post(running.url + path, json=body, headers=headers)

    for good in ([("x-api-key", "secret")], [("Authorization", "Bearer secret")], [("x-api-key", "secret"), ("Authorization", "Bearer x")]):
        assert status(good).status_code == 200
    wrong: list[list[tuple[str, str]]] = [
        [],
        [("x-api-key", "wrong")],
        [("x-api-key", "")],
        [("x-api-key", "secret"), ("x-api-key", "secret")],
        [("Authorization", "Basic secret")],
        [("Authorization", "secret")],
    ]
    for headers in wrong:
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            answer = status(headers, path)
            assert answer.status_code == 401 and answer.json()["error"]["type"] == "authentication_error"
    assert httpx.get(running.url + "/v1/models", headers={"x-api-key": "secret"}).status_code == 200


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
)


@given(st.dictionaries(st.text(max_size=4), json_values, max_size=4), st.data())
def test_whole_part(value, data):
    """Of any cut of an object the members that are whole, with what is whole of the one that is cut."""
    text = json.dumps(value, ensure_ascii=False)
    assert whole_part(text) == value
    part = whole_part(text[: data.draw(st.integers(0, len(text)))])
    names = list(value)
    assert list(part) == names[: len(part)]
    assert all(part[name] == value[name] for name in list(part)[:-1])


# -- the real client -----------------------------------------------------------------------------------------------------


def test_anthropic_client(say):
    running = say(THOUGHT + CALLS)
    with anthropic.Anthropic(base_url=running.url, api_key="none", max_retries=0) as client:
        fields = {"model": MODEL, "max_tokens": 200, "messages": HELLO, "tools": [WEATHER, TIME], "thinking": {"type": "adaptive"}}
        message = client.messages.create(**fields)
        assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
        assert message.content[2].input == {"city": "Oslo"} and message.stop_reason == "tool_use"
        with client.messages.stream(**fields) as stream:
            text = "".join(stream.text_stream)
            final = stream.get_final_message()
        assert text.strip() == "I look." and final.content[2].input == {"city": "Oslo"} and final.content[0].thinking == "the city"
        result = {"type": "tool_result", "tool_use_id": message.content[2].id, "content": "sun"}
        second = {"type": "tool_result", "tool_use_id": message.content[3].id, "content": "noon"}
        follow_up = [*HELLO, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result, second]}]
        client.messages.create(**{**fields, "messages": follow_up})
        assert client.messages.count_tokens(model=MODEL, messages=HELLO).input_tokens > 5
        with pytest.raises(anthropic.NotFoundError, match="does not exist"):
            client.messages.create(**{**fields, "model": "claude"})
        with pytest.raises(anthropic.BadRequestError, match="input_schema"):
            client.messages.create(**{**fields, "tools": [{"name": "f"}]})


async def test_anthropic_async_client(say):
    async with anthropic.AsyncAnthropic(base_url=say("Hello there.").url, api_key="none") as client:
        fields = {"model": MODEL, "max_tokens": 50, "messages": HELLO}
        text = ""
        async for event in await client.messages.create(**fields, stream=True):
            text += event.delta.text if event.type == "content_block_delta" else ""
        assert text == "Hello there." == (await client.messages.create(**fields)).content[0].text
