"""Two engines on the same work, on one machine, in one run; the figures as JSON, for report.py.

    python scripts/gpu/compare.py MODELDIR … --out DIR [--peer-site DIR] [--only startup,decode,prefill] [--budget 560]

Engines are ``octavo`` and, beside it, ``--engine-b`` (vllm; octavo for a run against itself, which shows the noise). Model folders need
config.json and, for serving, a tokenizer (scripts/gpu/model_folders.py writes them): weights are dummies. Parts:

    startup    process start to the first answer, offline, with empty compile caches and again with warm ones
    decode     a decode step's time by batch              prefill    prompt tokens a second
    mixed      256 requests of 100 to 1,024 tokens, in and out                    mixed1024  1,024 of them
    serve      a server under the loads of --loads, all from one client           prefix     TTFT of 4k tokens, new and cached
    hf         transformers' generate() on static batches of 8 and 32

Offline parts keep both engines in memory and take turns, each with half of the card; --alone gives each the whole card, one after the
other. Every part has a time (--part-seconds), and all together have --budget; a part that fails or finds no time left is recorded as
such and the next one goes on. One JSON a part and model lies in DIR/parts, each record is a line of DIR/results.jsonl (or --jsonl), and
the engines' output is in DIR/logs.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import compare_parts as parts  # noqa: E402
from compare_parts import Clock, Sizes, Values  # noqa: E402
from engines import ROOT, Engine, EngineError, Server, Worker, wait_for_free_gpu  # noqa: E402

OFFLINE = ("decode", "prefill", "mixed", "mixed1024")
SERVED = ("serve", "prefix")
PARTS = ("startup", *OFFLINE, *SERVED, "hf")  # in the order they run
PART_S = {"startup": 420.0, "decode": 130.0, "prefill": 40.0, "mixed": 110.0, "mixed1024": 160.0}
PART_S |= {"serve": 260.0, "prefix": 25.0, "hf": 150.0}
START_S = 300.0  # that an engine may take to start
BOTH_SHARE, ALONE_SHARE = 0.44, 0.9


class Comparison:
    """One run. ``deadline``: on time.monotonic(); what has not begun by then is left out."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.out: Path = args.out
        self.deadline = time.monotonic() + args.budget
        self.facts = machine_facts(args.commit)
        self.sizes = sizes_of(args)
        self.engines = engines_of(args)
        self.pool: dict[str, Worker] = {}
        for name in ("parts", "logs", "work"):
            (self.out / name).mkdir(parents=True, exist_ok=True)

    def run(self) -> int:
        """Status 1 if anything failed."""
        self.failures = 0
        if "startup" in self.args.only:  # the first one to start would pay for reading torch from disk, and the second not
            subprocess.run([sys.executable, "-c", "import torch; torch.cuda.is_available() and torch.zeros(1, device='cuda')"], check=False)
        for folder in self.args.models:
            chosen = [part for part in PARTS if part in self.args.only]
            try:
                self._model(folder, chosen)
            finally:
                self.close_workers()
        return 1 if self.failures else 0

    def _model(self, folder: Path, chosen: list[str]) -> None:
        if "startup" in chosen:
            self._each("startup", folder, lambda engine, clock: self._startup(engine, folder, clock))
        offline = [part for part in chosen if part in OFFLINE]
        groups = [[engine] for engine in self.engines] if self.args.alone else [list(self.engines)]
        for group in groups if offline else ():
            for part in offline:
                self._offline(part, folder, group)
            self.close_workers()
        self.close_workers()
        served = [part for part in chosen if part in SERVED]
        for engine in self.engines if served else ():
            self._served(engine, folder, served)
        if "hf" in chosen:
            self._static(folder)

    # -- parts of one kind

    def _offline(self, part: str, folder: Path, group: list[Engine]) -> None:
        run: Callable[[dict[str, Worker], Clock], Values] = {
            "decode": lambda workers, clock: parts.decode(workers, self.sizes, clock),
            "prefill": lambda workers, clock: parts.prefill(workers, self.sizes, clock),
            "mixed": lambda workers, clock: parts.mixed(workers, self.sizes, clock, self.sizes.mixed_counts[0]),
            "mixed1024": lambda workers, clock: parts.mixed(workers, self.sizes, clock, self.sizes.mixed_counts[1]),
        }[part]
        begun = time.monotonic()
        values: Values = {}
        workers: dict[str, Worker] = {}
        for engine in group:
            try:
                workers[engine.label] = self.worker(engine, folder)
            except EngineError as error:
                values[engine.label] = {"error": f"it did not start: {error}"}
        try:
            clock = self.clock(part, len(group) / len(self.engines))
            values |= run(workers, clock) if workers else {}
        except EngineError as error:
            values |= {label: {"error": str(error)} for label in workers if label not in values}
        except Exception as error:  # noqa: BLE001 (a fault of this script costs a part, not the run)
            traceback.print_exc()
            values |= {label: {"error": f"{type(error).__name__}: {error}"} for label in workers}
        for engine in group:
            worker = workers.get(engine.label)
            self.record(part, folder, engine, values[engine.label], begun, version=worker.marks["version"] if worker else None)

    def _startup(self, engine: Engine, folder: Path, clock: Clock) -> Values:
        """Cold: nothing compiled before. The warm one stays for the parts that follow, if they share the card in the same way."""
        self.close_workers(engine.label)
        shutil.rmtree(engine.cache_of(folder.name), ignore_errors=True)
        cold = self.worker(engine, folder, clock.timeout).marks
        self.close_workers(engine.label)
        if clock.left <= 0:
            return {"cold": cold}
        return {"cold": cold, "warm": self.worker(engine, folder, clock.timeout).marks}

    def _served(self, engine: Engine, folder: Path, chosen: list[str]) -> None:
        begun = time.monotonic()
        log = self.out / "logs" / f"{folder.name}-{engine.label}-server.log"
        vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
        try:
            self.check_time()
            wait_for_free_gpu()
            with Server(engine, str(folder.resolve()), log, max_model_len=self.sizes.server_len) as server:
                started = parts.first_answer(server, min(START_S, self.deadline - time.monotonic()))
                for part in chosen:
                    share = 1 / len(self.engines)
                    measure: Callable[[Engine, Clock], Values] = {
                        "serve": lambda _, clock: (
                            parts.serve(server, self.sizes, self.args.loads, vocab, self.out / "work", clock) | {"start": started}
                        ),
                        "prefix": lambda _, clock: parts.prefix(server, self.sizes, vocab, clock),
                    }[part]
                    self._one(part, folder, engine, measure, share)
                return
        except EngineError as error:
            for part in chosen:
                self.record(part, folder, engine, {"error": str(error)}, begun)

    def _static(self, folder: Path) -> None:
        hf = Engine("transformers", "hf", self.args.caches)

        def measure(engine: Engine, clock: Clock) -> Values:
            worker = self.worker(engine, folder)
            batches = parts.static_batches(worker, self.sizes, self.clock("hf", 1.0))  # its start, a minute and more, is not the batches'
            return {"batches": batches, "version": worker.marks["version"]}

        self.close_workers()
        self._one("hf", folder, hf, measure, 1.0)
        self.close_workers()

    # -- what they share

    def _each(self, part: str, folder: Path, measure: Callable[[Engine, Clock], Values]) -> None:
        for engine in self.engines:
            self._one(part, folder, engine, measure, 1 / len(self.engines))
            if self.args.alone:
                self.close_workers(engine.label)

    def _one(self, part: str, folder: Path, engine: Engine, measure: Callable[[Engine, Clock], Values], share: float) -> None:
        begun = time.monotonic()
        try:
            values = measure(engine, self.clock(part, share))
        except EngineError as error:
            values = {"error": str(error)}
        except Exception as error:  # noqa: BLE001 (as above)
            traceback.print_exc()
            values = {"error": f"{type(error).__name__}: {error}"}
        self.record(part, folder, engine, values, begun, version=values.pop("version", None))

    def clock(self, part: str, share: float) -> Clock:
        """The part's time, or what is left of the whole. Raises EngineError when nothing is."""
        self.check_time()
        left = self.deadline - time.monotonic()
        return Clock(min(self.args.part_seconds[part] * share, left), grace_s=min(START_S if part == "startup" else 30.0, max(left, 1.0)))

    def check_time(self) -> None:
        if time.monotonic() >= self.deadline:
            raise EngineError("not run: --budget was used up")

    def worker(self, engine: Engine, folder: Path, timeout: float = START_S) -> Worker:
        """The engine's running worker, or a new one."""
        worker = self.pool.get(engine.label)
        if worker is not None and worker.alive:
            return worker
        self.check_time()
        options: dict[str, Any] = {}
        if engine.module != "transformers":
            share = ALONE_SHARE if self.args.alone else BOTH_SHARE
            options = {"max_model_len": self.sizes.offline_len, "enable_prefix_caching": False, "gpu_memory_utilization": share}
        if not self.pool:
            wait_for_free_gpu()
        log = self.out / "logs" / f"{folder.name}-{engine.label}-offline.log"
        print(f"compare: starting {engine.label} on {folder.name}", file=sys.stderr, flush=True)
        timeout = min(timeout, self.deadline - time.monotonic())
        worker = self.pool[engine.label] = Worker(engine, str(folder.resolve()), options, log, timeout)
        return worker

    def close_workers(self, *labels: str) -> None:
        for label in labels or list(self.pool):
            worker = self.pool.pop(label, None)
            if worker is not None:
                worker.close()

    def record(self, part: str, folder: Path, engine: Engine, values: Values, begun: float, version: str | None = None) -> None:
        """A line of the results, and the part's own file with both engines in it."""
        error = values.pop("error", None)
        self.failures += error is not None
        settings = {"alone": self.args.alone, "sizes": dataclasses.asdict(self.sizes)}
        settings |= {"serve_words": list(engine.serve), "offline": dict(engine.offline)}
        record = {
            "part": part, "model": folder.name, "engine": engine.label, "module": engine.module, "version": version, "error": error,
            **self.facts, "date": datetime.now().isoformat(timespec="seconds"), "seconds": round(time.monotonic() - begun, 1),
            "values": values, "config": json.loads((folder / "config.json").read_text()), "settings": settings,
        }  # fmt: skip
        line = json.dumps(record)
        for path in {self.out / "results.jsonl", self.args.jsonl or self.out / "results.jsonl"}:
            with path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        path = self.out / "parts" / f"{folder.name}-{part}.json"
        with contextlib.suppress(OSError, ValueError):
            record = {"records": [r for r in json.loads(path.read_text())["records"] if r["engine"] != engine.label] + [record]}
        path.write_text(json.dumps(record if "records" in record else {"records": [record]}, indent=1))
        shown = error.splitlines()[-1][:160] if error else headline(part, values)
        print(f"{folder.name:14s} {part:10s} {engine.label:12s} {shown}", flush=True)


