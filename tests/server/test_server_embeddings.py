"""/v1/embeddings, /v1/rerank and /v1/score over the mock engine: shapes, orders, refusals, ends."""

from __future__ import annotations

import base64
import math
import struct
from typing import Any

import httpx
import openai
import pytest

from octavo.metrics.prometheus import FINISH_REASONS
from octavo.models.pooling import PoolingConfig, Roles
from octavo.server.mock import MockEngine
from tests.waiting import until

MODEL = "mock-model"  # as conftest serves it


def vector(tokens: list[int], size: int = 8) -> list[float]:
    """What the mock engine makes of a prompt."""
    counts = [float(sum(t % 8 == i for t in tokens)) for i in range(size)]
    length = math.hypot(*counts)
    return [c / length for c in counts]


def cosine(server: Any, a: str, b: str) -> float:
    x, y = (vector(server.engine.tokenizer.encode(t)) for t in (a, b))
    return sum(p * q for p, q in zip(x, y, strict=True))


@pytest.mark.parametrize("sent", [{}, {"encoding_format": "float"}, {"encoding_format": "base64"}])
def test_the_client_gets_floats(server: Any, client: openai.OpenAI, sent: dict[str, str]) -> None:
    """The client asks for base64 by default and decodes it; asked for base64 it hands the text on."""
    texts = ["one", "two words", "three of them"]
    answer = client.embeddings.create(model=MODEL, input=texts, user="somebody", **sent)
    assert [d.index for d in answer.data] == [0, 1, 2] and answer.model == MODEL and answer.object == "list"
    ids = [server.engine.tokenizer.encode(t) for t in texts]
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, ids))
    for entry, tokens in zip(answer.data, ids, strict=True):
        found = entry.embedding
        if isinstance(found, str):
            found = list(struct.unpack("<8f", base64.b64decode(found)))
        assert found == pytest.approx(vector(tokens), abs=1e-6)


@pytest.mark.parametrize("value", ["abc", ["abc"], [97, 98, 99], [[97, 98, 99]]])
def test_every_kind_of_input(http: httpx.Client, value: Any) -> None:
    answer = http.post("/v1/embeddings", json={"input": value}).json()
    assert len(answer["data"]) == 1 and answer["data"][0]["embedding"] == pytest.approx(vector([97, 98, 99]), abs=1e-6)
    assert answer["usage"] == {"prompt_tokens": 3, "total_tokens": 3}


def test_dimensions_normalize_and_truncation(http: httpx.Client) -> None:
    answer = http.post("/v1/embeddings", json={"input": "abc", "dimensions": 4}).json()
    assert answer["data"][0]["embedding"] == pytest.approx(vector([97, 98, 99], 4), abs=1e-6)
    answer = http.post("/v1/embeddings", json={"input": "abca", "normalize": False}).json()
    assert answer["data"][0]["embedding"] == [0, 2, 1, 1, 0, 0, 0, 0]
    answer = http.post("/v1/embeddings", json={"input": ["abcabc", "a"], "truncate_prompt_tokens": 3}).json()
    assert answer["data"][0]["embedding"] == pytest.approx(vector([97, 98, 99]), abs=1e-6)
    assert answer["usage"]["prompt_tokens"] == 4


def test_a_big_batch_keeps_its_order(server: Any, client: openai.OpenAI) -> None:
    texts = [f"text number {i}" for i in range(2048)]
    answer = client.embeddings.create(model=MODEL, input=texts)
    assert [d.index for d in answer.data] == list(range(2048))
    for i in (0, 1, 999, 2047):
        assert answer.data[i].embedding == pytest.approx(vector(server.engine.tokenizer.encode(texts[i])), abs=1e-6)


