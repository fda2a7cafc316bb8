"""Cases that users hit on other engines, as behaviour that must hold here. Numbers are those of the list of cases."""

from __future__ import annotations

import itertools
import json
import math
import random
import socket
import threading
import time
from urllib.parse import urlsplit

import httpx
import pytest

PROMPT = "The sea is deep and the octopus who lives in it"
HELLO = [{"role": "user", "content": "Name three animals that live in the sea."}]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def post(http: httpx.Client, path: str, **body) -> dict:
    answer = http.post(path, json={"temperature": 0, **body})
    assert answer.status_code == 200, answer.text
    return json.loads(answer.text, parse_constant=not_json)


def stream(http: httpx.Client, path: str, **body) -> list[dict]:
    answer = http.post(path, json={"temperature": 0, "stream": True, **body})
    assert answer.status_code == 200, answer.text
    lines = [line for line in answer.text.split("\n\n") if line]
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: "), parse_constant=not_json) for line in lines]


def not_json(name: str) -> None:
    pytest.fail(f"{name} is not JSON")


def refused(answer: httpx.Response, status: int, *words: str) -> None:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) >= {"message", "type", "param", "code"}
    for word in words:
        assert word in error["message"]


@pytest.mark.parametrize("size", [7, 8, 9, 10])
def test_1_stop_strings_over_several_tokens(http, size):
    whole = post(http, COMPLETIONS, prompt=PROMPT, max_tokens=40)["choices"][0]["text"]
    for start in range(3, min(len(whole) - size, 60), 9):
        stop = whole[start : start + size]
        expected = whole[: whole.index(stop)]
        answer = post(http, COMPLETIONS, prompt=PROMPT, max_tokens=40, stop=stop)["choices"][0]
        assert (answer["text"], answer["finish_reason"]) == (expected, "stop")
        chunks = stream(http, COMPLETIONS, prompt=PROMPT, max_tokens=40, stop=[stop])
        assert "".join(c["choices"][0]["text"] for c in chunks) == expected
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("stop", [None, ["never to be seen"], [" the"], ["e", "a"], ["\n"]])
def test_2_only_the_role_chunk_is_empty(http, stop):
    chunks = stream(http, CHAT, messages=HELLO, max_tokens=30, stop=stop)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all(c["choices"][0]["delta"].get("content") != "" for c in chunks[1:])
    whole = post(http, CHAT, messages=HELLO, max_tokens=30, stop=stop)["choices"][0]
    assert "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks) == whole["message"]["content"]
    assert chunks[-1]["choices"][0]["finish_reason"] == whole["finish_reason"]


@pytest.mark.parametrize("prompt", [PROMPT, " leading space", "na\u00efve caf\u00e9"])
def test_3_text_offsets_in_a_stream_with_echo(http, prompt):
    chunks = stream(http, COMPLETIONS, prompt=prompt, echo=True, logprobs=1, max_tokens=5)
    text = "".join(c["choices"][0]["text"] for c in chunks)
    assert text.startswith(prompt)
    parts = [c["choices"][0]["logprobs"] for c in chunks if c["choices"][0]["logprobs"]]
    tokens = [t for p in parts for t in p["tokens"]]
    offsets = [o for p in parts for o in p["text_offset"]]
    ends = [*offsets[1:], len(text)]
    for token, start, end in zip(tokens, offsets, ends):
        if not token.startswith("bytes:"):
            assert text[start:end] == token
    whole = post(http, COMPLETIONS, prompt=prompt, echo=True, logprobs=1, max_tokens=5)["choices"][0]["logprobs"]
    assert whole["text_offset"] == offsets and whole["tokens"] == tokens


@pytest.mark.parametrize("extra", [{}, {"logprobs": 1}, {"n": 2}])
def test_4_echo_and_no_tokens(http, extra):
    answer = post(http, COMPLETIONS, prompt=PROMPT, echo=True, max_tokens=0, **extra)
    assert all(c["text"] == PROMPT for c in answer["choices"]) and answer["usage"]["completion_tokens"] == 0
    chunks = stream(http, COMPLETIONS, prompt=PROMPT, echo=True, max_tokens=0, stream_options={"include_usage": True}, **extra)
    assert "".join(c["choices"][0]["text"] for c in chunks if c["choices"] and c["choices"][0]["index"] == 0) == PROMPT
    assert chunks[-1]["usage"]["completion_tokens"] == 0


