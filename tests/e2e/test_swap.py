"""Preemption through the front door: a KV cache so small that sequences lose their blocks again and again, with the swap tier and
without, and every answer is what it would be with room for all."""

from __future__ import annotations

import itertools
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.e2e.demo import demo_model_path, text_prompts
from tests.e2e.server import RunningServer
from tests.waiting import until

FEW_BLOCKS = ("--num-gpu-blocks-override", "20")
OUTPUT_TOKENS = 36
SHARED = "You are a careful assistant who writes about the sea, its animals, and the people who live from it. "


def start(*flags: str, steps_ahead: int = 0) -> RunningServer:
    demo_model_path()  # skips where there is none
    return RunningServer(
        *("--dtype", "float32", "--max-model-len", "256", "--max-num-seqs", "10", "--scheduling-policy", "priority", *flags),
        env={"OCTAVO_STEPS_AHEAD": str(steps_ahead), "OMP_NUM_THREADS": "2"},
    )


def requests() -> list[dict[str, Any]]:
    """Greedy ones with what must survive a preemption: log-probabilities, penalties, grammars, seeds, n, prompt log-probabilities."""
    kinds: list[dict[str, Any]] = [
        {},
        {"logprobs": 2},
        {"frequency_penalty": 0.5, "repetition_penalty": 1.1},
        {"n": 2, "temperature": 0.8, "seed": 3},
        {"structured_outputs": {"regex": "( [a-z]{1,9}){30}\\."}},
        {"prompt_logprobs": 1},
    ]
    prompts = [(SHARED if i % 3 else "") + text for i, text in enumerate(text_prompts(10, seed=5))]
    base = {"temperature": 0.0, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True, "seed": 1}
    return [{"prompt": prompt[:200], "priority": i % 2, **base, **kinds[i % len(kinds)], "model": "m"} for i, prompt in enumerate(prompts)]


def ask(url: str, body: dict[str, Any]) -> Any:
    answer = httpx.post(url + "/v1/completions", json=body, timeout=240)
    assert answer.status_code == 200, answer.text
    return [{k: c.get(k) for k in ("index", "text", "finish_reason", "logprobs", "prompt_logprobs")} for c in answer.json()["choices"]]


def ask_all(url: str) -> list[Any]:
    with ThreadPoolExecutor(20) as pool:
        return list(pool.map(lambda body: ask(url, body), requests()))


def settled(server: RunningServer) -> bool:
    names = ("num_requests_running", "num_requests_waiting", "num_requests_swapped", "kv_cache_usage_perc", "cpu_cache_usage_perc")
    return all(server.metric(f"vllm:{name}") == 0 for name in names)


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    server = start("--served-model-name", "m", "--max-num-seqs", "32")  # or who comes late takes the row of one that matters less
    try:
        answers = ask_all(server.url)
        assert server.metric("vllm:num_preemptions_total") == 0 == server.metric("vllm:swapped_out_blocks_total")
        return answers
    finally:
        server.stop()


def close(a: Any, b: Any) -> bool:
    """Equal but for the last digits of log-probabilities."""
    if isinstance(a, float) and isinstance(b, float):
        return abs(a - b) < 2e-3
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(close(a[k], b[k]) for k in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(close, a, b))
    return a == b


@pytest.mark.parametrize(
    ("flags", "steps_ahead", "swaps"),
    [
        (("--swap-space", "0.25"), 1, True),
        (("--swap-space", "0.25", "--no-enable-prefix-caching"), 0, True),
        (("--swap-space", "0"), 0, False),
    ],
    ids=["swap-ahead", "swap-no-cache", "recompute"],
)
def test_answers_are_what_they_are_with_room_for_all(expected: list[Any], flags: tuple[str, ...], steps_ahead: int, swaps: bool) -> None:
    server = start("--served-model-name", "m", *FEW_BLOCKS, *flags, steps_ahead=steps_ahead)
    try:
        come, needed = 0.0, "vllm:swapped_in_blocks_total" if swaps else "vllm:num_preemptions_total"
        for _ in range(8):  # 60 blocks for 20 places: more than once, but for where the requests do not come together
            for i, (got, wanted) in enumerate(zip(ask_all(server.url), expected, strict=True)):
                assert close(got, wanted), f"request {i}: {json.dumps(got)[:600]}\ninstead of {json.dumps(wanted)[:600]}"
            until(lambda: settled(server))
            come = server.metric(needed)
            if come:
                break
        assert come > 0 and server.metric("vllm:num_preemptions_total") > 0
        assert (server.metric("vllm:swapped_in_blocks_total") > 0) == swaps
        if swaps:
            clients_gone(server, expected)
        assert server.stop() == 0
    finally:
        server.stop()


def clients_gone(server: RunningServer, expected: list[Any]) -> None:
    """All clients go while sequences are swapped out: nothing is left of them, and the next one gets its answer."""
    for _ in range(8):
        if gone_while_swapped(server):
            break
    else:
        pytest.fail("there never was a sequence swapped out")
    assert close(ask(server.url, requests()[1]), expected[1])


def gone_while_swapped(server: RunningServer) -> bool:
    """Whether it was seen that one was: they may have ended before that."""
    go = threading.Event()

    def watch(body: dict[str, Any]) -> int:
        body = {**body, "stream": True, "n": 1, "max_tokens": 150}
        with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=60) as answer:
            return sum(not go.is_set() for _ in itertools.takewhile(lambda _: not go.is_set(), answer.iter_lines()))

    with ThreadPoolExecutor(20) as pool:
        watching = [pool.submit(watch, body) for body in requests()[:5]]
        seen = False
        try:
            while not (seen or all(future.done() for future in watching)):
                seen = server.metric("vllm:cpu_cache_usage_perc") > 0
        finally:
            go.set()
    assert any(future.result() for future in watching)
    until(lambda: settled(server))
    return seen


def test_what_does_not_fit_is_refused_at_the_start() -> None:
    with pytest.raises(RuntimeError, match=r"--swap-space 100000 asks for .* Ask for at most "):
        start("--swap-space", "100000", "--max-num-seqs", "256", "--max-model-len", "8192", "--num-gpu-blocks-override", "512").stop()
