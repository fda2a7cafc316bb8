#!/usr/bin/env python3
"""How many tokens a second the HTTP side streams, without a model: the real server, with the mock engine.

The engine makes one token per stream and step and follows AsyncLLM's rule that a consumer who is behind gets several
tokens at once; the client is a separate process that counts bytes and parses nothing. Printed: tokens/s, the server's
CPU time per token (of its own code, and of the kernel, which is the sending), and how many tokens an event carried on
average (1 is a client that sees every token on its own). With --wire the server is the whole HTTP process, over a real
AsyncLLM with the demo model's tokenizer, and the engine's end of the sockets is a process of its own that is not counted.

    python scripts/bench_frontend.py --streams 1000 --tokens 200
    python scripts/bench_frontend.py --streams 1000 --tokens 200 --tick 0.05    # paced, as by a real engine
    python scripts/bench_frontend.py --streams 1000 --tokens 200 --tools        # also --call, --logprobs 5
    python scripts/bench_frontend.py --streams 1000 --tokens 200 --wire --tick 0.05
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


REST_S = 0.002
"""The client reads, and then sleeps for so long whatever comes: else nearly every write of the server wakes it up, and that is
counted as the server's time in the kernel (3 us a token on a virtual machine), though clients are on machines of their own."""


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
    together = asyncio.gather(*waits)
    while not together.done():
        await asyncio.sleep(0)
        time.sleep(REST_S)
    return {**totals, "seconds": time.perf_counter() - start}


def cpu_seconds(pid: int) -> tuple[float, float]:
    """Of a process and its children: in their own code, and in the kernel."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        children = [cpu_seconds(int(child)) for child in file.read().split()]
    tick = os.sysconf("SC_CLK_TCK")
    return int(fields[11]) / tick + sum(c[0] for c in children), int(fields[12]) / tick + sum(c[1] for c in children)


def start_server(port: int, arguments: argparse.Namespace) -> list[subprocess.Popen[str]]:
    """The server's process, and with --wire that of its engine. Exits the script if it does not start."""
    call = ["call"] if arguments.call else []
    if arguments.wire:
        script = os.path.join(ROOT, "scripts", "wire_engine.py")
        command = [sys.executable, script, "serve", str(port), *([arguments.reasoning] if arguments.reasoning else [])]
    else:
        command = [sys.executable, "-m", "octavo.server.mock", str(port), str(arguments.tick), str(arguments.api_server_count), *call]
    processes = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)]
    output = processes[0].stdout
    assert output is not None
    if arguments.wire:
        folder = output.readline().strip()
        processes.append(subprocess.Popen([sys.executable, script, "engine", folder, str(arguments.tick), *call], cwd=ROOT))
    for line in output:
        if "serves" in line:
            return processes
    sys.exit("the server did not start")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=200, help="per stream")
    parser.add_argument("--tick", type=float, default=0.0, help="seconds a step; 0: as fast as it goes")
    parser.add_argument("--route", choices=tuple(ROUTES), default="chat")
    parser.add_argument("--tools", action="store_true", help="the requests offer a tool, so their answers are searched for calls")
    parser.add_argument("--call", action="store_true", help="the same, and the answers are one long call of it")
    parser.add_argument("--logprobs", type=int, metavar="K", help="with the log-probabilities of the K best")
    parser.add_argument("--stop", action="store_true", help="with two stop strings that never come")
    parser.add_argument("--wire", action="store_true", help="over a real AsyncLLM, with an engine process that has no model")
    parser.add_argument("--reasoning", metavar="PARSER", help="with --wire: the answers are read by this reasoning parser, too")
    parser.add_argument("--api-server-count", type=int, default=1, help="HTTP processes; each has a mock engine of its own")
    parser.add_argument("--repeat", type=int, default=3)
    arguments = parser.parse_args()
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    extra: dict[str, object] = {"tools": [TOOL]} if arguments.tools or arguments.call else {}
    if arguments.logprobs is not None:
        extra |= {"logprobs": True, "top_logprobs": arguments.logprobs} if arguments.route == "chat" else {"logprobs": arguments.logprobs}
    if arguments.stop:
        extra["stop_sequences" if arguments.route == "messages" else "stop"] = ["zebra crossing", "nothing at all"]
    processes = start_server(port, arguments)
    server = processes[0].pid
    try:
        try:
            import uvloop

            new_loop = uvloop.new_event_loop
        except ImportError:
            new_loop = asyncio.new_event_loop
        loop = new_loop()
        loop.run_until_complete(load(port, 10, 10, arguments.route, extra))
        best: dict[str, float] = {}
        for _ in range(arguments.repeat):
            before = cpu_seconds(server)
            result = loop.run_until_complete(load(port, arguments.streams, arguments.tokens, arguments.route, extra))
            own, kernel = (now - then for now, then in zip(cpu_seconds(server), before))
            result |= {"cpu": own + kernel, "kernel": kernel}
            if result["done"] != arguments.streams:
                sys.exit(f"{arguments.streams - result['done']} streams did not end as they should")
            if not best or result["cpu"] < best["cpu"]:
                best = result
        total = arguments.streams * arguments.tokens
        print(
            f"{' '.join(sys.argv[1:])}: "
            f"{arguments.api_server_count} process(es): "
            f"{arguments.streams} streams x {arguments.tokens} tokens: {total / best['seconds']:,.0f} tok/s, "
            f"{1e6 * best['cpu'] / total:.1f} us CPU a token, {1e6 * best['kernel'] / total:.1f} of it in the kernel "
            f"({total / best['cpu']:,.0f} tok/s a core), "
            f"{total / best['events']:.2f} tokens an event, {best['bytes'] / 1e6:.0f} MB"
        )
    finally:
        for process in processes:
            process.terminate()
            process.wait(10)


if __name__ == "__main__":
    main()
