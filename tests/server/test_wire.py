"""What comes over the wire beside plain HTTP/1.1 requests: older and newer HTTP, requests behind each other, broken framing."""

from __future__ import annotations

import json
import socket
import time

import httpx
import pytest

from octavo.server.mock import MockEngine
from tests.server.conftest import Running
from tests.waiting import until

PATH = "/v1/completions"


def request(fields: dict, *, version: str = "1.1", headers: str = "", path: str = PATH) -> bytes:
    body = json.dumps({"prompt": "x", **fields}).encode()
    return f"POST {path} HTTP/{version}\r\nHost: x\r\nContent-Length: {len(body)}\r\n{headers}\r\n".encode() + body


def exchange(port: int, *parts: bytes) -> bytes:
    """Everything that comes back until the server closes."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as sock:
        for part in parts:
            sock.sendall(part)
            time.sleep(0.02)
        received = b""
        while data := sock.recv(65536):
            received += data
    return received


def test_http_1_0_gets_no_chunks(server: Running):
    """A client of HTTP/1.0 (some proxies) would take the chunks' lengths for text; its stream ends with the connection."""
    head, _, body = exchange(server.port, request({"max_tokens": 4, "stream": True}, version="1.0")).partition(b"\r\n\r\n")
    assert b"200 OK" in head and b"transfer-encoding" not in head.lower() and b"connection: close" in head
    events = body.decode().split("\n\n")
    assert all(event.startswith("data: ") for event in events[:-1]) and events[-2:] == ["data: [DONE]", ""]


def test_http_1_0_whole(server: Running):
    head, _, body = exchange(server.port, request({"max_tokens": 4}, version="1.0")).partition(b"\r\n\r\n")
    assert f"content-length: {len(body)}".encode() in head
    assert json.loads(body)["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("split", [0, 20, 75, 200])
def test_upgrade_is_not_taken(server: Running, split: int):
    """Java's HttpClient asks every server for h2c, with the body right behind; the body must not be lost, nor the next request."""
    upgrade = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA\r\n"
    data = request({"max_tokens": 3}, headers=upgrade) + request({"max_tokens": 2}, headers="Connection: close\r\n")
    parts = (data[:split], data[split:]) if split else (data,)
    received = exchange(server.port, *parts)
    assert received.count(b"HTTP/1.1 200 OK") == 2 and b"101 Switching" not in received
    assert received.index(b'"completion_tokens":3') < received.index(b'"completion_tokens":2')


def test_upgrade_of_a_request_without_body(server: Running):
    data = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    assert exchange(server.port, data, request({"max_tokens": 2}, headers="Connection: close\r\n")).count(b" 200 OK") == 2


@pytest.mark.parametrize("stream", [False, True])
def test_pipelined_requests_end_with_their_client(start_server, stream: bool):
    """The request that runs ends, also when others wait behind it."""
    running = start_server(MockEngine(length=10**9, max_model_len=10**7, tick_s=0.01))
    with socket.create_connection(("127.0.0.1", running.port)) as sock:
        sock.sendall(request({"max_tokens": 10**6, "stream": stream}) * 3)
        until(lambda: running.engine.runs)
        time.sleep(0.05)
    running.wait_idle()


@pytest.mark.parametrize("framing", [b"ZZ\r\nabc", b"FFFFFFFFFFFFFFFFF\r\nabc", b"3\r\nabcX"])
def test_broken_chunks_are_answered(server: Running, framing: bytes):
    head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    for parts in ((head + framing,), (head, framing)):
        received = exchange(server.port, *parts)
        assert received.startswith(b"HTTP/1.1 400 ") and json.loads(received.split(b"\r\n\r\n")[1])["error"]["message"]
    server.wait_idle()


@pytest.mark.parametrize(
    ("prompt", "half"),
    [
        (r"cut \ud83d", r"\ud83d"),
        (r"\ud83c\udf89 then \uDC00", r"\uDC00"),
        (r"\\ud83d is no escape, \ud83d is", r"\ud83d"),
        (r"\udc00\ud800", r"\udc00"),
        (r"\ud83d\ud83c\udf89", r"\ud83d"),
    ],
)
def test_half_a_character_is_named(server: Running, prompt: str, half: str):
    """JavaScript's slice() cuts emojis in two, and its JSON.stringify() sends the half as an escape."""
    body = f'{{"prompt": "{prompt}"}}'.encode()
    answer = httpx.post(server.url + PATH, content=body)
    assert answer.status_code == 400
    where = (body.rindex if prompt.startswith("\\\\") else body.index)(half.encode())
    assert f"{half} at byte {where} is half" in answer.json()["error"]["message"]


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_byte_order_marks_are_named(server: Running, encoding: str):
    answer = httpx.post(server.url + PATH, content='{"prompt": "x"}'.encode(encoding))
    assert answer.status_code == 400 and "byte order mark" in answer.json()["error"]["message"]