@pytest.mark.parametrize(
    ("path", "body", "status", "message", "param"),
    [
        ("/v1/embeddings", {}, 400, "'input' is missing", "input"),
        ("/v1/embeddings", {"input": []}, 400, "must not be empty", "input"),
        ("/v1/embeddings", {"input": ""}, 400, "input is empty", "input"),
        ("/v1/embeddings", {"input": ["a", ""]}, 400, "input[1] is empty", "input[1]"),
        ("/v1/embeddings", {"input": [[]]}, 400, "input[0] is empty", "input[0]"),
        ("/v1/embeddings", {"input": ["a", 5]}, 400, "mixes kinds", "input"),
        ("/v1/embeddings", {"input": [1, [5]]}, 400, "mixes kinds", "input"),
        ("/v1/embeddings", {"input": [[1], [-1]]}, 400, "token id -1 is not in the vocabulary", "input[1]"),
        ("/v1/embeddings", {"input": [10**30]}, 400, "", None),
        ("/v1/embeddings", {"input": {"text": "a"}}, 400, "input", "input"),
        ("/v1/embeddings", {"input": ["a"] * 2049}, 400, "at most 2048 entries, got 2049", "input"),
        ("/v1/embeddings", {"input": ["ok", "a" * 2049]}, 400, "input[1] has 2049 tokens, and this model's maximum context", "input[1]"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "int8"}, 400, "float, base64", "encoding_format"),
        ("/v1/embeddings", {"input": "a", "dimensions": 9}, 400, "between 1 and 8", "dimensions"),
        ("/v1/embeddings", {"input": "a", "dimensions": 0}, 400, "between 1 and 8", "dimensions"),
        ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 4000}, 400, "between 1 and 2048", "truncate_prompt_tokens"),
        ("/v1/embeddings", {"input": [1], "add_special_tokens": True}, 400, "works on texts", "add_special_tokens"),
        ("/v1/embeddings", {"input": "a", "model": "other"}, 404, "does not exist", "model"),
        ("/v1/embeddings", {"input": "a", "input_type": "query"}, 400, "Unknown field 'input_type'", "input_type"),
        ("/v1/embeddings", {"input": "\ud800"}, 400, "", None),
        ("/v1/rerank", {"query": "a", "documents": []}, 400, "documents must not be empty", "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": 0}, 400, "at least 1", "top_n"),
        ("/v1/rerank", {"query": "a", "documents": ["b", ""]}, 400, "documents[1] is empty", "documents[1]"),
        ("/v1/rerank", {"query": "", "documents": ["b"]}, 400, "query is empty", "query"),
        ("/v1/rerank", {"query": "a", "documents": [{"txt": "b"}]}, 400, "Unknown field 'txt' in documents", "documents[0].txt"),
        ("/v1/rerank", {"query": "a", "documents": ["b"] * 2049}, 400, "at most 2048", "documents"),
        ("/v2/rerank", {"query": "a", "documents": ["b"], "max_tokens_per_doc": 0}, 400, "at least 1", "max_tokens_per_doc"),
        ("/v1/score", {"text_1": "a"}, 400, "'text_2' is missing", "text_2"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a"]}, 400, "can't be paired", "text_1"),
        ("/v1/score", {"text_1": "a", "text_2": [[1, 2]]}, 400, "both be texts", "text_2"),
    ],
)
def test_refusals(http: httpx.Client, path: str, body: dict[str, Any], status: int, message: str, param: str | None) -> None:
    import json

    content = json.dumps(body)  # with lone surrogates as escapes, which httpx would not write
    answer = http.post(path, content=content, headers={"content-type": "application/json"})
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert message in error["message"]
    assert param is None or error["param"] == param


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
def test_rerank_sorts(server: Any, http: httpx.Client, path: str) -> None:
    documents: list[Any] = ["ships and stars", {"text": "deep water"}, "the deep water", "x"]
    body = {"query": "deep water", "documents": documents, "top_n": 3, "return_documents": True}
    answer = http.post(path, json=body).json()
    texts = [d if isinstance(d, str) else d["text"] for d in documents]
    scores = [cosine(server, "deep water", t) for t in texts]
    order = sorted(range(4), key=lambda i: -scores[i])[:3]
    assert [r["index"] for r in answer["results"]] == order and order[0] == 1
    for result in answer["results"]:
        assert result["relevance_score"] == pytest.approx(scores[result["index"]], abs=1e-6)
        assert result["document"] == {"text": texts[result["index"]]}
    plain = http.post(path, json={"query": "a", "documents": ["b"]}).json()["results"][0]
    assert ("document" in plain) == (path != "/v2/rerank")
    assert answer["usage"]["total_tokens"] > 0


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
def test_scores_pair_up(server: Any, http: httpx.Client, path: str) -> None:
    one_to_many = http.post(path, json={"text_1": "ab", "text_2": ["ab", "cd"]}).json()
    assert [d["index"] for d in one_to_many["data"]] == [0, 1] and one_to_many["data"][0]["object"] == "score"
    assert [d["score"] for d in one_to_many["data"]] == pytest.approx([1, cosine(server, "ab", "cd")], abs=1e-6)
    pairs = http.post(path, json={"text_1": ["ab", "x"], "text_2": ["cd", "x"]}).json()
    assert [d["score"] for d in pairs["data"]] == pytest.approx([cosine(server, "ab", "cd"), 1], abs=1e-6)


