"""What compare.py measures: a function a part, each for any number of engines that are at hand, in turns.

Offline parts take workers by label and return values by label; what an engine failed with is a value, too: ``{"error": …}``. Every loop
over repetitions looks at the part's time and ends early once it has something; the number of repetitions is in the values.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine_worker import make_requests
from engines import ROOT, EngineError, Server, Worker

sys.path.insert(0, str(ROOT))

from octavo.bench.http import Client, HttpError, parse_address, run_loop  # noqa: E402
from octavo.bench.stream import Result, stream  # noqa: E402

Values = dict[str, Any]
Ask = Callable[[dict[str, Any]], float]


@dataclass(frozen=True)
class Sizes:
    """How much of everything. Pairs are (lowest, highest) or (prompt, output) tokens."""

    batches: tuple[int, ...] = (1, 8, 32, 128, 256)
    decode_in: int = 128
    decode_out: tuple[int, int] = (32, 288)  # a step's time is the difference of the two over their difference
    repeats: int = 5
    prefill: tuple[int, int] = (16, 2048)  # prompts, tokens each
    mixed_len: tuple[int, int] = (100, 1024)  # prompts and answers alike
    mixed_counts: tuple[int, int] = (256, 1024)
    static_batches: tuple[tuple[int, int], ...] = ((8, 8), (32, 32))  # batch, requests
    serve_len: tuple[int, int] = (512, 256)
    loads: tuple[str, ...] = ("r10x200", "c1x10", "c10x100", "c50x200", "c200x600", "all1000")
    warm_up: int = 256  # requests before the loads
    prefix: tuple[int, int, int] = (4096, 32, 8)  # common tokens, further tokens, repetitions
    offline_len: int = 4096  # --max-model-len
    server_len: int = 8192


TINY = Sizes(
    batches=(1, 2, 4), decode_in=16, decode_out=(4, 16), repeats=3, prefill=(2, 64), mixed_len=(4, 24), mixed_counts=(8, 16),
    static_batches=((2, 4), (4, 4)), serve_len=(32, 8), loads=("r20x10", "c1x3", "c4x12", "all16"), prefix=(160, 8, 3), offline_len=512,
    server_len=512, warm_up=8,
)  # fmt: skip


class Clock:
    """A part's time. ``grace``: how much longer than the budget one answer may take before its engine is given up."""

    def __init__(self, budget_s: float, grace_s: float = 20.0) -> None:
        self.end = time.monotonic() + budget_s
        self.grace_s = grace_s

    @property
    def left(self) -> float:
        return self.end - time.monotonic()

    @property
    def timeout(self) -> float:
        return max(self.left, 0.0) + self.grace_s


def in_turns(workers: dict[str, Worker], clock: Clock, measure: Callable[[str, Ask], None]) -> Values:
    """Call ``measure(label, ask)`` for each worker; returns the errors of those that failed, by label, which then are left out."""
    errors: Values = {}
    for label, worker in workers.items():

        def ask(command: dict[str, Any], worker: Worker = worker) -> float:
            return float(worker.ask(command, clock.timeout)["seconds"])

        try:
            measure(label, ask)
        except EngineError as error:
            errors[label] = {"error": str(error)}
    return errors


def rounds(workers: dict[str, Worker], clock: Clock, count: int, measure: Callable[[str, int, Ask], None]) -> Values:
    """``count`` rounds of all workers in turns, fewer when the time is over after one. Returns what the failed ones failed with."""
    failed: Values = {}
    for i in range(count):
        if i and clock.left <= 0:
            break
        alive = {label: worker for label, worker in workers.items() if label not in failed}
        failed |= in_turns(alive, clock, lambda label, ask, i=i: measure(label, i, ask))  # type: ignore[misc]
    return failed


def decode(workers: dict[str, Worker], sizes: Sizes, clock: Clock) -> Values:
    """Milliseconds of a decode step by batch. Each repetition runs a short and a long answer for the same prompts, and the step's
    time is the difference of their medians: what both have in common, prompts and the call itself, falls out."""
    short, long = sizes.decode_out
    times: dict[str, dict[int, tuple[list[float], list[float]]]] = {label: {b: ([], []) for b in sizes.batches} for label in workers}

    def measure(label: str, i: int, ask: Ask) -> None:
        for batch in sizes.batches:
            if i and clock.left <= 0:
                return
            spec = {"count": batch, "n_in": (sizes.decode_in,) * 2, "seed": 1000 * batch + i}
            seconds = [ask(spec | {"n_out": (n, n)}) for n in (short, long)]
            if i:  # the first round captures and compiles
                for kept, value in zip(times[label][batch], seconds, strict=True):
                    kept.append(value)

    failed = rounds(workers, clock, sizes.repeats + 1, measure)
    values: Values = {}
    for label in workers:
        steps = {str(b): _step(*pair, long - short) for b, pair in times[label].items() if pair[0]}
        values[label] = {"steps": steps, "context": sizes.decode_in + (short + long) / 2} | failed.get(label, {})
        if not steps:
            values[label].setdefault("error", "the time was over before the second round")
    return values


