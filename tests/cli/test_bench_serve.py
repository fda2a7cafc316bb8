"""The benchmark's client against a small server whose speed and faults are known."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_serve", ROOT / "scripts" / "bench_serve.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_serve"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


class SmallServer:
    """Streams ``max_tokens`` events, ``delay`` seconds apart, some torn over two chunks and some joined in one."""

    def __init__(self, delay: float = 0.002, fault: str = "") -> None:
        self.delay, self.fault, self.bodies = delay, fault, []

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = next((int(line.split(":")[1]) for line in head.splitlines() if line.lower().startswith("content-length")), 0)
        body = json.loads(await reader.readexactly(length) or b"{}")
        if head.startswith("GET /v1/models"):
            data = b'{"data": [{"id": "m"}]}'
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(data) + data)
        elif self.fault == "status":
            writer.write(b"HTTP/1.1 503 Busy\r\n\r\nno room")
        else:
            self.bodies.append(body)
            await self._stream(writer, body["max_tokens"])
        await writer.drain()
        writer.close()

    async def _stream(self, writer: asyncio.StreamWriter, n: int) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        event = b'data: {"choices": [{"text": "x"}]}\n\n'
        for i in range(n):
            await asyncio.sleep(self.delay)
            writer.write(chunk(event[:9]) + chunk(event[9:]) if i % 3 == 0 else chunk(event))
            if self.fault == "cut" and i == n // 2:
                return
        tokens = n - 1 if self.fault == "short" else n
        usage = json.dumps({"choices": [], "usage": {"completion_tokens": tokens}}).encode()
        writer.write(chunk(b"data: " + usage + b"\n\ndata: [DONE]\n\n") + b"0\r\n\r\n")


def with_server(small: SmallServer, work: Callable[[int], Any]) -> Any:
    async def run() -> Any:
        server = await asyncio.start_server(small.handle, "127.0.0.1", 0)
        async with server:
            return await work(server.sockets[0].getsockname()[1])

    return asyncio.run(run())


async def load(bench: ModuleType, port: int, prompts: Any, *sizes: int) -> Any:
    client = bench.Client(bench.parse_address(f"127.0.0.1:{port}"))
    try:
        return await bench.load(client, "m", prompts, *sizes)
    finally:
        client.close()


def test_load(bench: ModuleType) -> None:
    small = SmallServer(delay=0.004)
    prompts = bench.Prompts(1000, seed=1)
    row, errors = with_server(small, lambda port: load(bench, port, prompts, 4, 2, 16, 10))
    assert errors == [] and (row.streams, row.requests, row.errors) == (4, 8, 0)
    # No upper bounds but the whole: the machine may be busy. A token that is read late seems nearer to the next.
    assert 2 <= row.tpot_ms <= 1e3 * row.seconds and 3.9 <= row.ttft_ms <= 1e3 * row.seconds
    assert row.output_tok_s == pytest.approx(80 / row.seconds, rel=0.2)
    assert len({tuple(body["prompt"]) for body in small.bodies}) == 8  # no two alike: no prefix hits
    assert all(body["ignore_eos"] and body["temperature"] == 0 and len(body["prompt"]) == 16 for body in small.bodies)


@pytest.mark.parametrize(
    ("fault", "text"), [("status", "HTTP 503: no room"), ("cut", "in the middle of the answer"), ("short", "9 of 10 tokens, complete")]
)
def test_faults_are_counted(bench: ModuleType, fault: str, text: str) -> None:
    row, errors = with_server(SmallServer(fault=fault), lambda port: load(bench, port, bench.Prompts(1000, 1), 2, 1, 4, 10))
    assert row.errors == 2 and len(errors) == 2
    assert text in errors[0]
    assert row.output_tok_s == 0 and row.ttft_ms is None


def test_whole_run_against_a_url(
    bench: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "performance.md"
    monkeypatch.setattr(bench, "PERFORMANCE", page)
    out = tmp_path / "out.json"

    async def work(port: int) -> int:
        words = ["--url", f"http://127.0.0.1:{port}", "--streams", "1,3", "--output-len", "6", "--clients", "20", "--clients-len", "4"]
        return await asyncio.to_thread(bench.main, [*words, "--json", str(out), "--markdown"])

    assert with_server(SmallServer(), work) == 0
    result = json.loads(out.read_text())
    assert [row["streams"] for row in result["rows"]] == [1, 3]
    assert result["clients"]["requests"] == 20 and result["model"] == "m" and "memory_bytes" not in result
    assert "| 3 |" in page.read_text() and "commit" in page.read_text()
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == result


def test_memory_of_a_process_tree(bench: ModuleType) -> None:
    memory = bench.memory_bytes(os.getpid())
    if memory is None:
        pytest.skip("needs /proc")
    assert memory["rss"] >= memory["pss"] > 5_000_000
    assert os.getpid() in bench.process_tree(os.getppid())


def test_kv_cache_size_is_read_from_the_flags(bench: ModuleType) -> None:
    assert bench.parse([]).kv_cache_bytes == 512 * 2**20
    assert bench.parse(["--", "--kv-cache-memory=1G"]).kv_cache_bytes == 2**30
    assert bench.parse(["--", "m", "--kv_cache_memory", "2G"]).kv_cache_bytes == 2**31
    assert bench.parse(["--repeat", "1", "--", "m"]).serve == ["m", "--kv-cache-memory", "512M"]
