"""``octavo bench throughput`` and ``octavo bench latency``: the offline ``LLM``, without a server."""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from octavo.bench import report
from octavo.bench.datasets import Prompt, make_prompts
from octavo.bench.options import DatasetOptions, LatencyOptions, ThroughputOptions
from octavo.bench.stats import describe
from octavo.bench.tokens import FIRST_TOKEN_ID, LocalCounter
from octavo.errors import ConfigError

PERCENTILES = (10.0, 25.0, 50.0, 75.0, 90.0, 99.0)
_WARMUP_LEN = 16


def run_throughput(options: ThroughputOptions, dataset: DatasetOptions, engine: dict[str, Any]) -> int:
    """All prompts at once; requests and tokens a second, tokenizing included. ``engine``: keyword arguments of ``LLM``."""
    report.check_writable(options.output_json)
    llm = _load(engine)
    prompts = asyncio.run(_prompts(llm, options, dataset, int(engine.get("seed", 0))))
    _check_lengths(llm, [p.input_len for p in prompts], [p.output_len or 0 for p in prompts])
    params = [_params(p.output_len or 1, options.n, options.disable_detokenize) for p in prompts]
    inputs = [p.content if isinstance(p.content, str) else {"prompt_token_ids": p.content} for p in prompts]
    _generate(llm, [_ids(random.Random(-1), llm, _WARMUP_LEN)], 2, 1, True)
    start = time.perf_counter()
    outputs = llm.generate(inputs, params, use_tqdm=sys.stderr.isatty() and not options.disable_tqdm)
    elapsed = time.perf_counter() - start
    result = throughput_result(elapsed, [(len(o.prompt_token_ids), sum(len(c.token_ids) for c in o.outputs)) for o in outputs])
    result = {"date": report.date(), "model": engine.get("model") or "demo", "dataset_name": dataset.dataset_name, **result}
    print(
        f"Throughput: {result['requests_per_second']:.2f} requests/s, {result['tokens_per_second']:,.1f} total tokens/s, "
        f"{result['output_tokens_per_second']:,.1f} output tokens/s\n"
        f"{result['num_requests']} requests, {result['total_input_tokens']:,} tokens in and {result['total_output_tokens']:,} out, "
        f"in {elapsed:.2f} s"
    )
    report.write(result, options.output_json)
    return 0


async def _prompts(llm: Any, options: ThroughputOptions, dataset: DatasetOptions, seed: int) -> list[Prompt]:
    tokenizer = llm.get_tokenizer()
    counter = LocalCounter(tokenizer) if tokenizer is not None else None
    return await make_prompts(dataset, options.num_prompts, seed, counter)


def throughput_result(elapsed: float, lengths: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """vLLM's fields, and the output's own rate. ``lengths``: tokens in and out, a pair a request."""
    n_in, n_out = sum(a for a, _ in lengths), sum(b for _, b in lengths)
    return {
        "elapsed_time": elapsed,
        "num_requests": len(lengths),
        "total_num_tokens": n_in + n_out,
        "total_input_tokens": n_in,
        "total_output_tokens": n_out,
        "requests_per_second": len(lengths) / elapsed,
        "tokens_per_second": (n_in + n_out) / elapsed,
        "output_tokens_per_second": n_out / elapsed,
    }


def run_latency(options: LatencyOptions, engine: dict[str, Any]) -> int:
    """One batch, again and again: how long it takes from the call to its result. Ctrl-C reports the iterations that were done."""
    report.check_writable(options.output_json)
    llm = _load({"enable_prefix_caching": False} | engine)
    _check_lengths(llm, [options.input_len], [options.output_len])
    rng = random.Random(int(engine.get("seed", 0)))
    batch = [_ids(rng, llm, options.input_len) for _ in range(options.batch_size)]

    def once() -> None:
        _generate(llm, batch, options.output_len, options.n, options.disable_detokenize)

    seconds = repeat(once, options.num_iters_warmup, options.num_iters, show=not options.disable_tqdm)
    result = {
        "date": report.date(),
        "model": engine.get("model") or "demo",
        "batch_size": options.batch_size,
        "input_len": options.input_len,
        "output_len": options.output_len,
        "interrupted": len(seconds) < options.num_iters,
        **latency_result(seconds),
    }
    result["output_tokens_per_second"] = options.batch_size * options.n * options.output_len / result["avg_latency"]
    print(f"Average latency: {result['avg_latency']:.4f} s ({result['output_tokens_per_second']:,.1f} output tokens/s)")
    for percentile, value in result["percentiles"].items():
        print(f"{percentile}% percentile latency: {value:.4f} s")
    if result["interrupted"]:
        print(f"Interrupted: these are {len(seconds)} of {options.num_iters} iterations.")
    report.write(result, options.output_json)
    if result["interrupted"]:
        raise KeyboardInterrupt
    return 0


def repeat(work: Callable[[], None], warmups: int, count: int, *, show: bool = False) -> list[float]:
    """Seconds of each of ``count`` calls, after ``warmups`` others. KeyboardInterrupt after the first of them ends it early."""
    from tqdm import tqdm

    for _ in tqdm(range(warmups), desc="warm-up", disable=None if show and warmups else True):
        work()
    seconds: list[float] = []
    try:
        for _ in tqdm(range(count), desc="iterations", disable=None if show else True):
            start = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - start)
    except KeyboardInterrupt:
        if not seconds:
            raise
    return seconds


def latency_result(seconds: Sequence[float]) -> dict[str, Any]:
    """vLLM's fields, and the spread. Percentiles by linear interpolation."""
    found = describe(seconds, PERCENTILES)
    return {
        "avg_latency": found["mean"],
        "std_latency": found["std"],
        "latencies": list(seconds),
        "percentiles": {f"{p:g}": found[f"p{p:g}"] for p in PERCENTILES},
    }


def _load(engine: dict[str, Any]) -> Any:
    from octavo.frontend.llm import LLM

    return LLM(**engine)


def _ids(rng: random.Random, llm: Any, length: int) -> list[int]:
    vocab = llm.model_config.vocab_size
    return [rng.randrange(min(FIRST_TOKEN_ID, vocab // 2), vocab) for _ in range(length)]


def _params(output_len: int, n: int, disable_detokenize: bool) -> Any:
    from octavo.frontend.params import SamplingParams

    return SamplingParams(n=n, temperature=1.0 if n > 1 else 0.0, ignore_eos=True, max_tokens=output_len, detokenize=not disable_detokenize)


def _generate(llm: Any, batch: list[list[int]], output_len: int, n: int, disable_detokenize: bool) -> None:
    params = _params(output_len, n, disable_detokenize)
    llm.generate([{"prompt_token_ids": ids} for ids in batch], params, use_tqdm=False)


def _check_lengths(llm: Any, inputs: Sequence[int | None], outputs: Sequence[int]) -> None:
    """max_tokens is cut to what is left of the context, which would measure less than was asked for."""
    longest = max((a or 0) + b for a, b in zip(inputs, outputs, strict=True))
    if longest > llm.max_model_len:
        raise ConfigError(
            f"A prompt with its output is {longest} tokens, and this model's context is {llm.max_model_len}; "
            "lower the lengths (--input-len, --output-len) or raise --max-model-len."
        )