def _step(shorts: list[float], longs: list[float], tokens: int) -> Values:
    pairs = [(b - a) / tokens * 1e3 for a, b in zip(shorts, longs, strict=True)]
    return {
        "step_ms": (statistics.median(longs) - statistics.median(shorts)) / tokens * 1e3,
        "lowest_ms": min(pairs),
        "highest_ms": max(pairs),
        "short_s": shorts,
        "long_s": longs,
    }


def prefill(workers: dict[str, Worker], sizes: Sizes, clock: Clock) -> Values:
    """Prompt tokens a second: all prompts at once, one token out of each."""
    count, length = sizes.prefill
    seconds: dict[str, list[float]] = {label: [] for label in workers}

    def measure(label: str, i: int, ask: Ask) -> None:
        took = ask({"count": count, "n_in": (length, length), "n_out": (1, 1), "seed": i})
        if i:
            seconds[label].append(took)

    failed = rounds(workers, clock, sizes.repeats + 1, measure)
    return {
        label: ({"tok_s": count * length / statistics.median(s), "seconds": s, "prompts": [count, length]} if s else {})
        | (failed.get(label) or ({} if s else {"error": "the time was over before the second round"}))
        for label, s in seconds.items()
    }


def mixed_spec(sizes: Sizes, count: int, seed: int) -> dict[str, Any]:
    return {"count": count, "n_in": sizes.mixed_len, "n_out": sizes.mixed_len, "seed": seed, "temperature": 0.6}


def mixed(workers: dict[str, Worker], sizes: Sizes, clock: Clock, count: int) -> Values:
    """Output tokens a second of ``count`` requests of many lengths. The first run, with a seed of its own, warms up everything that
    happens once; it is told apart. Then as many runs as repetitions and time allow, at most two."""
    runs: dict[str, list[float]] = {label: [] for label in workers}

    def measure(label: str, i: int, ask: Ask) -> None:
        spec = mixed_spec(sizes, count, seed=99 if i == 0 else i - 1)
        made = sum(n_out for _, n_out, _ in make_requests(1000, spec))
        runs[label].append(made / ask(spec))

    failed = rounds(workers, clock, 3, measure)
    return {
        label: ({"first_run_tok_s": r[0]} if r else {})
        | ({"tok_s": statistics.median(r[1:]), "runs_tok_s": r[1:]} if r[1:] else {"error": "the time was over after the first run"})
        | failed.get(label, {})
        for label, r in runs.items()
    }


