"""Requests that crashed, blocked or misled servers of this kind: refused at the door, quickly, and the server is well afterwards."""

from __future__ import annotations

import json
import socket
import threading
import time

import httpx
import pytest

from octavo.server import caps
from octavo.server.mock import MockEngine
from octavo.weights.files import safetensors_files
from tests.waiting import slowness

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]
PATHS = ((COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": HELLO}))


def refused(answer: httpx.Response, param: str | None = None, status: int = 400) -> str:
    assert answer.status_code == status, answer.text[:300]
    error = answer.json()["error"]
    if param is not None:
        assert error["param"] == param, error
    return error["message"]


@pytest.fixture(autouse=True)
def _quick_and_still_well(http, server):
    start = time.process_time()  # the server is in this process
    yield
    assert time.process_time() - start < 5 * slowness()
    assert http.get("/health").status_code == 200
    assert http.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 1}).status_code == 200
    server.wait_idle()


@pytest.mark.parametrize("prompt", ["", [], [[]], [""], ["a", ""], [[1], []]], ids=str)
@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"echo": True}, {"n": 2}, {"add_special_tokens": False}], ids=str)
def test_empty_prompts(http, prompt, fields):
    if fields.get("add_special_tokens") is False and prompt == [[1], []]:
        pytest.skip("token ids")
    refused(http.post(COMPLETIONS, json={"prompt": prompt, **fields}), "prompt")


@pytest.mark.parametrize("token", [-1, 2**31, 2**63, 10**30, -(2**70), 10_000])
def test_ids_outside_of_the_vocabulary(http, server, token):
    """In every field that holds ids; none reaches the engine."""
    before = server.engine.stats.prompt_tokens
    refused(http.post(COMPLETIONS, json={"prompt": [5, token]}), "prompt" if -(2**63) <= token < 2**64 else None)
    refused(http.post(COMPLETIONS, json={"prompt": [[5], [token]]}))
    for path, base in PATHS:
        for name, value in (("stop_token_ids", [token]), ("allowed_token_ids", [token]), ("logit_bias", {str(token): 1})):
            refused(http.post(path, json={**base, name: value}), name)
    refused(http.post("/detokenize", json={"tokens": [token]}))
    assert server.engine.stats.prompt_tokens == before


@pytest.mark.parametrize("n", [129, 10**6, 2**31, 2**63, 10**40, -1, 0])
def test_huge_n(http, n):
    for path, base in PATHS:
        for fields in ({"n": n}, {"n": n, "stream": True}):
            assert "n" in refused(http.post(path, json={**base, **fields}))
    refused(http.post(COMPLETIONS, json={"prompt": "x", "best_of": n, "n": 1}))


def test_many_prompts_and_choices(start_server, http):
    refused(http.post(COMPLETIONS, json={"prompt": ["x"] * 2049}), "prompt")
    refused(http.post(COMPLETIONS, json={"prompt": ["x"] * 128, "n": 128}), "n")
    few = start_server(max_prompts_per_request=2)
    assert "--max-prompts-per-request" in refused(httpx.post(few.url + COMPLETIONS, json={"prompt": ["x"] * 3}), "prompt")
    assert httpx.post(few.url + COMPLETIONS, json={"prompt": ["x"] * 2, "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stop", "s" * (caps.MAX_STOP_CHARS + 1)),
        ("stop", ["s", "s" * (caps.MAX_STOP_CHARS + 1)]),
        ("stop", [str(i) for i in range(17)]),
        ("bad_words", ["b" * (caps.MAX_BAD_WORD_CHARS + 1)]),
        ("bad_words", ["b"] * 1025),
        ("stop_token_ids", [1] * (caps.MAX_STOP_TOKEN_IDS + 1)),
        ("allowed_token_ids", [1] * 100_000),
        ("logit_bias", {str(i): 1 for i in range(2000)}),
        ("request_id", "r" * (caps.MAX_ID_CHARS + 1)),
        ("cache_salt", "s" * (caps.MAX_SALT_CHARS + 1)),
    ],
    ids=lambda v: v if isinstance(v, str) and len(v) < 30 else "",
)
def test_lists_and_texts_without_end(http, name, value):
    for path, base in PATHS:
        for stream in (False, True):
            assert name in refused(http.post(path, json={**base, name: value, "stream": stream}), name)


