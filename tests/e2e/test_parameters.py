"""Every parameter of the two generation routes on the real demo model, through a real server: plain HTTP and openai's client."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.server import RunningServer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PROMPT = "The sea is deep and the octopus who lives in it"
HELLO = [{"role": "user", "content": "Name three animals that live in the sea."}]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    running = RunningServer(
        *("--max-model-len", "1024", "--kv-cache-memory", "128M", "--dtype", "float32", "--scheduling-policy", "priority"),
        *("--max-num-batched-tokens", "128", "--max-num-seqs", "64"),
        *("--generation-config", "none", "--trust-request-chat-template"),
    )
    yield running
    running.stop()


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


@pytest.fixture(scope="module")
def model(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


class Api:
    """Both routes, streamed and not, with one way to ask: ``text(...)`` runs both and holds them equal."""

    def __init__(self, url: str) -> None:
        self.http = httpx.Client(base_url=url, timeout=120)

    def post(self, path: str, **fields: Any) -> dict[str, Any]:
        answer = self.http.post(path, json=self._body(path, fields))
        assert answer.status_code == 200, answer.text
        return json.loads(answer.text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))

    def stream(self, path: str, **fields: Any) -> list[dict[str, Any]]:
        answer = self.http.post(path, json=self._body(path, {**fields, "stream": True}))
        assert answer.status_code == 200, answer.text
        lines = [line for line in answer.text.split("\n\n") if line]
        assert lines.pop() == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines]

    def refuse(self, path: str, param: str, **fields: Any) -> str:
        answer = self.http.post(path, json=self._body(path, fields))
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["param"] == param, answer.text
        return error["message"]

    def all(self, ask: Any, path: str, **named: dict[str, Any]) -> dict[str, Any]:
        """``ask`` for each of the named sets of fields at the same time, as one batch on the engine; answers by name."""
        with ThreadPoolExecutor(len(named)) as pool:
            waiting = {name: pool.submit(ask, path, **fields) for name, fields in named.items()}
        return {name: future.result() for name, future in waiting.items()}

    def text(self, path: str, **fields: Any) -> str:
        choice = self.post(path, **fields)["choices"][0]
        text = choice["message"]["content"] if path == CHAT else choice["text"]
        chunks = [c["choices"][0] for c in self.stream(path, **fields)]
        joined = "".join((c["delta"].get("content") or "") if path == CHAT else c["text"] for c in chunks)
        assert (joined, chunks[-1]["finish_reason"], chunks[-1]["stop_reason"]) == (text, choice["finish_reason"], choice["stop_reason"])
        return text

    def ids(self, path: str, **fields: Any) -> list[int]:
        ids = self.post(path, **fields)["choices"][0]["token_ids"]
        chunks = self.stream(path, **fields)
        assert sum((c["choices"][0].get("token_ids") or [] for c in chunks), []) == ids
        return ids

    @staticmethod
    def _body(path: str, fields: dict[str, Any]) -> dict[str, Any]:
        start = {"messages": HELLO} if path == CHAT else {"prompt": PROMPT}
        return {"temperature": 0, "max_tokens": 8, "return_token_ids": True, **start, **fields}


@pytest.fixture(scope="module")
def api(server: RunningServer) -> Api:
    return Api(server.url)


both = pytest.mark.parametrize("path", [COMPLETIONS, CHAT])


@both
def test_sampling_fields_change_what_they_say(api: Api, path: str) -> None:
    plain = api.ids(path)
    assert len(plain) == 8
    first, second = plain[:2]
    hot = {"temperature": 1.2, "seed": 7}
    long = {"max_tokens": 24, "ignore_eos": True}
    got = api.all(
        api.ids,
        path,
        biased={"logit_bias": {str(first): -100}},
        forced={"logit_bias": {str(second): 100}},
        allowed={"allowed_token_ids": [first, second]},
        seeded=hot,
        again=hot,
        other={**hot, "seed": 8},
        top_k={**hot, "top_k": 1},
        min_p={**hot, "min_p": 1.0},
        top_p={**hot, "top_p": 1e-6},
        long=long,
        frequency={**long, "frequency_penalty": 2.0},
        presence={**long, "presence_penalty": 2.0},
        repetition={**long, "repetition_penalty": 5.0},
        short={"max_tokens": 3},
        **({"short_too": {"max_tokens": None, "max_completion_tokens": 3}} if path == CHAT else {}),
    )
    assert first not in got["biased"] and set(got["forced"]) == {second} and set(got["allowed"]) <= {first, second}
    assert got["seeded"] == got["again"] != got["other"]
    assert got["top_k"] == got["min_p"] == got["top_p"] == plain  # each leaves only the best token
    for name in ("frequency", "presence", "repetition"):
        assert len(set(got[name])) > len(set(got["long"])), name
    assert len(got["short"]) == 3 and got.get("short_too", got["short"]) == got["short"]


@both
def test_ends(api: Api, path: str) -> None:
    ids = api.ids(path, max_tokens=16)
    # The bias makes the end of sequence the likeliest token at once.
    (eos,) = api.http.post("/tokenize", json={"prompt": "<|im_end|>", "add_special_tokens": False}).json()["tokens"]
    ending = {"logit_bias": {str(eos): 100}}
    got = api.all(
        api.post,
        path,
        by_id={"max_tokens": 16, "stop_token_ids": [ids[5]]},
        later={"max_tokens": 16, "stop_token_ids": [ids[0]], "min_tokens": 3},
        ended=ending,
        ignored={**ending, "ignore_eos": True},
        least={**ending, "min_tokens": 8},
    )
    choices = {name: answer["choices"][0] for name, answer in got.items()}
    by_id, ended = choices["by_id"], choices["ended"]
    assert by_id["token_ids"] == ids[: ids.index(ids[5]) + 1] and (by_id["finish_reason"], by_id["stop_reason"]) == ("stop", ids[5])
    assert len(choices["later"]["token_ids"]) >= 3
    assert ended["token_ids"] == [eos] and (ended["finish_reason"], ended["stop_reason"]) == ("stop", None)
    assert len(choices["ignored"]["token_ids"]) == len(choices["least"]["token_ids"]) == 8

    whole = api.text(path, max_tokens=16)
    stop = whole[9:13]
    cut = whole[: whole.index(stop)]
    word = whole.split()[1]
    texts = api.all(
        api.text,
        path,
        string={"max_tokens": 16, "stop": stop},
        listed={"max_tokens": 16, "stop": ["never", stop]},
        kept={"max_tokens": 16, "stop": [stop], "include_stop_str_in_output": True},
        special={**ending, "ignore_eos": True, "skip_special_tokens": False, "spaces_between_special_tokens": False},
        hidden={**ending, "ignore_eos": True},
        without={"max_tokens": 16, "bad_words": [word]},
    )
    assert texts["string"] == texts["listed"] == cut and texts["kept"] == cut + stop
    assert texts["special"] == "<|im_end|>" * 8 and texts["hidden"] == ""
    assert word not in texts["without"]


@both
def test_several_choices(api: Api, path: str) -> None:
    fields = {"n": 3, "temperature": 1.0, "seed": 3}
    answer = api.post(path, **fields)
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2] and answer["usage"]["completion_tokens"] == sum(
        len(c["token_ids"]) for c in answer["choices"]
    )
    assert len({tuple(c["token_ids"]) for c in answer["choices"]}) == 3
    streamed: dict[int, list[int]] = {}
    for chunk in api.stream(path, **fields):
        for choice in chunk["choices"]:
            streamed.setdefault(choice["index"], []).extend(choice.get("token_ids") or [])
    assert streamed == {c["index"]: c["token_ids"] for c in answer["choices"]}


def test_best_of(api: Api) -> None:
    fields = {"temperature": 1.0, "seed": 5, "logprobs": 0, "max_tokens": 6, "ignore_eos": True}
    four = api.post(COMPLETIONS, n=4, **fields)["choices"]
    ranked = sorted(four, key=lambda c: -sum(c["logprobs"]["token_logprobs"]))
    best = api.post(COMPLETIONS, n=2, best_of=4, **fields)["choices"]
    assert [c["text"] for c in best] == [c["text"] for c in ranked[:2]]


def test_legacy_logprobs_and_echo(api: Api) -> None:
    whole = api.post(COMPLETIONS, echo=True, logprobs=3, max_tokens=5)["choices"][0]
    assert whole["text"].startswith(PROMPT)
    logprobs = whole["logprobs"]
    assert "".join(logprobs["tokens"]) == whole["text"] and logprobs["token_logprobs"][0] is None
    assert all(math.isfinite(x) and x <= 0 for x in logprobs["token_logprobs"][1:])
    assert all(3 <= len(top) <= 4 for top in logprobs["top_logprobs"][1:])
    chunks = [c["choices"][0] for c in api.stream(COMPLETIONS, echo=True, logprobs=3, max_tokens=5)]
    assert sum((c["logprobs"]["tokens"] for c in chunks if c["logprobs"]), []) == logprobs["tokens"]
    scored = api.post(COMPLETIONS, prompt=whole["text"], echo=True, logprobs=3, max_tokens=0)
    assert scored["usage"]["completion_tokens"] == 0 and scored["choices"][0]["text"] == whole["text"]
    for a, b in zip(scored["choices"][0]["logprobs"]["token_logprobs"][1:], logprobs["token_logprobs"][1:]):
        assert abs(a - b) < 1e-3
    many = api.post(COMPLETIONS, prompt=["a b", "c d e"], echo=True, max_tokens=0)
    assert [c["text"] for c in many["choices"]] == ["a b", "c d e"]


def test_chat_logprobs(api: Api) -> None:
    choice = api.post(CHAT, logprobs=True, top_logprobs=4)["choices"][0]
    entries = choice["logprobs"]["content"]
    assert b"".join(bytes(e["bytes"]) for e in entries).decode() == choice["message"]["content"]
    for entry in entries:
        assert len(entry["top_logprobs"]) == 4 and entry["logprob"] == entry["top_logprobs"][0]["logprob"]
        assert sum(math.exp(t["logprob"]) for t in entry["top_logprobs"]) <= 1 + 1e-6
    streamed = [e for c in api.stream(CHAT, logprobs=True, top_logprobs=4) for e in (c["choices"][0]["logprobs"] or {}).get("content", ())]
    assert [e["token"] for e in streamed] == [e["token"] for e in entries]
    masked = api.post(CHAT, logprobs=True, top_logprobs=20, allowed_token_ids=[5], max_tokens=2)["choices"][0]["logprobs"]["content"]
    assert all(math.isfinite(t["logprob"]) for e in masked for t in e["top_logprobs"])


@both
def test_prompt_logprobs_in_any_order(api: Api, path: str) -> None:
    """Overlapping prompts, forwards and backwards, with the prefix cache on, one longer than a step's budget: the same numbers."""
    base = "Octopuses have three hearts and blue blood, and they are known to be clever. " * 40

    def numbers(size: int) -> list[Any]:
        text = base[:size]
        fields = {"prompt": text} if path == COMPLETIONS else {"messages": [{"role": "user", "content": text}]}
        answer = api.post(path, max_tokens=1, prompt_logprobs=2, **fields)
        found = answer["choices"][0]["prompt_logprobs"] if path == COMPLETIONS else answer["prompt_logprobs"]
        assert found[0] is None and len(found) == answer["usage"]["prompt_tokens"]
        return found

    sizes = (60, 150, 151, 900)
    forwards = [numbers(size) for size in sizes]
    assert [numbers(size) for size in reversed(sizes)][::-1] == forwards
    api.refuse(path, "prompt_logprobs", prompt_logprobs=1, stream=True)