def static_batches(worker: Worker, sizes: Sizes, clock: Clock) -> Values:
    """transformers' generate() on the mixed load, batch by batch; tokens a second of those that were asked for. A size whose first batch
    is not over in time has an error instead."""
    worker.ask({"count": 2, "n_in": (16, 16), "n_out": (4, 4), "seed": 7, "temperature": 0.6}, clock.timeout)
    values: Values = {}
    for batch, total in sizes.static_batches:
        made, seconds, failed = 0, 0.0, None
        for i in range(max(total // batch, 1)):
            if i and clock.left <= seconds / i:  # the next would not end in time
                break
            try:
                answer = worker.ask(mixed_spec(sizes, batch, seed=i), clock.timeout)
            except EngineError as error:  # it is still at work: nothing more can be asked of it
                failed = str(error)
                break
            made, seconds = made + answer["output_tokens"], seconds + answer["seconds"]
        values[str(batch)] = ({"tok_s": made / seconds} if made else {"error": failed}) | {"output_tokens": made, "seconds": seconds}
        if failed:
            break
    return values


# ---------------------------------------------------------------------------------------------------------------------
# servers


def first_answer(server: Server, timeout: float) -> Values:
    """Seconds from the process's start until it is healthy, and until its first token has come."""

    async def wait() -> Values:
        client = Client(parse_address(server.url), timeout=timeout)
        ready = None
        try:
            while time.monotonic() < server.start + timeout:
                server.check()
                try:
                    if ready is None:
                        status, _ = await client.send(client.encode("GET", "/health"))
                        ready = time.monotonic() - server.start if status == 200 else None
                    if ready is not None:
                        result = await ask_server(client, [11, 12, 13, 14, 15, 16, 17, 18], 1)
                        if result.error is None:
                            return {"ready_s": ready, "first_answer_s": time.monotonic() - server.start}
                        raise EngineError(f"the first answer failed: {result.error}")
                except HttpError:
                    pass
                await asyncio.sleep(0.02)
        finally:
            client.close()
        raise EngineError(f"the server gave no answer within {timeout:.0f} s")

    return run_loop(wait())


async def ask_server(client: Client, prompt: list[int], n_out: int) -> Result:
    body = {"model": "m", "prompt": prompt, "max_tokens": n_out, "temperature": 0, "ignore_eos": True, "stream": True}
    body["stream_options"] = {"include_usage": True}
    return await stream(client, client.encode("POST", "/v1/completions", json.dumps(body).encode()))


def parse_load(name: str) -> dict[str, Any]:
    """``r10x200``: 10 requests a second, 200 in all; ``c50x200``: 50 at a time; ``all1000``: all at once. ValueError for others."""
    if name.startswith("all"):
        return {"num_prompts": int(name[3:])}
    value, _, count = name[1:].partition("x")
    if name[:1] == "r":
        return {"request_rate": float(value), "num_prompts": int(count)}
    if name[:1] == "c":
        return {"max_concurrency": int(value), "num_prompts": int(count)}
    raise ValueError(f"unknown load {name!r}: write r10x200, c50x200 or all1000")


def run_load(server: Server, name: str, spec: dict[str, Any], vocab: int, folder: Path, timeout: float) -> Values:
    """One load from ``octavo bench serve`` in a process of its own, on prompts out of a file: the same ids for every server.
    ``spec``: the prompts' and answers' lengths and the seed, as ``make_requests`` takes them."""
    load = parse_load(name)
    prompts = folder / f"prompts-{name}-{spec['seed']}-{spec['n_in'][1]}-{vocab}.jsonl"
    if not prompts.exists():
        requests = make_requests(vocab, spec | {"count": load["num_prompts"] + 1})
        prompts.write_text("".join(json.dumps({"prompt": ids, "output_len": n}) + "\n" for ids, n, _ in requests))
    result = folder / f"load-{server.engine.label}-{name}.json"
    result.unlink(missing_ok=True)
    words = [sys.executable, "-m", "octavo", "bench", "serve", "--base-url", server.url, "--model", "m", "--ignore-eos"]
    words += ["--dataset-name", "custom", "--dataset-path", str(prompts), "--disable-shuffle", "--seed", str(spec["seed"])]
    words += ["--disable-tqdm", "--save-result", "--result-filename", str(result), "--metric-percentiles", "90,99"]
    for key, value in load.items():
        words += [f"--{key.replace('_', '-')}", f"{value:g}"]
    try:
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=max(timeout, 1.0))
    except subprocess.TimeoutExpired:
        return {"error": f"not over within {timeout:.0f} s"}
    if not result.exists():
        server.check()
        return {"error": (done.stderr or done.stdout).strip()[-400:]}
    values: Values = json.loads(result.read_text())
    return values


def serve(server: Server, sizes: Sizes, loads: Sequence[str], vocab: int, folder: Path, clock: Clock) -> Values:
    """Every load on a server that answers, after one of many lengths that warms it up at every batch size. Loads that the time does not
    allow are told."""
    n_in, n_out = sizes.serve_len
    warm = {"n_in": (n_in // 4, n_in), "n_out": (max(n_out // 32, 1), n_out), "seed": 77}
    values: Values = {"loads": {}, "lengths": [n_in, n_out]}
    values["warm_up"] = _short(run_load(server, f"all{sizes.warm_up}", warm, vocab, folder, clock.timeout))
    for i, name in enumerate(loads):
        if clock.left <= 0:
            values["loads"][name] = {"error": "the part's time was over"}
            continue
        spec = {"n_in": (n_in, n_in), "n_out": (n_out, n_out), "seed": i}
        values["loads"][name] = run_load(server, name, spec, vocab, folder, clock.left)
    return values


def _short(result: Values) -> Values:
    return {key: result[key] for key in ("error", "duration", "output_throughput", "completed", "failed") if key in result}


def prefix(server: Server, sizes: Sizes, vocab: int, clock: Clock) -> Values:
    """Milliseconds to the first token of a long prompt that is new, and of one whose beginning was just asked."""
    common, own, repeats = sizes.prefix

    async def measure() -> Values:
        client = Client(parse_address(server.url), timeout=clock.timeout)
        times: dict[str, list[float]] = {"cold": [], "cached": []}
        try:
            for i in range(repeats + 1):
                if i > 1 and clock.left <= 0:
                    break
                shape = {"n_in": (common + own,) * 2, "n_out": (8, 8)}
                (first, _, _), (second, _, _) = make_requests(vocab, {"count": 2, "seed": 5000 + i, **shape})
                for kind, prompt in (("cold", first), ("cached", first[:common] + second[common:])):
                    result = await ask_server(client, prompt, 8)
                    if result.error is not None:
                        raise EngineError(result.error)
                    if i:
                        times[kind].append(result.ttft * 1e3)
                    await asyncio.sleep(0.05)  # the server is idle again
        finally:
            client.close()
        medians = {f"{kind}_ttft_ms": statistics.median(values) for kind, values in times.items()}
        return {**medians, **times, "tokens": [common, own]}

    return run_loop(measure())