def test_logprobs_of_many_long_answers_at_once(start_server):
    running = start_server(MockEngine(length=3, max_model_len=8192))
    body = {"prompt": "x", "n": 128, "logprobs": 20}
    with httpx.Client(base_url=running.url) as http:
        assert "stream: true" in refused(http.post(COMPLETIONS, json=body), "logprobs")
        chat = {"messages": HELLO, "n": 128, "logprobs": True, "top_logprobs": 20}
        refused(http.post(CHAT, json=chat), "logprobs")
        for fields in ({"max_tokens": 8}, {"n": 4}, {"stream": True}):
            assert http.post(COMPLETIONS, json={**body, **fields}).status_code == 200


def test_logprobs_of_many_long_prompts_at_once(start_server):
    """A body of 16 MB holds millions of token ids, and each may ask for twenty candidates."""
    running = start_server(MockEngine(length=1, max_model_len=8192))
    many = {"prompt": [[65] * 4000] * 60, "max_tokens": 1}
    with httpx.Client(base_url=running.url, timeout=60) as http:
        assert "fewer prompts" in refused(http.post(COMPLETIONS, json={**many, "prompt_logprobs": 20}), "prompt_logprobs")
        assert "fewer prompts" in refused(http.post(COMPLETIONS, json={**many, "echo": True, "logprobs": 20}), "logprobs")
        few = {**many, "prompt": [[65] * 400] * 6}
        for fields in ({"prompt_logprobs": 20}, {"echo": True, "logprobs": 20}, {"echo": True, "logprobs": 2, "stream": True}):
            assert http.post(COMPLETIONS, json={**few, **fields}).status_code == 200


# -- addresses and file names


class Listener:
    """A port of this machine that counts who calls."""

    def __init__(self) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        self.calls = 0
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        while True:
            try:
                connection, _ = self.socket.accept()
            except OSError:
                return
            self.calls += 1
            connection.close()


@pytest.fixture
def listener():
    listener = Listener()
    yield listener
    listener.socket.close()


def test_nothing_is_fetched(http, listener, tmp_path):
    """Addresses in a request (images, audio, files, tools, templates, schemas) are refused or are text; no connection is made."""
    url = f"http://127.0.0.1:{listener.port}/x"
    secret = tmp_path / "secret"
    secret.write_text("secret words")
    for address in (url, url.replace("http", "https"), f"file://{secret}", str(secret), "ftp://127.0.0.1/x", "http://169.254.169.254/"):
        parts = (
            {"type": "image_url", "image_url": {"url": address}},
            {"type": "image_url", "image_url": address},
            {"type": "input_image", "image_url": address},
            {"type": "image", "image": address},
            {"type": "input_audio", "input_audio": {"data": address, "format": "wav"}},
            {"type": "audio_url", "audio_url": {"url": address}},
            {"type": "video_url", "video_url": {"url": address}},
            {"type": "file", "file": {"file_data": address}},
            {"type": "input_file", "file_url": address},
        )
        for part in parts:
            body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "see"}, part]}]}
            assert part["type"] in refused(http.post(CHAT, json=body))
        schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"$ref": address}}}
        texts = {"guided_json": {"$ref": address}}, {"response_format": schema}
        for fields in ({"chat_template": address}, {"documents": [{"url": address}]}):
            answer = http.post(CHAT, json={"messages": HELLO, "max_tokens": 2, **fields})
            assert answer.status_code == 400 and "secret words" not in answer.text, fields
        for fields in texts:  # refused where there is a compiler (test_grammars.py); the mock has none
            assert "secret words" not in http.post(CHAT, json={"messages": HELLO, "max_tokens": 2, **fields}).text
        http.post(CHAT, json={"messages": HELLO, "max_tokens": 2, "chat_template_kwargs": {"image": address}})
        http.post(CHAT, json={"messages": [{"role": "user", "content": address}], "max_tokens": 2})
    time.sleep(0.05)
    assert listener.calls == 0


