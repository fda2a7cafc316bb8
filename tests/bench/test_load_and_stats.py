"""Arrival times against the distributions that they promise; statistics on traces whose answers are known."""

from __future__ import annotations

import asyncio
import math
import random
import statistics
from array import array
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.bench.http import Address, Client, raise_file_limit, run_loop
from octavo.bench.load import LoadRun, arrival_times, run_load
from octavo.bench.stats import describe, details, meets, peak_per_second, percentile_name, summarize
from octavo.bench.stream import Result
from octavo.errors import ConfigError
from tests.bench.conftest import Serving, good_answer


def gaps(count: int, rate: float, burstiness: float, seed: int = 0) -> list[float]:
    times = arrival_times(count, rate, burstiness, seed)
    assert times[0] == 0 and times == sorted(times)
    return [b - a for a, b in zip(times, times[1:], strict=False)]


def test_poisson_arrivals() -> None:
    """Kolmogorov–Smirnov: the gaps' distribution is the exponential one, to the 0.1% level."""
    found = sorted(gaps(20001, 50.0, 1.0))
    n = len(found)
    distance = max(max(abs((i + 1) / n - (1 - math.exp(-50 * x))), abs(i / n - (1 - math.exp(-50 * x)))) for i, x in enumerate(found))
    assert distance < 1.95 / math.sqrt(n)
    assert statistics.mean(found) == pytest.approx(1 / 50, rel=0.03)
    per_second = [0] * 300  # a Poisson process: counts have a variance like their mean
    for at in arrival_times(15000, 50.0, 1.0, 1):
        if at < 300:
            per_second[int(at)] += 1
    assert statistics.variance(per_second[:280]) / statistics.mean(per_second[:280]) == pytest.approx(1, abs=0.35)


@pytest.mark.parametrize("burstiness", [0.25, 4.0, 100.0])
def test_burstiness_is_the_gammas_shape(burstiness: float) -> None:
    found = gaps(20001, 10.0, burstiness)
    assert statistics.mean(found) == pytest.approx(0.1, rel=0.05)
    assert statistics.pstdev(found) / statistics.mean(found) == pytest.approx(1 / math.sqrt(burstiness), rel=0.05)


def test_arrivals_without_randomness() -> None:
    assert arrival_times(3, math.inf, 1.0, 0) == [0, 0, 0]
    assert arrival_times(3, 4.0, math.inf, 0) == [0, 0.25, 0.5]
    assert arrival_times(9, 4.0, 1.0, 7) == arrival_times(9, 4.0, 1.0, 7) != arrival_times(9, 4.0, 1.0, 8)


def loaded(serving: Serving, arrivals: list[float], limit: int | None) -> LoadRun:
    async def run() -> LoadRun:
        client = Client(Address("127.0.0.1", serving.port, False, ""))
        request = client.encode("POST", "/v1/completions", b'{"max_tokens": 2}')
        try:
            return await run_load(client, [request] * len(arrivals), arrivals, limit)
        finally:
            client.close()

    return run_loop(run())


def test_concurrency_is_limited(raw_server: Callable[..., Serving]) -> None:
    async def answer(body: Any, number: int, writer: asyncio.StreamWriter) -> None:
        await good_answer(body, number, writer, delay=0.01)

    serving = raw_server(answer)
    run = loaded(serving, [0.0] * 20, 4)
    assert run.peak == 4 and serving.raw.peak == 4 and len(run.results) == 20
    assert [r.index for r in run.results] == list(range(20)) and all(r.error is None for r in run.results)
    assert serving.raw.connections == 4


def test_requests_are_sent_when_they_arrive(raw_server: Callable[..., Serving]) -> None:
    serving, arrivals, late = raw_server(good_answer), [0.0, 0.1, 0.3], []
    for _ in range(12):  # never early; not late either, unless the machine is busy
        run = loaded(serving, arrivals, None)
        starts = [r.start - run.start for r in run.results]
        assert all(start >= at - 0.002 for at, start in zip(arrivals, starts, strict=True)) and run.duration >= 0.3
        late.append(max(start - at for at, start in zip(arrivals, starts, strict=True)))
        if late[-1] < 0.09 and run.lateness < 0.09:
            return
    pytest.fail(f"late by {late} s")


def test_a_thousand_streams_at_once(raw_server: Callable[..., Serving]) -> None:
    raise_file_limit(2200)

    async def answer(body: Any, number: int, writer: asyncio.StreamWriter) -> None:
        while serving.raw.peak < 1000:  # nobody is answered until all are there
            await asyncio.sleep(0.05)
        await good_answer(body, number, writer)

    serving = raw_server(answer)
    run = loaded(serving, [0.0] * 1000, None)
    assert run.peak == 1000 and all(r.error is None for r in run.results)


def test_too_many_streams_for_the_system() -> None:
    resource = pytest.importorskip("resource")
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard == resource.RLIM_INFINITY:
        pytest.skip("no limit here")
    with pytest.raises(ConfigError, match="open files"):
        raise_file_limit(hard)


def result(index: int, start: float, arrivals: list[float], tokens: int, error: str | None = None) -> Result:
    made = Result(index, start)
    made.arrivals, made.output_tokens, made.error, made.input_tokens = array("d", arrivals), tokens, error, 10
    made.end = max([start, *arrivals])
    return made


