#!/usr/bin/env python3
"""How many tokens a second the HTTP side streams, without a model: the real server, with the mock engine.

The engine makes one token per stream and step and follows AsyncLLM's rule that a consumer who is behind gets several
tokens at once; the client is a separate process that counts bytes and parses nothing. Printed: tokens/s, the server's
CPU time per token, and how many tokens an event carried on average (1 is a client that sees every token on its own).

    python scripts/bench_frontend.py --streams 1000 --tokens 200
    python scripts/bench_frontend.py --streams 1000 --tokens 200 --tick 0.05    # paced, as by a real engine
    python scripts/bench_frontend.py --streams 1000 --tokens 200 --tools        # also --call, --logprobs 5
    python scripts/bench_frontend.py --api-server-count 2
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


class Client(asyncio.Protocol):
    """Sends one request, then counts bytes and events until the connection closes."""

    def __init__(self, request: bytes, done: asyncio.Future[None], totals: dict[str, int], end: bytes) -> None:
        self.request, self.done, self.totals, self.end = request, done, totals, end

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.write(self.request)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        self.totals["bytes"] += len(data)
        self.totals["events"] += data.count(b"data: {")
        self.totals["done"] += data.count(self.end)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(None)


TOOL = {"type": "function", "function": {"name": "write", "parameters": {"type": "object", "properties": {"text": {"type": "string"}}}}}


HELLO = [{"role": "user", "content": "hello"}]
# route -> path, prompt, what the end of a stream is known by
ROUTES: dict[str, tuple[str, dict[str, object], bytes]] = {
    "chat": ("/v1/chat/completions", {"messages": HELLO}, b"[DONE]"),
    "completions": ("/v1/completions", {"prompt": "hello"}, b"[DONE]"),
    "responses": ("/v1/responses", {"input": "hello"}, b"event: response.incomplete"),
    "messages": ("/v1/messages", {"messages": HELLO}, b"event: message_stop"),
}


async def load(port: int, streams: int, tokens: int, route: str, extra: dict[str, object]) -> dict[str, float]:
    path, prompt, end = ROUTES[route]
    length = "max_output_tokens" if route == "responses" else "max_tokens"
    ends = {} if route == "messages" else {"ignore_eos": True}  # Anthropic has no such field; the mock goes on for long enough
    data = json.dumps({length: tokens, "stream": True, **prompt, **ends, **extra}).encode()
    request = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data
    loop = asyncio.get_running_loop()
    totals = {"bytes": 0, "events": 0, "done": 0}
    start = time.perf_counter()
    waits = [loop.create_future() for _ in range(streams)]
    for wait in waits:
        await loop.create_connection(lambda wait=wait: Client(request, wait, totals, end), "127.0.0.1", port)
    await asyncio.gather(*waits)
    return {**totals, "seconds": time.perf_counter() - start}


def cpu_seconds(pid: int) -> float:
    """Of a process and its children."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        children = map(int, file.read().split())
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") + sum(map(cpu_seconds, children))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=200, help="per stream")
    parser.add_argument("--tick", type=float, default=0.0, help="seconds a step; 0: as fast as it goes")
    parser.add_argument("--route", choices=tuple(ROUTES), default="chat")
    parser.add_argument("--tools", action="store_true", help="the requests offer a tool, so their answers are searched for calls")
    parser.add_argument("--call", action="store_true", help="the same, and the answers are one long call of it")
    parser.add_argument("--logprobs", type=int, metavar="K", help="with the log-probabilities of the K best")
    parser.add_argument("--api-server-count", type=int, default=1, help="HTTP processes; each has a mock engine of its own")
    parser.add_argument("--repeat", type=int, default=3)
    arguments = parser.parse_args()
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    command = [sys.executable, "-m", "octavo.server.mock", str(port), str(arguments.tick), str(arguments.api_server_count)]
    command += ["call"] if arguments.call else []
    extra: dict[str, object] = {"tools": [TOOL]} if arguments.tools or arguments.call else {}
    if arguments.logprobs is not None:
        extra |= {"logprobs": True, "top_logprobs": arguments.logprobs} if arguments.route == "chat" else {"logprobs": arguments.logprobs}
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        if "serves" not in process.stdout.readline():
            sys.exit("the server did not start")
        try:
            import uvloop

            new_loop = uvloop.new_event_loop
        except ImportError:
            new_loop = asyncio.new_event_loop
        loop = new_loop()
        loop.run_until_complete(load(port, 10, 10, arguments.route, extra))
        best: dict[str, float] = {}
        for _ in range(arguments.repeat):
            before = cpu_seconds(process.pid)
            result = loop.run_until_complete(load(port, arguments.streams, arguments.tokens, arguments.route, extra))
            result["cpu"] = cpu_seconds(process.pid) - before
            if result["done"] != arguments.streams:
                sys.exit(f"{arguments.streams - result['done']} streams did not end as they should")
            if not best or result["seconds"] < best["seconds"]:
                best = result
        total = arguments.streams * arguments.tokens
        print(
            f"{arguments.route}{'' if arguments.logprobs is None else f' with {arguments.logprobs} logprobs'}, "
            f"{arguments.api_server_count} process(es): "
            f"{arguments.streams} streams x {arguments.tokens} tokens: {total / best['seconds']:,.0f} tok/s, "
            f"{1e6 * best['cpu'] / total:.1f} us CPU a token ({total / best['cpu']:,.0f} tok/s a core), "
            f"{total / best['events']:.2f} tokens an event, {best['bytes'] / 1e6:.0f} MB"
        )
    finally:
        process.terminate()
        process.wait(10)


if __name__ == "__main__":
    main()
