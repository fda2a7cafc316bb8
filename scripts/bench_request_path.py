#!/usr/bin/env python3
"""What the HTTP process adds to a request: before the engine sees it, and between a token's arrival and its first byte.

    python scripts/bench_request_path.py

With the demo model's tokenizer and chat template, and without its weights. The steps of a chat request of some 2,000
tokens are timed one by one (JSON and schema; parameters; chat template; tokens). For the first byte a real server runs
on a real port, over a real front end whose engine is this script: it notes the time, sends one token, and the client
notes when the event's bytes are there (so ZeroMQ, detokenizer, frame, and both ends of the TCP connection are in it).
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import msgspec
import zmq

from octavo.config import EngineConfig, ServerOptions
from octavo.frontend.async_llm import AsyncLLM
from octavo.frontend.engine_process import SharedEngine
from octavo.frontend.parts import find_model
from octavo.server.run import _Runner, bind
from octavo.types import EngineInput, EngineReady, EngineStats, GenerateRequest, StepOutputs, TokenDelta

WORD = 260  # a token of the demo model whose text is complete: each makes an event
SENTENCE = "The octopus reads books about deep water and writes letters to a friend who lives near the lighthouse. "


class ScriptedEngine(threading.Thread):
    """The engine's end of the sockets: answers a request with tokens, one each time ``go`` is released; notes when it sent them."""

    def __init__(self, link: SharedEngine) -> None:
        super().__init__(daemon=True)
        self.context = zmq.Context()
        self.receive, self.push = self.context.socket(zmq.PULL), self.context.socket(zmq.PUSH)
        self.receive.connect(link.address("in"))
        self.push.connect(link.address("out"))
        self.decoder, self.encoder = msgspec.msgpack.Decoder(EngineInput), msgspec.msgpack.Encoder()
        self.go = threading.Semaphore(0)
        self.sent_at = 0.0

    def send(self, message: Any) -> None:
        self.push.send(self.encoder.encode(message))

    def run(self) -> None:
        self.send(EngineReady(num_blocks=1000, block_size=16, max_model_len=8192, dtype="float32", device="none"))
        while True:
            message = self.decoder.decode(self.receive.recv())
            if isinstance(message, GenerateRequest):
                for i in range(message.params.max_tokens):
                    self.go.acquire()
                    reason = "length" if i == message.params.max_tokens - 1 else None
                    delta = TokenDelta(request_id=message.request_id, index=0, token_ids=[WORD], finish_reason=reason)
                    outputs = StepOutputs(deltas=[delta], stats=EngineStats(num_running=1))
                    self.sent_at = time.perf_counter()
                    self.send(outputs)


class Front:
    """A running server over a ``ScriptedEngine``, in threads of this process."""

    def __init__(self) -> None:
        config, options = EngineConfig(), ServerOptions(disable_log_requests=True)
        self.link = SharedEngine(find_model(config), "script")
        self.engine = ScriptedEngine(self.link)
        self.sock = bind("127.0.0.1", 0)
        self.port = self.sock.getsockname()[1]
        self.ready = threading.Event()
        self.llm: Any = None

        async def start(config: EngineConfig, options: ServerOptions) -> AsyncLLM:
            self.llm = await AsyncLLM.start(config, process=self.link)
            return self.llm

        import uvloop

        self.loop = uvloop.new_event_loop()
        self.loop.add_signal_handler = lambda *args: None  # type: ignore[method-assign] (this is no main thread)
        self.runner = _Runner(config, options, (), self.sock, start, on_listen=self.ready.set)
        self.thread = threading.Thread(target=lambda: self.loop.run_until_complete(self.runner.run()), daemon=True)

    def __enter__(self) -> Front:
        self.engine.start()
        self.thread.start()
        if not self.ready.wait(60):
            raise RuntimeError("the server did not start")
        return self

    def __exit__(self, *args: object) -> None:
        self.loop.call_soon_threadsafe(setattr, self.runner.server, "should_exit", True)
        self.thread.join(10)


