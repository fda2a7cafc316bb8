"""``octavo bench startup``: from the start of a process to its first answer, for the server and for the offline LLM.

Stages are moments on the clock that all processes share (CLOCK_MONOTONIC), so a child's own marks and ours are one row.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import octavo
from octavo.bench import report
from octavo.bench.http import Client, HttpError, parse_address, run_loop
from octavo.bench.options import StartupOptions
from octavo.bench.stats import describe
from octavo.bench.stream import stream
from octavo.errors import OctavoError

PROMPT = "Once upon a time"
CACHES = ("OCTAVO_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
POLL_S = 0.005
STOP_S = 60.0

# Run by the child; prints its marks as the last line.
LLM_PROGRAM = """
import json, sys, time
marks = {"interpreter_started": time.monotonic()}
from octavo import LLM, SamplingParams
from octavo.env import prepare_cpu_libraries
marks["octavo_imported"] = time.monotonic()
prepare_cpu_libraries()
import torch
marks["torch_imported"] = time.monotonic()
llm = LLM(**json.loads(sys.argv[1]))
marks["model_loaded"] = time.monotonic()
llm.generate(sys.argv[2], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
marks["first_token"] = time.monotonic()
llm.generate(sys.argv[2], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
marks["second_token"] = time.monotonic()
print("\\nMARKS" + json.dumps(marks))
"""


def run(options: StartupOptions, engine: dict[str, Any], engine_words: Sequence[str]) -> int:
    """The command. ``engine``: keyword arguments of ``LLM``; ``engine_words``: the same as flags of ``octavo serve``.

    Ctrl-C, or a start that fails, reports the starts before it.
    """
    report.check_writable(options.output_json)
    result: dict[str, Any] = {"date": report.date(), "model": engine.get("model") or "demo", "empty_caches": options.empty_caches}
    for what in ("serve", "llm"):
        if options.what not in (what, "both"):
            continue
        starts: list[dict[str, float]] = []
        ended_by: BaseException | None = None
        try:
            for i in range(options.repeat):
                with caches(options.empty_caches) as environment:
                    if what == "serve":
                        starts.append(run_loop(start_server(engine_words, environment, options.timeout)))
                    else:
                        starts.append(start_llm(engine, environment, options.timeout))
                print(f"{what} {i + 1} of {options.repeat}: {list(starts[-1].values())[-1]:.2f} s", file=sys.stderr, flush=True)
        except (KeyboardInterrupt, OctavoError) as error:
            ended_by = error
        if starts:
            result[what] = {"starts": starts, "stages": {name: describe([s[name] for s in starts], (90.0,)) for name in starts[0]}}
            print(startup_table(what, starts))
        if ended_by is not None:
            if starts or "serve" in result:
                report.write(result, options.output_json)
            raise ended_by
    report.write(result, options.output_json)
    return 0


def startup_table(what: str, starts: Sequence[dict[str, float]]) -> str:
    """A row a stage: seconds since the process's start, of every start, and their median."""
    title = {"serve": "octavo serve", "llm": "LLM(…)"}[what]
    columns = [f"{title}: seconds until", *(f"start {i}" for i in range(1, len(starts) + 1)), "median"]
    rows = [[name.replace("_", " "), *values, describe(values, ())["median"]] for name, values in stage_rows(starts)]
    return report.table(columns, rows) + "\n"


def stage_rows(starts: Sequence[dict[str, float]]) -> Iterator[tuple[str, list[float]]]:
    for name in starts[0]:
        yield name, [start[name] for start in starts]


@contextlib.contextmanager
def caches(empty: bool) -> Iterator[dict[str, str]]:
    """The child's environment; ``empty``: with new folders for what is built and kept."""
    root = str(Path(octavo.__file__).resolve().parent.parent)
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
    environment = os.environ | {"PYTHONPATH": path}
    if not empty:
        yield environment
        return
    with tempfile.TemporaryDirectory(prefix="octavo-bench-") as folder:
        yield environment | {name: os.path.join(folder, name.lower()) for name in CACHES}


def start_llm(engine: dict[str, Any], environment: dict[str, str], timeout: float) -> dict[str, float]:
    """Seconds from the start of a Python process to each stage of an offline LLM. Raises OctavoError if it fails."""
    begin = time.monotonic()
    command = [sys.executable, "-c", LLM_PROGRAM, json.dumps(engine), PROMPT]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        raise OctavoError(f"The LLM gave no answer within --timeout {timeout:g} s.") from None
    line = next((line for line in done.stdout.splitlines() if line.startswith("MARKS")), None)
    if done.returncode != 0 or line is None:
        raise OctavoError(f"The LLM's process ended with status {done.returncode}:\n{_tail(done.stderr)}")
    return {name: mark - begin for name, mark in json.loads(line[5:]).items()}


async def start_server(words: Sequence[str], environment: dict[str, str], timeout: float) -> dict[str, float]:
    """Seconds from the start of ``octavo serve`` to: port bound, healthy, first token, first whole answer, a second token."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "octavo", "serve", *words, "--host", "127.0.0.1", "--port", str(port), "--disable-log-requests"]
    with tempfile.TemporaryFile("w+") as log:
        begin = time.monotonic()
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        client = Client(parse_address(f"http://127.0.0.1:{port}"), timeout=timeout)
        try:
            return await _server_stages(client, process, begin, timeout)
        except HttpError as error:
            log.seek(0)
            raise OctavoError(f"{error}\n{_tail(log.read())}".rstrip()) from None
        finally:
            client.close()
            await stop(process)


async def _server_stages(client: Client, process: subprocess.Popen[bytes], begin: float, timeout: float) -> dict[str, float]:
    stages: dict[str, float] = {}
    while True:
        try:
            status, _ = await client.send(client.encode("GET", "/health"))
            if status == 200:
                break
        except HttpError:
            pass
        if process.poll() is not None:
            raise HttpError(f"octavo serve ended with status {process.returncode} before it answered:")
        if time.monotonic() - begin > timeout:
            raise HttpError(f"octavo serve did not answer within --timeout {timeout:g} s:")
        await asyncio.sleep(POLL_S)
    stages["ready"] = time.monotonic() - begin
    model = (await client.get_json("/v1/models"))["data"][0]["id"]
    for name in ("first_token", "second_token"):
        body = {"model": model, "prompt": PROMPT, "max_tokens": 1, "temperature": 0, "stream": True}
        result = await stream(client, client.encode("POST", "/v1/completions", json.dumps(body).encode()))
        if result.error is not None:
            raise HttpError(f"the first answer failed: {result.error}")
        stages[name] = time.monotonic() - begin
    return stages


async def stop(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM, and what is left after a while is killed."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + STOP_S
        while process.poll() is None and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
    if process.poll() is None:
        process.kill()
    process.wait()


def _tail(text: str, lines: int = 15) -> str:
    return "\n".join(text.strip().splitlines()[-lines:])
