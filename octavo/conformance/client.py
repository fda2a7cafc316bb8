"""A small HTTP client that says exactly what came: statuses, strict JSON, events as they arrive, connections that are cut."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import socket
import ssl
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn
from urllib.parse import urlsplit

JSON = {"Content-Type": "application/json"}
RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs", "llamacpp:requests_processing")
WAITING = ("vllm:num_requests_waiting", "sglang:num_queue_reqs", "llamacpp:requests_deferred")
CACHE_USE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage", "llamacpp:kv_cache_usage_ratio")


class Failed(Exception):
    """The server did something else than it should; the text says what."""


class Skipped(Exception):
    """The case says nothing about this server; the text says why."""


def expect(condition: Any, why: str) -> None:
    if not condition:
        raise Failed(why)


def loads(text: str | bytes) -> Any:
    """Strict JSON: NaN and Infinity are no JSON."""

    def constant(name: str) -> NoReturn:
        raise Failed(f"{name} in an answer, which is not JSON")

    try:
        return json.loads(text, parse_constant=constant)
    except ValueError as error:
        raise Failed(f"an answer is not JSON ({error}): {short(text)}") from None


def short(text: str | bytes, size: int = 200) -> str:
    text = text.decode(errors="replace") if isinstance(text, bytes) else text
    return text if len(text) <= size else text[:size] + "…"


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]  # names in lower case
    body: bytes

    def json(self) -> Any:
        return loads(self.body)

    def ok(self) -> Any:
        """The JSON of a 200; Failed with what the server said otherwise."""
        expect(self.status == 200, f"answered {self.status}: {short(self.body)}")
        return self.json()

    def refused(self, statuses: int | tuple[int, ...], *words: str) -> dict[str, Any]:
        """The error object of a refusal that has one of the statuses, OpenAI's shape, and all of ``words`` in its message."""
        wanted = (statuses,) if isinstance(statuses, int) else statuses
        expect(self.status in wanted, f"answered {self.status} instead of {' or '.join(map(str, wanted))}: {short(self.body)}")
        body = self.json()
        error = body.get("error") if isinstance(body, dict) else None
        expect(
            isinstance(error, dict) and isinstance(error.get("message"), str) and {"type", "param", "code"} <= error.keys(),
            f'the error is not {{"error": {{"message", "type", "param", "code"}}}}: {short(self.body)}',
        )
        for word in words:
            expect(word in error["message"], f"the error does not name {word!r}: {short(error['message'])}")
        return error


