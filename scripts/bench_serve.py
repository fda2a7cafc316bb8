"""Measure the server: start-up, throughput and latency of 1, 8 and 32 streams, memory, and 500 clients at once.

    python scripts/bench_serve.py [flags] [-- flags of octavo serve]
    python scripts/bench_serve.py --url http://127.0.0.1:8000      a server that runs already (any OpenAI-compatible one)

Prompts are random token ids, all different, so that no prefix is shared; temperature 0 and ignore_eos, so that every
answer has its full length. The client and the figures are those of ``octavo bench serve``; what this adds is a server that
is started and watched (its start, its memory), and the table for docs/performance.md.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # runs from a clone, too

from octavo.bench.http import Client, HttpError, parse_address, raise_file_limit, run_loop  # noqa: E402
from octavo.bench.load import run_load  # noqa: E402
from octavo.bench.stats import describe, latencies_ms  # noqa: E402
from octavo.bench.stream import Result, stream  # noqa: E402
from octavo.cli.flags import parse_size  # noqa: E402

PERFORMANCE = ROOT / "docs" / "performance.md"
DEFAULT_KV_CACHE = "512M"  # small enough that the runs touch all of it, so that resident memory minus it means something
FIRST_TOKEN_ID = 100  # below are special tokens


@dataclass(frozen=True)
class Row:
    """One load: ``requests`` requests, ``streams`` at a time. Latencies are None without a good answer."""

    streams: int
    requests: int
    errors: int
    output_tok_s: float
    ttft_ms: float | None
    ttft_p99_ms: float | None
    tpot_ms: float | None
    tpot_p99_ms: float | None
    seconds: float


# ---------------------------------------------------------------------------------------------------------------------
# loads


class Prompts:
    """Random prompts, each new. Seeded, so that two runs ask the same."""

    def __init__(self, vocab: int, seed: int) -> None:
        self._rng, self._vocab = random.Random(seed), vocab

    def next(self, length: int) -> list[int]:
        return [self._rng.randrange(FIRST_TOKEN_ID, self._vocab) for _ in range(length)]


def encode(client: Client, model: str, prompt: list[int], max_tokens: int) -> bytes:
    """One streamed completion as it goes over the wire."""
    body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    return client.encode("POST", "/v1/completions", json.dumps(body).encode())


def problem_of(result: Result, n_out: int) -> str | None:
    """What was wrong with an answer; one that is too short is wrong, too."""
    if result.error is None and result.output_tokens != n_out:
        return f"{result.output_tokens} of {n_out} tokens, complete"
    return result.error


async def load(client: Client, model: str, prompts: Prompts, streams: int, repeat: int, n_in: int, n_out: int) -> tuple[Row, list[str]]:
    """``streams * repeat`` requests, ``streams`` at a time; and the errors' texts."""
    requests = [encode(client, model, prompts.next(n_in), n_out) for _ in range(streams * repeat)]
    run = await run_load(client, requests, [0.0] * len(requests), streams)
    problems = [problem_of(result, n_out) for result in run.results]
    good = [result for result, problem in zip(run.results, problems, strict=True) if problem is None]
    latencies = latencies_ms(good)
    ttft, tpot = (describe(latencies[name], (99.0,)) for name in ("ttft", "tpot"))
    row = Row(
        streams=streams,
        requests=len(requests),
        errors=len(requests) - len(good),
        output_tok_s=round(sum(result.output_tokens for result in good) / run.duration, 1),
        ttft_ms=rounded(ttft["median"], 1),
        ttft_p99_ms=rounded(ttft["p99"], 1),
        tpot_ms=rounded(tpot["median"], 2),
        tpot_p99_ms=rounded(tpot["p99"], 2),
        seconds=round(run.duration, 2),
    )
    return row, [problem for problem in problems if problem is not None]


def rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


# ---------------------------------------------------------------------------------------------------------------------
# the server's process


def process_tree(pid: int) -> list[int]:
    """A process and all that descend from it (Linux)."""
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                parents[int(name)] = int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1])
    tree = [pid]
    for member in tree:
        tree += [child for child, parent in parents.items() if parent == member]
    return tree