def trace() -> LoadRun:
    """100 requests at 0, 1, 2 … ms: TTFT i+1 ms, then four tokens 10 ms apart. Two more failed."""
    results = [result(i, 5 + i / 1e3, [5 + (2 * i + 1 + 10 * k) / 1e3 for k in range(5)], 5) for i in range(100)]
    results += [result(100, 5.0, [], 0, "HTTP 429: slow down"), result(101, 5.0, [5.01], 1, "HTTP 500")]
    return LoadRun(results, start=5.0, duration=2.0, peak=17, client_cpu=0.5)


def test_the_figures_of_a_known_trace() -> None:
    figures = summarize(trace(), [10] * 102, metrics=("ttft", "tpot", "itl", "e2el"), percentiles=(90.0, 99.0, 99.9), slos={"ttft": 50.0})
    assert (figures["completed"], figures["failed"]) == (100, 2)
    assert figures["failures"] == {"HTTP 429: slow down": 1, "HTTP 500": 1}
    assert (figures["total_input_tokens"], figures["total_output_tokens"]) == (1000, 500)
    assert figures["request_throughput"] == 50 and figures["output_throughput"] == 250 and figures["total_token_throughput"] == 750
    assert figures["request_goodput"] == pytest.approx(25, abs=0.51)  # TTFT of 1 … 50 ms of 1 … 100, over 2 s
    assert figures["mean_ttft_ms"] == pytest.approx(50.5) and figures["median_ttft_ms"] == pytest.approx(50.5)
    assert figures["std_ttft_ms"] == pytest.approx(math.sqrt((100**2 - 1) / 12))
    assert figures["p90_ttft_ms"] == pytest.approx(90.1) and figures["p99_ttft_ms"] == pytest.approx(99.01)
    assert figures["p99.9_ttft_ms"] == pytest.approx(99.901)
    for metric in ("tpot", "itl"):
        assert figures[f"mean_{metric}_ms"] == pytest.approx(10) and figures[f"std_{metric}_ms"] == pytest.approx(0, abs=1e-6)
    assert figures["mean_e2el_ms"] == pytest.approx(90.5)
    assert figures["max_concurrent_requests"] == 17 and figures["mean_tokens_per_chunk"] == 1
    assert figures["max_output_tokens_per_s"] == 500 and figures["client_cpu_cores"] == 0.25


def test_chunks_of_several_tokens() -> None:
    run = LoadRun([result(0, 0.0, [0.1, 0.3], 5)], start=0.0, duration=1.0)
    figures = summarize(run, [None], metrics=("tpot", "itl"), percentiles=())
    assert figures["mean_tokens_per_chunk"] == 2.5
    assert figures["answers_in_one_chunk"] == 0
    assert figures["mean_tpot_ms"] == pytest.approx(50) and figures["mean_itl_ms"] == pytest.approx(200)


def test_answers_that_were_not_streamed_are_counted() -> None:
    run = LoadRun([result(0, 0.0, [0.1], 5), result(1, 0.0, [0.1], 1)], start=0.0, duration=1.0)
    assert summarize(run, [None] * 2, metrics=(), percentiles=())["answers_in_one_chunk"] == 1


def test_nothing_succeeded() -> None:
    run = LoadRun([result(0, 0.0, [], 0, "x")], start=0.0, duration=0.0)
    figures = summarize(run, [None], metrics=("ttft",), percentiles=(99.0,), slos={"ttft": 1.0})
    assert figures["completed"] == 0 and figures["mean_ttft_ms"] is None and figures["p99_ttft_ms"] is None
    assert figures["request_throughput"] == figures["request_goodput"] == figures["max_output_tokens_per_s"] == 0


def test_service_levels() -> None:
    one = result(0, 0.0, [0.1], 1)
    assert meets(one, {"ttft": 100.1, "tpot": 0.001, "e2el": 101}) and not meets(one, {"ttft": 99.0})
    five = result(0, 0.0, [0.1, 0.5], 5)
    assert meets(five, {"tpot": 100.1}) and not meets(five, {"tpot": 99.9}) and not meets(five, {"e2el": 499.0})


def test_peak_tokens_of_a_second() -> None:
    results = [result(0, 0.0, [0.5, 1.5, 1.6, 2.5], 8), result(1, 0.0, [1.1], 3)]
    assert peak_per_second(results, 0.0, 2.5) == 7  # 2 tokens a chunk, two chunks and three tokens in the second second


@given(st.lists(st.floats(0, 1e4), min_size=1, max_size=50), st.floats(0, 100))
def test_percentiles_interpolate_linearly(values: list[float], percentile: float) -> None:
    found = describe(values, (percentile,))[percentile_name(percentile)]
    ordered = sorted(values)
    at = (len(values) - 1) * percentile / 100
    low = math.floor(at)
    expected = ordered[low] + (at - low) * (ordered[min(low + 1, len(values) - 1)] - ordered[low])
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_mean_median_and_deviation_against_the_standard_library() -> None:
    values = [random.expovariate(1) for _ in range(999)]
    found = describe(values, ())
    assert found["mean"] == pytest.approx(statistics.fmean(values)) and found["median"] == pytest.approx(statistics.median(values))
    assert found["std"] == pytest.approx(statistics.pstdev(values))


def test_details_are_a_row_a_request() -> None:
    lists = details(trace(), [10] * 102)
    assert {len(values) for values in lists.values()} == {102}
    assert lists["ttfts"][99] == pytest.approx(0.1) and lists["itls"][0] == pytest.approx([0.01] * 4)
    assert lists["errors"][-2:] == ["HTTP 429: slow down", "HTTP 500"] and lists["ttfts"][-1] == 0
    assert lists["start_times"][:2] == pytest.approx([0.0, 0.001]) and lists["output_lens"][0] == 5
