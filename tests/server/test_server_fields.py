"""Fields one by one, against the server with the mock engine: what they do to the request and to the answer."""

from __future__ import annotations

import json

import httpx
import pytest

from octavo.server.mock import MockEngine

MODEL = "mock-model"
HELLO = [{"role": "user", "content": "hello"}]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def post(http: httpx.Client, path: str, **body) -> dict:
    body.setdefault("messages" if path == CHAT else "prompt", HELLO if path == CHAT else "the octopus")
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(http: httpx.Client, path: str, **body) -> list[dict]:
    body.setdefault("messages" if path == CHAT else "prompt", HELLO if path == CHAT else "the octopus")
    answer = http.post(path, json={"stream": True, **body})
    assert answer.status_code == 200, answer.text
    return [json.loads(line[6:]) for line in answer.text.split("\n\n") if line and line != "data: [DONE]"]


def test_best_of_takes_the_likeliest(http, monkeypatch):
    """Sequence i has a mean log-probability of its own; those with the best come back, in order, without log-probabilities."""
    import octavo.server.mock as mock
    from octavo.types import TokenLogprobs

    means = {0: -3.0, 1: -0.5, 2: -2.0, 3: -0.1}
    real = mock._Sequence.step

    def step(self, max_tokens: int) -> None:
        real(self, max_tokens)
        self.logprobs = self.logprobs and [
            TokenLogprobs(entry.token_ids, [means[self.index]] * len(entry.token_ids), 1) for entry in self.logprobs
        ]

    plain = post(http, COMPLETIONS, n=4, max_tokens=5)["choices"]
    monkeypatch.setattr(mock._Sequence, "step", step)
    answer = post(http, COMPLETIONS, n=2, best_of=4, max_tokens=5)
    assert [c["text"] for c in answer["choices"]] == [plain[3]["text"], plain[1]["text"]]
    assert [c["index"] for c in answer["choices"]] == [0, 1] and all(c["logprobs"] is None for c in answer["choices"])
    assert answer["usage"]["completion_tokens"] == 20  # all four were generated
    two = post(http, COMPLETIONS, prompt=["the octopus", "a"], best_of=3, max_tokens=5, logprobs=1, echo=True)
    assert [c["index"] for c in two["choices"]] == [0, 1]
    assert [c["text"].startswith(p) for c, p in zip(two["choices"], ("the octopus", "a"))] == [True, True]
    assert two["choices"][0]["logprobs"]["token_logprobs"][-1] == -0.5


def test_tokens_as_ids(http):
    legacy = post(http, COMPLETIONS, logprobs=2, max_tokens=3, return_tokens_as_token_ids=True, return_token_ids=True)["choices"][0]
    names = [f"token_id:{token}" for token in legacy["token_ids"]]
    assert legacy["logprobs"]["tokens"] == names
    assert all(key.startswith("token_id:") for top in legacy["logprobs"]["top_logprobs"] for key in top)
    plain = post(http, COMPLETIONS, logprobs=2, max_tokens=3)["choices"][0]
    assert legacy["logprobs"]["text_offset"] == plain["logprobs"]["text_offset"] and legacy["text"] == plain["text"]
    chat = {"logprobs": True, "top_logprobs": 2, "max_tokens": 3}
    entries = post(http, CHAT, **chat, return_tokens_as_token_ids=True)["choices"][0]["logprobs"]["content"]
    readable = post(http, CHAT, **chat)["choices"][0]["logprobs"]["content"]
    assert [e["bytes"] for e in entries] == [e["bytes"] for e in readable]
    assert all(e["token"].startswith("token_id:") and e["top_logprobs"][0]["token"].startswith("token_id:") for e in entries)
    streamed = [
        e
        for c in events(http, CHAT, **chat, return_tokens_as_token_ids=True)
        for e in (c["choices"][0]["logprobs"] or {}).get("content", ())
    ]
    assert streamed == entries


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_without_text_tokens_still_come_one_by_one(start_server, path):
    running = start_server(MockEngine(tick_s=0.01))
    with httpx.Client(base_url=running.url) as http:
        whole = post(http, path, detokenize=False, return_token_ids=True, max_tokens=6)["choices"][0]
        assert not (whole.get("text") or whole.get("message", {}).get("content"))
        assert len(whole["token_ids"]) == 6
        chunks = events(http, path, detokenize=False, return_token_ids=True, max_tokens=6)
    ids = [c["choices"][0]["token_ids"] for c in chunks if c["choices"][0].get("token_ids")]
    assert sum(ids, []) == whole["token_ids"] and len(ids) >= 3


