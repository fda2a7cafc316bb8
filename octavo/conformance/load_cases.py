"""Cases of absurd requests, of clients that vanish, and of clients that share the server."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from octavo.conformance.client import CACHE_USE, JSON, RUNNING, WAITING, Failed, Server, Skipped, expect

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Name three animals that live in the sea."}]
WORDS = "sea ship star tree river house stone light bird fish road cloud wind fire moon sand leaf wave hill salt".split()
QUICK_S = 10.0  # all of the absurd requests together
FLAT_BYTES = 64 * 2**20
BODY_BYTES = 100 * 2**20


def absurd_requests(server: Server) -> str | None:
    before, start = server.resident_bytes(), time.monotonic()
    server.post(COMPLETIONS, {"prompt": "x", "max_tokens": 1, "n": 1_000_000}).refused(400, "n")
    server.post(COMPLETIONS, {"prompt": "", "max_tokens": 1}).refused(400)
    server.post(COMPLETIONS, {"prompt": [], "max_tokens": 1}).refused(400)
    server.raw(f"GET {server.root}/v1/models HTTP/1.1", headers={"X-Big": "a" * 2**20, "Connection": "close"}).refused((400, 431))
    for body in (b"this is not JSON", b"[1, 2, 3]", b'"text"', b""):
        server.request("POST", CHAT, body, JSON).refused((400, 422))
    head = f"POST {server.root}{CHAT} HTTP/1.1"
    server.raw(head, _megabytes(), {**JSON, "Content-Length": str(BODY_BYTES), "Connection": "close"}).refused((400, 413))
    chunked = (b"%x\r\n%s\r\n" % (len(part), part) for part in _megabytes())
    server.raw(head, chunked, {**JSON, "Transfer-Encoding": "chunked", "Connection": "close"}).refused((400, 413))
    seconds = time.monotonic() - start
    expect(seconds < QUICK_S, f"it took {seconds:.1f} s")
    after = server.resident_bytes()
    if before is None or after is None:
        return "memory was not watched (--pid)"
    expect(after - before < FLAT_BYTES, f"the server's memory grew by {(after - before) / 2**20:.0f} MiB")
    return None


def _megabytes() -> Iterator[bytes]:
    part = b"x" * 2**20
    for _ in range(BODY_BYTES // len(part)):
        yield part


def vanishing_clients(server: Server) -> str | None:
    """Cut the connection in the middle; the server's own gauges must fall to 0 within a second."""
    if server.metric(RUNNING) is None:
        raise Skipped("the server has no /metrics that tells how many requests run")
    waited = time.monotonic()
    while _busy(server):
        expect(time.monotonic() - waited < 5, "other requests run on this server: the case needs it alone")
        time.sleep(0.05)
    cache = True
    for path, prompt in ((COMPLETIONS, {"prompt": "Once upon a time"}), (CHAT, {"messages": MESSAGES})):
        for fields in ({"stream": True}, {"stream": False}, {"stream": True, "n": 2}):
            _vanish(server, path, {**prompt, "max_tokens": 800, "ignore_eos": True, **fields})
            ended = time.monotonic()
            while (used := server.metric(CACHE_USE)) and time.monotonic() - ended < 1.0:
                time.sleep(0.02)  # where a server has several processes, this one may not have heard of it yet
            cache = used is not None
            expect(not used, f"{path} {fields}: {used:.2%} of the KV cache is still held" if used else "")
    return None if cache else "the server does not tell how much of its KV cache is used"


def _vanish(server: Server, path: str, body: dict[str, Any]) -> None:
    with contextlib.closing(server.start(path, body)) as sock:
        if body["stream"]:
            received = b""
            while received.count(b"data: ") < 4:
                part = sock.recv(4096)
                expect(part, f"{path}: the stream ended early: {received[:200]!r}")
                received += part
        end = time.monotonic() + 20
        while not server.metric(RUNNING):
            expect(time.monotonic() < end, f"{path}: the request never ran")
            time.sleep(0.01)
    start = time.monotonic()
    while _busy(server):
        expect(time.monotonic() - start < 1.0, f"{path}: a second after its client has gone, the request still runs")
        time.sleep(0.02)


def _busy(server: Server) -> bool:
    return bool(server.metric(RUNNING) or server.metric(WAITING))


def long_prompt(server: Server) -> str:
    """While some 7,000 tokens of another client are worked on, a stream goes on: its pauses are a part of that work."""
    numbers = random.Random()  # other words each time: a server that was checked before would have the prompt in its prefix cache
    text = " ".join(numbers.choices(WORDS, k=200))
    per_word = server.complete(text, max_tokens=1)["usage"]["prompt_tokens"] / 200
    long = " ".join(numbers.choices(WORDS, k=int(6900 / per_word)))
    outcome: list[Any] = []

    def send_long() -> None:
        start = time.monotonic()
        try:
            answer = server.post(COMPLETIONS, {"prompt": long, "max_tokens": 1}, timeout_s=300)
            outcome.extend((time.monotonic() - start, answer))
        except OSError as error:
            outcome.extend((time.monotonic() - start, error))

    times: list[float] = []
    thread = threading.Thread(target=send_long)
    body = {"prompt": "Once upon a time", "max_tokens": 1000, "ignore_eos": True, "temperature": 0}
    events = server.events(COMPLETIONS, body)
    with contextlib.closing(events):  # type: ignore[type-var]
        for _ in events:
            times.append(time.monotonic())
            if len(times) == 10:
                begun = time.monotonic()
                thread.start()
            if outcome and time.monotonic() > begun + outcome[0] + 0.5:
                break
    if not thread.ident:
        raise Failed(f"the stream ended after {len(times)} chunks")
    thread.join()
    took, answer = outcome
    if isinstance(answer, OSError):
        raise Failed(f"the long prompt failed: {answer}")
    if answer.status == 400:
        raise Skipped(f"the context does not hold 7,000 tokens: {answer.json()['error']['message']}")
    count = answer.ok()["usage"]["prompt_tokens"]
    during = [t for t in times if begun <= t <= begun + took]
    longest = max(b - a for a, b in pairwise(times[9:]))
    expect(len(during) >= 3 or took < 0.1, f"{len(during)} tokens were streamed in the {took:.2f} s of the long prompt")
    expect(longest < max(took / 2, 0.5), f"the stream paused {longest:.2f} s of the {took:.2f} s that {count} tokens took")
    return f"longest pause {1e3 * longest:.0f} ms, {count} tokens in {took:.2f} s"


def wrong_model(server: Server) -> None:
    for path, fields in ((COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": MESSAGES})):
        for stream in (False, True):
            answer = server.post(path, {"max_tokens": 1, **fields, "stream": stream, "model": "no-such-model"})
            answer.refused(404, "no-such-model", server.model)
