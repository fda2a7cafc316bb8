"""What real clients need beside the answers themselves; tests/clients found each of these."""

from __future__ import annotations

import httpx
import pytest

from octavo.errors import RequestError
from octavo.server.messages_errors import anthropic_refusal
from octavo.server.mock import FakeChatTemplate, MockEngine

MODEL = "mock-model"
HELLO = [{"role": "user", "content": "hello"}]
CALL = {"id": "call_1", "type": "function", "function": {"name": "get_time", "arguments": "{}"}}


def test_results_of_tools_get_their_functions_names(start_server):
    """OpenAI's clients send the call's id alone, and some templates want the name."""
    running = start_server(MockEngine(template=FakeChatTemplate("<tool_call>")))
    history = [*HELLO, {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "tool_call_id": "call_1", "content": "noon"}]
    assert httpx.post(running.url + "/v1/chat/completions", json={"messages": history, "max_tokens": 2}).status_code == 200
    assert "<|im_start|>tool\nnoon" in running.engine.last_request["prompt"]
    history[-1]["tool_call_id"] = "another"
    refused = httpx.post(running.url + "/v1/chat/completions", json={"messages": history, "max_tokens": 2})
    assert refused.status_code == 400 and "needs a name" in refused.json()["error"]["message"]


def test_what_clients_put_into_answers_may_come_back(http):
    function = {**CALL["function"], "parsed_arguments": {}, "provider_specific_fields": None}
    call = {**CALL, "function": function, "provider_specific_fields": {}, "index": 0}
    message = {"role": "assistant", "content": None, "tool_calls": [call], "parsed": None, "provider_specific_fields": {"refusal": None}}
    result = {"role": "tool", "tool_call_id": "call_1", "name": "get_time", "content": "noon"}
    assert http.post("/v1/chat/completions", json={"messages": [*HELLO, message, result], "max_tokens": 2}).status_code == 200
    items = [
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "parsed_arguments": {}},
        {"type": "function_call_output", "call_id": "c", "output": "x"},
    ]
    assert http.post("/v1/responses", json={"input": items, "max_output_tokens": 2}).status_code == 200
    block = {"type": "text", "text": "{}", "parsed_output": {}}
    said = {"messages": [*HELLO, {"role": "assistant", "content": [block]}, *HELLO], "max_tokens": 2}
    assert http.post("/v1/messages", json=said).status_code == 200
    block["nonsense"] = 1
    assert http.post("/v1/messages", json=said).status_code == 400


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("POST", "/v1/messages", 401, "authentication_error"),
        ("GET", "/v1/messages", 405, "invalid_request_error"),
        ("POST", "/v1/messages/nothing", 404, "not_found_error"),
        ("POST", "/v1/messages", 429, "rate_limit_error"),
        ("POST", "/v1/messages/count_tokens", 429, "rate_limit_error"),
    ],
)
def test_anthropics_clients_get_their_shape_of_every_error(start_server, method, path, status, kind):
    running = start_server(api_key=("key",), max_requests_per_minute=1)
    headers = {} if status == 401 else {"x-api-key": "key"}
    if status == 429:
        httpx.post(running.url + "/v1/messages", json={"messages": HELLO, "max_tokens": 1}, headers=headers)
    answer = httpx.request(method, running.url + path, headers=headers)
    assert answer.status_code == status and answer.json()["type"] == "error" and answer.json()["error"]["type"] == kind
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
    assert ("retry-after" in answer.headers) == (status == 429)


def test_anthropics_clients_learn_when_to_come_again():
    full = RequestError("The queue is full.", status=503)
    full.retry_after = 2.5
    assert anthropic_refusal(full).headers["retry-after"] == "3"
    assert "retry-after" not in anthropic_refusal(RequestError("No.")).headers


def test_request_id_is_named_as_each_api_has_it(http):
    answer = http.post("/v1/messages", json={"messages": HELLO, "max_tokens": 1}, headers={"x-request-id": "mine"})
    assert answer.headers["request-id"] == answer.headers["x-request-id"] == "mine"
    assert "request-id" not in http.post("/v1/chat/completions", json={"messages": HELLO, "max_tokens": 1}).headers


def test_errors_have_the_words_that_clients_look_for(http, start_server):
    """LiteLLM maps them to its exceptions by these, not by code or status."""
    running = start_server(api_key=("key",))
    assert "Incorrect API key provided" in httpx.get(running.url + "/v1/models").json()["error"]["message"]
    long = [{"role": "user", "content": "x " * 3000}]
    message = http.post("/v1/chat/completions", json={"messages": long}).json()["error"]["message"]
    assert "this model's maximum context length is" in message


def test_stream_options_of_responses_are_checked(http):
    for options, stream in (({"include_obfuscation": True}, True), ({"include_obfuscation": False}, False)):
        answer = http.post("/v1/responses", json={"input": "hi", "stream": stream, "stream_options": options})
        assert answer.status_code == 400 and answer.json()["error"]["param"].startswith("stream_options"), answer.text
    good = {"input": "hi", "stream": True, "stream_options": {"include_obfuscation": False}, "max_output_tokens": 2}
    assert http.post("/v1/responses", json=good).status_code == 200
