"""A real server on a real port, with a tiny model: structured output through the openai client, and what must not stop it."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.server import RunningServer
from tests.structured.test_compiler import HOSTILE
from tests.tiny_model import EOS, make_tiny_model
from tests.waiting import until

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Zürich", "東京"]}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["city", "count"],
    "additionalProperties": False,
}
CHAT = [{"role": "user", "content": "Where?"}]
FORMAT = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA, "strict": True}}


@pytest.fixture(scope="module", params=["0", "1"], ids=["plain", "ahead"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", max_position=2048)
    flags = ["--load-format", "dummy", "--dtype", "float32", "--device", "cpu", "--kv-cache-memory", "8M", "--max-num-seqs", "32"]
    flags += ["--served-model-name", "tiny"]
    env = {"OCTAVO_STEPS_AHEAD": request.param, "OCTAVO_DECODE_GRAPHS": request.param, "OMP_NUM_THREADS": "1"}
    running = RunningServer(str(folder), *flags, env=env)
    yield running
    assert running.healthy()
    until(lambda: running.metric("vllm:num_requests_running") == running.metric("vllm:num_requests_waiting") == 0)
    pids = running.pids()
    assert running.stop() == 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids), "a process was left behind"


@pytest.fixture
def client(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


def keeps(text: str) -> bool:
    value = json.loads(text)
    return list(value) == ["city", "count"] and value["city"] in ("Zürich", "東京") and value["count"] in range(100)


def test_response_formats(client: openai.OpenAI) -> None:
    create = client.chat.completions.create
    answer = create(model="tiny", messages=CHAT, response_format=FORMAT, n=3, seed=1, temperature=1.0, logprobs=True, max_tokens=300)
    for choice in answer.choices:
        assert choice.finish_reason == "stop" and keeps(choice.message.content)
        assert b"".join(bytes(t.bytes) for t in choice.logprobs.content).decode() == choice.message.content
    chunks = list(create(model="tiny", messages=CHAT, response_format=FORMAT, seed=1, n=3, temperature=1.0, max_tokens=300, stream=True))
    texts = ["", "", ""]
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [c.message.content for c in answer.choices]
    bias = {str(EOS): 100, "4": 5.0, "92": 9.0}
    anything = create(model="tiny", messages=CHAT, response_format={"type": "json_object"}, max_tokens=200, logit_bias=bias).choices[0]
    assert anything.finish_reason == "length" or isinstance(json.loads(anything.message.content), dict)
    assert create(model="tiny", messages=CHAT, response_format={"type": "text"}, max_tokens=2).choices


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"guided_json": SCHEMA}, r"\{.*\}"),
        ({"guided_json": json.dumps(SCHEMA)}, r"\{.*\}"),
        ({"guided_regex": r"[a-c]{3}-\d+x"}, r"[a-c]{3}-[0-9]+x"),
        ({"guided_choice": ["red", "grün"]}, "red|grün"),
        ({"guided_grammar": 'start: "<" ("a" | "b")+ ">"'}, "<[ab]+>"),
        ({"structured_outputs": {"regex": "(ab)+c"}}, "(ab)+c"),
        ({"structured_outputs": {"grammar": 'root ::= "x" | "yé"'}}, "x|yé"),
        ({"structured_outputs": {"choice": ["one"]}, "response_format": {"type": "text"}}, "one"),
    ],
)
def test_the_other_fields(server: RunningServer, fields: dict[str, Any], pattern: str) -> None:
    for path, body in (("chat/completions", {"messages": CHAT}), ("completions", {"prompt": "Where?"})):
        answer = httpx.post(f"{server.url}/v1/{path}", json={"max_tokens": 1500, "seed": 2, **body, **fields}, timeout=200).json()
        choice = answer["choices"][0]
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        assert choice["finish_reason"] == "length" or re.fullmatch(pattern, text, re.DOTALL), text
        assert "json" not in str(fields) or choice["finish_reason"] == "length" or keeps(text)


def test_structural_tags(server: RunningServer) -> None:
    tags = {
        "type": "structural_tag",
        "triggers": ["<fn="],
        "structures": [{"begin": "<fn=a>", "schema": {"type": "integer", "minimum": 1, "maximum": 9}, "end": "</fn>"}],
    }
    bias = {"27": 9, "69": 9, "77": 6, "28": 9}
    body = {"messages": CHAT, "response_format": tags, "max_tokens": 150, "temperature": 1.0, "logit_bias": bias}
    for seed in range(4):
        answer = httpx.post(f"{server.url}/v1/chat/completions", json={**body, "seed": seed}, timeout=200).json()
        text = answer["choices"][0]["message"]["content"]
        for found in re.finditer("<fn=", text):
            rest = text[found.start() :]
            assert re.match(r"<fn=a>[1-9]</fn>", rest) or any(f"<fn=a>{i}</fn>".startswith(rest) for i in range(1, 10)), text


def test_refusals_name_the_place(server: RunningServer) -> None:
    cases = [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"properties": {"x": {"not": {}}}}}}},
         "response_format.json_schema.schema", "/properties/x/not"),
        ({"guided_json": {"$ref": "http://127.0.0.1:1/x"}}, "guided_json", "/$ref"),
        ({"guided_regex": r"(a)\1"}, "guided_regex", "backreferences"),
        ({"guided_grammar": "start: nothing"}, "guided_grammar", "unknown name"),
        ({"structured_outputs": {"json": {"uniqueItems": True}}}, "structured_outputs.json", "/uniqueItems"),
        ({"guided_choice": ["a"], "guided_regex": "a"}, "guided_choice", "both"),
        ({"guided_choice": ["yes"], "allowed_token_ids": [5, 6]}, None, "forbid every token"),
        ({"guided_regex": "\ud800"}, None, ""),
    ]  # fmt: skip
    for fields, param, text in cases:
        for stream in (False, True):
            body = {"messages": CHAT, "max_tokens": 8, "stream": stream, **fields}
            answer = httpx.post(f"{server.url}/v1/chat/completions", content=json.dumps(body).encode(), timeout=200)
            error = answer.json()["error"]
            assert answer.status_code == 400 and text in error["message"] and error["param"] == param or param is None, answer.text
            assert answer.status_code == 400
    assert server.healthy()


async def test_hostile_input_beside_others(server: RunningServer) -> None:
    """While hostile grammars come in, plain streams go on, and /health answers.

    A schema that takes long to compile, in the server and again in the engine, must hold up neither: the longest wait for a plain
    stream's next line stays a small part of the time that the schema is in work. Both are counted in turns of this test's own
    loop, which stand still when the machine does, and what comes each time is no accident.
    """
    fields = {"json_schema": "guided_json", "regex": "guided_regex", "grammar": "guided_grammar"}
    turns = last = longest = 0
    done = False

    async def plain(client: httpx.AsyncClient) -> None:
        nonlocal last, longest
        while not done:
            body = {"prompt": "p", "max_tokens": 50, "stream": True, "ignore_eos": True}
            async with client.stream("POST", "/v1/completions", json=body) as response:
                assert response.status_code == 200
                async for _ in response.aiter_lines():
                    longest, last = max(longest, turns - last), turns

    async def count() -> None:
        nonlocal turns
        while not done:
            await asyncio.sleep(0.002)
            turns += 1

    async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
        beside = asyncio.gather(plain(client), count())
        names = {"deep nesting", "nesting in an enum", "an intersection of many unions", "nested repetition", "repetition of repetition"}
        names |= {"optional repetition", "deep parentheses", "left recursion", "ambiguity", "deep groups", "many alternatives in a loop"}

        async def hostile(kind: str, value: Any) -> None:
            body = {"prompt": "p", "max_tokens": 4, fields[kind]: value if isinstance(value, str) else json.dumps(value)}
            answer = await client.post("/v1/completions", json=body)
            assert answer.status_code in (200, 400), answer.text
            assert (await client.get("/health")).status_code == 200

        await asyncio.gather(*(hostile(kind, value) for name, kind, value in HOSTILE if name in names))
        shares = []
        for size in (3000, 5000, 7000, 8000):  # what has other causes is a smaller part of more work
            large = {f"k{i}": {"type": "string", "pattern": f"^a{i}+$"} for i in range(size)}
            begun, longest = turns, 0
            await hostile("json_schema", {"type": "object", "properties": large})
            shares.append(max(longest, turns - last) / (turns - begun))
            if shares[-1] < 0.2:
                break
        done = True
        await beside
    assert shares[-1] < 0.2, shares
    assert server.healthy()


def test_clients_that_leave(server: RunningServer) -> None:
    body = {"prompt": "p", "max_tokens": 1500, "stream": True, "guided_regex": "a*", "ignore_eos": True}
    before = server.metric("vllm:generation_tokens_total")
    for _ in range(4):
        with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=30) as response:
            next(response.iter_lines())
    until(lambda: server.metric("vllm:num_requests_running") == 0)
    assert server.metric("vllm:generation_tokens_total") - before < 3 * 1500, "they ran to their ends"