def test_truncate_to_what_the_context_holds(start_server):
    running = start_server(MockEngine(max_model_len=64))
    with httpx.Client(base_url=running.url) as http:
        long = "octopus " * 200
        answer = post(http, COMPLETIONS, prompt=long, truncate_prompt_tokens=-1, max_tokens=10, ignore_eos=True)
        assert answer["usage"]["prompt_tokens"] == 54 and answer["usage"]["completion_tokens"] == 10
        chat = post(http, CHAT, messages=[{"role": "user", "content": long}], truncate_prompt_tokens=-1, max_completion_tokens=4)
        assert chat["usage"]["prompt_tokens"] == 60
        assert http.post(COMPLETIONS, json={"prompt": long}).status_code == 400


def test_a_template_of_the_request(start_server):
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ word }}{% for d in documents or [] %}[{{ d.text }}]{% endfor %}"
    )
    running = start_server(trust_request_chat_template=True)
    with httpx.Client(base_url=running.url) as http:
        for _ in range(2):
            post(http, CHAT, chat_template=template, chat_template_kwargs={"word": "!"}, documents=[{"text": "deep"}], max_tokens=1)
            assert running.engine.last_request["prompt"] == "<user>hello![deep]"
        sent = post(http, "/tokenize", messages=HELLO, chat_template=template, prompt=None)
        assert running.engine.tokenizer.decode(sent["tokens"]) == "<user>hello"
        for broken, words in (("{% for %}", "syntax error"), ("{{ messages", "syntax error"), ("x" * 300_000, "262144")):
            answer = http.post(CHAT, json={"messages": HELLO, "chat_template": broken})
            assert answer.status_code == 400 and words in answer.json()["error"]["message"], answer.text
            assert answer.json()["error"]["param"] == "chat_template"
        for i in range(40):
            post(http, CHAT, chat_template=f"{{{{ messages[0].content }}}} {i}", max_tokens=1)
        assert len(running.app.state.context.templates) <= 16


def test_beam_search_over_http(http, server):
    answer = post(http, COMPLETIONS, use_beam_search=True, n=2, beam_width=3, max_tokens=4, logprobs=1, echo=True, temperature=0)
    prompt = answer["usage"]["prompt_tokens"]
    assert [c["index"] for c in answer["choices"]] == [0, 1] and answer["usage"]["completion_tokens"] == 8
    assert all(c["text"].startswith("the octopus") and len(c["logprobs"]["tokens"]) == prompt + 4 for c in answer["choices"])
    chat = post(http, CHAT, use_beam_search=True, n=3, max_tokens=4, user="somebody", store=True)
    assert len(chat["choices"]) == 3 and all(c["finish_reason"] == "length" for c in chat["choices"])
    for path in (CHAT, COMPLETIONS):
        body = {"messages": HELLO} if path == CHAT else {"prompt": "x"}
        refused = http.post(path, json={**body, "use_beam_search": True, "stream": True})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "stream"
    server.wait_idle()


def test_a_client_that_leaves_ends_its_search(start_server):
    running = start_server(MockEngine(tick_s=0.02))
    with pytest.raises(httpx.ReadTimeout):
        body = {"prompt": "x", "use_beam_search": True, "n": 4, "max_tokens": 1500}
        httpx.post(running.url + COMPLETIONS, json=body, timeout=httpx.Timeout(60, read=0.3))
    running.wait_idle()


def test_ping_and_load(start_server):
    running = start_server(MockEngine(tick_s=0.02, length=2000))
    with httpx.Client(base_url=running.url) as http:
        assert http.get("/ping").status_code == http.post("/ping").status_code == 200
        assert http.get("/load").json() == {"server_load": 0}
        with http.stream("POST", COMPLETIONS, json={"prompt": "x", "stream": True, "max_tokens": 1000}) as answer:
            lines = answer.iter_lines()
            next(lines)
            assert httpx.get(running.url + "/load").json() == {"server_load": 1}
        running.engine.dead = True
        assert http.get("/ping").status_code == 503


def test_request_ids(http):
    answer = http.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 1}, headers={"X-Request-Id": "mine-1"})
    assert answer.json()["id"] == "cmpl-mine-1" and answer.headers["x-request-id"] == "mine-1"
    answer = http.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 1, "request_id": "field-2"}, headers={"X-Request-Id": "mine-1"})
    assert answer.json()["id"] == "cmpl-field-2" and answer.headers["x-request-id"] == "mine-1"