def test_5_logprobs_are_finite(http):
    for body in ({"top_k": 1}, {"top_k": 1, "logprobs": 5}, {"allowed_token_ids": [20, 21]}):
        answer = post(http, COMPLETIONS, **{"prompt": PROMPT, "echo": True, "logprobs": 1, "temperature": 1, "max_tokens": 5, **body})
        logprobs = answer["choices"][0]["logprobs"]
        numbers = [x for x in logprobs["token_logprobs"] if x is not None]
        numbers += [x for top in logprobs["top_logprobs"] if top for x in top.values()]
        assert numbers and all(math.isfinite(x) and x <= 0 for x in numbers)


def test_6_chat_logprobs_without_top(http):
    answer = post(http, CHAT, messages=HELLO, logprobs=True, max_tokens=8)
    entries = answer["choices"][0]["logprobs"]["content"]
    assert len(entries) == answer["usage"]["completion_tokens"]
    assert all(e["top_logprobs"] == [] and isinstance(e["bytes"], list) and e["logprob"] <= 0 for e in entries)
    assert b"".join(bytes(e["bytes"]) for e in entries).decode(errors="replace").startswith(answer["choices"][0]["message"]["content"])


def test_7_bias_of_an_unknown_token(http):
    for path, body in ((COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": HELLO})):
        refused(http.post(path, json={**body, "logit_bias": {"191222": -100}}), 400, "191222")
        refused(http.post(path, json={**body, "logit_bias": {"191222": -100}, "stream": True}), 400, "191222")


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "required", "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
    ],
    ids=["8", "9"],
)
def test_8_9_tools_are_refused_by_name(http, fields, streams):
    """Until tool calling exists, it is refused, not ignored."""
    answer = http.post(CHAT, json={"messages": HELLO, "max_tokens": 64, "stream": streams, **fields})
    refused(answer, 400, "not supported yet")
    assert answer.json()["error"]["param"] in fields


@pytest.mark.real
@pytest.mark.parametrize("streams", [False, True])
def test_14_a_schema_with_an_unsupported_keyword(http, streams):
    schema = {"type": "object", "properties": {"a/b": {"type": "array", "unevaluatedItems": False}}}
    sent = {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}}
    answer = http.post(CHAT, json={"messages": HELLO, "max_tokens": 64, "stream": streams, **sent})
    refused(answer, 400, "/properties/a~1b/unevaluatedItems")
    assert answer.json()["error"]["param"] == "response_format.json_schema.schema"
    del schema["properties"]["a/b"]["unevaluatedItems"]
    schema |= {"required": ["a/b"], "additionalProperties": False}
    schema["properties"]["a/b"] |= {"items": {"type": "boolean"}, "maxItems": 3}
    content = post(http, CHAT, messages=HELLO, max_tokens=64, **sent)["choices"][0]["message"]["content"]
    assert list(json.loads(content)) == ["a/b"] and all(isinstance(v, bool) for v in json.loads(content)["a/b"])


@pytest.mark.real
def test_10_prompt_logprobs_do_not_depend_on_the_prefix_cache(http):
    base = "Octopuses have three hearts and blue blood, and they are known to be clever. " * 4
    prompts = [base[:size] for size in (60, 150, 151, 230, 300)]

    def numbers(prompt: str) -> list:
        body = post(http, COMPLETIONS, prompt=prompt, max_tokens=1, prompt_logprobs=1)
        return body["choices"][0]["prompt_logprobs"]

    forwards = [numbers(p) for p in prompts]
    backwards = [numbers(p) for p in reversed(prompts)]
    assert backwards[::-1] == forwards