def test_prompts_of_every_kind(api: Api) -> None:
    ids = api.http.post("/tokenize", json={"prompt": PROMPT}).json()["tokens"]
    text = api.text(COMPLETIONS)
    for prompt in (ids, [ids], [PROMPT]):
        assert api.text(COMPLETIONS, prompt=prompt) == text
    four = api.post(COMPLETIONS, prompt=[ids, ids[:4], ids], n=2)
    assert len(four["choices"]) == 6 and four["choices"][0]["text"] == four["choices"][4]["text"] == text
    last = api.post(COMPLETIONS, truncate_prompt_tokens=5)["choices"][0]
    assert last["prompt_token_ids"] == ids[-5:]
    api.refuse(COMPLETIONS, "prompt_embeds", prompt_embeds=base64.b64encode(b"x" * 8).decode())
    api.refuse(COMPLETIONS, "suffix", suffix="the end")


def test_the_template_fields(api: Api) -> None:
    def prompt(**fields: Any) -> str:
        ids = api.post(CHAT, max_tokens=1, **fields)["prompt_token_ids"]
        return api.http.post("/detokenize", json={"tokens": ids}).json()["prompt"]

    assert prompt().endswith("<|im_start|>assistant\n")
    assert prompt(add_generation_prompt=False).endswith("<|im_end|>\n")
    begun = [*HELLO, {"role": "assistant", "content": "The first is"}]
    assert prompt(messages=begun, continue_final_message=True, add_generation_prompt=False).endswith("assistant\nThe first is")
    assert prompt(chat_template="{{ messages[0].content }}/{{ mood }}", chat_template_kwargs={"mood": "calm"}).endswith("sea./calm")
    with_documents = "{% for d in documents %}{{ d.title }};{% endfor %}"
    assert prompt(chat_template=with_documents, documents=[{"title": "a"}, {"title": "b"}]) == "a;b;"
    api.refuse(CHAT, "documents", documents=[{"title": "a"}])
    parts = [{"role": "user", "content": [{"type": "text", "text": "One."}, {"type": "text", "text": "Two."}], "name": "ann"}]
    assert "One.\nTwo." in prompt(messages=parts)
    talk = [
        {"role": "developer", "content": "Be short."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "c", "content": "42"},
        {"role": "system", "content": "Be polite."},
    ]
    assert "Be short." in prompt(messages=talk) and "42" in prompt(messages=talk)
    for kind in ("image_url", "input_audio", "video_url", "file"):
        words = api.refuse(CHAT, "messages[0].content[0].type", messages=[{"role": "user", "content": [{"type": kind, kind: {}}]}])
        assert kind in words


