"""Limits of each key: against a slow truth, over HTTP with OpenAI's headers, and with OpenAI's client."""

from __future__ import annotations

import contextlib
import time

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.config import ServerOptions
from octavo.metrics.cells import Cells
from octavo.server.mock import MockEngine
from octavo.server.quota import KeyLimits, duration
from tests.waiting import until

COMPLETIONS = "/v1/completions"
BODY = {"prompt": "hello", "max_tokens": 5}


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def limits(keys: int = 1, **options) -> tuple[KeyLimits, Clock]:
    clock = Clock()
    return KeyLimits(ServerOptions(**options), keys, Cells(), clock), clock


@given(st.lists(st.tuples(st.floats(0, 30), st.integers(0, 400)), max_size=60))
def test_buckets_against_a_slow_truth(steps):
    """Let in are exactly those for whom an evenly filling bucket holds enough; over any time no more than limit * (1 + minutes)."""
    found, clock = limits(max_requests_per_minute=6, max_tokens_per_minute=300)
    requests, tokens, taken, start = 6.0, 300.0, 0, clock.now
    for pause, used in steps:
        clock.now += pause
        requests, tokens = min(requests + pause / 10, 6.0), min(tokens + pause * 5, 300.0)
        refusal = found.enter(0)
        margin = min(abs(requests - 1), abs(tokens))
        if margin > 1e-6:
            assert (refusal is None) == (requests >= 1 and tokens > 0)
        if refusal is None:
            found.leave(0, used)
            requests, tokens, taken = requests - 1, tokens - used, taken + 1
        else:
            clock.now += refusal.retry_after  # then it is let in
            requests, tokens = min(requests + refusal.retry_after / 10, 6.0), min(tokens + refusal.retry_after * 5, 300.0)
    assert taken <= 6 * (1 + (clock.now - start) / 60) + 1e-6


def test_keys_do_not_share():
    found, clock = limits(2, max_requests_per_minute=1, max_concurrent_requests_per_key=1)
    assert found.enter(0) is None and found.enter(1) is None
    assert found.enter(0).code == "concurrency_limit_exceeded"
    found.leave(0, 0)
    assert found.enter(0).code == "rate_limit_exceeded"
    clock.now += 61
    assert found.enter(0) is None


def test_durations():
    assert [duration(s) for s in (0, 0.02, 1, 8.64, 360, 61.5)] == ["0ms", "20ms", "1s", "8.64s", "6m0s", "1m1.5s"]


def test_requests_a_minute(start_server):
    running = start_server(api_key=("a", "b"), max_requests_per_minute=3)
    with httpx.Client(base_url=running.url, headers={"Authorization": "Bearer a"}) as http:
        for left in (2, 1, 0):
            answer = http.post(COMPLETIONS, json=BODY)
            assert answer.status_code == 200 and answer.headers["x-ratelimit-remaining-requests"] == str(left)
            assert answer.headers["x-ratelimit-limit-requests"] == "3" and answer.headers["x-ratelimit-reset-requests"]
        answer = http.post(COMPLETIONS, json=BODY)
        assert answer.status_code == 429 and 5 <= int(answer.headers["retry-after"]) <= 21  # 20, less what has passed
        error = answer.json()["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded") and "3 requests a minute" in error["message"]
        assert http.get("/v1/models").status_code == 200  # costs nothing
        assert http.post(COMPLETIONS, json=BODY, headers={"Authorization": "Bearer b"}).status_code == 200
    with pytest.raises(openai.RateLimitError):
        openai.OpenAI(base_url=running.url + "/v1", api_key="a", max_retries=0).completions.create(model="mock-model", prompt="x")


def test_tokens_a_minute(start_server):
    running = start_server(max_tokens_per_minute=600)
    body = {"prompt": "hello", "max_tokens": 1400, "ignore_eos": True}
    with httpx.Client(base_url=running.url) as http:
        first = http.post(COMPLETIONS, json=body)
        used = first.json()["usage"]["total_tokens"]
        assert used > 1400 and first.headers["x-ratelimit-remaining-tokens"] == "600"
        answer = http.post(COMPLETIONS, json=body)
        assert answer.status_code == 429 and "600 tokens a minute" in answer.json()["error"]["message"]
        assert 40 <= int(answer.headers["retry-after"]) <= (used - 600) / 10 + 1  # ten a second, less what has passed
        assert answer.headers["x-ratelimit-remaining-tokens"] == "0"