def first_byte_seconds(front: Front, tokens: int) -> list[float]:
    """From a token's sending by the engine to its event's arrival at the client, for each token of a streamed chat."""
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": tokens, "ignore_eos": True, "stream": True}
    data = json.dumps(body).encode()
    times = []
    with socket.create_connection(("127.0.0.1", front.port), timeout=20) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.sendall(f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
        received = b""
        for i in range(tokens):
            time.sleep(0.002)
            front.engine.go.release()
            while received.count(b"data: ") < i + 2:  # the first event has the role
                received += sock.recv(65536)
            times.append(time.perf_counter() - front.engine.sent_at)
    return times


def path_seconds(llm: AsyncLLM, repeat: int = 500, clock: Callable[[], float] = time.perf_counter) -> tuple[dict[str, list[float]], int]:
    """Seconds of each step of a chat request of some 2,000 tokens, ``repeat`` times, and how many tokens it has.

    The steps take turns, so that the i-th times of all are of one request.
    """
    from octavo.metrics.prometheus import Metrics
    from octavo.server.context import ServerContext
    from octavo.server.limits import decode
    from octavo.server.prompts import template_message
    from octavo.server.sampling import chat_params
    from octavo.server.schemas import chat_decoder

    context = ServerContext(llm, ServerOptions(), ("m",), Metrics("m"))  # type: ignore[arg-type]
    turns = [{"role": "user" if i % 2 == 0 else "assistant", "content": SENTENCE * 9} for i in range(11)]
    body = json.dumps({"model": "m", "messages": turns, "temperature": 0.5, "top_p": 0.9, "max_tokens": 100, "stream": True}).encode()
    request = decode(chat_decoder, body)
    messages = [template_message(message, "messages", False) for message in request.messages]
    text = llm.chat_template.render(messages, add_generation_prompt=True)  # type: ignore[union-attr]
    ids = llm.tokenizer.encode(text, add_special_tokens=False)  # type: ignore[union-attr]
    params = chat_params(request, context)

    def render() -> None:
        fresh = [template_message(message, "messages", False) for message in request.messages]
        llm.chat_template.render(fresh, add_generation_prompt=True)  # type: ignore[union-attr]

    steps: dict[str, Callable[[], Any]] = {
        "parse": lambda: decode(chat_decoder, body),
        "validate": lambda: (chat_params(request, context), llm.check_prompt(ids, params)),
        "render": render,
        "tokenize": lambda: llm.tokenizer.encode(text, add_special_tokens=False),  # type: ignore[union-attr]
    }
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repeat):
        for name, step in steps.items():
            start = clock()
            step()
            times[name].append(clock() - start)
    return times, len(ids)


def before_tokens(times: dict[str, list[float]]) -> list[float]:
    """Seconds of parsing, validating and rendering together, request by request."""
    return [sum(steps) for steps in zip(times["parse"], times["validate"], times["render"], strict=True)]


def shown(times: list[float]) -> str:
    ordered = sorted(times)
    return f"{1e3 * statistics.median(ordered):6.3f} ms, p99 {1e3 * ordered[int(0.99 * len(ordered))]:6.3f} ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--tokens", type=int, default=500, help="tokens whose first byte is timed")
    arguments = parser.parse_args()
    with Front() as front:
        first_byte_seconds(front, 50)
        times = first_byte_seconds(front, arguments.tokens)
        steps, count = path_seconds(front.llm)
        work, _ = path_seconds(front.llm, clock=time.thread_time)
    print(f"chat of {count} tokens, {len(steps['parse'])} times: median and p99; of CPU time")
    for name, values in (*steps.items(), ("parse, validate, render", before_tokens(steps))):
        print(f"  {name:24} {shown(values)}; {shown(work[name] if name in work else before_tokens(work))}")
    print(f"first byte after a token, {len(times)} times\n  {'':24} {shown(times)}")


if __name__ == "__main__":
    main()