def memory_bytes(pid: int) -> dict[str, int] | None:
    """Resident memory of a process tree: ``rss`` counts shared pages once a process, ``pss`` once. None off Linux."""
    if not os.path.isdir("/proc/self"):
        return None
    total = {"rss": 0, "pss": 0}
    for member in process_tree(pid):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{member}/smaps_rollup").read_text().splitlines():
                name, _, value = line.partition(":")
                if name.lower() in total:
                    total[name.lower()] += int(value.split()[0]) * 1024
    return total


def start_server(arguments: list[str]) -> tuple[subprocess.Popen[bytes], str]:
    """The process, and the address it will answer at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "octavo", "serve", "--port", str(port), "--disable-log-requests", *arguments]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))}
    return subprocess.Popen(command, env=environment, stdout=sys.stderr), f"http://127.0.0.1:{port}"


async def wait_for_answer(process: subprocess.Popen[bytes] | None, client: Client, vocab: int, timeout: float) -> str:
    """Ask until the first token has come; returns the model's name."""
    deadline = time.perf_counter() + timeout
    problem: str | None = "nothing listens"
    while time.perf_counter() < deadline:
        if process is not None and process.poll() is not None:
            raise SystemExit(f"bench_serve: the server ended with status {process.returncode} before it answered")
        try:
            model = str((await client.get_json("/v1/models"))["data"][0]["id"])
            problem = problem_of(await stream(client, encode(client, model, Prompts(vocab, seed=-1).next(8), 1)), 1)
            if problem is None:
                return model
        except (HttpError, LookupError, TypeError) as error:
            problem = f"{type(error).__name__}: {error}"
        await asyncio.sleep(0.02)
    raise SystemExit(f"bench_serve: no answer within {timeout:.0f} s ({problem})")


def stop_server(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


# ---------------------------------------------------------------------------------------------------------------------
# the whole


async def bench(args: argparse.Namespace, url: str, process: subprocess.Popen[bytes] | None, started: float) -> dict[str, Any]:
    client = Client(parse_address(url), headers={"Authorization": f"Bearer {args.api_key}"} if args.api_key else None)
    try:
        return await measure(args, client, process, started)
    finally:
        client.close()


async def measure(args: argparse.Namespace, client: Client, process: subprocess.Popen[bytes] | None, started: float) -> dict[str, Any]:
    model = await wait_for_answer(process, client, args.vocab, args.timeout)
    result: dict[str, Any] = {"model": model, "input_len": args.input_len, "output_len": args.output_len}
    if process is not None:
        result["start_to_first_answer_s"] = round(time.perf_counter() - started, 2)
        at_start = memory_bytes(process.pid)
    prompts = Prompts(args.vocab, args.seed)
    await load(client, model, prompts, max(args.streams), 1, 16, 8)  # warm up every batch size on the way
    rows, errors = [], []
    for streams in args.streams:
        row, texts = await load(client, model, prompts, streams, args.repeat, args.input_len, args.output_len)
        rows.append(row)
        errors += texts
        print(f"bench_serve: {streams} streams: {row.output_tok_s} tok/s", file=sys.stderr)
    result["rows"] = [asdict(row) for row in rows]
    if args.clients:
        row, texts = await load(client, model, prompts, args.clients, 1, args.clients_len, args.clients_len)
        result["clients"] = asdict(row)
        errors += texts
    if process is not None and (memory := memory_bytes(process.pid)) is not None:
        result["memory_bytes"] = memory | {"kv_cache": args.kv_cache_bytes, "rss_at_start": at_start["rss"] if at_start else 0}
    result["error_texts"] = sorted(set(errors))[:5]
    return result


def facts(args: argparse.Namespace) -> dict[str, Any]:
    """When, where and what was measured."""
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    cpu = ""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "date": datetime.datetime.now().strftime("%Y-%m-%d %H:%M"),
        "commit": commit or "unknown",
        "machine": f"{cpu or 'unknown CPU'}, {cores} cores",
        "arguments": " ".join(args.serve) if not args.url else args.url,
    }


