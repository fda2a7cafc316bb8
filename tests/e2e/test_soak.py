"""A soak: random requests, aborts and disconnects; afterwards no block, task or file handle is left and memory is flat.

OCTAVO_SOAK_SECONDS sets its length (default short, for CI; 600 for the full one).
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time

import pytest

from tests.e2e.demo import demo_model_path
from tests.e2e.server import RunningServer
from tests.waiting import until

SECONDS = float(os.environ.get("OCTAVO_SOAK_SECONDS", "20"))
CLIENTS = 24
pytestmark = pytest.mark.timeout(int(SECONDS) + 240)


def random_body(rng: random.Random) -> tuple[str, dict[str, object]]:
    sampling = {
        "max_tokens": rng.randint(1, 48),
        "temperature": rng.choice([0, 0.7, 1.3]),
        "top_p": rng.choice([1.0, 0.8]),
        "top_k": rng.choice([0, 5, 50]),
        "n": rng.choice([1, 1, 1, 3]),
        "stream": rng.random() < 0.7,
        "frequency_penalty": rng.choice([0, 0.5]),
        "seed": rng.randint(0, 9),
    }
    if rng.random() < 0.2:
        sampling["stop"] = [rng.choice([" the", "\n", ". "])]
    words = " ".join(rng.choice(["alpha", "beta", "river", "stone", "cloud"]) for _ in range(rng.choice([3, 40, 400])))
    if rng.random() < 0.5:
        if rng.random() < 0.3:
            sampling |= {"logprobs": True, "top_logprobs": 3}
        return "/v1/chat/completions", {"messages": [{"role": "user", "content": words}], **sampling}
    return "/v1/completions", {"prompt": words, **sampling}


async def one_request(port: int, rng: random.Random) -> int:
    """Send one request; now and then hang up in the middle. Returns the status (0: hung up)."""
    path, body = random_body(rng)
    data = json.dumps({"model": "m", **body}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        head = (
            f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\nConnection: close\r\n\r\n"
        )
        writer.write(head.encode() + data)
        await writer.drain()
        if rng.random() < 0.25:
            await asyncio.sleep(rng.random() * 0.5)
            return 0
        status = int((await reader.readline()).split()[1])
        while await reader.read(65536):
            if rng.random() < 0.01:
                return 0
        return status
    finally:
        writer.close()


async def client(port: int, seed: int, end: float, statuses: dict[int, int]) -> None:
    rng = random.Random(seed)
    while time.monotonic() < end:
        status = await asyncio.wait_for(one_request(port, rng), 120)
        statuses[status] = statuses.get(status, 0) + 1


async def load(port: int, seconds: float, seed: int) -> dict[int, int]:
    statuses: dict[int, int] = {}
    end = time.monotonic() + seconds
    await asyncio.gather(*(client(port, seed * 1000 + i, end, statuses) for i in range(CLIENTS)))
    return statuses


def wait_idle(server: RunningServer) -> None:
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    until(lambda: not any(server.metric(n) for n in names), every=0.1)


async def test_soak() -> None:
    server = RunningServer(
        demo_model_path(), "--served-model-name", "m", "--kv-cache-memory", "64M", "--max-model-len", "2048",
        "--max-num-seqs", "16", "--disable-log-requests",
    )  # fmt: skip
    try:
        warm = await load(server.port, min(SECONDS * 0.4, 120.0), seed=1)  # caches and allocators fill up
        await asyncio.to_thread(wait_idle, server)
        memory, files = server.resident_bytes(), server.open_files()
        statuses = await load(server.port, SECONDS, seed=2)
        await asyncio.to_thread(wait_idle, server)
        assert set(warm) | set(statuses) <= {0, 200}, (warm, statuses)
        assert statuses[200] > 10
        until(lambda: server.open_files() <= files + 4, every=0.1)  # the last connections may be on their way out
        assert server.resident_bytes() <= memory * 1.10, (memory, server.resident_bytes())
        assert server.healthy()
    finally:
        code = server.stop()
    assert code == 0