NAMES = ["../../etc/passwd", "/etc/passwd", "..%2f..%2fetc%2fpasswd", "mock-model/../../etc/passwd", "file:///etc/passwd", "x\0", "~root"]


@pytest.mark.parametrize("name", NAMES)
def test_names_are_compared_and_never_opened(http, name):
    for path, base in PATHS:
        refused(http.post(path, json={**base, "model": name}), "model", 404)
    for path in ("/v1/models/", "/web/", "/"):
        with socket.create_connection((http.base_url.host, http.base_url.port), timeout=60) as sock:
            sock.sendall(f"GET {path}{name} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
            answer = b""
            while part := sock.recv(65536):
                answer += part
        assert answer.split()[1] in (b"400", b"404"), (path, answer[:100])
        assert b"root:" not in answer


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "a/../../outside.safetensors", "sub/x.safetensors", "", "."])
def test_a_model_names_no_files_outside_of_its_folder(tmp_path, name):
    from octavo.errors import ModelError

    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "outside.safetensors").write_bytes(b"x")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": name}}))
    with pytest.raises(ModelError):
        safetensors_files(folder)


# -- one client's data and the others


def test_a_salt_keeps_prefixes_apart(http, server):
    """The field reaches the engine on both routes, and the block hash has it in it: other salts share nothing, equal ones do."""
    for path, base in PATHS:
        for salt in (None, "tenant-a", "tenant-b"):
            assert http.post(path, json={**base, "max_tokens": 1, "cache_salt": salt}).status_code == 200
            assert server.engine.last_request["cache_salt"] == salt
    from octavo.engine.prefix_cache import PrefixCache

    cache, tokens = PrefixCache(8, 4), list(range(16))

    def hashes(salt: str | None, ids: list[int] = tokens) -> list[bytes]:
        result: list[bytes] = []
        cache.extend_hashes(result, ids, 4, salt)
        return result

    salts = [None, "", "a", "b", "aa", "none", "salt", "\0", "a\0", "\ud800"]
    everything = [h for salt in salts for h in hashes(salt)]
    assert len(set(everything)) == 4 * len(salts) and hashes("a") == hashes("a")
    assert all(len(h) == 32 for h in everything)  # 256 bits: no client can look for a second prompt with the same


def test_hashes_cannot_be_steered():
    """Known ways to make cheap hashes of token lists collide: other cuts, zeros, order, -1 and -2, numbers as texts."""
    from octavo.engine.prefix_cache import PrefixCache

    cache = PrefixCache(8, 2)
    lists = [[0, 0, 0, 0], [0, 0], [1, 2, 3, 4], [3, 4, 1, 2], [2, 1, 4, 3], [12, 34, 1, 2], [1, 234, 1, 2], [2**31, 0, 0, 0],
             [0, 2**31, 0, 0], [2**32, 1, 0, 0], [0, 1, 0, 0], [1, 0, 0, 0], [2**61 - 1, 0, 0, 0], [2**61, 0, 0, 0]]  # fmt: skip
    seen = {}
    for ids in lists:
        result: list[bytes] = []
        cache.extend_hashes(result, ids, len(ids) // 2, None)
        for end, digest in enumerate(result, 1):
            assert seen.setdefault(digest, tuple(ids[: 2 * end])) == tuple(ids[: 2 * end])
    from octavo.engine.prefix_cache import hashlib as used

    assert used.blake2b  # cryptographic, not Python's hash()
