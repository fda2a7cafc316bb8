from __future__ import annotations

import asyncio
import json

import httpx
import openai
import pytest

MODEL = "mock-model"
HELLO = [{"role": "user", "content": "hello"}]


def chat(client: openai.OpenAI, **fields):
    return client.chat.completions.create(**{"model": MODEL, "messages": HELLO, "max_tokens": 12, **fields})


def events(http: httpx.Client, path: str, **body) -> list[dict | str]:
    """The data of all events, decoded but for [DONE]."""
    answer = http.post(path, json={"stream": True, **body})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    frames = answer.text.split("\n\n")
    assert frames.pop() == ""
    assert all(f.startswith("data: ") and "\n" not in f for f in frames)
    return [f[6:] if f == "data: [DONE]" else json.loads(f[6:]) for f in frames]


def test_answer(client):
    answer = chat(client)
    choice = answer.choices[0]
    assert answer.object == "chat.completion" and answer.model == MODEL and answer.id.startswith("chatcmpl-")
    assert choice.message.role == "assistant" and choice.message.content and choice.finish_reason == "length"
    assert choice.logprobs is None
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12


def test_stop_by_eos_and_default_length(client):
    answer = client.chat.completions.create(model=MODEL, messages=HELLO)
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == 25


def test_stream_equals_answer(client):
    chunks = list(chat(client, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[0].choices[0].delta.content == ""
    texts = [c.choices[0].delta.content for c in chunks[1:-1]]
    assert all(texts)
    assert chunks[-1].choices[0].delta.content is None and chunks[-1].choices[0].finish_reason == "length"
    assert "".join(texts) == chat(client).choices[0].message.content
    assert len({c.id for c in chunks}) == 1
    assert all(c.choices[0].finish_reason is None for c in chunks[:-1])


async def test_async_client(server):
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none") as client:
        stream = await client.chat.completions.create(model=MODEL, messages=HELLO, stream=True, max_tokens=5)
        text = "".join([c.choices[0].delta.content or "" async for c in stream])
        answers = await asyncio.gather(*(client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=5) for _ in range(20)))
    assert {a.choices[0].message.content for a in answers} == {text}


def test_done_and_usage_events(http):
    plain = events(http, "/v1/chat/completions", messages=HELLO, max_tokens=3)
    assert plain[-1] == "[DONE]" and all("usage" not in e for e in plain[:-1])
    asked = events(http, "/v1/chat/completions", messages=HELLO, max_tokens=3, stream_options={"include_usage": True})
    assert asked[-1] == "[DONE]"
    assert asked[-2]["choices"] == [] and asked[-2]["usage"]["completion_tokens"] == 3
    assert all(e["usage"] is None for e in asked[:-2])


def test_continuous_usage(http):
    options = {"include_usage": True, "continuous_usage_stats": True}
    asked = events(http, "/v1/chat/completions", messages=HELLO, max_tokens=4, stream_options=options)
    counts = [e["usage"]["completion_tokens"] for e in asked[:-1]]
    assert counts == sorted(counts) and counts[-1] == 4
    only = events(http, "/v1/chat/completions", messages=HELLO, max_tokens=4, stream_options={"continuous_usage_stats": True})
    assert all(e["usage"] for e in only[:-1]) and only[-2]["choices"]


@pytest.mark.parametrize("stream", [False, True])
def test_n(client, stream):
    answer = chat(client, n=3, stream=stream)
    texts = ["", "", ""]
    if stream:
        begun = set()
        for chunk in answer:
            for choice in chunk.choices:
                if choice.index not in begun:
                    begun.add(choice.index)
                    assert choice.delta.role == "assistant"
                texts[choice.index] += choice.delta.content or ""
    else:
        assert [c.index for c in answer.choices] == [0, 1, 2]
        assert answer.usage.completion_tokens == 36
        texts = [c.message.content for c in answer.choices]
    assert len(set(texts)) == 3 and all(texts)


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(client, stream):
    def entries(**fields):
        answer = chat(client, logprobs=True, stream=stream, **fields)
        if not stream:
            return answer.choices[0].message.content, answer.choices[0].logprobs.content
        chunks = list(answer)
        text = "".join(c.choices[0].delta.content or "" for c in chunks)
        return text, [e for c in chunks if c.choices[0].logprobs for e in c.choices[0].logprobs.content]

    text, plain = entries()
    assert len(plain) == 12 and all(e.top_logprobs == [] for e in plain)
    assert b"".join(bytes(e.bytes) for e in plain).decode() == text
    _, top = entries(top_logprobs=4)
    assert all(len(e.top_logprobs) == 4 for e in top)
    assert all(e.top_logprobs[0].token == e.token for e in top)
    assert min(t.logprob for e in top for t in e.top_logprobs) == -9999.0  # a masked token, and still JSON


@pytest.mark.parametrize("stream", [False, True])
def test_stop_string(client, stream):
    whole = chat(client, max_tokens=20).choices[0].message.content
    stop = whole[12:20]
    answer = chat(client, max_tokens=20, stop=[stop], stream=stream)
    if stream:
        chunks = list(answer)
        assert all(c.choices[0].delta.content != "" for c in chunks[1:])
        text, reason = "".join(c.choices[0].delta.content or "" for c in chunks), chunks[-1].choices[0].finish_reason
    else:
        text, reason = answer.choices[0].message.content, answer.choices[0].finish_reason
    assert text == whole[: whole.index(stop)] and reason == "stop"


def test_stream_logprobs_wait_for_text(client):
    """Tokens whose text is held back keep their log-probabilities for the next chunk: none is lost, none comes alone."""
    whole = chat(client, max_tokens=20).choices[0].message.content
    chunks = list(chat(client, max_tokens=20, stop=[whole[:30] + "never"], stream=True, logprobs=True))
    entries = [e for c in chunks if c.choices[0].logprobs for e in c.choices[0].logprobs.content]
    assert len(entries) == 20
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole


def test_cached_tokens(client):
    messages = [{"role": "user", "content": "count me twice " * 5}]
    first = chat(client, messages=messages)
    second = chat(client, messages=messages)
    assert first.usage.prompt_tokens_details.cached_tokens < second.usage.prompt_tokens_details.cached_tokens
    assert second.usage.prompt_tokens_details.cached_tokens % 16 == 0
    chunks = list(chat(client, messages=messages, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == second.usage.prompt_tokens_details.cached_tokens


def test_roles_names_and_parts(client, server):
    chat(
        client,
        messages=[
            {"role": "system", "content": "be brief"},
            {"role": "user", "name": "ann", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "1", "name": "f", "content": "42"},
            {
                "role": "assistant",
                "content": "it is 42",
                "refusal": None,
                "annotations": [],
                "audio": None,
                "function_call": None,
                "tool_calls": None,
            },
            {"role": "user", "content": "thanks"},
        ],
    )
    prompt = server.engine.last_request["prompt"]
    assert "<|im_start|>user\na\nb<|im_end|>" in prompt and "<|im_start|>tool\n42" in prompt
    assert prompt.endswith("<|im_start|>assistant\n")


def test_developer_is_system_for_templates_that_do_not_know_it(client, server):
    chat(client, messages=[{"role": "developer", "content": "d"}, *HELLO])
    assert server.engine.last_request["prompt"].startswith("<|im_start|>system\nd")


def test_template_options(client, server):
    extra = {"chat_template_kwargs": {"thinking": False}, "add_generation_prompt": False}
    chat(client, extra_body=extra, reasoning_effort="low")
    prompt = server.engine.last_request["prompt"]
    assert "[thinking=False]" in prompt and "[reasoning_effort=low]" in prompt and prompt.endswith("<|im_end|>\n")


@pytest.mark.parametrize("stream", [False, True])
def test_continue_and_echo(client, server, stream):
    messages = [*HELLO, {"role": "assistant", "content": "Once upon"}]
    answer = chat(client, messages=messages, stream=stream, extra_body={"continue_final_message": True, "echo": True})
    assert server.engine.last_request["prompt"].endswith("Once upon")
    text = "".join(c.choices[0].delta.content or "" for c in answer) if stream else answer.choices[0].message.content
    assert text.startswith("Once upon ")


def test_sampling_fields_reach_the_engine(client, server):
    chat(
        client,
        temperature=0.5,
        top_p=0.9,
        seed=7,
        presence_penalty=0.1,
        frequency_penalty=0.2,
        logit_bias={"65": -100},
        stop="zzz",
        extra_body={
            "top_k": 5,
            "min_p": 0.05,
            "repetition_penalty": 1.1,
            "min_tokens": 2,
            "ignore_eos": True,
            "stop_token_ids": [3],
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
            "bad_words": ["bad"],
            "allowed_token_ids": [65, 66],
            "cache_salt": "salt",
            "request_id": "mine",
        },
    )
    params = server.engine.last_params
    assert (params.temperature, params.top_p, params.top_k, params.min_p, params.seed) == (0.5, 0.9, 5, 0.05, 7)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.1, 0.2, 1.1)
    assert params.logit_bias == {65: -100} and params.stop == ["zzz"] and params.stop_token_ids == [3]
    assert params.min_tokens == 2 and params.ignore_eos and params.include_stop_str_in_output
    assert params.skip_special_tokens is False and params.spaces_between_special_tokens is False
    assert params.bad_words == ["bad"] and params.allowed_token_ids == [65, 66] and params.max_tokens == 12
    assert server.engine.last_request["cache_salt"] == "salt"
    assert server.engine.last_request["request_id"].startswith("chatcmpl-mine-")


def test_max_completion_tokens(client, server):
    client.chat.completions.create(model=MODEL, messages=HELLO, max_completion_tokens=4)
    assert server.engine.last_params.max_tokens == 4
    client.chat.completions.create(model=MODEL, messages=HELLO)
    assert server.engine.last_params.max_tokens is None


def test_openais_own_fields_are_accepted(client):
    chat(client, user="u", metadata={"a": "b"}, store=False, service_tier="auto", safety_identifier="s", prompt_cache_key="k")
    chat(
        client,
        parallel_tool_calls=True,
        tool_choice="none",
        tools=[],
        response_format={"type": "text"},
        modalities=["text"],
        verbosity="medium",
    )
    nulls = {
        name: None for name in ("temperature", "top_p", "n", "stop", "tools", "response_format", "stream_options", "logit_bias", "seed")
    }
    chat(client, extra_body=nulls)


def test_prompt_logprobs_and_token_ids(http):
    body = {"messages": HELLO, "max_tokens": 3, "prompt_logprobs": 1, "return_token_ids": True}
    answer = http.post("/v1/chat/completions", json=body).json()
    ids = answer["prompt_token_ids"]
    assert len(answer["prompt_logprobs"]) == len(ids) == answer["usage"]["prompt_tokens"]
    assert answer["prompt_logprobs"][0] is None and str(ids[1]) in answer["prompt_logprobs"][1]
    assert len(answer["choices"][0]["token_ids"]) == 3
    stream = events(http, "/v1/chat/completions", messages=HELLO, max_tokens=3, return_token_ids=True)
    assert stream[0]["prompt_token_ids"] == ids
    assert [t for e in stream[:-1] for t in e["choices"][0].get("token_ids", [])] == answer["choices"][0]["token_ids"]


def test_model_defaults(start_server):
    from octavo.server.mock import MockEngine

    running = start_server(MockEngine(defaults={"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05}))
    body = {"messages": HELLO, "max_tokens": 2}
    assert httpx.post(running.url + "/v1/chat/completions", json=body).status_code == 200
    params = running.engine.last_params
    assert (params.temperature, params.top_k, params.top_p, params.repetition_penalty) == (0.6, 20, 0.95, 1.05)
    httpx.post(running.url + "/v1/chat/completions", json={**body, "temperature": 0, "top_k": 0})
    assert (running.engine.last_params.temperature, running.engine.last_params.top_k) == (0, 0)


def test_long_prompts_are_encoded_off_the_loop(start_server):
    """While a long text is encoded the server answers others: the encoding waits here until it has."""
    import threading

    from octavo.server.mock import FakeTokenizer, MockEngine

    class Slow(FakeTokenizer):
        def encode(self, text, add_special_tokens=True):
            if len(text) > 4000:
                encoding.set()
                in_time.append(answered.wait(30))
                text = text[:100]
            return super().encode(text, add_special_tokens)

    encoding, answered, in_time = threading.Event(), threading.Event(), []
    engine = MockEngine()
    engine.tokenizer = Slow()
    running = start_server(engine)
    long = threading.Thread(target=lambda: httpx.post(running.url + "/v1/completions", json={"prompt": "a" * 9000, "max_tokens": 1}))
    long.start()
    assert encoding.wait(60)
    assert httpx.get(running.url + "/health").status_code == 200
    answered.set()
    long.join()
    assert in_time == [True]
