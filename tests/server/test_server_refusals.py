"""Bad input of every kind: a clear, OpenAI-shaped 4xx that names the field, and a server that is well afterwards."""

from __future__ import annotations

import json
import logging
import re
import socket
import time

import httpx
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.server.not_served import why_not_served

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]


def refused(answer: httpx.Response, status: int, *words: str, param: str | None = None) -> dict:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"]
    body = answer.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    for word in words:
        assert word in body["error"]["message"], body
    if param is not None:
        assert body["error"]["param"] == param, body
    return body["error"]


@pytest.fixture(autouse=True)
def _still_well(http, server):
    yield
    assert http.get("/health").status_code == 200
    assert http.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 1}).status_code == 200
    server.wait_idle()


CHAT_REFUSALS = [
    ({"tools": [{"type": "function", "function": {"name": "f g"}}]}, "tools[0].function.name", "letters"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}] * 2}, "tools[1].function.name", "twice"),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "missing"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "functions only"),
    ({"tools": [{"type": "function", "function": {"name": "f", "x": 1}}]}, "tools[0].function.x", "Unknown field"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "always"}, "tool_choice", "required"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": {"type": "function"}}, "tool_choice", "name"),
    (
        {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": {"type": "function", "function": {"name": "g"}}},
        "tool_choice",
        "not among the tools",
    ),
    ({"tool_choice": "required"}, "tool_choice", "no tools"),
    ({"thinking_token_budget": 5}, "thinking_token_budget", "--reasoning-parser"),
    ({"functions": [{"name": "f"}]}, "functions", "not supported"),
    ({"response_format": "json"}, "response_format", "must be an object"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "one of text, json_object, json_schema, structural_tag"),
    ({"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema", "no field 'schema'"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "name and schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "response_format.json_schema.schema", "is missing"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}, "strict": "yes"}}},
        "response_format.json_schema.strict",
        "true or false",
    ),
    ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex", "response_format and guided_regex both"),
    ({"structured_outputs": {"jso": {}}}, "structured_outputs.jso", "no field 'jso'"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "exactly one"),
    ({"modalities": ["text", "audio"]}, "modalities", "not supported"),
    ({"audio": {"voice": "alloy"}}, "audio", "not supported"),
    ({"prediction": {"type": "content", "content": "x"}}, "prediction", "not supported"),
    ({"web_search_options": {}}, "web_search_options", "not supported"),
    ({"verbosity": "low"}, "verbosity", "not supported"),
    ({"guided_json": 5}, "guided_json", "must be a JSON object"),
    ({"guided_choice": []}, "guided_choice", "list of texts"),
    ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "Unknown field"),
    ({"chat_template": "{{ x }}"}, "chat_template", "--chat-template"),
    ({"max_token": 3}, "max_token", "did you mean 'max_tokens'"),
    ({"nonsense": 1}, "nonsense", "Unknown field"),
    ({"prompt": "hello"}, "prompt", "a prompt goes to /v1/completions"),
    ({"do_sample": False}, "do_sample", "temperature 0"),
    ({"enable_thinking": False}, "enable_thinking", "chat_template_kwargs"),
    ({"guided_decoding_backend": "x"}, "guided_decoding_backend", "leave it out"),
    ({"ebnf": "x"}, "ebnf", "structured_outputs"),
    ({"best_of": 2}, "best_of", "/v1/completions"),
    ({"messages": [{"role": "bot", "content": "x"}]}, "messages[0].role", "the roles are system, developer, user, assistant and tool"),
    ({"max_tokens": "ten"}, "max_tokens", "int"),
    ({"max_tokens": -1}, "max_tokens", "at least 0"),
    ({"temperature": -0.1}, "temperature", "at least 0"),
    ({"temperature": "hot"}, "temperature", "float"),
    ({"top_p": 0}, "top_p", "greater than 0"),
    ({"top_k": -2}, "top_k", "at least -1"),
    ({"n": 0}, "n", "at least 1"),
    ({"n": 1000000}, "n", "at most 128"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "at most 20"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs", "at least 0"),
    ({"top_logprobs": 2}, "top_logprobs", "logprobs: true"),
    ({"prompt_logprobs": 21}, "prompt_logprobs", "at most 20"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "stream"),
    ({"logit_bias": {"191222": -100}}, "logit_bias", "191222"),
    ({"logit_bias": {"-1": -100}}, "logit_bias", "-1"),
    ({"logit_bias": {"hello": -100}}, "logit_bias", "hello"),
    ({"logit_bias": {"1": 101}}, "logit_bias", "101"),
    ({"stop_token_ids": [99999]}, "stop_token_ids", "99999"),
    ({"allowed_token_ids": []}, "allowed_token_ids", "empty"),
    ({"allowed_token_ids": [-5]}, "allowed_token_ids", "-5"),
    ({"stop": ["a"] * 17}, "stop", "at most 16"),
    ({"stop": [""]}, "stop", "empty"),
    ({"stop": [1]}, "stop[0]", "str"),
    ({"seed": 2**70}, "seed", "at most"),
    ({"min_tokens": 9, "max_tokens": 3}, "min_tokens", "max_tokens"),
    ({"max_tokens": 4, "max_completion_tokens": 5}, "max_completion_tokens", "differ"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream: true"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation", "not supported"),
    ({"stream": True, "stream_options": {"x": True}}, "stream_options.x", "Unknown field"),
    ({"add_generation_prompt": True, "continue_final_message": True}, "add_generation_prompt", "exclude"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "messages"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "at least 1"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "at least 1"),
    ({"logits_processors": ["os.system"]}, "logits_processors", "run code"),
    ({"mm_processor_kwargs": {"a": 1}}, "mm_processor_kwargs", "text only"),
    ({"vllm_xargs": {"a": 1}}, "vllm_xargs", "no extensions"),
    ({"kv_transfer_params": {"a": 1}}, "kv_transfer_params", "same engine"),
    ({"documents": [{"text": "x"}]}, "documents", "no place"),
    ({"chat_template_kwargs": {"documents": []}}, "chat_template_kwargs", "documents"),
    ({"stop": "x", "detokenize": False}, "stop", "stop_token_ids"),
    ({"beam_width": 3}, "beam_width", "use_beam_search"),
    ({"length_penalty": 2}, "length_penalty", "use_beam_search"),
    ({"early_stopping": True}, "early_stopping", "use_beam_search"),
    ({"early_stopping": "always"}, "early_stopping", "always"),
    ({"use_beam_search": True, "n": 3, "beam_width": 2}, "n", "1 to beam_width (2)"),
    ({"use_beam_search": True, "beam_width": 33}, "beam_width", "1 to 32"),
    ({"use_beam_search": True, "temperature": 0.5}, "temperature", "set it to 0"),
    ({"use_beam_search": True, "top_p": 0.9}, "top_p", "set it to 1"),
    ({"use_beam_search": True, "stop": "x"}, "stop", "leave it out"),
    ({"use_beam_search": True, "logit_bias": {"1": 5}}, "logit_bias", "leave it out"),
    ({"use_beam_search": True, "min_tokens": 2}, "min_tokens", "set it to 0"),
    ({"echo": True}, "echo", "assistant's"),
    ({"messages": []}, "messages", "empty"),
    ({"messages": "hello"}, "messages", "array"),
    ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role", "king"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "missing"),
    ({"messages": [{"content": "x"}]}, "messages[0].role", "missing"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content", "int"),
    ({"messages": [{"role": "user", "content": "x", "mood": "y"}]}, "messages[0].mood", "Unknown field"),
    ({"messages": [{"role": "assistant", "content": None}]}, "messages[0].content", "content or tool_calls"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0].type",
        "image_url",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages[0].content[0].type", "input_audio"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text", "string"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages", "template refused"),
]


@pytest.mark.parametrize(("fields", "param", "words"), CHAT_REFUSALS, ids=lambda v: json.dumps(v)[:50] if isinstance(v, dict) else None)
@pytest.mark.parametrize("stream", [False, True])
def test_chat(http, fields, param, words, stream):
    """The same refusal for a stream: a status, not an event."""
    if stream and "stream_options" in fields and "stream" not in fields:
        pytest.skip("is right in a stream")
    refused(http.post(CHAT, json={"messages": HELLO, "max_tokens": 10, "stream": stream, **fields}), 400, words, param=param)


COMPLETION_REFUSALS = [
    ({"prompt": ""}, "prompt", "empty"),
    ({"prompt": []}, "prompt", "empty"),
    ({"prompt": ["a", ""]}, "prompt", "empty"),
    ({"prompt": [[]]}, "prompt", "empty"),
    ({"prompt": ["a", 1]}, "prompt", "mixes"),
    ({"prompt": [1, [1]]}, "prompt", "mixes"),
    ({"prompt": [[1], ["a"]]}, "prompt[1][0]", "int"),
    ({"prompt": [1, 99999]}, "prompt", "99999"),
    ({"prompt": [-1]}, "prompt", "-1"),
    ({"prompt": [2**80]}, "prompt", "vocabulary"),
    ({"prompt": None}, "prompt", "null"),
    ({"prompt": ["x"] * 2049}, "prompt", "at most 2048"),
    ({"prompt": ["x"] * 100, "n": 100}, "n", "8192"),
    ({"best_of": 129}, "best_of", "at most 128"),
    ({"best_of": 2, "n": 3}, "best_of", "at least n (3)"),
    ({"best_of": 2, "n": 0}, "n", "at least 1"),
    ({"best_of": 2, "stream": True}, "best_of", "streamed"),
    ({"prompt": ["x"] * 100, "best_of": 100}, "best_of", "8192"),
    ({"prompt_embeds": "AAAA"}, "prompt_embeds", "text or token ids"),
    ({"suffix": "end"}, "suffix", "not supported"),
    ({"logprobs": 21}, "logprobs", "at most 20"),
    ({"logprobs": True}, "logprobs", "int"),
    ({"prompt": [1, 2], "add_special_tokens": True}, "add_special_tokens", "token ids"),
    ({"messages": HELLO}, "messages", "messages go to /v1/chat/completions"),
    ({"n_predict": 3}, "n_predict", "did you mean 'max_tokens'"),
    ({"num_ctx": 3}, "num_ctx", "--max-model-len"),
]


@pytest.mark.parametrize(
    ("fields", "param", "words"), COMPLETION_REFUSALS, ids=lambda v: json.dumps(v)[:50] if isinstance(v, dict) else None
)
def test_completions(http, fields, param, words):
    refused(http.post(COMPLETIONS, json={"prompt": "x", **fields}), 400, words, param=param)


def test_missing_prompt(http):
    refused(http.post(COMPLETIONS, json={}), 400, "missing", param="prompt")


def test_best_of_n_is_fine(http):
    assert http.post(COMPLETIONS, json={"prompt": "x", "n": 2, "best_of": 2, "max_tokens": 1}).status_code == 200


def test_prompt_too_long_has_both_numbers(http):
    chat = {"messages": [{"role": "user", "content": "a" * 3000}]}
    for path, param, body in ((COMPLETIONS, "prompt", {"prompt": "a" * 3000}), (CHAT, "messages", chat)):
        error = refused(http.post(path, json=body), 400, "2048", param=param)
        assert error["code"] == "context_length_exceeded"
        assert any(3000 <= int(n) < 3100 for n in re.findall(r"\d+", error["message"]))


def test_wrong_model_lists_the_served(http, client):
    error = refused(http.post(CHAT, json={"model": "gpt-9", "messages": HELLO}), 404, "gpt-9", "mock-model", "second-name", param="model")
    assert error["code"] == "model_not_found"
    with pytest.raises(openai.NotFoundError, match="mock-model"):
        client.completions.create(model="gpt-9", prompt="x")
    refused(http.get("/v1/models/gpt-9"), 404, "mock-model")


@pytest.mark.parametrize(
    "body",
    [b"", b" ", b"nonsense", b"[1, 2]", b'"text"', b"null", b"3", b"{", b'{"prompt": "a"',
     b'{"prompt": "\\ud800"}', b'{"prompt": "\xff"}', b'{"prompt": NaN}',
     b'{"metadata": ' + b"[" * 100_000, b'{"metadata": ' + b'{"a":' * 50_000, b'{"seed": ' + b"9" * 10_000 + b"}", b"\x00\x01"],
    ids=lambda b: repr(b[:20]),
)  # fmt: skip
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/tokenize", "/detokenize"])
def test_not_what_json_should_be(http, path, body):
    refused(http.post(path, content=body, headers={"content-type": "application/json"}), 400)


def test_content_type_and_encoding(http):
    refused(http.post(CHAT, content=b"{}", headers={"content-type": "text/plain"}), 415, "application/json")
    refused(http.post(CHAT, content=b"{}", headers={"content-type": "application/json", "content-encoding": "gzip"}), 415, "gzip")
    assert http.post(COMPLETIONS, content=b'{"prompt": "x", "max_tokens": 1}').status_code == 200


def test_routes_and_methods(http):
    refused(http.get("/nope"), 404, "/nope")
    refused(http.get("/v1/chat/completions/"), 404)
    refused(http.get(CHAT), 405, "POST")
    refused(http.post("/chat/completions", json={}), 404, "did you mean /v1/chat/completions?")
    refused(http.get("/v1/v1/models"), 404, "did you mean /v1/models?")
    refused(http.post("/v1/nonsense", json={}), 404, "see /v1/models, /v1/chat/completions")
    refused(http.delete("/v1/models"), 405, "GET")
    assert http.head("/health").status_code == 200


def test_the_address_without_a_browser(http, server):
    answer = http.get("/")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/plain")
    paths = {route.path for route in server.app.routes}
    named = set(re.findall(r"/[a-z1/]+", answer.text)) - {"/v1"}
    assert named <= paths and "/v1/chat/completions" in named
    assert "mock-model, second-name" in answer.text


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


@pytest.mark.parametrize("chunked", [False, True])
def test_huge_body(server, http, chunked):
    """100 MB: refused at its announcement, or once it has passed the limit; memory stays flat (the server is in this process)."""
    before, block = resident(), b"x" * 65536
    highest = before

    def blocks():
        nonlocal highest
        for i in range(1600):
            yield block
            if i % 100 == 0:
                highest = max(highest, resident())

    headers = {"content-type": "application/json"} | ({} if chunked else {"content-length": str(1600 * 65536)})
    start = time.process_time()
    refused(http.post(CHAT, content=blocks(), headers=headers), 413, "--max-body-size")
    assert time.process_time() - start < 5
    assert max(highest, resident()) - before < 50 * 2**20


def raw(port: int, data: bytes, pieces: int = 1) -> bytes:
    """What the server answers to bytes, until it closes."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as sock:
        step = -(-len(data) // pieces)
        for i in range(0, len(data), step):
            sock.sendall(data[i : i + step])
        answer = b""
        while chunk := sock.recv(65536):
            answer += chunk
        return answer


def raw_refused(answer: bytes, status: int) -> None:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), answer[:200]
    assert json.loads(body)["error"]["message"]


@pytest.mark.parametrize("pieces", [1, 50])
def test_huge_header(server, pieces):
    start, before = time.process_time(), resident()
    head = b"GET /health HTTP/1.1\r\nHost: x\r\nX-Big: " + b"a" * 2**20
    raw_refused(raw(server.port, head + b"\r\n\r\n", pieces), 431)
    raw_refused(raw(server.port, head, pieces), 431)  # never completed
    many = b"".join(b"X-%d: aaaaaaaaaaaaaaaa\r\n" % i for i in range(30_000))
    raw_refused(raw(server.port, b"GET /health HTTP/1.1\r\n" + many + b"\r\n", pieces), 431)
    raw_refused(raw(server.port, b"GET /" + b"a" * 2**20 + b" HTTP/1.1\r\n\r\n", pieces), 431)
    assert time.process_time() - start < 5 and resident() - before < 20 * 2**20


def test_endless_trailers(server):
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nX-Trailer: "
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as sock:
        sock.sendall(head)
        for _ in range(4):
            sock.sendall(b"a" * 65536)
        assert sock.recv(4096).startswith(b"HTTP/1.1 431 ")
        before, end = resident(), time.monotonic() + 60
        with pytest.raises(OSError):  # what still comes is thrown away for a moment, and then the connection is closed
            while time.monotonic() < end:
                sock.sendall(b"a" * 65536)
        assert resident() - before < 20 * 2**20


def test_small_chunks_are_fine(server):
    body = b'{"prompt": "x", "max_tokens": 1, "user": "' + b"u" * 30_000 + b'"}'
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert raw(server.port, head + chunks, 40).startswith(b"HTTP/1.1 200 ")


def test_large_headers_below_the_limit_and_keep_alive(http):
    for _ in range(3):
        assert http.get("/health", headers={"x-big": "a" * 60_000}).status_code == 200


def test_not_http(server):
    raw_refused(raw(server.port, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03hello\r\n\r\n"), 400)
    raw_refused(raw(server.port, b"HELLO\r\n\r\n"), 400)


def test_pipelined_requests(server):
    one = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"
    last = b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    assert raw(server.port, one * 3 + last).count(b"HTTP/1.1 200 OK") == 4


NOT_OFFERED = [
    ("POST", "/v1/batches", "octavo run-batch"),
    ("GET", "/v1/batches/batch_1", "octavo run-batch"),
    ("POST", "/v1/files", "octavo run-batch"),
    ("POST", "/batches", "octavo run-batch"),
    ("POST", "/v1/audio/speech", "models take text"),
    ("POST", "/v1/images/generations", "models take text"),
    ("POST", "/v1/moderations", "no moderation model"),
    ("POST", "/v1/fine_tuning/jobs", "does not train"),
    ("POST", "/v1/assistants", "/v1/responses"),
    ("GET", "/v1/responses/resp_1", "no answer is stored"),
    ("DELETE", "/v1/chat/completions/chatcmpl-1", "no answer is stored"),
]


@pytest.mark.parametrize(("method", "path", "words"), NOT_OFFERED)
def test_routes_of_other_servers_say_what_is_here_instead(http, method, path, words):
    error = refused(http.request(method, path), 404, f"{path} is not offered", words)
    assert error["code"] == "unsupported_route"


def test_no_route_is_both_served_and_not(server):
    assert [r.path for r in server.app.routes if why_not_served(r.path)] == []
    answer = httpx.post(f"{server.url}/v1/messages/batches").json()
    assert answer["type"] == "error" and "octavo run-batch" in answer["error"]["message"]


@pytest.mark.parametrize("sent", ["a" * 129, "two words", "caf\u00e9".encode()])
def test_an_odd_request_id_is_replaced_and_a_line_says_so(http, caplog, sent):
    with caplog.at_level(logging.DEBUG, "octavo.access"):
        answer = http.get("/health", headers={"x-request-id": sent})
    new = answer.headers["x-request-id"]
    assert answer.status_code == 200 and re.fullmatch("[0-9a-f]{32}", new)
    assert [line for line in caplog.messages if "X-Request-Id" in line and new in line]


def test_request_id_comes_back(http):
    assert http.get("/health", headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    assert http.get("/nope", headers={"x-request-id": "abc-2"}).headers["x-request-id"] == "abc-2"
    assert len(http.get("/health", headers={"x-request-id": "a" * 500}).headers["x-request-id"]) == 32
    body = {"messages": HELLO, "max_tokens": 1}
    answer = http.post(CHAT, json=body, headers={"x-request-id": "abc-3"})
    assert answer.json()["id"] == "chatcmpl-abc-3"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
@given(data=st.data())
def test_any_field_with_any_value(http, data):
    """Whatever JSON a field gets: 200 or a 4xx that says why, never a 500."""
    from octavo.server.schemas import ChatRequest, CompletionRequest

    path, schema, base = data.draw(
        st.sampled_from([(CHAT, ChatRequest, {"messages": HELLO}), (COMPLETIONS, CompletionRequest, {"prompt": "x"})])
    )
    name = data.draw(st.sampled_from([f for f in schema.__struct_fields__ if f != "stream"]))
    answer = http.post(path, json={**base, "max_tokens": 1, name: data.draw(json_values)})
    assert answer.status_code in (200, 400, 404), answer.text
    if answer.status_code != 200:
        refused(answer, answer.status_code)


def test_a_body_that_never_comes(server, monkeypatch):
    from octavo.server import limits

    monkeypatch.setattr(limits, "IDLE_BODY_S", 0.2)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 100\r\n\r\n{"
    raw_refused(raw(server.port, head), 408)


def test_headers_that_never_come(start_server, monkeypatch):
    from octavo.server import limits

    monkeypatch.setattr(limits, "IDLE_HEADER_S", 0.2)
    running = start_server()
    raw_refused(raw(running.port, b"GET /health HT"), 408)
    assert httpx.get(running.url + "/health").status_code == 200
