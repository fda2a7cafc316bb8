"""OpenAI's client asks again where the server says that it may: a busy queue (503), a key's limits (429). And clients that half close."""

from __future__ import annotations

import json
import socket

import httpx
import openai
import pytest

from octavo.server.mock import MockEngine
from tests.server.conftest import MODEL, running_server
from tests.waiting import until

HELLO = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize(
    ("options", "status", "code", "kind"),
    [
        ({"max_queued_requests": 0}, 503, "queue_full", openai.InternalServerError),
        ({"max_concurrent_requests_per_key": 1}, 429, "concurrency_limit_exceeded", openai.RateLimitError),
    ],
    ids=["503", "429"],
)
def test_who_waits_gets_an_answer(options, status, code, kind) -> None:
    engine = MockEngine(tick_s=0.01, length=10**6, max_model_len=60_000)
    engine.max_num_seqs = 1
    statuses: list[int] = []

    def seen(response: httpx.Response) -> None:
        statuses.append(response.status_code)
        if response.status_code == status:
            stream.close()  # from now on there is room

    hooks = {"response": [seen]}
    with running_server(engine, **options) as running, httpx.Client(event_hooks=hooks) as watched:
        hasty = openai.OpenAI(base_url=running.url + "/v1", api_key="none", max_retries=0)
        patient = openai.OpenAI(base_url=running.url + "/v1", api_key="none", max_retries=5, http_client=watched)
        stream = hasty.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
        next(iter(stream))
        with pytest.raises(kind) as refused:
            hasty.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=2)
        assert refused.value.status_code == status and refused.value.code == code
        assert refused.value.response.headers["retry-after"] == "1"
        answer = patient.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=2)
        assert answer.usage.completion_tokens == 2
        assert statuses[0] == status and statuses[-1] == 200 and set(statuses[:-1]) == {status}, statuses
        # a stream, too, is refused before it begins, so the client can ask again
        statuses.clear()
        stream = hasty.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
        next(iter(stream))
        chunks = list(patient.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=2, stream=True))
        assert chunks[-1].choices[0].finish_reason == "length" and statuses[0] == status and statuses[-1] == 200
        running.wait_idle()


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_half_closes_counts_as_gone(stream) -> None:
    """It can't be told from one that has closed: an answer that is not streamed would be made to its end for nobody."""
    with running_server(MockEngine(tick_s=0.01, length=10**6, max_model_len=60_000)) as running:
        body = json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 50_000, "stream": stream}).encode()
        with socket.create_connection(("127.0.0.1", running.port), timeout=60) as sock:
            sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            until(lambda: running.engine.runs)
            sock.shutdown(socket.SHUT_WR)
            running.wait_idle()
            while sock.recv(2**16):  # the server closes its side
                pass
