"""The conformance suite itself: every case can fail, and says why; the command prints and exits as it should."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from octavo.conformance import load_cases
from octavo.conformance.__main__ import main
from octavo.conformance.cases import CASES
from octavo.conformance.client import Server
from octavo.conformance.run import FAIL, OK, SKIPPED, run_case
from octavo.server import chat, context, logprobs, sampling
from octavo.server.mock import MockEngine, _Sequence
from tests.cases.conftest import run_patiently
from tests.server.conftest import running_server

BY_ID = {case.id: case for case in CASES}
Reply = Callable[[str, dict[str, Any]], Any]


@pytest.fixture(scope="module")
def mock() -> Iterator[Server]:
    with running_server(MockEngine(tick_s=0.005, length=1000, max_model_len=8192)) as running:
        yield Server(running.url)


def run(case_id: str, server: Server) -> Any:
    return run_case(BY_ID[case_id], server)


def test_every_row_of_the_list_has_a_case():
    assert [case.id for case in CASES] == [str(i) for i in range(1, 16)]


@pytest.mark.parametrize("case", [c for c in CASES if c.id not in ("8", "9", "14")], ids=lambda case: case.id)
def test_the_mock_passes(mock, case):
    result = run_patiently(case, mock)
    assert result.status == OK, result.why


def leak_a_character(self, text):
    """As a server without hold-back: the text is sent before the stop is complete."""
    self.held += text
    stop = next((s for s in self.params.stop or () if s in self.held), None)
    self.text.append(text)
    if stop is not None:
        self.finish_reason, self.stop_reason, self.held = "stop", stop, ""


def empty_frames(self, output):
    whole = real_frames(self, output)
    return whole + self.frames.text(0, "") if self.begun[0] and output.outputs[0].finish_reason is None else whole


real_frames, real_add = chat.ChatWriter.frames_of, logprobs.LegacyLogprobs.add


def offsets_start_anew(self, *args, **kwargs):
    self.offset = 0
    return real_add(self, *args, **kwargs)


def tops_unasked(*args):
    return [shown[:-2] + b'{"token":"a","logprob":-1.0,"bytes":[97]}]}' for shown in logprobs.chat_logprobs(*args)]


BROKEN: list[tuple[str, Any, str, Any, str]] = [
    ("1", _Sequence, "_write", leak_a_character, "the text is"),
    ("2", chat.ChatWriter, "frames_of", empty_frames, "empty content"),
    ("3", logprobs.LegacyLogprobs, "add", offsets_start_anew, "has the offset"),
    ("4", chat.sse.CompletionFrames, "usage", lambda self, usage: chat.sse.event(b'{"choices":[],"usage":null}'), "shape"),
    ("5", logprobs, "numbers", lambda values: [b"1.5"] * len(values), "log-probabilities [1.5"),
    ("6", chat, "chat_logprobs", tops_unasked, "top_logprobs is"),
    ("7", sampling, "check_ids", lambda *args: None, "answered 200 instead of 400"),
    ("12", MockEngine, "abort", lambda self, request_id: None, "still runs"),
    ("15", context.ServerContext, "check_model", lambda self, name: name or "mock-model", "answered 200 instead of 404"),
]


@pytest.mark.parametrize(("case_id", "owner", "name", "broken", "why"), BROKEN, ids=[b[0] for b in BROKEN])
def test_a_fault_is_found(monkeypatch, case_id, owner, name, broken, why):
    with running_server(MockEngine(tick_s=0.005, length=1000, max_model_len=8192)) as running:
        monkeypatch.setattr(owner, name, broken)
        result = run(case_id, Server(running.url))
        monkeypatch.undo()
    assert result.status == FAIL and why in result.why


def test_other_numbers_from_the_cache(monkeypatch, mock):
    import itertools

    from octavo.server import completions

    count = itertools.count()
    monkeypatch.setattr(completions, "prompt_logprobs_json", lambda *args: [next(count)])
    assert "other numbers" in run("10", mock).why


def test_memory_and_time_are_watched(monkeypatch, mock):
    sizes = iter((0, 2**30))
    monkeypatch.setattr(Server, "resident_bytes", lambda self: next(sizes))
    monkeypatch.setattr(load_cases, "BODY_BYTES", 20 * 2**20)
    monkeypatch.setattr(load_cases, "QUICK_S", 250.0)
    assert "memory grew by 1024 MiB" in run("11", mock).why
    monkeypatch.undo()
    monkeypatch.setattr(load_cases, "BODY_BYTES", 20 * 2**20)
    monkeypatch.setattr(load_cases, "QUICK_S", 0.0)
    assert "it took" in run("11", mock).why


def test_a_pause_is_found(monkeypatch):
    import time

    def sleepy(self, prompt):
        if len(prompt) > 5000:
            time.sleep(0.8)
        return 0

    monkeypatch.setattr(MockEngine, "_lookup", sleepy)
    with running_server(MockEngine(tick_s=0.005, length=1000, max_model_len=8192)) as running:
        result = run("13", Server(running.url))
    assert result.status == FAIL and ("paused" in result.why or "tokens were streamed" in result.why)


def test_a_short_context_is_skipped():
    with running_server(MockEngine(tick_s=0.005, length=1000)) as running:
        result = run("13", Server(running.url))
    assert result.status == SKIPPED and "7,000" in result.why


# -- a scripted server, for what the mock has not


@pytest.fixture
def scripted() -> Iterator[Callable[[Reply], Server]]:
    servers = []

    def start(reply: Reply) -> Server:
        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args: Any) -> None:
                pass

            def do_GET(self) -> None:
                self._send(*_plain(self.path, {}, reply))

            def do_POST(self) -> None:
                data = self.rfile.read(int(self.headers.get("content-length") or 0))
                self._send(*_plain(self.path, json.loads(data), reply))

            def _send(self, status: int, kind: str, body: bytes) -> None:
                self.send_response(status)
                self.send_header("content-type", kind)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        servers.append(server)
        return Server(f"http://127.0.0.1:{server.server_address[1]}/v1")

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def _plain(path: str, body: dict[str, Any], reply: Reply) -> tuple[int, str, bytes]:
    """What every scripted server answers alike; ``reply`` gives a dict, (status, dict), or a list of chunks."""
    if path == "/v1/models":
        return 200, "application/json", b'{"data": [{"id": "m"}]}'
    if path == "/v1/completions":
        return 200, "application/json", b'{"choices": [{"text": "x"}]}'
    answer = reply(path, body) if path.startswith("/v1/chat") else (404, {})
    if isinstance(answer, list):
        events = [*(json.dumps(chunk) for chunk in answer), "[DONE]"]
        return 200, "text/event-stream", "".join(f"data: {event}\n\n" for event in events).encode()
    status, content = answer if isinstance(answer, tuple) else (200, answer)
    return status, "application/json", json.dumps(content).encode()


def refusal(message: str) -> tuple[int, dict[str, Any]]:
    return 400, {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": None}}


def tool_server(reason: str, streamed_reason: str, arguments: str, *, early: int | None = None) -> Reply:
    def reply(path: str, body: dict[str, Any]) -> Any:
        whole = early is not None and body["max_tokens"] > early
        call = {"index": 0, "function": {"name": "ping", "arguments": arguments}}
        if body.get("stream"):
            end = "tool_calls" if whole else streamed_reason
            return [
                {"choices": [{"delta": {"tool_calls": [call]}, "finish_reason": None}]},
                {"choices": [{"delta": {}, "finish_reason": end}]},
            ]
        usage = {"completion_tokens": early if whole else body["max_tokens"]}
        return {"choices": [{"message": {"tool_calls": [call]}, "finish_reason": "tool_calls" if whole else reason}], "usage": usage}

    return reply


def test_8_calls_that_are_cut_short(scripted):
    assert run("8", scripted(tool_server("length", "length", '{"story": "o'))).status == OK
    late = run("8", scripted(tool_server("length", "length", '{"story": "o', early=20)))
    assert late.status == OK and "cut at 10" in late.why
    for reasons in (("tool_calls", "length"), ("length", "tool_calls")):
        assert run("8", scripted(tool_server(*reasons, "{"))).status == FAIL
    result = run("8", scripted(lambda path, body: refusal("no tools")))
    assert result.status == SKIPPED and "no tools" in result.why


@pytest.mark.parametrize(("arguments", "status"), [("{}", OK), (" {} ", OK), ("", FAIL), ("{", FAIL), ("null", FAIL), ('{"a": 1}', FAIL)])
def test_9_tools_without_parameters(scripted, arguments, status):
    assert run("9", scripted(tool_server("tool_calls", "tool_calls", arguments))).status == status


def schema_server(message: str | None, value: Any) -> Reply:
    """Refuses every keyword with ``message`` about it, or answers ``value``, whatever was asked."""

    def reply(path: str, body: dict[str, Any]) -> Any:
        schema = body["response_format"]["json_schema"]["schema"]["properties"]["a"]
        if message is not None and schema != {"const": 1}:
            from octavo.conformance.tool_cases import KEYWORDS

            return refusal(message.format(next(k for k, (s, _) in KEYWORDS.items() if s == schema)))
        return {"choices": [{"message": {"content": json.dumps({"a": value})}, "finish_reason": "stop"}]}

    return reply


def test_14_keywords(scripted):
    assert "refused: uniqueItems, contains" in run("14", scripted(schema_server("/properties/a/{} is not supported", 1))).why
    assert "does not name '/properties/a/uniqueItems'" in run("14", scripted(schema_server("{} is not supported", 1))).why
    assert "accepted and not honoured" in run("14", scripted(schema_server(None, [1, 1]))).why
    assert run("14", scripted(lambda path, body: refusal("no"))).status == SKIPPED


@pytest.mark.parametrize("answer", [{}, {"choices": []}, (500, {"error": "x"}), [], [{"error": {"message": "x"}}]], ids=str)
def test_nonsense_is_never_ok(scripted, answer):
    server = scripted(lambda path, body: answer)
    for case_id in ("2", "6", "8", "9", "14"):
        result = run(case_id, server)
        assert result.status == FAIL and result.why


def test_the_command(mock, capsys):
    url = f"http://{mock.host}:{mock.port}/v1"
    assert main(["--base-url", url, "--case", "15", "--case", "7"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:2] == ["7", "ok"] and lines[2].split()[:2] == ["15", "ok"] and lines[-1] == "2 ok, 0 fail, 0 skipped"
    assert main(["--base-url", url, "--case", "15", "--json", "--model", "second-name"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["model"] == "second-name" and answer["results"][0]["status"] == OK
    assert main(["--list"]) == 0 and len(capsys.readouterr().out.splitlines()) == 15
    assert main(["--base-url", "http://127.0.0.1:1/v1"]) == 2
    with pytest.raises(SystemExit):
        main(["--case", "99"])


def test_the_command_fails_when_a_case_does(scripted, capsys):
    server = scripted(lambda path, body: {})
    assert main(["--base-url", f"http://127.0.0.1:{server.port}", "--case", "6"]) == 1
    assert "1 fail" in capsys.readouterr().out


def test_a_key_is_sent(capsys):
    with running_server(api_key=("k",)) as running:
        assert main(["--base-url", running.url, "--api-key", "k", "--case", "15"]) == 0
        assert main(["--base-url", running.url, "--api-key", "wrong", "--case", "15"]) == 2
