"""From the requests' times to the figures that are reported. Nothing here knows about HTTP or printing.

- TTFT: sending to the first token. E2EL: sending to the last. TPOT: (E2EL - TTFT) / (output tokens - 1), a figure a
  request. ITL: the gap between two chunks of a stream, a figure a gap; a chunk with several tokens is one chunk.
- Throughputs: of successful requests, over the time from the start to the last end.
- Goodput: requests a second that kept every service level.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.bench.load import LoadRun
from octavo.bench.stream import Result, text_of

CLIENT_BUSY = 0.8  # cores; above, the client may be what is measured


def describe(values: Sequence[float], percentiles: Sequence[float]) -> dict[str, float | None]:
    """mean, median, std (of the population) and ``p<N>`` by linear interpolation; all None without values."""
    names = ["mean", "median", "std", *(percentile_name(p) for p in percentiles)]
    if not len(values):
        return dict.fromkeys(names)
    import numpy

    data = numpy.asarray(values, dtype=numpy.float64)
    found = [data.mean(), numpy.median(data), data.std(), *numpy.percentile(data, list(percentiles))]
    return dict(zip(names, map(float, found), strict=True))


def percentile_name(percentile: float) -> str:
    """99.0 -> p99, 99.9 -> p99.9"""
    return f"p{percentile:g}"


def latencies_ms(results: Sequence[Result]) -> dict[str, list[float]]:
    """All values of each latency, in milliseconds, of successful requests."""
    return {
        "ttft": [r.ttft * 1e3 for r in results],
        "tpot": [tpot * 1e3 for r in results if (tpot := r.tpot) is not None],
        "itl": [gap * 1e3 for r in results for gap in r.itls],
        "e2el": [r.e2el * 1e3 for r in results],
    }


def meets(result: Result, slos: Mapping[str, float]) -> bool:
    """Whether a successful request kept every service level (ms). A single token has no TPOT, and keeps it."""
    values = {"ttft": result.ttft, "tpot": result.tpot or 0.0, "e2el": result.e2el}
    return all(values[name] * 1e3 <= limit for name, limit in slos.items())


def peak_per_second(results: Sequence[Result], start: float, duration: float) -> float:
    """Most output tokens in one of the whole seconds since the start. A stream's tokens are spread evenly over its chunks."""
    import numpy

    totals = numpy.zeros(int(duration) + 1)
    for result in results:
        seconds = (numpy.asarray(result.arrivals) - start).astype(numpy.int64)
        numpy.add.at(totals, seconds.clip(0, len(totals) - 1), result.output_tokens / len(result.arrivals))
    return float(totals.max())


def summarize(
    run: LoadRun,
    input_lens: Sequence[int | None],
    *,
    metrics: Sequence[str],
    percentiles: Sequence[float],
    slos: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """The figures of one load under vLLM's field names, and some more. ``input_lens``: known prompt lengths, for a server
    that reports no usage."""
    good = [r for r in run.results if r.error is None]
    failures = Counter(r.error for r in run.results if r.error is not None)
    n_in = sum(r.input_tokens if r.input_tokens is not None else input_lens[r.index] or 0 for r in good)
    n_out = sum(r.output_tokens for r in good)
    chunks = sum(len(r.arrivals) for r in good)
    seconds = max(run.duration, 1e-9)
    figures: dict[str, Any] = {
        "interrupted": run.interrupted,
        "duration": run.duration,
        "completed": len(good),
        "failed": len(run.results) - len(good),
        "failures": dict(failures.most_common()),
        "total_input_tokens": n_in,
        "total_output_tokens": n_out,
        "request_throughput": len(good) / seconds,
        "request_goodput": sum(meets(r, slos) for r in good) / seconds if slos else None,
        "output_throughput": n_out / seconds,
        "total_token_throughput": (n_in + n_out) / seconds,
        "max_output_tokens_per_s": peak_per_second(good, run.start, run.duration),
        "max_concurrent_requests": run.peak,
        "mean_tokens_per_chunk": n_out / chunks if chunks else None,
        "answers_in_one_chunk": sum(len(r.arrivals) == 1 < r.output_tokens for r in good),
        "output_tokens_counted_by": "server" if all(r.counted for r in good) else "chunks",
        "client_cpu_seconds": run.client_cpu,
        "client_cpu_cores": run.client_cpu / seconds,
        "max_dispatch_delay_ms": run.lateness * 1e3,
    }
    values = latencies_ms(good)
    for metric in metrics:
        for name, value in describe(values[metric], percentiles).items():
            figures[f"{name}_{metric}_ms"] = value
    return figures


def details(run: LoadRun, input_lens: Sequence[int | None]) -> dict[str, list[Any]]:
    """A list a field, an entry a request, in seconds. ``start_times`` count from the load's start."""
    results = run.results
    good = [r.error is None for r in results]
    return {
        "input_lens": [r.input_tokens if r.input_tokens is not None else input_lens[r.index] for r in results],
        "output_lens": [r.output_tokens for r in results],
        "start_times": [r.start - run.start for r in results],
        "ttfts": [r.ttft if ok else 0.0 for r, ok in zip(results, good, strict=True)],
        "itls": [r.itls for r in results],
        "e2els": [r.e2el if ok else 0.0 for r, ok in zip(results, good, strict=True)],
        "generated_texts": [text_of(r.kept or ()) for r in results],
        "errors": [r.error or "" for r in results],
    }