def test_a_server_that_only_embeds(start_server: Any) -> None:
    engine = MockEngine()
    engine.roles = Roles(generates=False, pooling=PoolingConfig("mean"))
    server = start_server(engine)
    with httpx.Client(base_url=server.url) as http:
        for path, body in (
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
            ("/v1/completions", {"prompt": "hi", "stream": True}),
        ):
            answer = http.post(path, json=body)
            assert answer.status_code == 400
            error = answer.json()["error"]
            assert "--runner pooling" in error["message"] and error["code"] == "unsupported_task"
        assert http.post("/v1/embeddings", json={"input": "a"}).status_code == 200


def test_a_server_that_only_generates(start_server: Any) -> None:
    engine = MockEngine()
    engine.roles = Roles(generates=True, pooling=None)
    with httpx.Client(base_url=start_server(engine).url) as http:
        for path, body in (
            ("/v1/embeddings", {"input": "a"}),
            ("/v1/rerank", {"query": "a", "documents": ["a"]}),
            ("/v1/score", {"text_1": "a", "text_2": "a"}),
        ):
            answer = http.post(path, json=body)
            assert answer.status_code == 400 and "--runner generate" in answer.json()["error"]["message"]
        assert http.post("/v1/completions", json={"prompt": "hi", "max_tokens": 1}).status_code == 200


def test_keys_close_the_new_routes(start_server: Any) -> None:
    server = start_server(api_key=("secret",))
    with httpx.Client(base_url=server.url) as http:
        for path in ("/v1/embeddings", "/v1/rerank", "/rerank", "/v2/rerank", "/v1/score", "/score"):
            assert http.post(path, json={"input": "a"}).status_code == 401


def test_metrics_count_inputs(start_server: Any) -> None:
    """An input is a request: finished, aborted when the client goes, failed when the engine does."""
    engine = MockEngine()
    server = start_server(engine)
    counts = server.app.state.context.metrics.finished
    stop, abort = FINISH_REASONS.index("stop"), FINISH_REASONS.index("abort")
    with httpx.Client(base_url=server.url) as http:
        http.post("/v1/embeddings", json={"input": ["a", "b", "c"]})
        assert counts[stop] == 3
        engine.tick_s = 60  # for what is waited for in vain, however late it is noticed that the client has gone
        with pytest.raises(httpx.ReadTimeout):
            http.post("/v1/embeddings", json={"input": ["a", "b"]}, timeout=httpx.Timeout(60, read=0.1))
        until(lambda: counts[abort] >= 2)
        assert (counts[stop], counts[abort]) == (3, 2)
        engine.dead = True
        assert http.post("/v1/embeddings", json={"input": "a"}).status_code == 503


def test_answers_are_as_described(http: httpx.Client) -> None:
    import msgspec

    from octavo.server.schemas_pooling import Embeddings, Ranking, Scores

    for path, body, kind in (
        ("/v1/embeddings", {"input": ["a", "b"], "encoding_format": "base64"}, Embeddings),
        ("/v1/embeddings", {"input": "a"}, Embeddings),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}, Ranking),
        ("/v2/rerank", {"query": "a", "documents": ["b"]}, Ranking),
        ("/v1/score", {"text_1": "a", "text_2": "b"}, Scores),
    ):
        answer = http.post(path, json=body).json()
        assert msgspec.to_builtins(msgspec.convert(answer, kind)) == answer
