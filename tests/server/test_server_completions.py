from __future__ import annotations

import json
import math

import pytest

MODEL = "mock-model"


def complete(client, prompt="the octopus", **fields):
    return client.completions.create(**{"model": MODEL, "prompt": prompt, "max_tokens": 8, **fields})


def streamed(client, **fields) -> dict[int, tuple[str, str]]:
    """Choice index -> (text, finish reason)."""
    result: dict[int, tuple[str, str]] = {}
    for chunk in complete(client, stream=True, **fields):
        for choice in chunk.choices:
            text, reason = result.get(choice.index, ("", None))
            assert reason is None, "a chunk after the end"
            result[choice.index] = (text + choice.text, choice.finish_reason)
    return result


def test_answer_and_stream(client):
    answer = complete(client)
    assert answer.object == "text_completion" and answer.id.startswith("cmpl-")
    assert answer.usage.completion_tokens == 8 and answer.choices[0].finish_reason == "length"
    assert streamed(client) == {0: (answer.choices[0].text, "length")}


def test_kinds_of_prompts(client, server):
    ids = server.engine.tokenizer.encode("the octopus")
    one = complete(client).choices[0].text
    assert complete(client, ids).choices[0].text == one
    many = complete(client, [ids, ids[:2]])
    assert many.choices[0].text == one and len(many.choices) == 2
    texts = complete(client, ["the octopus", "th"])
    assert [c.text for c in texts.choices] == [c.text for c in many.choices]
    assert texts.usage.prompt_tokens == len(ids) + 2 and texts.usage.completion_tokens == 16
    assert {i: t for i, (t, _) in streamed(client, prompt=["the octopus", "th"]).items()} == {
        i: c.text for i, c in enumerate(texts.choices)
    }


def test_n_of_several_prompts(client):
    answer = complete(client, ["a", "b"], n=2)
    assert [c.index for c in answer.choices] == [0, 1, 2, 3]
    alone = complete(client, "b", n=2)
    assert [c.text for c in answer.choices[2:]] == [c.text for c in alone.choices]
    assert {i: t for i, (t, _) in streamed(client, prompt=["a", "b"], n=2).items()} == {c.index: c.text for c in answer.choices}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("extra", [{}, {"logprobs": 1}])
def test_echo_without_tokens(client, stream, extra):
    answer = complete(client, echo=True, max_tokens=0, stream=stream, stream_options={"include_usage": True} if stream else None, **extra)
    if stream:
        chunks = list(answer)
        assert "".join(c.choices[0].text for c in chunks[:-1]) == "the octopus"
        assert chunks[-1].usage.completion_tokens == 0 and chunks[-2].choices[0].finish_reason == "length"
    else:
        assert answer.choices[0].text == "the octopus" and answer.usage.completion_tokens == 0


def test_echo_of_token_ids(client, server):
    ids = server.engine.tokenizer.encode(" caf\u00e9s and")
    answer = complete(client, ids, echo=True)
    assert answer.choices[0].text.startswith(" caf\u00e9s and")
    assert streamed(client, prompt=ids, echo=True)[0][0] == answer.choices[0].text


def offsets_hold(logprobs: list[dict], text: str) -> None:
    """Every token's offset is the length of the text before it; tokens inside of a character share its place."""
    pending, length = b"", 0
    for part in logprobs:
        for token, offset in zip(part["tokens"], part["text_offset"]):
            raw = b"".join(bytes([int(x, 16)]) for x in token[8:].split("\\x")) if token.startswith("bytes:") else token.encode()
            assert offset == length
            pending += raw
            try:
                length += len(pending.decode())
                pending = b""
            except UnicodeDecodeError:
                pass
    assert length == len(text)


