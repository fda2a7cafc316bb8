"""Metrics for Prometheus under the names that vLLM's dashboards read (``vllm:…``, label ``model_name``).

The numbers are plain Python integers and lists, written by one thread (the event loop) and read when /metrics is asked
for. prometheus-client's own counters take a lock and a label lookup on every observation, which is too much for
something that happens once a token; only its text format is used, through one custom collector.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from octavo.metrics.cells import Cells
from octavo.types import EngineReady, EngineStats

TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0)
TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
LATENCY_BUCKETS = (0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0)
COUNT_BUCKETS = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5))

FINISH_REASONS = ("stop", "length", "abort", "error")


class Histogram:
    """Counts of values by upper bound (inclusive), the last for all above; and their sum."""

    __slots__ = ("bounds", "cells", "counts", "start")

    def __init__(self, bounds: Sequence[float], cells: Cells | None = None) -> None:
        """``cells``: where several processes count; what is read is then the sum of all."""
        self.bounds = tuple(bounds)
        self.cells = cells or Cells()
        self.start = self.cells.position
        self.counts = self.cells.own(len(self.bounds) + 2)  # the sum of all values comes last

    def observe(self, value: float, count: int = 1) -> None:
        """``count`` observations of ``value``."""
        counts = self.counts
        counts[bisect_left(self.bounds, value)] += count
        counts[-1] += value * count

    def read(self) -> tuple[list[tuple[str, float]], float]:
        """Counts by bound, cumulative as the text format wants them, and the sum of all values."""
        total, result = 0.0, []
        *counts, value_sum = self.cells.summed(self.start, self.counts)
        for bound, count in zip((*map(str, self.bounds), "+Inf"), counts):
            total += count
            result.append((bound, total))
        return result, value_sum


_ENGINE_COUNTERS = ("num_preemptions", "prefix_cache_queries", "prefix_cache_hits", "prompt_tokens", "generation_tokens", "num_steps")


class Metrics(Collector):
    """All metrics of one server. Times in seconds.

    ``observe_stats`` takes the engine's snapshot (gauges, and counters as totals since its start); the other methods
    are called for each request as its output arrives.
    """

    def __init__(self, model_name: str, cells: Cells | None = None) -> None:
        """``cells``: shared with the server's other processes; each of them then shows what all have counted."""
        self.model_name = model_name
        self.cells = cells or Cells()
        self.stats = EngineStats()
        self.ready: EngineReady | None = None
        self.first_token = Histogram(TTFT_BUCKETS, self.cells)
        self.inter_token = Histogram(TOKEN_BUCKETS, self.cells)
        self.observe_inter_token = self.inter_token.observe
        """(seconds, count): ``count`` tokens, each ``seconds`` after the one before it."""
        self.request_token_time = Histogram(TOKEN_BUCKETS, self.cells)
        self.e2e = Histogram(LATENCY_BUCKETS, self.cells)
        self.prompt_length = Histogram(COUNT_BUCKETS, self.cells)
        self.generation_length = Histogram(COUNT_BUCKETS, self.cells)
        self.finished_start = self.cells.position
        self.finished = self.cells.own(len(FINISH_REASONS))
        self.shown = self.cells.common(len(_ENGINE_COUNTERS))
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)

    def observe_stats(self, stats: EngineStats) -> None:
        """Counters never fall: another process, who heard of the engine later, may have shown more at the scrape before."""
        if self.cells.count > 1:
            with self.cells.locked():
                for i, name in enumerate(_ENGINE_COUNTERS):
                    self.shown[i] = max(self.shown[i], getattr(stats, name))
                stats = msgspec.structs.replace(stats, **dict(zip(_ENGINE_COUNTERS, map(int, self.shown))))
        self.stats = stats

    def observe_ready(self, ready: EngineReady) -> None:
        self.ready = ready

    def observe_first_token(self, seconds: float) -> None:
        self.first_token.observe(seconds)

    def observe_finished(
        self, finish_reason: str, e2e: float, num_prompt: int, num_generation: int, decode_seconds: float | None = None
    ) -> None:
        """One sequence ended. ``decode_seconds``: from its first token to its last, None when there are fewer than two."""
        self.finished[FINISH_REASONS.index(finish_reason)] += 1
        if finish_reason in ("abort", "error"):
            return  # what is left of a request says nothing about latencies and lengths
        self.e2e.observe(e2e)
        self.prompt_length.observe(num_prompt)
        self.generation_length.observe(num_generation)
        if decode_seconds is not None and num_generation > 1:
            self.request_token_time.observe(decode_seconds / (num_generation - 1))

    def render(self) -> tuple[bytes, str]:
        """The text for a scrape, and its content type."""
        return generate_latest(self.registry), CONTENT_TYPE_LATEST

    # -- Collector

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        yield from self._gauges()
        yield from self._counters()
        yield from self._histograms()

    def _gauges(self) -> Iterable[Metric]:
        stats = self.stats
        usage_help = "Share of the KV cache's blocks that are in use, 0 to 1"
        for name, help_text, value in (
            ("num_requests_running", "Requests that are running", stats.num_running),
            ("num_requests_waiting", "Requests that wait to run", stats.num_waiting),
            ("num_requests_swapped", "Requests that are swapped out to CPU memory", stats.num_swapped),
            ("kv_cache_usage_perc", usage_help, stats.kv_cache_usage),
            ("cpu_cache_usage_perc", "Share of the swap space's blocks that are in use, 0 to 1", stats.cpu_cache_usage),
            ("gpu_cache_usage_perc", usage_help + " (older name)", stats.kv_cache_usage),
        ):
            gauge = GaugeMetricFamily(f"vllm:{name}", help_text, labels=["model_name"])
            gauge.add_metric([self.model_name], value)
            yield gauge
        if self.ready is not None:
            info = {
                "block_size": self.ready.block_size,
                "num_gpu_blocks": self.ready.num_blocks,
                "num_cpu_blocks": self.ready.num_cpu_blocks,
                "cache_dtype": self.ready.dtype,
            }
            gauge = GaugeMetricFamily("vllm:cache_config_info", "The KV cache's settings, as labels", labels=["model_name", *info])
            gauge.add_metric([self.model_name, *map(str, info.values())], 1)
            yield gauge

    def _counters(self) -> Iterable[Metric]:
        stats = self.stats
        queries, hits = "Tokens looked up in the prefix cache", "Tokens found in the prefix cache"
        for name, help_text, value in (
            ("prompt_tokens", "Prompt tokens processed", stats.prompt_tokens),
            ("generation_tokens", "Tokens generated", stats.generation_tokens),
            ("prefix_cache_queries", queries, stats.prefix_cache_queries),
            ("prefix_cache_hits", hits, stats.prefix_cache_hits),
            ("gpu_prefix_cache_queries", queries + " (older name)", stats.prefix_cache_queries),
            ("gpu_prefix_cache_hits", hits + " (older name)", stats.prefix_cache_hits),
            ("num_preemptions", "Times that a sequence lost its blocks to others", stats.num_preemptions),
            ("swapped_out_blocks", "KV blocks moved to CPU memory", stats.num_blocks_out),
            ("swapped_in_blocks", "KV blocks moved back from CPU memory", stats.num_blocks_in),
            ("engine_steps", "Forward passes", stats.num_steps),
        ):
            counter = CounterMetricFamily(f"vllm:{name}", help_text, labels=["model_name"])
            counter.add_metric([self.model_name], value)
            yield counter
        success = CounterMetricFamily("vllm:request_success", "Sequences that ended, by reason", labels=["model_name", "finished_reason"])
        for reason, count in zip(FINISH_REASONS, self.cells.summed(self.finished_start, self.finished)):
            success.add_metric([self.model_name, reason], count)
        yield success

    def _histograms(self) -> Iterable[Metric]:
        for name, help_text, histogram in (
            ("time_to_first_token_seconds", "From a request's arrival to its first token", self.first_token),
            ("inter_token_latency_seconds", "From a token to the next of its request", self.inter_token),
            ("time_per_output_token_seconds", "From a token to the next of its request (older name)", self.inter_token),
            ("request_time_per_output_token_seconds", "Mean time between a request's tokens", self.request_token_time),
            ("e2e_request_latency_seconds", "From a request's arrival to its end", self.e2e),
            ("request_prompt_tokens", "Prompt tokens per request", self.prompt_length),
            ("request_generation_tokens", "Generated tokens per request", self.generation_length),
        ):
            family = HistogramMetricFamily(f"vllm:{name}", help_text, labels=["model_name"])
            family.add_metric([self.model_name], *histogram.read())
            yield family
