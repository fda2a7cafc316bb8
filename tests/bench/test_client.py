"""The HTTP client and the event stream: whatever way the bytes are cut, and what becomes of faults."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.bench.http import Address, Client, HttpError, _Connection, describe_failure, parse_address, run_loop
from octavo.bench.stream import EventStream, Result, stream, text_of
from octavo.errors import ConfigError
from tests.bench.conftest import TEXT_EVENT, Serving, chunk, event, good_answer


class Transport:
    def __init__(self) -> None:
        self.closed = False

    def write(self, data: bytes) -> None: ...

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    abort = close


def feed(pieces: list[bytes], *, streamed: bool) -> tuple[int, bytes, bool]:
    """Status, body and whether the connection was kept, of an answer that comes in ``pieces``."""

    async def run() -> tuple[int, bytes, bool]:
        idle: list[_Connection] = []
        connection = _Connection(idle)
        connection.connection_made(Transport())  # type: ignore[arg-type]
        got: list[bytes] = []
        answer = connection.send(b"", (lambda data, now: got.append(data)) if streamed else None)
        for piece in pieces:
            connection.data_received(piece)
        if not answer.done():
            connection.connection_lost(None)
        status, body = await answer
        return status, b"".join(got) if streamed else body, bool(idle)

    return asyncio.run(run())


BODY = b"".join(TEXT_EVENT for _ in range(3)) + b"\r\n\r\n0\r\n\r\nf\r\n"  # looks like framing in places
ANSWERS = {
    "chunked": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked\r\n\r\n" + chunk(BODY[:50]) + chunk(BODY[50:]) + b"0\r\n\r\n", True),
    "chunk extensions and trailers": (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%X;a=b\r\n" % len(BODY) + BODY + b"\r\n0;x\r\nA: b\r\n\r\n",
        True,
    ),
    "length": (b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(BODY) + BODY, True),
    "close": (b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(BODY) + BODY, False),
    "until close": (b"HTTP/1.0 200 OK\r\n\r\n" + BODY, False),
    "continue": (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(BODY) + BODY, True),
}


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("streamed", [True, False])
def test_a_body_is_the_same_however_it_is_cut(name: str, streamed: bool) -> None:
    data, keeps = ANSWERS[name]
    rng = random.Random(0)
    cuts = [[], list(range(1, len(data)))] + [sorted(rng.sample(range(1, len(data)), rng.randint(1, 12))) for _ in range(60)]
    for cut in cuts:
        pieces = [data[a:b] for a, b in zip([0, *cut], [*cut, len(data)], strict=True)]
        assert feed(pieces, streamed=streamed) == (200, BODY, keeps), cut


def test_only_a_200_is_streamed() -> None:
    assert feed([b"HTTP/1.1 429 Too Many\r\ncontent-length: 2\r\n\r\nno"], streamed=True) == (429, b"", True)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"HELLO\r\n\r\n", "not an HTTP answer"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", "not a readable answer"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nabc", "in the middle of the answer"),
        (b"", "before the answer"),
        (b"HTTP/1.1 200 " + b"x" * 70000, "too long"),
    ],
)
def test_broken_answers(data: bytes, message: str) -> None:
    with pytest.raises(HttpError, match=message):
        feed([data] if data else [], streamed=False)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://a:81", Address("a", 81, False, "")),
        ("a:81/", Address("a", 81, False, "")),
        ("http://a", Address("a", 80, False, "")),
        ("https://a/v1/", Address("a", 443, True, "")),
        ("http://[::1]:5/x/v1", Address("::1", 5, False, "/x")),
    ],
)
def test_addresses(url: str, expected: Address) -> None:
    assert parse_address(url) == expected


@pytest.mark.parametrize("url", ["ftp://a", "http://", "http://a:b", "http://a/?x=1"])
def test_bad_addresses(url: str) -> None:
    with pytest.raises(ConfigError, match="--base-url"):
        parse_address(url)


def test_host_header() -> None:
    assert Address("::1", 5, False, "").header == "[::1]:5" and Address("a", 443, True, "").header == "a"


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b'{"error": {"message": "slow down"}}', "HTTP 429: slow down"),
        (b'{"error": "no"}', "HTTP 429: no"),
        (b'{"detail": "why"}', "HTTP 429: why"),
        (b"<html>", "HTTP 429: <html>"),
        (b"", "HTTP 429"),
    ],
)
def test_failures_are_described(body: bytes, text: str) -> None:
    assert describe_failure(429, body) == text


# What each event of a stream counts for: (event, tokens came?)
EVENTS: list[tuple[Any, bool]] = [
    ({"choices": [{"text": "a", "finish_reason": None}]}, True),
    ({"choices": [{"text": "", "finish_reason": None}]}, True),  # a token without text yet
    ({"choices": [{"text": "", "finish_reason": "stop"}]}, False),
    ({"choices": [{"text": "end", "finish_reason": "length"}]}, True),
    ({"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}, False),
    ({"choices": [{"delta": {"role": "assistant", "content": "a"}, "finish_reason": None}]}, True),
    ({"choices": [{"delta": {"content": 'say "completion_tokens": 3, "text": "x" [DONE]'}, "finish_reason": None}]}, True),
    ({"choices": [{"delta": {"reasoning_content": "hm"}, "finish_reason": None}]}, True),
    ({"choices": [{"delta": {"tool_calls": [{"function": {"arguments": "{"}}]}, "finish_reason": None}]}, True),
    ({"choices": [{"delta": {}, "finish_reason": "stop"}]}, False),
    ({"choices": [{"text": "", "finish_reason": None, "prompt_token_ids": [1], "token_ids": []}]}, False),
    ({"choices": [{"text": "", "finish_reason": "length", "token_ids": [4]}]}, True),
    ({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 5}}, False),
]


@pytest.mark.parametrize(("data", "counts"), EVENTS)
@pytest.mark.parametrize("spaced", [True, False])
def test_which_events_are_tokens(data: Any, counts: bool, spaced: bool) -> None:
    events = EventStream()
    raw = event(data)
    events.feed(raw if spaced else raw.replace(b'": ', b'":').replace(b"data: ", b"data:"), 1.0)
    assert len(events.arrivals) == counts and events.error is None and not events.done


@given(st.lists(st.integers(0, 2000), max_size=20), st.sampled_from([b"\n", b"\r\n"]))
def test_events_are_the_same_however_they_are_cut(cuts: list[int], newline: bytes) -> None:
    data = b": comment\n\n" + b"".join(event(e) for e, _ in EVENTS) + event(b"[DONE]")
    data = data.replace(b"\n", newline)
    cuts = sorted(min(c, len(data)) for c in cuts)
    events = EventStream(keep=True)
    for time_, (a, b) in enumerate(zip([0, *cuts], [*cuts, len(data)], strict=True)):
        events.feed(data[a:b], float(time_))
    assert len(events.arrivals) == sum(counts for _, counts in EVENTS)
    assert (events.input_tokens, events.output_tokens, events.done, events.error) == (3, 5, True, None)
    assert list(events.arrivals) == sorted(events.arrivals)
    assert text_of(events.kept or ()).startswith("aenda") and text_of(events.kept or ()).endswith("hm")


def test_usage_beside_text_and_errors() -> None:
    events = EventStream()
    events.feed(event({"choices": [{"text": "x"}], "usage": {"prompt_tokens": 1, "completion_tokens": 2}}), 1.0)
    assert len(events.arrivals) == 1 and events.output_tokens == 2
    events.feed(event({"error": {"message": "engine died"}}), 2.0)
    assert events.error == "error in the stream: engine died"


def ask(serving: Serving, times: int = 1, timeout: float = 60.0) -> list[Result]:
    async def run() -> list[Result]:
        client = Client(Address("127.0.0.1", serving.port, False, ""), timeout=timeout)
        request = client.encode("POST", "/v1/completions", b'{"max_tokens": 4}')
        results = [await stream(client, request) for _ in range(times)]
        client.close()
        return results

    return run_loop(run())


def test_a_connection_is_reused(raw_server: Callable[..., Serving]) -> None:
    serving = raw_server(good_answer)
    results = ask(serving, 3)
    assert [r.error for r in results] == [None] * 3 and [r.output_tokens for r in results] == [4] * 3
    assert serving.raw.connections == 1


def test_an_idle_connection_that_was_closed_is_replaced(raw_server: Callable[..., Serving]) -> None:
    async def answer(body: Any, number: int, writer: asyncio.StreamWriter) -> None:
        if number % 2 == 0:  # closes on the second request of a connection, as if it had been too long idle
            writer.close()
        else:
            await good_answer(body, number, writer)

    serving = raw_server(answer)
    assert [r.error for r in ask(serving, 2)] == [None, None]
    assert serving.raw.connections == 2


def test_times_are_those_of_the_chunks(raw_server: Callable[..., Serving]) -> None:
    async def answer(body: Any, number: int, writer: asyncio.StreamWriter) -> None:
        await good_answer(body, number, writer, delay=0.03)

    for _ in range(8):  # where the client is held up, it reads several chunks at once
        start = time.perf_counter()
        (result,) = ask(raw_server(answer))
        assert 0.02 < result.ttft <= result.e2el < time.perf_counter() - start
        assert result.tpot == pytest.approx((result.e2el - result.ttft) / 3) and len(result.itls) == 3
        if 0.02 < min(result.itls):
            break
    assert 0.02 < min(result.itls)


async def _die(body: Any, number: int, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk(TEXT_EVENT))
    await writer.drain()
    writer.close()


async def _no_done(body: Any, number: int, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk(TEXT_EVENT) + b"0\r\n\r\n")


async def _torn_event(body: Any, number: int, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk(TEXT_EVENT[:-5] + b"\n") + b"0\r\n\r\n")


async def _empty(body: Any, number: int, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk(event(b"[DONE]")) + b"0\r\n\r\n")


async def _list_event(body: Any, number: int, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk(event([1, 2]) + event(b"[DONE]")) + b"0\r\n\r\n")


async def _no_stream(body: Any, number: int, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 15\r\n\r\n" + b'{"choices": []}')


async def _hang(body: Any, number: int, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk(TEXT_EVENT))
    await writer.drain()
    await asyncio.sleep(60)


async def _error_event(body: Any, number: int, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    writer.write(chunk(TEXT_EVENT + event({"error": {"message": "engine died"}})) + b"0\r\n\r\n")


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (_die, "in the middle of the answer"),
        (_no_done, "without [DONE]"),
        (_torn_event, "without [DONE]"),
        (_empty, "no tokens"),
        (_list_event, "no JSON object: [1, 2]"),
        (_no_stream, "no stream of events"),
        (_hang, "within 0.3 s"),
        (_error_event, "error in the stream: engine died"),
    ],
)
def test_faults_are_errors(raw_server: Callable[..., Serving], answer: Any, error: str) -> None:
    (result,) = ask(raw_server(answer), timeout=0.3 if answer is _hang else 60)
    assert result.error is not None and error in result.error


def test_nothing_listens(free_port: int) -> None:
    async def run() -> Result:
        client = Client(Address("127.0.0.1", free_port, False, ""))
        return await stream(client, client.encode("POST", "/", b""))

    assert run_loop(run()).error == "no connection: connection refused"


def test_a_server_without_usage_is_counted_by_chunks(raw_server: Callable[..., Serving]) -> None:
    async def answer(body: Any, number: int, writer: asyncio.StreamWriter) -> None:
        await good_answer(body, number, writer, usage=False)

    (result,) = ask(raw_server(answer))
    assert result.error is None and (result.output_tokens, result.counted, result.input_tokens) == (4, False, None)