def test_11_absurd_requests(http, target):
    before, start = target.resident(), time.monotonic()
    refused(http.post(COMPLETIONS, json={"prompt": "x", "n": 1_000_000}), 400, "n must be")
    refused(http.post(COMPLETIONS, json={"prompt": ""}), 400, "prompt")
    refused(http.post(COMPLETIONS, json={"prompt": []}), 400, "prompt")
    refused(http.get("/v1/models", headers={"x-big": "a" * 2**20}), 431)
    for body in (b"this is not JSON", b"[1, 2, 3]", b'"text"', b""):
        refused(http.post(CHAT, content=body, headers={"content-type": "application/json"}), 400)
    refused(http.post(CHAT, content=b"x" * (100 * 2**20), headers={"content-type": "application/json"}), 413)
    chunks = (b"x" * 2**20 for _ in range(100))
    refused(http.post(CHAT, content=chunks, headers={"content-type": "application/json"}), 413)
    assert time.monotonic() - start < 10
    assert target.resident() - before < 64 * 2**20


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("fields", [{"stream": True}, {"stream": False}, {"stream": True, "n": 2}], ids=str)
def test_12_a_client_that_dies(target, path, fields):
    prompt = {"prompt": PROMPT} if path == COMPLETIONS else {"messages": HELLO}
    data = json.dumps({**prompt, "max_tokens": 800, "ignore_eos": True, **fields}).encode()
    where = urlsplit(target.url)
    with socket.create_connection((where.hostname, where.port), timeout=30) as sock:
        sock.sendall(
            f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data
        )
        if fields["stream"]:
            received = b""
            while received.count(b"data: ") < 4:
                received += sock.recv(4096)
        end = time.monotonic() + 20
        while target.metric("vllm:num_requests_running") == 0:
            assert time.monotonic() < end, "it never ran"
            time.sleep(0.01)
    start = time.monotonic()
    while target.metric("vllm:num_requests_running") or target.metric("vllm:num_requests_waiting"):
        assert time.monotonic() - start < 1.0, "it still runs"
        time.sleep(0.02)
    assert target.metric("vllm:kv_cache_usage_perc") == 0


@pytest.mark.real
def test_13_a_long_prompt_does_not_stop_the_others(http, target):
    """While 7,000 tokens are prefilled, a stream goes on: its longest pause is a part of the prefill, not all of it."""
    numbers = random.Random(13)
    long = [numbers.randrange(1000, 40_000) for _ in range(7000)]
    took: list[float] = []

    def send_long() -> None:
        start = time.monotonic()
        answer = httpx.post(target.url + COMPLETIONS, json={"prompt": long, "max_tokens": 1}, headers=http.headers, timeout=300)
        took.append(time.monotonic() - start)
        assert answer.status_code == 200, answer.text

    times: list[float] = []
    thread = threading.Thread(target=send_long)
    body = {"prompt": PROMPT, "max_tokens": 1000, "ignore_eos": True, "stream": True}
    with http.stream("POST", COMPLETIONS, json=body) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                times.append(time.monotonic())
            if len(times) == 10 and not thread.ident:
                thread.start()
                begun = time.monotonic()
            if took and time.monotonic() > begun + took[0] + 0.5:
                break
    thread.join()
    during = [t for t in times if begun <= t <= begun + took[0]]
    pauses = [b - a for a, b in itertools.pairwise(times[9:])]
    assert len(during) >= 3, f"{len(during)} tokens in {took[0]:.2f} s"
    assert max(pauses) < max(took[0] / 2, 0.5), f"paused {max(pauses):.2f} s of {took[0]:.2f} s"


def test_15_wrong_model_name(http, target):
    for path, body in ((COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": HELLO})):
        refused(http.post(path, json={"model": "gpt-4", **body}), 404, "gpt-4", target.model)
        refused(http.post(path, json={"model": "gpt-4", "stream": True, **body}), 404, target.model)


def test_the_openai_client_works(client, target):
    models = client.models.list().data
    assert target.model in [m.id for m in models]
    answer = client.chat.completions.create(model=target.model, messages=HELLO, max_tokens=8, temperature=0)
    chunks = client.chat.completions.create(model=target.model, messages=HELLO, max_tokens=8, temperature=0, stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == answer.choices[0].message.content