def test_tokens_of_a_stream_that_is_cut_count(start_server):
    running = start_server(MockEngine(tick_s=0.001, length=5000, max_model_len=8000), max_tokens_per_minute=30)
    with httpx.Client(base_url=running.url) as http:
        with http.stream("POST", COMPLETIONS, json={"prompt": "x", "max_tokens": 4000, "stream": True}) as answer:
            seen = 0
            for line in answer.iter_lines():
                seen += line.startswith("data: {")
                if seen > 100:
                    break
        running.wait_idle()
        # It is counted when its request ends, soon after its run has. What is asked here alone would take longer to use up a minute's.
        statuses = [http.post(COMPLETIONS, json=BODY).status_code for _ in range(4) if not time.sleep(0.05)]
        assert 429 in statuses


def test_requests_at_the_same_time(start_server):
    running = start_server(MockEngine(tick_s=0.02, length=2000), max_concurrent_requests_per_key=2)
    with httpx.Client(base_url=running.url) as http:
        long = {"prompt": "x", "max_tokens": 1500, "stream": True}
        with http.stream("POST", COMPLETIONS, json=long), http.stream("POST", COMPLETIONS, json=long):
            answer = http.post(COMPLETIONS, json=BODY)
            assert answer.status_code == 429 and answer.json()["error"]["code"] == "concurrency_limit_exceeded"
            assert answer.headers["retry-after"] == "1"
        running.wait_idle()
        until(lambda: http.post(COMPLETIONS, json=BODY).status_code == 200)


def test_openais_client_waits_and_gets_it(start_server):
    running = start_server(max_requests_per_minute=100)
    client = openai.OpenAI(base_url=running.url + "/v1", api_key="x", max_retries=5)
    with httpx.Client(base_url=running.url) as http:
        while http.post(COMPLETIONS, json=BODY).status_code == 200:
            pass
    assert client.completions.create(model="mock-model", prompt="x", max_tokens=2).usage.completion_tokens == 2


def test_no_limits_no_headers(http):
    answer = http.post(COMPLETIONS, json=BODY)
    assert not [name for name in answer.headers if name.startswith("x-ratelimit")]


# -- the queue


def test_a_bounded_queue(start_server):
    """One runs, two wait, the fourth is refused; when the first has ended there is room again."""
    engine = MockEngine(tick_s=0.02, length=2000)
    engine.max_num_seqs = 1
    running = start_server(engine, max_queued_requests=2)
    with httpx.Client(base_url=running.url) as http, contextlib.ExitStack() as stack:
        body = {"prompt": "x", "max_tokens": 1900, "stream": True}
        first = http.stream("POST", COMPLETIONS, json=body)
        with first:
            others = [stack.enter_context(http.stream("POST", COMPLETIONS, json=body)) for _ in range(2)]
            assert [answer.status_code for answer in others] == [200] * 2 and engine.num_unfinished == 3
            answer = http.post(COMPLETIONS, json=BODY)
            assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
            error = answer.json()["error"]
            assert (error["type"], error["code"]) == ("server_error", "queue_full") and "--max-queued-requests 2" in error["message"]
            assert http.post(COMPLETIONS, json={**BODY, "stream": True}).status_code == 503
        until(lambda: http.post(COMPLETIONS, json=BODY).status_code == 200, 15)


def test_what_the_engine_says_of_its_queue_counts(start_server):
    running = start_server(max_queued_requests=4)
    running.engine.stats.num_waiting = 4
    assert httpx.post(running.url + COMPLETIONS, json=BODY).status_code == 503
    running.engine.stats.num_waiting = 3
    assert httpx.post(running.url + COMPLETIONS, json=BODY).status_code == 200
    assert httpx.post(running.url + COMPLETIONS, json={"prompt": ["a", "b"], "max_tokens": 1}).status_code == 503