def table(result: dict[str, Any]) -> str:
    """The result as Markdown, which is also readable in a terminal."""
    lines = [f"{result['date']}, commit {result['commit']}, {result['machine']}: {result['model']}, `{result['arguments']}`", ""]
    lines.append(f"{result['input_len']} tokens in, {result['output_len']} out:")
    lines += [
        "",
        "| streams | output tok/s | TTFT median / p99 (ms) | TPOT median / p99 (ms) | errors |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in [*result["rows"], *([result["clients"]] if "clients" in result else [])]:
        latency = f"{row['ttft_ms']} / {row['ttft_p99_ms']} | {row['tpot_ms']} / {row['tpot_p99_ms']}"
        lines.append(f"| {row['streams']} | {row['output_tok_s']} | {latency} | {row['errors']} of {row['requests']} |")
    lines.append("")
    if "clients" in result:
        lines.append("(The last row's clients ask for a short answer each, all at once.)")
    if "start_to_first_answer_s" in result:
        lines.append(f"Process start to first answer: {result['start_to_first_answer_s']} s.")
    if "memory_bytes" in result:
        memory = result["memory_bytes"]
        gb = {name: value / 1e9 for name, value in memory.items()}
        lines.append(
            f"Resident memory of all processes: {gb['rss_at_start']:.2f} GB after the first answer, {gb['rss']:.2f} GB after these runs "
            f"(shared pages counted once: {gb['pss']:.2f} GB); without the KV cache of {gb['kv_cache']:.2f} GB, if they touched all of it: "
            f"{gb['rss'] - gb['kv_cache']:.2f} GB ({gb['pss'] - gb['kv_cache']:.2f} GB)."
        )
    return "\n".join(lines)


def append_to_page(result: dict[str, Any]) -> None:
    if not PERFORMANCE.exists():
        PERFORMANCE.write_text("# Performance\n", encoding="utf-8")
    with PERFORMANCE.open("a", encoding="utf-8") as file:
        file.write(f"\n## CPU: serving, {result['date']}\n\n{table(result)}\n")


def parse(argv: list[str]) -> argparse.Namespace:
    own, _, serve = (argv[: argv.index("--")], "--", argv[argv.index("--") + 1 :]) if "--" in argv else (argv, "", [])
    parser = argparse.ArgumentParser(usage="%(prog)s [flags] [-- flags of octavo serve]", description="Measure octavo serve.")
    parser.add_argument("--url", help="a server that runs already; then start-up and memory are not measured")
    parser.add_argument("--api-key", help="its key")
    parser.add_argument("--streams", type=lambda text: [int(n) for n in text.split(",")], default=[1, 8, 32], help="default: 1,8,32")
    parser.add_argument("--repeat", type=int, default=2, help="requests of each stream, one after the other (2)")
    parser.add_argument("--input-len", type=int, default=128, help="prompt tokens (128)")
    parser.add_argument("--output-len", type=int, default=128, help="output tokens (128)")
    parser.add_argument("--clients", type=int, default=500, help="clients at once in the last run; 0 leaves it out (500)")
    parser.add_argument("--clients-len", type=int, default=32, help="their prompt and output tokens (32)")
    parser.add_argument("--vocab", type=int, default=49152, help="token ids are drawn from 100 up to this (49152)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=300, help="seconds to wait for the first answer (300)")
    parser.add_argument("--json", metavar="FILE", help="write the result there, too")
    parser.add_argument("--markdown", action="store_true", help="append the table to docs/performance.md")
    args = parser.parse_args(own)
    if args.url and serve:
        parser.error("flags of octavo serve make no sense with --url")
    if not any(word.replace("_", "-").startswith("--kv-cache-memory") for word in serve):
        serve = [*serve, "--kv-cache-memory", DEFAULT_KV_CACHE]
    args.serve = serve
    args.kv_cache_bytes = kv_cache_bytes(serve)
    return args


def kv_cache_bytes(serve: list[str]) -> int:
    """The size that the server was told, read as the command line itself reads it."""
    for word, following in zip(serve, [*serve[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        if name.replace("_", "-").startswith("--kv-cache-memory"):
            return parse_size(value if equals else following)
    raise AssertionError("parse() adds the flag")


def main(argv: list[str] | None = None) -> int:
    args = parse(sys.argv[1:] if argv is None else argv)
    raise_file_limit(max([*args.streams, args.clients]))
    process = None
    started = time.perf_counter()
    if args.url:
        url = args.url
    else:
        process, url = start_server(args.serve)
    try:
        result = facts(args) | run_loop(bench(args, url, process, started))
    finally:
        if process is not None:
            stop_server(process)
    print(table(result))
    for text in result["error_texts"]:
        print(f"error: {text}")
    print(json.dumps(result))
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if args.markdown:
        append_to_page(result)
    return 1 if result["error_texts"] else 0


if __name__ == "__main__":
    sys.exit(main())
