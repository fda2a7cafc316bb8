"""``octavo bench sweep``: the same prompts' kind at rising loads, the knee, and what --max-num-seqs a service level allows."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from octavo.bench import report
from octavo.bench.http import raise_file_limit, run_loop
from octavo.bench.knee import knee, recommend
from octavo.bench.options import SweepOptions
from octavo.bench.plot import plot_name, plot_sweep
from octavo.bench.serve import ServeBench, facts, measure
from octavo.bench.stats import percentile_name
from octavo.bench.target import connect
from octavo.errors import OctavoError

PROMPTS_PER_STREAM = 4
MIN_PROMPTS = 16
DEFAULT_FILENAME = "sweep.json"


def run(bench: ServeBench, options: SweepOptions) -> int:
    """The command. Status 1 if a request failed. Ctrl-C, or an error at a later load, reports those that were measured before."""
    loads = [point_bench(bench, options, i) for i in range(len(options.loads))]
    plot, folder = plot_name(options.plot), bench.report.result_dir or ""
    path = os.path.join(folder, bench.report.result_filename or DEFAULT_FILENAME)
    for name in (path, plot and os.path.join(folder, plot)):
        report.check_writable(name)
    raise_file_limit(max(min(point.num_prompts, point.load.max_concurrency or point.num_prompts) for point in loads))
    shared: dict[str, Any] = {}
    points: list[dict[str, Any]] = []
    ended_by: BaseException | None = None
    try:
        if not run_loop(_measure(bench, options, loads, shared, points)):
            raise KeyboardInterrupt
    except (KeyboardInterrupt, OctavoError) as error:
        if not points:
            raise
        ended_by = error
    sweep = judge(shared, points, options)
    print(sweep_table(sweep))
    print(f"Written: {report.save(sweep, path, append=bench.report.append_result)}")
    if plot is not None:
        path = os.path.join(folder, plot)
        plot_sweep(sweep, path)
        print(f"Written: {path}")
    if ended_by is not None:
        print(f"Interrupted: {len(points)} of {len(loads)} loads were measured.", flush=True)
        raise ended_by
    return 1 if any(point["failed"] for point in sweep["points"]) else 0


def point_bench(bench: ServeBench, options: SweepOptions, index: int) -> ServeBench:
    """The load of one point. Its seed is its own: prompts of an earlier point would be in the prefix cache."""
    value = options.loads[index]
    if options.rates is not None:
        default = max(MIN_PROMPTS, round(value * options.point_seconds))
        changes: dict[str, Any] = {"request_rate": value}
    else:
        default = max(MIN_PROMPTS, PROMPTS_PER_STREAM * int(value))
        changes = {"max_concurrency": int(value)}
    count = bench.load.num_prompts or default
    load = dataclasses.replace(bench.load, num_prompts=count, seed=bench.load.seed + 1000 * index, **changes)
    load.check_arrivals("--request-rates")
    percentiles = ",".join(f"{p:g}" for p in dict.fromkeys((*bench.report.percentiles, options.slo_percentile)))
    metrics = ",".join(dict.fromkeys((*bench.report.metrics, "ttft", "tpot")))
    kept = dataclasses.replace(bench.report, metric_percentiles=percentiles, percentile_metrics=metrics)
    return dataclasses.replace(bench, load=load, report=kept)


async def _measure(
    bench: ServeBench, options: SweepOptions, loads: list[ServeBench], shared: dict[str, Any], points: list[dict[str, Any]]
) -> bool:
    """Put facts into ``shared`` and each load's result into ``points``; False if Ctrl-C ended a load, which is left out."""
    async with connect(bench.target) as target:
        shared.update(facts(target, bench))
        for value, point in zip(options.loads, loads, strict=True):
            result, load_run, _ = await measure(target, point, trial=not points)
            if load_run.interrupted:
                return False
            points.append({"load": value, **result})
            lines = report.notes(result)
            print(f"{_label(options)} {value:g}: {result['output_throughput']:.1f} tok/s", *lines, sep="\n  ", flush=True)
    return True


def _label(options: SweepOptions) -> str:
    return "concurrency" if options.rates is None else "request rate"


def judge(shared: dict[str, Any], points: list[dict[str, Any]], options: SweepOptions) -> dict[str, Any]:
    """The sweep's result: the points, the knee and the recommendation."""
    high = percentile_name(options.slo_percentile)
    bend = knee([p["load"] for p in points], [p["output_throughput"] for p in points])
    has_slo = options.slo_ttft_ms is not None or options.slo_tpot_ms is not None
    picked = recommend(points, high, options.slo_ttft_ms, options.slo_tpot_ms) if has_slo else bend
    left_out = ("num_prompts", "request_rate", "max_concurrency")
    return {
        "interrupted": len(points) < len(options.loads),
        **{key: value for key, value in shared.items() if key not in left_out},
        "sweep_over": "max_concurrency" if options.rates is None else "request_rate",
        "knee": None if bend is None else points[bend]["load"],
        "knee_method": "largest distance above the chord of output throughput over load, both scaled to [0, 1] (Kneedle)",
        "slo_ttft_ms": options.slo_ttft_ms,
        "slo_tpot_ms": options.slo_tpot_ms,
        "slo_percentile": high,
        "recommended_load": None if picked is None else points[picked]["load"],
        "recommended_max_num_seqs": None if picked is None else points[picked]["max_concurrent_requests"],
        "points": points,
    }


def sweep_table(sweep: dict[str, Any]) -> str:
    """The points and what follows from them, for a terminal."""
    high = sweep["slo_percentile"]
    columns = ["load", "peak", "req/s", "output tok/s", "TTFT median", f"TTFT {high}", "TPOT median", f"TPOT {high}", "failed"]
    keys = ["max_concurrent_requests", "request_throughput", "output_throughput", "median_ttft_ms", f"{high}_ttft_ms"]
    keys += ["median_tpot_ms", f"{high}_tpot_ms", "failed"]
    rows = [[f"{point['load']:g}", *(point[key] for key in keys)] for point in sweep["points"]]
    return "\n".join(["", report.table(columns, rows), "", *conclusions(sweep)])


def conclusions(sweep: dict[str, Any]) -> list[str]:
    high, n = sweep["slo_percentile"], sweep["recommended_max_num_seqs"]
    if len(sweep["points"]) < 3:
        lines = ["Knee: none; it takes three loads to see one."]
    elif sweep["knee"] is None:
        lines = ["Knee: none; throughput still grows with the load. Sweep higher to find where it ends."]
    else:
        lines = [f"Knee: load {sweep['knee']:g} (the point highest above the straight line from the first to the best, axes scaled alike)."]
    limits = [f"{name.upper()} ≤ {sweep[f'slo_{name}_ms']:g} ms" for name in ("ttft", "tpot") if sweep[f"slo_{name}_ms"] is not None]
    if not limits:
        if n is not None:
            lines.append(f"Recommended: --max-num-seqs {n}, at the knee; with --slo-ttft-ms or --slo-tpot-ms, one that keeps them.")
    elif n is None:
        lines.append(f"Even the lowest load does not keep {' and '.join(limits)} at {high}.")
    else:
        lines.append(f"Recommended: --max-num-seqs {n} keeps {' and '.join(limits)} at {high} (load {sweep['recommended_load']:g}).")
        if sweep["recommended_load"] == sweep["points"][-1]["load"]:
            lines.append("That is the highest load of this sweep: a higher one may keep it too.")
    return lines