def headline(part: str, values: Values) -> str:
    """The figures of a record that fit a line."""
    if part == "startup":
        return ", ".join(f"{kind} {marks['first_answer_s']:.1f} s" for kind, marks in values.items())
    if part == "decode":
        return ", ".join(f"{batch}: {step['step_ms']:.3f} ms" for batch, step in values["steps"].items())
    if part == "serve":
        loads = ", ".join(load_headline(name, result) for name, result in values["loads"].items())
        return f"start {values['start']['first_answer_s']:.1f} s; {loads}"
    if part == "prefix":
        return f"TTFT {values['cold_ttft_ms']:.1f} ms, cached {values['cached_ttft_ms']:.1f} ms"
    if part == "hf":
        runs = values["batches"].items()
        return ", ".join(f"batch {batch}: " + (f"{run['tok_s']:.0f} tok/s" if "tok_s" in run else run["error"][:60]) for batch, run in runs)
    first = f" (first run {values['first_run_tok_s']:.0f})" if "first_run_tok_s" in values else ""
    return f"{values['tok_s']:.0f} tok/s{first}"


def load_headline(name: str, result: Values) -> str:
    if "error" in result:
        return f"{name}: {result['error'][:80]}"
    failed = f" {result['failed']} FAILED" if result["failed"] else ""
    ttft, tpot = ("?" if (value := result[f"median_{name}_ms"]) is None else f"{value:.2f}" for name in ("ttft", "tpot"))
    return f"{name}: {result['output_throughput']:.0f} tok/s TTFT {ttft} TPOT {tpot}{failed}"


