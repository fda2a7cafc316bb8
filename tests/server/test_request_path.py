"""What the HTTP process adds, measured as scripts/bench_request_path.py does."""

from __future__ import annotations

import importlib.util
import statistics
import sys
import time
from pathlib import Path

import pytest

from tests.waiting import slowness

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench_request_path.py"


@pytest.fixture(scope="module")
def bench():
    spec = importlib.util.spec_from_file_location("bench_request_path", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_request_path"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["bench_request_path"]


@pytest.fixture(scope="module")
def front(bench):
    with bench.Front() as front:
        yield front


def test_the_first_byte_follows_its_token(bench, front):
    """Within 1 ms; a quarter of that is usual. The best of some rounds' medians: in others the machine had something else to do.

    What it must not have is a timer of any kind in its way, which would be longer on machines of every speed.
    """
    bench.first_byte_seconds(front, 20)
    bound = 0.001 * slowness()
    medians = []
    for _ in range(20):
        medians.append(statistics.median(bench.first_byte_seconds(front, 50)))
        if medians[-1] < bound:
            break
        time.sleep(0.2)
    assert min(medians) < bound, medians


def test_a_chat_of_2000_tokens_is_taken_in(bench, front):
    """2 ms for parse, validate and render; a tenth of that is usual. CPU time of this thread: what others run doesn't count."""
    times, count = bench.path_seconds(front.llm, repeat=100, clock=time.thread_time)
    assert 1900 < count < 2100
    assert all(len(values) == 100 and sum(values) > 0 for values in times.values())
    assert statistics.median(bench.before_tokens(times)) < 0.002 * slowness()
