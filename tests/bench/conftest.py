"""A mock of the whole server in a process of its own, and a small raw one whose faults are known."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import free_port, until

ROOT = Path(__file__).resolve().parents[2]
TICK_S = 0.004


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OCTAVO_API_KEY", "VLLM_API_KEY", "OPENAI_API_KEY", "OCTAVO_LOG_LEVEL"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def mock_port() -> Iterator[int]:
    port = free_port()
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-m", "octavo.server.mock", str(port), str(TICK_S)], env=environment, stdout=subprocess.DEVNULL
    )

    def listens() -> bool:
        assert process.poll() is None, "the mock server ended"
        try:
            socket.create_connection(("127.0.0.1", port), 10).close()
        except OSError:
            return False
        return True

    until(listens, 120)
    yield port
    process.terminate()
    process.wait(60)


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def event(data: Any) -> bytes:
    return b"data: " + (data if isinstance(data, bytes) else json.dumps(data).encode()) + b"\n\n"


TEXT_EVENT = event({"choices": [{"index": 0, "text": "x", "finish_reason": None}]})


class RawServer:
    """Speaks just enough HTTP. ``answer(body, number, writer)`` writes the answer to the number-th completion."""

    def __init__(self, answer: Callable[[dict[str, Any], int, asyncio.StreamWriter], Any]) -> None:
        self.answer, self.bodies, self.heads = answer, [], []
        self.active = self.peak = self.connections = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while not writer.is_closing():
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = next((int(x.split(":")[1]) for x in head.splitlines() if x.lower().startswith("content-length")), 0)
                body = json.loads(await reader.readexactly(length) or b"{}")
                if head.startswith("GET /v1/models"):
                    data = b'{"data": [{"id": "m"}]}'
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(data) + data)
                elif "/completions" not in head.split()[1]:
                    writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
                else:
                    self.heads.append(head)
                    self.bodies.append(body)
                    self.active += 1
                    self.peak = max(self.peak, self.active)
                    try:
                        await self.answer(body, len(self.bodies), writer)
                    finally:
                        self.active -= 1
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


async def good_answer(body: dict[str, Any], number: int, writer: asyncio.StreamWriter, *, usage: bool = True, delay: float = 0.0) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    n = body.get("max_tokens") or body["max_completion_tokens"]
    for _ in range(n):
        if delay:
            await asyncio.sleep(delay)
        writer.write(chunk(TEXT_EVENT))
    last = event({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": n}}) if usage else b""
    writer.write(chunk(last + event(b"[DONE]")) + b"0\r\n\r\n")


class Serving:
    """A RawServer in a thread, so that commands can run in this one."""

    def __init__(self, raw: RawServer) -> None:
        self.raw = raw
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._main, daemon=True)

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._server = self._loop.run_until_complete(asyncio.start_server(self.raw.handle, "127.0.0.1", 0, backlog=2048))
        self.port = self._server.sockets[0].getsockname()[1]
        self._ready.set()
        self._loop.run_forever()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.close()

    def __enter__(self) -> Serving:
        self._thread.start()
        self._ready.wait(60)
        return self

    def stop_listening(self) -> None:
        self._loop.call_soon_threadsafe(self._server.close)

    def __exit__(self, *_: Any) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)


@pytest.fixture
def raw_server() -> Iterator[Callable[..., Serving]]:
    """Start a server that answers with the given coroutine function."""
    running: list[Serving] = []

    def start(answer: Callable[..., Any]) -> Serving:
        running.append(Serving(RawServer(answer)).__enter__())
        return running[-1]

    yield start
    for serving in running:
        serving.__exit__()


def interrupted(words: list[Any], when: Callable[[], bool]) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, which gets one Ctrl-C as soon as ``when``."""
    command = [sys.executable, "-m", "octavo", "bench", *map(str, words)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:

        def now() -> bool:
            assert process.poll() is None, process.communicate()
            return when()

        until(now, 120)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    return subprocess.CompletedProcess(command, process.returncode, out, err)
