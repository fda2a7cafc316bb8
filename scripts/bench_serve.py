"""Measure the server: start-up, throughput and latency of 1, 8 and 32 streams, memory, and 500 clients at once.

    python scripts/bench_serve.py [flags] [-- flags of octavo serve]
    python scripts/bench_serve.py --url http://127.0.0.1:8000      a server that runs already (any OpenAI-compatible one)

Prompts are random token ids, all different, so that no prefix is shared; temperature 0 and ignore_eos, so that every
answer has its full length. The client is written on bare asyncio streams: on a machine with few cores an HTTP library's
own work would be measured too. Standard library only.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import json
import os
import random
import resource
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.parse
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PERFORMANCE = ROOT / "docs" / "performance.md"
DEFAULT_KV_CACHE = "512M"  # small enough that the runs touch all of it, so that resident memory minus it means something
FIRST_TOKEN_ID = 100  # below are special tokens


@dataclass(frozen=True)
class Server:
    host: str
    port: int
    model: str = ""
    api_key: str | None = None


@dataclass(frozen=True)
class Answer:
    """Times in seconds since the request was sent. ``error`` None: complete."""

    first: float = 0.0
    last: float = 0.0
    tokens: int = 0
    error: str | None = None


@dataclass(frozen=True)
class Row:
    """One load: ``streams`` clients, each with ``requests / streams`` requests one after the other."""

    streams: int
    requests: int
    errors: int
    output_tok_s: float
    ttft_ms: float
    ttft_p99_ms: float
    tpot_ms: float
    tpot_p99_ms: float
    seconds: float


# ---------------------------------------------------------------------------------------------------------------------
# a small HTTP client


async def http_lines(server: Server, path: str, body: dict[str, Any] | None = None) -> AsyncIterator[bytes]:
    """The lines of an answer's body as they arrive, chunked transfer or not. RuntimeError unless the status is 200."""
    reader, writer = await asyncio.open_connection(server.host, server.port, limit=2**20)
    try:
        data = b"" if body is None else json.dumps(body).encode()
        head = f"{'GET' if body is None else 'POST'} {path} HTTP/1.1\r\nHost: {server.host}\r\nConnection: close\r\n"
        head += f"Authorization: Bearer {server.api_key}\r\n" if server.api_key else ""
        writer.write(f"{head}Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
        status = await reader.readline()
        headers = {}
        while (line := await reader.readline()) not in (b"\r\n", b""):
            name, _, value = line.partition(b":")
            headers[name.strip().lower()] = value.strip().lower()
        chunked = headers.get(b"transfer-encoding") == b"chunked"
        if status.split()[1:2] != [b"200"]:
            text = await reader.read(10_000)
            raise RuntimeError(f"{status.decode('latin-1').strip()}: {text.decode('utf-8', 'replace')[:300]}")
        rest = b""
        while True:
            if chunked:
                size = int(await reader.readline() or b"0", 16)
                piece = (await reader.readexactly(size + 2))[:-2] if size else b""
            else:
                piece = await reader.read(65536)
            if not piece:
                break
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                yield line
        if rest:
            yield rest
    finally:
        writer.close()


async def get_json(server: Server, path: str) -> Any:
    return json.loads(b"\n".join([line async for line in http_lines(server, path)]))


async def complete(server: Server, prompt: list[int], max_tokens: int) -> Answer:
    """One streamed completion. Never raises for what the server does wrong: that is counted."""
    body = {
        "model": server.model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    start = time.perf_counter()
    first = last = 0.0
    tokens, done = 0, False
    try:
        async for line in http_lines(server, "/v1/completions", body):
            if not line.startswith(b"data:"):
                continue
            now = time.perf_counter() - start
            if b"[DONE]" in line:
                done = True
            elif b'"completion_tokens"' in line:  # parse only what has to be: the client shares the cores
                event = json.loads(line[5:])
                tokens = event["usage"]["completion_tokens"]
                if event.get("choices"):
                    last = now
            elif b'"error"' in line[:20]:
                return Answer(error=line.decode("utf-8", "replace")[:300])
            else:
                first = first or now
                last = now
    except (OSError, RuntimeError, ValueError, LookupError, EOFError) as error:
        return Answer(error=f"{type(error).__name__}: {error}")
    first = first or last  # a single event
    if not done or tokens != max_tokens:
        return Answer(first, last, tokens, f"{tokens} of {max_tokens} tokens, {'complete' if done else 'broken off'}")
    return Answer(first, last, tokens)


# ---------------------------------------------------------------------------------------------------------------------
# loads


class Prompts:
    """Random prompts, each new. Seeded, so that two runs ask the same."""

    def __init__(self, vocab: int, seed: int) -> None:
        self._rng, self._vocab = random.Random(seed), vocab

    def next(self, length: int) -> list[int]:
        return [self._rng.randrange(FIRST_TOKEN_ID, self._vocab) for _ in range(length)]


async def load(server: Server, prompts: Prompts, streams: int, repeat: int, n_in: int, n_out: int) -> tuple[Row, list[str]]:
    """``streams`` clients at once, each asking ``repeat`` times in a row; and the errors' texts."""
    queues = [[prompts.next(n_in) for _ in range(repeat)] for _ in range(streams)]

    async def client(mine: list[list[int]]) -> list[Answer]:
        return [await complete(server, prompt, n_out) for prompt in mine]

    start = time.perf_counter()
    answers = [answer for many in await asyncio.gather(*map(client, queues)) for answer in many]
    seconds = time.perf_counter() - start
    good = [a for a in answers if a.error is None]
    ttft = [a.first * 1e3 for a in good] or [float("nan")]
    tpot = [(a.last - a.first) / (a.tokens - 1) * 1e3 for a in good if a.tokens > 1] or [float("nan")]
    row = Row(
        streams=streams,
        requests=len(answers),
        errors=len(answers) - len(good),
        output_tok_s=round(sum(a.tokens for a in answers) / seconds, 1),
        ttft_ms=round(statistics.median(ttft), 1),
        ttft_p99_ms=round(quantile(ttft, 0.99), 1),
        tpot_ms=round(statistics.median(tpot), 2),
        tpot_p99_ms=round(quantile(tpot, 0.99), 2),
        seconds=round(seconds, 2),
    )
    return row, [a.error for a in answers if a.error is not None]


def quantile(values: list[float], q: float) -> float:
    """The smallest value that at least the share ``q`` of all does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-int(q * 1000) * len(ordered) // 1000) - 1)]


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


def start_server(arguments: list[str]) -> tuple[subprocess.Popen[bytes], Server]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "octavo", "serve", "--port", str(port), "--disable-log-requests", *arguments]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))}
    return subprocess.Popen(command, env=environment, stdout=sys.stderr), Server("127.0.0.1", port)


async def wait_for_answer(process: subprocess.Popen[bytes] | None, server: Server, vocab: int, timeout: float) -> Server:
    """Ask until the first token has come; returns the server with its model's name."""
    deadline = time.perf_counter() + timeout
    problem = "nothing listens"
    while time.perf_counter() < deadline:
        if process is not None and process.poll() is not None:
            raise SystemExit(f"bench_serve: the server ended with status {process.returncode} before it answered")
        try:
            models = await get_json(server, "/v1/models")
            named = Server(server.host, server.port, models["data"][0]["id"], server.api_key)
            answer = await complete(named, Prompts(vocab, seed=-1).next(8), 1)
            if answer.error is None:
                return named
            problem = answer.error
        except (OSError, RuntimeError, ValueError, LookupError, EOFError) as error:
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


async def bench(args: argparse.Namespace, server: Server, process: subprocess.Popen[bytes] | None, started: float) -> dict[str, Any]:
    server = await wait_for_answer(process, server, args.vocab, args.timeout)
    result: dict[str, Any] = {"model": server.model, "input_len": args.input_len, "output_len": args.output_len}
    if process is not None:
        result["start_to_first_answer_s"] = round(time.perf_counter() - started, 2)
        at_start = memory_bytes(process.pid)
    prompts = Prompts(args.vocab, args.seed)
    await load(server, prompts, max(args.streams), 1, 16, 8)  # warm up every batch size on the way
    rows, errors = [], []
    for streams in args.streams:
        row, texts = await load(server, prompts, streams, args.repeat, args.input_len, args.output_len)
        rows.append(row)
        errors += texts
        print(f"bench_serve: {streams} streams: {row.output_tok_s} tok/s", file=sys.stderr)
    result["rows"] = [asdict(row) for row in rows]
    if args.clients:
        row, texts = await load(server, prompts, args.clients, 1, args.clients_len, args.clients_len)
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
        file.write(f"\n### Serving, {result['date']}\n\n{table(result)}\n")


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
    sys.path.insert(0, str(ROOT))
    from octavo.cli.flags import parse_size

    for word, following in zip(serve, [*serve[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        if name.replace("_", "-").startswith("--kv-cache-memory"):
            return parse_size(value if equals else following)
    raise AssertionError("parse() adds the flag")


def main(argv: list[str] | None = None) -> int:
    args = parse(sys.argv[1:] if argv is None else argv)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 8192)) if hard > 0 else max(soft, 8192), hard))
    process = None
    started = time.perf_counter()
    if args.url:
        parts = urllib.parse.urlsplit(args.url if "://" in args.url else f"http://{args.url}")
        server = Server(parts.hostname or "127.0.0.1", parts.port or 80, api_key=args.api_key)
    else:
        process, server = start_server(args.serve)
    try:
        result = facts(args) | asyncio.run(bench(args, server, process, started))
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
