"""``octavo chat``: the conversation's loop, the HTTP backend against a real socket, and the local backend's threads."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest

from octavo.cli.chat import Conversation
from octavo.cli.chat_backends import LocalBackend, ServerBackend, Usage
from octavo.cli.main import main
from octavo.config import EngineConfig
from octavo.errors import ModelError, OctavoError, RequestError
from octavo.frontend.outputs import CompletionOutput, RequestOutput
from octavo.types import EngineProgress

Input = Callable[..., None]


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Input:
    """Make ``input()`` answer with these lines (an exception is raised), then end of file."""

    def lines(*items: Any) -> None:
        queue = [*items, EOFError()]

        def read(prompt: str = "") -> str:
            item = queue.pop(0)
            if isinstance(item, BaseException):
                raise item
            return item

        monkeypatch.setattr("builtins.input", read)

    return lines


class EchoBackend:
    """Streams the last message back word by word, then raises ``error`` if it has one."""

    name = "echo"

    def __init__(self, error: BaseException | None = None) -> None:
        self.usage = Usage(tokens=3, first_token_s=0.5, seconds=1.5, finish_reason="stop")
        self.error = error
        self.seen: list[list[dict[str, str]]] = []
        self.closed = 0

    def stream(self, messages: list[dict[str, str]]) -> Iterator[str]:
        self.seen.append(messages)
        try:
            for word in messages[-1]["content"].split():
                yield word + " "
            if self.error is not None:
                error, self.error = self.error, None
                raise error
        finally:
            self.closed += 1

    def close(self) -> None: ...


def roles(messages: list[dict[str, str]]) -> str:
    return "".join(m["role"][0] for m in messages)


def test_conversation_grows(typed: Input, capsys: pytest.CaptureFixture[str]) -> None:
    typed("hello you", "", "again", "/exit", "never")
    backend = EchoBackend()
    assert Conversation(backend, "be kind").run() == 0
    assert [roles(m) for m in backend.seen] == ["su", "suau"]
    captured = capsys.readouterr()
    assert captured.out == "hello you \nagain \n"
    assert "[3 tokens, 2.0 tok/s, first after 0.50 s]" in captured.err


def test_commands(typed: Input, capsys: pytest.CaptureFixture[str]) -> None:
    typed("a", "/reset", "b", "/system short answers", "c", "/system", "d", "/help", "/nonsense", "/reset")
    backend = EchoBackend()
    conversation = Conversation(backend, "one")
    assert conversation.run() == 0
    assert [roles(m) for m in backend.seen] == ["su", "su", "su", "u"]
    assert backend.seen[2][0]["content"] == "short answers"
    assert "/nonsense" in capsys.readouterr().err
    assert conversation.messages == []


def test_interrupt_stops_the_answer_not_the_program(typed: Input, capsys: pytest.CaptureFixture[str]) -> None:
    typed("one two", "three")
    backend = EchoBackend(KeyboardInterrupt())
    conversation = Conversation(backend)
    assert conversation.run() == 0
    assert backend.closed == 2
    assert conversation.messages[1] == {"role": "assistant", "content": "one two "}
    assert "[stopped; " in capsys.readouterr().err


def test_interrupt_at_the_prompt_leaves_at_the_second(typed: Input) -> None:
    conversation = Conversation(EchoBackend())
    conversation.interactive = True
    typed(KeyboardInterrupt(), "word", KeyboardInterrupt(), KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        conversation.run()
    assert roles(conversation.messages) == "ua"


def test_a_refused_message_is_forgotten(typed: Input, capsys: pytest.CaptureFixture[str]) -> None:
    typed("long", "short")
    backend = EchoBackend(RequestError("the prompt is too long"))
    assert Conversation(backend).run() == 0
    assert [roles(m) for m in backend.seen] == ["u", "u"]
    assert "octavo: error: the prompt is too long" in capsys.readouterr().err


def test_usage_line() -> None:
    assert Usage().line() == "0 tokens"
    assert Usage(1, 0.1, 0.1, "stop").line() == "1 tokens, first after 0.10 s"
    assert Usage(11, 1.0, 2.0, "length").line() == "11 tokens, 10.0 tok/s, first after 1.00 s, cut short by the length limit"


# ---------------------------------------------------------------------------------------------------------------------
# against a server


class Handler(BaseHTTPRequestHandler):
    """A small OpenAI-shaped server: refuses a wrong key and the word "bad"; streams anything else back in capitals."""

    def log_message(self, *args: Any) -> None: ...

    def do_GET(self) -> None:
        self._json(200, {"data": [{"id": "served"}]}) if self.path == "/v1/models" else self._json(404, {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append(body)
        text = body["messages"][-1]["content"]
        if self.headers.get("Authorization") != "Bearer k":
            return self._json(401, {"error": {"message": "wrong key"}})
        if text == "bad":
            return self._json(400, {"error": {"message": "no bad words"}})
        self.send_response(200)
        self.end_headers()
        deltas = [{"role": "assistant", "content": ""}, *({"content": c.upper()} for c in text), {}]
        events = [{"choices": [{"delta": d, "finish_reason": None if d else "stop"}]} for d in deltas]
        for event in [*events, {"choices": [], "usage": {"completion_tokens": 42}}]:
            self._write(b": comment\n\ndata: " + json.dumps(event).encode() + b"\n\n")
        if text != "cut":
            self._write(b"data: [DONE]\n\n")

    def _json(self, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self._write(data)

    def _write(self, data: bytes) -> None:
        self.wfile.write(data)


@pytest.fixture
def server() -> Iterator[Any]:
    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    httpd.requests = []
    thread = threading.Thread(target=httpd.serve_forever)
    thread.start()
    yield httpd
    httpd.shutdown()
    thread.join()
    httpd.server_close()


@pytest.mark.parametrize("shape", ["http://127.0.0.1:{}", "http://127.0.0.1:{}/v1", "http://127.0.0.1:{}/v1/", "127.0.0.1:{}"])
def test_server_backend_streams(server: Any, shape: str) -> None:
    backend = ServerBackend(shape.format(server.server_port), api_key="k", sampling={"temperature": 0.5})
    assert backend.name == "served"
    assert list(backend.stream([{"role": "user", "content": "hé"}])) == ["H", "É"]
    assert (backend.usage.tokens, backend.usage.finish_reason) == (42, "stop")
    (body,) = server.requests
    assert (body["model"], body["stream"], body["temperature"]) == ("served", True, 0.5)


def test_server_backend_errors(server: Any, free_port: int) -> None:
    url = f"http://127.0.0.1:{server.server_port}"
    with pytest.raises(RequestError, match="400: no bad words"):
        list(ServerBackend(url, api_key="k").stream([{"role": "user", "content": "bad"}]))
    with pytest.raises(RequestError, match="401: wrong key Give the server's key with --api-key"):
        list(ServerBackend(url).stream([{"role": "user", "content": "x"}]))
    with pytest.raises(OctavoError, match="Nothing answers at .*octavo serve"):
        ServerBackend(f"http://127.0.0.1:{free_port}")
    with pytest.raises(OctavoError, match="must look like"):
        ServerBackend("ftp://somewhere")


def test_chat_command_with_a_server(server: Any, typed: Input, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    typed("one", "bad", "two")
    monkeypatch.setenv("OCTAVO_API_KEY", "k")
    words = ["chat", "--url", f"http://127.0.0.1:{server.server_port}/v1", "--system", "s", "--max-tokens", "9", "named"]
    assert main(words) == 0
    captured = capsys.readouterr()
    assert captured.out == "ONE\n\nTWO\n"
    assert "no bad words" in captured.err and "42 tokens" in captured.err
    assert [roles(r["messages"]) for r in server.requests] == ["su", "suau", "suau"]
    assert server.requests[0]["model"] == "named" and server.requests[0]["max_tokens"] == 9


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--url", "http://127.0.0.1:1", "--max-model-len", "5"], "--max-model-len is for a model loaded here"),
        (["--api-key", "k"], "--api-key needs --url"),
        (["--temperature", "-1"], "--temperature"),
        (["m", "--n", "2"], "unknown flag --n"),
    ],
)
def test_chat_refusals(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main(["chat", *words])
    except SystemExit as error:
        status = error.code
    assert status == 2
    assert message in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------------------------
# with a model in this program


class FakeAsyncLLM:
    """Streams the prompt's token ids back, one a millisecond; tells when a request was ended early."""

    def __init__(self) -> None:
        self.tokenizer = SimpleNamespace(encode=self._encode)
        self.chat_template = SimpleNamespace(render=lambda messages: messages[-1]["content"])
        self.model_config = SimpleNamespace(generation_defaults={"temperature": 0.2, "max_new_tokens": 5})
        self.requests: list[tuple[Any, ...]] = []
        self.ended_early = threading.Event()
        self.shut_down = False

    @staticmethod
    def _encode(text: str, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens  # the template has written them
        return [ord(c) for c in text]

    async def generate(self, ids: list[int], params: Any, *, request_id: str) -> AsyncIterator[RequestOutput]:
        self.requests.append((request_id, params))
        if ids == [ord("!")]:
            raise RequestError("refused")
        finished = False
        try:
            for position, token in enumerate(ids):
                await asyncio.sleep(0.001)
                finished = position == len(ids) - 1
                output = CompletionOutput(0, chr(token), [token], finish_reason="length" if finished else None)
                yield RequestOutput(request_id, None, ids, [output], finished)
        finally:
            if not finished:
                self.ended_early.set()

    async def shutdown(self) -> None:
        self.shut_down = True


@pytest.fixture
def local(fake_module: Callable[..., Any]) -> FakeAsyncLLM:
    llm = FakeAsyncLLM()

    async def start(config: EngineConfig, *, log_level: str, on_progress: Callable[[Any], None]) -> FakeAsyncLLM:
        on_progress(EngineProgress(stage="weights", fraction=1.0))
        if config.model == "missing":
            raise ModelError("no such model")
        return llm

    fake_module("octavo.frontend.async_llm", AsyncLLM=SimpleNamespace(start=start))
    return llm


def test_local_backend(local: FakeAsyncLLM) -> None:
    backend = LocalBackend(EngineConfig(model="m"), sampling={"top_k": 3})
    assert "".join(backend.stream([{"role": "user", "content": "hello"}])) == "hello"
    assert (backend.usage.tokens, backend.usage.finish_reason) == (5, "length")
    with pytest.raises(RequestError, match="refused"):
        list(backend.stream([{"role": "user", "content": "!"}]))
    names = [request_id for request_id, _ in local.requests]
    assert len(set(names)) == 2
    params = local.requests[0][1]
    assert (params.temperature, params.top_k, params.max_tokens) == (0.2, 3, None)
    assert not local.ended_early.is_set()
    backend.close()
    assert local.shut_down and not backend._thread.is_alive()


def test_closing_the_stream_ends_the_request(local: FakeAsyncLLM) -> None:
    backend = LocalBackend(EngineConfig(model="m"))
    stream = backend.stream([{"role": "user", "content": "x" * 10_000}])
    assert next(stream) == "x"
    stream.close()
    assert local.ended_early.wait(60)
    backend.close()


def test_local_backend_that_cannot_start(local: FakeAsyncLLM, capsys: pytest.CaptureFixture[str]) -> None:
    before = {*threading.enumerate()}
    assert main(["chat", "missing"]) == 1
    assert "octavo: error: no such model" in capsys.readouterr().err
    local.chat_template = None
    assert main(["chat", "base-model"]) == 1
    assert "no chat template" in capsys.readouterr().err
    assert local.shut_down and {*threading.enumerate()} <= before


def test_chat_command_with_the_demo_model(local: FakeAsyncLLM, typed: Input, capsys: pytest.CaptureFixture[str]) -> None:
    typed("hi")
    assert main(["chat"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "hi\n" and "embedded demo model" in captured.err
    assert "weights 100%" in captured.err
