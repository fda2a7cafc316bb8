"""Clients that do not read: what waits for them is packed, bounded by time, and gone with them."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator

import httpx
import pytest
import uvicorn

from octavo.frontend.logprob_buffer import LogprobBuffer, to_logprob_dict, token_text
from octavo.frontend.output_processor import RequestOutputs
from octavo.frontend.params import SamplingParams
from octavo.server import limits
from octavo.server.mock import MockEngine
from octavo.types import TokenDelta, TokenLogprobs
from tests.waiting import until

COMPLETIONS = "/v1/completions"


def ask(port: int, **fields) -> socket.socket:
    body = json.dumps({"prompt": "x", "stream": True, "ignore_eos": True, **fields}).encode()
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect(("127.0.0.1", port))
    sock.sendall(f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    return sock


def test_who_never_reads_is_cut_off(start_server, caplog):
    """Its request ends in the engine too; a client beside it gets everything. The log tells it."""
    running = start_server(MockEngine(length=10**9, max_model_len=10**7), client_write_timeout=0.5)
    start = time.monotonic()
    with ask(running.port, max_tokens=10**6, logprobs=20, n=4) as sock:
        until(lambda: running.engine.runs)
        until(lambda: not running.engine.runs)
        assert time.monotonic() - start >= 0.5
        assert httpx.post(running.url + COMPLETIONS, json={"prompt": "y", "max_tokens": 50}).json()["usage"]["completion_tokens"] == 50
        sock.settimeout(60)
        with pytest.raises(ConnectionError):  # cut, not closed in good order: the answer is not complete
            while sock.recv(2**20):
                pass
    until(lambda: [r.levelname for r in caplog.records if "does not read its answer" in r.getMessage()] == ["WARNING"])


def test_all_that_is_written_and_not_read_is_bounded(monkeypatch):
    """Answers of 8 MiB: with room for two and a half, each further one cuts off the client that has waited longest."""
    monkeypatch.setattr(limits, "MAX_UNSENT", 20 << 20)
    size = 8 << 20

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % size)]})
        await send({"type": "http.response.body", "body": bytes(size)})

    protocol = limits.limited_protocol(250)
    unsent = protocol.unsent

    def newest() -> list[object]:
        return list(unsent.sizes)[-1:]

    with contextlib.ExitStack() as stack:
        port = stack.enter_context(serving(app, protocol))
        clients = []
        for _ in range(6):
            before = newest()
            clients.append(stack.enter_context(ask(port)))
            until(lambda: newest() != before)  # noqa: B023
            assert unsent.total == sum(unsent.sizes.values()) <= 20 << 20
        kept = len(unsent.sizes)
        assert 2 <= kept < 6  # the system has buffers, too
        received = [read_all(client) for client in clients]
        assert [r > size for r in received] == [False] * (6 - kept) + [True] * kept
        until(lambda: not unsent.sizes)
        assert unsent.total == 0


def read_all(sock: socket.socket) -> int:
    sock.settimeout(60)
    count = 0
    with contextlib.suppress(ConnectionError):
        while part := sock.recv(2**20):
            count += len(part)
            if count > 8 << 20:
                break
    return count


@contextlib.contextmanager
def serving(app, protocol) -> Iterator[int]:
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    config = uvicorn.Config(app, http=protocol, ws="none", lifespan="off", log_config=None, access_log=False, loop="uvloop")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: server.run(sockets=[sock]), daemon=True)
    thread.start()
    until(lambda: server.started)
    yield sock.getsockname()[1]
    server.should_exit = server.force_exit = True
    thread.join(5)


def test_who_reads_slowly_is_not(start_server):
    """A reader of some 300 KB/s, for longer than the timeout, gets the whole stream."""

    def read(patience: float) -> bool:
        running = start_server(MockEngine(length=10**9, max_model_len=10**7), client_write_timeout=patience)
        with ask(running.port, max_tokens=6000, logprobs=3) as sock, contextlib.suppress(ConnectionError):
            sock.settimeout(60)
            received, start = bytearray(), time.monotonic()
            while b"[DONE]" not in received[-200:]:
                part = sock.recv(16384)
                if not part:
                    return False
                received += part
                time.sleep(0.02 if time.monotonic() - start < 4 * patience else 0)
            return b'"finish_reason":"length"' in received
        return False

    assert any(read(patience) for patience in (0.5, 2, 8)), "cut off"  # the machine may take longer than the first, once


def test_packed_logprobs_are_small_and_the_same():
    """20 candidates a token: a tenth of what dictionaries take, and nothing is lost."""
    import random
    import tracemalloc

    numbers = random.Random(0)

    class Texts:
        def decode(self, ids, skip_special_tokens):
            return f"<{ids[0]}>"

    def entries(count: int) -> list[TokenLogprobs]:
        result = []
        for _ in range(count):
            ids = [numbers.randrange(50_000) for _ in range(21)]
            result.append(TokenLogprobs(ids, [-numbers.random() * 10 for _ in ids], numbers.randrange(1, 9)))
        return result

    sample, texts = entries(300), Texts()
    buffer = LogprobBuffer()
    for i in range(0, 300, 7):
        buffer.extend(sample[i : i + 7])
    assert buffer.drain(texts) == [to_logprob_dict(entry, texts) for entry in sample] and buffer.drain(texts) == []
    sizes = []
    for make in (lambda e: buffer.extend([e]), lambda e, kept=[]: kept.append(to_logprob_dict(e, texts))):  # noqa: B006
        tracemalloc.start()
        for entry in sample:
            make(entry)
        sizes.append(tracemalloc.get_traced_memory()[0] / len(sample))
        tracemalloc.stop()
    assert sizes[0] < 500 and sizes[0] < sizes[1] / 4, sizes


def test_an_unread_request_of_16_sequences_with_20_logprobs():
    """What a reader leaves behind, of the front end's own objects: some 0.3 KB a token and sequence."""
    import gc
    import tracemalloc

    params = SamplingParams(n=16, logprobs=20, max_tokens=1000)
    outputs = RequestOutputs("r", "x", [1], params, None)
    logprobs = [float(-i) for i in range(21)]
    gc.collect()
    tracemalloc.start()
    for step in range(500):
        for index in range(16):
            ids = [(step * 31 + index * 7 + i) % 50_000 + 300 for i in range(21)]
            outputs.push(TokenDelta(request_id="r", index=index, token_ids=ids[:1], logprobs=[TokenLogprobs(ids, list(logprobs), 1)]))
    size = tracemalloc.get_traced_memory()[0] / 16
    tracemalloc.stop()
    assert size / 500 < 450, f"{size / 1000:.0f} KB a sequence"
    drained = outputs.drain()
    assert len(drained.outputs) == 16 and all(len(o.logprobs) == len(o.token_ids) == 500 for o in drained.outputs)


def test_texts_of_tokens_are_decoded_once():
    class Counting:
        calls = 0

        def decode(self, ids, skip_special_tokens):
            self.calls += 1
            return str(ids[0])

    one, other = Counting(), Counting()
    assert [token_text(one, 5), token_text(one, 5), token_text(other, 5), token_text(None, 5)] == ["5", "5", "5", None]
    assert (one.calls, other.calls) == (1, 1)
