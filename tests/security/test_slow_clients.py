"""Clients that do not read: what waits for them is packed, bounded by time, and gone with them."""

from __future__ import annotations

import json
import socket
import time

import httpx
import pytest

from octavo.frontend.logprob_buffer import LogprobBuffer, to_logprob_dict, token_text
from octavo.frontend.output_processor import RequestOutputs
from octavo.frontend.params import SamplingParams
from octavo.server.mock import MockEngine
from octavo.types import TokenDelta, TokenLogprobs

COMPLETIONS = "/v1/completions"


def ask(port: int, **fields) -> socket.socket:
    body = json.dumps({"prompt": "x", "stream": True, "ignore_eos": True, **fields}).encode()
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect(("127.0.0.1", port))
    sock.sendall(f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    return sock


def wait_for(condition, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return bool(condition())


def test_who_never_reads_is_cut_off(start_server):
    """Its request ends in the engine too; a client beside it gets everything."""
    running = start_server(MockEngine(length=10**9, max_model_len=10**7), client_write_timeout=0.5)
    with ask(running.port, max_tokens=10**6, logprobs=20, n=4) as sock:
        assert wait_for(lambda: running.engine.runs, 5)
        start = time.monotonic()
        assert wait_for(lambda: not running.engine.runs, 10), "it still runs"
        assert time.monotonic() - start >= 0.4
        assert httpx.post(running.url + COMPLETIONS, json={"prompt": "y", "max_tokens": 50}).json()["usage"]["completion_tokens"] == 50
        sock.settimeout(10)
        with pytest.raises(ConnectionError):  # cut, not closed in good order: the answer is not complete
            while sock.recv(2**20):
                pass


def test_who_reads_slowly_is_not(start_server):
    """A reader of some 300 KB/s, for longer than the timeout, gets the whole stream."""
    running = start_server(MockEngine(length=10**9, max_model_len=10**7), client_write_timeout=0.5)
    with ask(running.port, max_tokens=6000, logprobs=3) as sock:
        sock.settimeout(20)
        received, start = bytearray(), time.monotonic()
        while b"[DONE]" not in received[-200:]:
            part = sock.recv(16384)
            assert part, "cut off"
            received += part
            time.sleep(0.02 if time.monotonic() - start < 2 else 0)
    assert b'"finish_reason":"length"' in received


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