@both
def test_usage_in_streams(api: Api, path: str) -> None:
    usage = api.post(path)["usage"]
    chunks = api.stream(path, stream_options={"include_usage": True})
    last = chunks.pop()
    assert last["choices"] == [] and {**last["usage"], "prompt_tokens_details": None} == {**usage, "prompt_tokens_details": None}
    assert all(c["usage"] is None for c in chunks)
    counted = api.stream(path, stream_options={"include_usage": True, "continuous_usage_stats": True})
    counts = [c["usage"]["completion_tokens"] for c in counted]
    assert counts == sorted(counts) and counts[-1] == usage["completion_tokens"]


@both
def test_beam_search(api: Api, path: str) -> None:
    """Wider beams find likelier sequences, the first choice is the best, and a beam of one is the greedy answer."""

    def totals(**fields: Any) -> list[float]:
        answer = api.post(
            path, use_beam_search=True, length_penalty=0.0, max_tokens=6, logprobs=1 if path == COMPLETIONS else True, **fields
        )
        if path == COMPLETIONS:
            return [sum(c["logprobs"]["token_logprobs"]) for c in answer["choices"]]
        return [sum(e["logprob"] for e in c["logprobs"]["content"]) for c in answer["choices"]]

    one = totals()[0]
    four = totals(n=4)
    assert four == sorted(four, reverse=True) and len(totals(n=1, beam_width=4)) == 1
    assert four[0] > one
    greedy = api.post(path, max_tokens=10)
    single = api.post(path, max_tokens=10, use_beam_search=True, early_stopping=True)
    key = (lambda a: a["choices"][0]["text"]) if path == COMPLETIONS else (lambda a: a["choices"][0]["message"]["content"])
    assert key(greedy) == key(single)
    api.refuse(path, "stream", use_beam_search=True, n=2, stream=True)


