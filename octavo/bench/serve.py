"""``octavo bench serve``: one load on a server, from prompts to the report."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from octavo.bench import report
from octavo.bench.datasets import Prompt, make_prompts
from octavo.bench.http import raise_file_limit, run_loop
from octavo.bench.load import LoadRun, arrival_times, first_ctrl_c, run_load
from octavo.bench.options import DatasetOptions, LoadOptions, ReportOptions, SamplingOptions, TargetOptions, parse_pairs
from octavo.bench.stats import details, summarize
from octavo.bench.stream import Result
from octavo.bench.target import Target, check_answers, connect

DEFAULT_NUM_PROMPTS = 1000


@dataclass(frozen=True)
class ServeBench:
    """Everything that one load is described by."""

    target: TargetOptions
    dataset: DatasetOptions
    load: LoadOptions
    sampling: SamplingOptions
    report: ReportOptions

    @property
    def num_prompts(self) -> int:
        return self.load.num_prompts or DEFAULT_NUM_PROMPTS


def run(bench: ServeBench) -> int:
    """The command. Status 1 if a request failed. Ctrl-C in the load reports what had ended by then, with status 130."""
    bench.load.check_arrivals("--request-rate")
    saving = bench.report.save_result or bench.report.append_result or bench.report.save_detailed
    if saving:
        report.check_writable(os.path.join(bench.report.result_dir or "", bench.report.result_filename or "result.json"))
    raise_file_limit(min(bench.num_prompts, bench.load.max_concurrency or bench.num_prompts))
    result, load_run, prompts = run_loop(_measure(bench))
    if load_run.interrupted and not load_run.results:
        raise KeyboardInterrupt
    print(report.serve_table(result, bench.report.metrics, bench.report.percentiles))
    if saving:
        if bench.report.save_detailed:
            result |= details(load_run, [p.input_len for p in prompts])
        name = bench.report.result_filename or report.default_filename(result, bench.report)
        path = os.path.join(bench.report.result_dir or "", name)
        print(f"Written: {report.save(result, path, append=bench.report.append_result)}")
    if load_run.interrupted:
        raise KeyboardInterrupt
    return 1 if result["failed"] else 0


async def _measure(bench: ServeBench) -> tuple[dict[str, Any], LoadRun, list[Prompt]]:
    async with connect(bench.target) as target:
        return await measure(target, bench)


async def measure(target: Target, bench: ServeBench, *, trial: bool = True) -> tuple[dict[str, Any], LoadRun, list[Prompt]]:
    """One load on a server that answers: the result, what happened, and the prompts."""
    load, options = bench.load, bench.report
    warmups = load.num_warmups + (1 if trial else 0)
    made = await make_prompts(bench.dataset, bench.num_prompts + warmups, load.seed, target.counter, ids_allowed=not target.options.is_chat)
    requests = [target.encode(prompt, bench.sampling) for prompt in made]
    if trial:  # with prompts of its own, so that the load finds none of its prompts cached
        await check_answers(target, requests[0])
    if load.num_warmups:
        await run_load(target.client, requests[warmups - load.num_warmups : warmups], [0.0] * load.num_warmups, load.max_concurrency)
    prompts, requests = made[warmups:], requests[warmups:]
    arrivals = arrival_times(len(requests), load.request_rate, load.burstiness, load.seed)
    show, close = progress(len(requests), options.disable_tqdm)
    try:
        keep = options.save_detailed
        with first_ctrl_c() as stop:
            load_run = await run_load(target.client, requests, arrivals, load.max_concurrency, on_done=show, keep=keep, stop=stop)
    finally:
        close()
    figures = summarize(
        load_run,
        [prompt.input_len for prompt in prompts],
        metrics=options.metrics,
        percentiles=options.percentiles,
        slos=options.slos,
    )
    return facts(target, bench) | figures, load_run, prompts


def facts(target: Target, bench: ServeBench) -> dict[str, Any]:
    """What was measured, under vLLM's names. No key is in it."""
    load = bench.load
    known: dict[str, Any] = {
        "date": report.date(),
        "endpoint_type": "openai-chat" if target.options.is_chat else "openai",
        "backend": bench.target.backend,
        "label": bench.report.label,
        "model_id": bench.target.model or target.model,
        "tokenizer_id": bench.target.tokenizer or bench.target.model or target.model,
        "num_prompts": bench.num_prompts,
        "dataset_name": bench.dataset.dataset_name,
        "request_rate": report.jsonable(load.request_rate),
        "burstiness": report.jsonable(load.burstiness),
        "max_concurrency": load.max_concurrency,
        "seed": load.seed,
    }
    return parse_pairs(bench.report.metadata) | known


def progress(total: int, disabled: bool) -> tuple[Callable[[Result], Any], Callable[[], Any]]:
    """A bar on standard error, if that is a terminal: what to call for each result, and at the end."""
    from tqdm import tqdm

    bar = tqdm(total=total, unit="req", disable=True if disabled else None, dynamic_ncols=True)
    failed = 0

    def show(result: Result) -> None:
        nonlocal failed
        if result.error is not None:
            failed += 1
            bar.set_postfix_str(f"{failed} failed", refresh=False)
        bar.update()

    return show, bar.close