class Server:
    """One server under test. ``base_url`` with or without its /v1."""

    def __init__(
        self, base_url: str, *, api_key: str | None = None, model: str | None = None, timeout_s: float = 120, pid: int | None = None
    ) -> None:
        parts = urlsplit(base_url if "//" in base_url else f"http://{base_url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"--base-url must be a http(s) address, got {base_url!r}")
        self.scheme, self.host = parts.scheme, parts.hostname
        self.port = parts.port or (443 if parts.scheme == "https" else 80)
        self.root = parts.path.rstrip("/").removesuffix("/v1")
        self.auth = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.timeout_s = timeout_s
        self.pid = pid
        self._model = model
        self.tls = ssl.create_default_context() if self.scheme == "https" else None

    @property
    def model(self) -> str:
        if self._model is None:
            models = self.get("/v1/models").ok()["data"]
            expect(models, "/v1/models lists no model")
            self._model = str(models[0]["id"])
        return self._model

    # -- requests

    def request(
        self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None, timeout_s: float | None = None
    ) -> Answer:
        connection = self._connection(timeout_s)
        with contextlib.closing(connection):
            connection.request(method, self.root + path, body=body, headers={**self.auth, **(headers or {})})
            response = connection.getresponse()
            return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())

    def get(self, path: str) -> Answer:
        return self.request("GET", path)

    def post(self, path: str, body: dict[str, Any], timeout_s: float | None = None) -> Answer:
        data = json.dumps({"model": self.model, **body}).encode()
        return self.request("POST", path, data, JSON, timeout_s)

    def complete(self, prompt: Any, **fields: Any) -> dict[str, Any]:
        """The body of a plain, greedy completion."""
        return self.post("/v1/completions", {"prompt": prompt, "temperature": 0, **fields}).ok()

    def chat(self, text: str, **fields: Any) -> dict[str, Any]:
        return self.post("/v1/chat/completions", _chat(text, fields)).ok()

    def stream_complete(self, prompt: Any, **fields: Any) -> list[dict[str, Any]]:
        return self.stream("/v1/completions", {"prompt": prompt, "temperature": 0, **fields})

    def stream_chat(self, text: str, **fields: Any) -> list[dict[str, Any]]:
        return self.stream("/v1/chat/completions", _chat(text, fields))

    def stream(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """All chunks of a stream that must end with [DONE]."""
        return list(self.events(path, body))

    def events(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Chunks as they arrive. Closing the iterator cuts the connection."""
        connection = self._connection()
        with contextlib.closing(connection):
            data = json.dumps({"model": self.model, **body, "stream": True}).encode()
            connection.request("POST", self.root + path, body=data, headers={**self.auth, **JSON})
            response = connection.getresponse()
            if response.status != 200:
                Answer(response.status, {}, response.read()).ok()
            kind = response.getheader("content-type", "")
            expect(kind.startswith("text/event-stream"), f"a stream has the content type {kind!r}")
            for line in response:
                line = line.strip()
                if not line or line.startswith(b":") or not line.startswith(b"data:"):
                    continue
                payload = line[5:].strip()
                if payload == b"[DONE]":
                    return
                chunk = loads(payload)
                expect("error" not in chunk, f"the stream ended with an error: {short(payload)}")
                yield chunk
            raise Failed("the stream ended without [DONE]")

    def raw(self, head: str, chunks: Iterable[bytes] = (), headers: dict[str, str] | None = None) -> Answer:
        """Send bytes that no well-behaved client sends, and read the answer, also when the server stops reading early."""
        sock = self.connect()
        with contextlib.closing(sock):
            with contextlib.suppress(OSError):  # a server that refuses early closes its side
                sock.sendall(self._head(head, headers or {}))
                for chunk in chunks:
                    sock.sendall(chunk)
            response = http.client.HTTPResponse(sock)
            try:
                response.begin()
                return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
            except (OSError, http.client.HTTPException) as error:
                raise Failed(f"the connection broke without an answer ({type(error).__name__})") from None

    def start(self, path: str, body: dict[str, Any]) -> socket.socket:
        """Send a request and leave it: the connection, to be cut by the caller."""
        data = json.dumps({"model": self.model, **body}).encode()
        sock = self.connect()
        sock.sendall(self._head(f"POST {self.root}{path} HTTP/1.1", {**JSON, "Content-Length": str(len(data))}) + data)
        return sock

    def _head(self, first: str, headers: dict[str, str]) -> bytes:
        lines = [first, *(f"{k}: {v}" for k, v in {"Host": self.host, **self.auth, **headers}.items())]
        return "\r\n".join([*lines, "", ""]).encode()

    def connect(self) -> socket.socket:
        sock = socket.create_connection((self.host, self.port), timeout=self.timeout_s)
        return self.tls.wrap_socket(sock, server_hostname=self.host) if self.tls is not None else sock

    def _connection(self, timeout_s: float | None = None) -> http.client.HTTPConnection:
        timeout = timeout_s or self.timeout_s
        if self.tls is not None:
            return http.client.HTTPSConnection(self.host, self.port, timeout=timeout, context=self.tls)
        return http.client.HTTPConnection(self.host, self.port, timeout=timeout)

    # -- what can be seen of the server beside its answers

    def metric(self, names: tuple[str, ...]) -> float | None:
        """Sum of the first of these Prometheus metrics that the server has; None when it has none of them."""
        answer = self.get("/metrics")
        if answer.status != 200:
            return None
        text = answer.body.decode(errors="replace")
        for name in names:
            values = re.findall(rf"^{re.escape(name)}(?:\{{[^\n]*\}})? (\S+)$", text, re.MULTILINE)
            if values:
                return sum(map(float, values))
        return None

    def resident_bytes(self) -> int | None:
        """Memory of the server's process (``pid``) and its children; None when it is not known."""
        return None if self.pid is None else sum(map(_resident, _family(self.pid)))


def _chat(text: str, fields: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "temperature": 0, **fields}


def _family(pid: int) -> list[int]:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{pid}/children") as file:
        return [pid, *(p for child in file.read().split() for p in _family(int(child)))]
    return [pid]


def _resident(pid: int) -> int:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status") as file:
        for line in file:
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
    return 0