def test_openais_client_can_ask_for_all_of_it(client: openai.OpenAI, model: str) -> None:
    own: dict[str, Any] = {"top_k": 5, "min_p": 0.01, "repetition_penalty": 1.1, "min_tokens": 2, "return_token_ids": True, "priority": 3}
    chat = client.chat.completions.create(
        model=model,
        messages=HELLO,  # type: ignore[arg-type]
        max_completion_tokens=8,
        n=2,
        seed=1,
        logprobs=True,
        top_logprobs=2,
        stop=["zzz"],
        logit_bias={"5": 1},
        frequency_penalty=0.1,
        presence_penalty=0.1,
        user="me",
        metadata={"a": "b"},
        store=False,
        service_tier="auto",
        safety_identifier="x",
        prompt_cache_key="k",
        extra_body=own,
        extra_headers={"X-Request-Id": "from-openai"},
    )
    assert chat.id == "chatcmpl-from-openai" and chat._request_id == "from-openai" and len(chat.choices) == 2
    text = client.completions.create(
        model=model, prompt=PROMPT, echo=True, logprobs=1, best_of=3, n=1, max_tokens=4, seed=2, extra_body=own
    )
    assert text.choices[0].text.startswith(PROMPT)
    beams = client.completions.create(model=model, prompt=PROMPT, n=2, max_tokens=4, extra_body={"use_beam_search": True})
    assert len(beams.choices) == 2
    assert client.models.retrieve(model).id == model
    with client.chat.completions.stream(model=model, messages=HELLO, max_completion_tokens=8) as stream:  # type: ignore[arg-type]
        for _ in stream:
            pass
        assert stream.current_completion_snapshot.choices[0].message.content


def test_helper_routes(api: Api, model: str) -> None:
    assert api.http.get("/version").json()["version"]
    assert api.http.get("/ping").status_code == api.http.get("/health").status_code == 200
    assert api.http.get("/load").json() == {"server_load": 0}
    assert api.http.get(f"/v1/models/{model}").json()["max_model_len"] == 1024
    sent = api.http.post("/tokenize", json={"prompt": PROMPT, "return_token_strs": True}).json()
    assert "".join(sent["token_strs"]) == PROMPT