def machine_facts(commit: str | None) -> dict[str, Any]:
    if commit is None:
        done = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False)
        commit = done.stdout.strip() or "unknown"
    gpu = None
    with contextlib.suppress(OSError):
        asked = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        gpu = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip() or None
    return {"commit": commit, "machine": gpu or platform.processor() or platform.machine(), "cores": os.cpu_count()}


def sizes_of(args: argparse.Namespace) -> Sizes:
    sizes = parts.TINY if args.sizes == "tiny" else Sizes()
    changes: dict[str, Any] = {"repeats": args.repeats} if args.repeats else {}
    if args.batches:
        changes["batches"] = tuple(int(n) for n in args.batches.split(","))
    sizes = dataclasses.replace(sizes, **changes)
    args.loads = args.loads.split(",") if args.loads else list(sizes.loads)
    for load in args.loads:
        parts.parse_load(load)
    return sizes


def engines_of(args: argparse.Namespace) -> list[Engine]:
    made: list[Engine] = []
    for side, module in (("a", args.engine_a), ("b", args.engine_b)):
        if module == "none":
            continue
        label = module if all(engine.label != module for engine in made) else f"{module}-again"
        offline = tuple(json.loads(getattr(args, f"options_{side}")).items())
        site = args.peer_site if module == "vllm" else None
        made.append(Engine(module, label, args.caches, site, offline, tuple(shlex.split(getattr(args, f"serve_{side}")))))
    return made


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Two engines on the same work; the docstring says what is measured.")
    parser.add_argument("models", type=Path, nargs="+", metavar="MODELDIR")
    parser.add_argument("--out", type=Path, required=True, help="folder for results")
    parser.add_argument("--jsonl", type=Path, help="append records there, too")
    parser.add_argument("--only", default=",".join(PARTS), help=f"parts to run (default: {','.join(PARTS)})")
    parser.add_argument("--engine-a", default="octavo", choices=("octavo", "vllm"))
    parser.add_argument("--engine-b", default="vllm", choices=("octavo", "vllm", "none"))
    parser.add_argument("--peer-site", type=Path, help="where vllm is unpacked (scripts/gpu/peer_setup.sh); default: this environment")
    parser.add_argument("--caches", type=Path, default=Path("/tmp/compare-caches"), help="what engines compile is kept there")
    parser.add_argument("--alone", action="store_true", help="offline parts: one engine in memory at a time, with the whole card")
    parser.add_argument("--budget", type=float, default=560.0, help="seconds for everything (560)")
    parser.add_argument("--part-seconds", default="", help="e.g. decode=60,serve=300: time of a part, both engines together")
    parser.add_argument("--repeats", type=int, help="of decode and prefill (5)")
    parser.add_argument("--batches", help="of decode, e.g. 1,32,256")
    parser.add_argument("--loads", help="of serve, e.g. r10x200,c50x200,all1000: a rate or a concurrency, times requests")
    parser.add_argument("--sizes", choices=("full", "tiny"), default="full", help="tiny: to try this out on a CPU")
    parser.add_argument("--options-a", default="{}", help="more options of engine a's LLM, as JSON")
    parser.add_argument("--options-b", default="{}", help="of engine b's")
    parser.add_argument("--serve-a", default="", help="more flags of engine a's server")
    parser.add_argument("--serve-b", default="", help="of engine b's")
    parser.add_argument("--commit", help="what is measured (default: what git says)")
    args = parser.parse_args(argv)
    args.only = args.only.split(",")
    for part in args.only:
        if part not in PARTS:
            parser.error(f"unknown part {part!r}; there are {', '.join(PARTS)}")
    args.part_seconds = PART_S | {k: float(v) for k, _, v in (pair.partition("=") for pair in args.part_seconds.split(",") if pair)}
    for folder in args.models:
        if not (folder / "config.json").is_file():
            parser.error(f"{folder} has no config.json")
    args.out, args.caches = args.out.resolve(), args.caches.resolve()
    args.peer_site = args.peer_site.resolve() if args.peer_site else None
    return args


def main(argv: list[str] | None = None) -> int:
    comparison = Comparison(parse(argv))

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt  # SIGTERM ends as Ctrl-C does: through everyone's clean-up

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        return comparison.run()
    finally:
        signal.signal(signal.SIGTERM, previous)


if __name__ == "__main__":
    sys.exit(main())
