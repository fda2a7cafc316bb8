"""What the HTTP process adds, measured as scripts/bench_request_path.py does; loosely, for the machine may be busy."""

from __future__ import annotations

import importlib.util
import statistics
import sys
from pathlib import Path

import pytest

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
    """1 ms is the aim, a quarter of that is usual on a quiet machine."""
    bench.first_byte_seconds(front, 20)
    assert statistics.median(bench.first_byte_seconds(front, 100)) < 0.005


def test_a_chat_of_2000_tokens_is_taken_in(bench, front):
    """2 ms is the aim for parse, validate and render; a tenth of that is usual."""
    steps, count = bench.path_seconds(front.llm, repeat=20)
    assert 1900 < count < 2100
    assert steps["parse"] + steps["validate"] + steps["render"] < 0.005