@pytest.mark.parametrize("prompt", ["the octopus", "caf\u00e9 \U0001f600 deep", " stars"])
@pytest.mark.parametrize("echo", [False, True])
def test_text_offsets(http, prompt, echo):
    body = {"prompt": prompt, "max_tokens": 7, "logprobs": 2, "echo": echo}
    whole = http.post("/v1/completions", json=body).json()["choices"][0]
    offsets_hold([whole["logprobs"]], whole["text"])
    raw = http.post("/v1/completions", json={**body, "stream": True}).text
    chunks = [json.loads(line[6:])["choices"][0] for line in raw.splitlines() if line.startswith("data: {")]
    parts = [c["logprobs"] for c in chunks if c["logprobs"]]
    offsets_hold(parts, whole["text"])
    assert {key: [x for p in parts for x in p[key]] for key in parts[0]} == whole["logprobs"]
    numbers = [x for x in whole["logprobs"]["token_logprobs"] if x is not None]
    assert all(map(math.isfinite, numbers)) and (not echo or whole["logprobs"]["token_logprobs"][0] is None)


def test_legacy_logprobs_counts(client):
    answer = complete(client, logprobs=0).choices[0].logprobs
    assert all(len(top) == 1 for top in answer.top_logprobs)
    answer = complete(client, logprobs=3).choices[0].logprobs
    assert len(answer.tokens) == len(answer.token_logprobs) == len(answer.top_logprobs) == len(answer.text_offset) == 8
    assert all(token in top and len(top) == 3 for token, top in zip(answer.tokens, answer.top_logprobs))
    assert min(v for top in answer.top_logprobs for v in top.values()) == -9999.0


@pytest.mark.parametrize("include", [False, True])
def test_stop(client, include):
    whole = complete(client, max_tokens=20).choices[0].text
    for start in range(1, 20, 3):
        stop = whole[start : start + 9]
        expected = whole[: whole.index(stop) + (len(stop) if include else 0)]
        answer = complete(client, max_tokens=20, stop=stop, extra_body={"include_stop_str_in_output": include})
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == (expected, "stop")
        assert streamed(client, max_tokens=20, stop=stop, extra_body={"include_stop_str_in_output": include}) == {0: (expected, "stop")}


def test_stop_reason(http):
    body = {"prompt": "x", "max_tokens": 20, "ignore_eos": True}
    ids = http.post("/v1/completions", json={**body, "return_token_ids": True}).json()["choices"][0]["token_ids"]
    choice = http.post("/v1/completions", json={**body, "stop_token_ids": [ids[4]]}).json()["choices"][0]
    assert choice["finish_reason"] == "stop" and choice["stop_reason"] == ids[4]


def test_prompt_logprobs(http):
    answer = http.post("/v1/completions", json={"prompt": ["the", "octopus"], "max_tokens": 1, "prompt_logprobs": 2}).json()
    first, second = (c["prompt_logprobs"] for c in answer["choices"])
    assert len(first) == 3 and first[0] is None and len(second) == 7
    entry = next(iter(first[1].values()))
    assert set(entry) == {"logprob", "rank", "decoded_token"}


def test_truncate_prompt(http, server):
    body = {"prompt": "abcdefgh", "max_tokens": 1, "truncate_prompt_tokens": 3, "return_token_ids": True, "echo": True}
    choice = http.post("/v1/completions", json=body).json()["choices"][0]
    assert choice["prompt_token_ids"] == [ord("f"), ord("g"), ord("h")] and choice["text"].startswith("fgh")


def test_stream_token_ids(http):
    body = {"prompt": ["ab", "c"], "max_tokens": 4, "return_token_ids": True}
    whole = http.post("/v1/completions", json=body).json()["choices"]
    raw = http.post("/v1/completions", json={**body, "stream": True}).text
    chunks = [json.loads(line[6:])["choices"][0] for line in raw.splitlines() if line.startswith("data: {")]
    for i in (0, 1):
        mine = [c for c in chunks if c["index"] == i]
        assert mine[0]["prompt_token_ids"] == whole[i]["prompt_token_ids"]
        assert [t for c in mine for t in c["token_ids"]] == whole[i]["token_ids"]


def test_missing_model_is_the_first(http):
    assert http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}).json()["model"] == MODEL
    assert http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1, "model": "second-name"}).json()["model"] == "second-name"
