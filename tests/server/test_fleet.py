"""Several HTTP processes on one port: with mocks for what is theirs alone, with the demo model for what they share."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from octavo.config import ServerOptions
from octavo.errors import ConfigError
from octavo.metrics.cells import Cells
from octavo.metrics.prometheus import Metrics
from octavo.server.fleet import bind_all
from octavo.server.quota import KeyLimits
from octavo.types import EngineStats
from tests.e2e.server import RunningServer
from tests.server.test_server_life import refused
from tests.waiting import runs, until

COMPLETIONS = "/v1/completions"
ROOT = Path(__file__).resolve().parents[2]
MOCK = """
import sys
from octavo.config import EngineConfig, ServerOptions
from octavo.log import setup_logging
from octavo.server.fleet import serve_fleet
setup_logging(stream=sys.stdout)
options = ServerOptions(port=0, served_model_name=("mock-model",), api_server_count=2, disable_log_requests=True, **OPTIONS)
serve_fleet(EngineConfig(), options, mock={"tick_s": 0.01, "length": 10**6, "max_model_len": 10**6})
print("ended", flush=True)
"""


class Fleet:
    """Two HTTP processes with mocks."""

    def __init__(self, **options) -> None:
        code = MOCK.replace("OPTIONS", repr(options))
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", code]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
        self.lines: list[str] = []
        self.url = ""
        while not self.url:
            line = self.process.stdout.readline()
            assert line, self.lines
            self.lines.append(line)
            self.url = line.split(" on ")[1].strip() if "Octavo serves" in line else ""

    def workers(self) -> list[int]:
        """Those that run: one that was killed is a child until its parent has noticed."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [int(pid) for pid in children if runs(pid)]

    def kill_one(self) -> int:
        """Kill the oldest, and return when it is dead: until then it may accept somebody."""
        pid = self.workers()[0]
        os.kill(pid, signal.SIGKILL)
        until(lambda: not runs(pid))
        return pid

    def end(self) -> str:
        text, _ = self.process.communicate(timeout=120)
        return "".join(self.lines) + text


@pytest.fixture
def fleet() -> Iterator[type[Fleet]]:
    made: list[Fleet] = []

    def start(**options) -> Fleet:
        made.append(Fleet(**options))
        return made[-1]

    yield start  # type: ignore[misc]
    for one in made:
        if one.process.poll() is None:
            one.process.kill()
            one.process.communicate()


def metric(url: str, name: str) -> float:
    """On a connection of its own, which any of the processes may answer."""
    lines = httpx.get(url + "/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((name + "{", name + " ")))


def ask(url: str, **fields) -> httpx.Response:
    return httpx.post(url + COMPLETIONS, json={"prompt": "x", "max_tokens": 3, **fields}, timeout=120)


# -- numbers in common


def test_cells_of_several_processes():
    """Two instances over the same memory stand for two processes: what is common is one, what is own is summed."""
    descriptor = os.memfd_create("test")
    os.ftruncate(descriptor, Cells.size(2))
    first, second = Cells(descriptor, 0, 2), Cells(descriptor, 1, 2)
    one, two = Metrics("m", first), Metrics("m", second)
    one.observe_first_token(0.3)
    two.observe_first_token(0.3)
    two.observe_finished("stop", 1.0, 10, 5, 0.5)
    for metrics in (one, two):
        text = metrics.render()[0].decode()
        assert 'vllm:time_to_first_token_seconds_count{model_name="m"} 2.0' in text
        assert 'vllm:time_to_first_token_seconds_sum{model_name="m"} 0.6' in text
        assert 'vllm:request_success_total{finished_reason="stop",model_name="m"} 1.0' in text
    again = Metrics("m", Cells(descriptor, 1, 2))  # the second process, started again: counters do not fall
    assert 'vllm:time_to_first_token_seconds_count{model_name="m"} 2.0' in again.render()[0].decode()
    options = ServerOptions(max_requests_per_minute=3, max_concurrent_requests_per_key=2)
    limits = [KeyLimits(options, 1, cells) for cells in (first, second)]
    assert limits[0].enter(0) is None and limits[1].enter(0) is None
    assert limits[0].enter(0).code == limits[1].enter(0).code == "concurrency_limit_exceeded"
    limits[0].leave(0, 0)
    assert limits[1].enter(0) is None
    limits[1].leave(0, 0)
    assert limits[0].enter(0).code == "rate_limit_exceeded"
    restarted = Cells(descriptor, 1, 2)
    Metrics("m", restarted)
    KeyLimits(options, 1, restarted)  # it had one running when it died
    assert sum(part[0] for part in first.all(limits[0].start, 1)) == 0
    os.close(descriptor)


def test_counters_never_fall_from_scrape_to_scrape():
    """Scrapes of one port meet different processes, each hearing of the engine at its own times; a fall would look like a restart."""
    memory = os.memfd_create("cells")
    try:
        os.ftruncate(memory, Cells.size(2))
        first, second = (Metrics("m", Cells(memory, i, 2)) for i in range(2))
        shown = []
        for metrics, tokens in ((first, 50), (second, 40), (first, 60), (second, 45), (second, 70)):
            metrics.observe_stats(EngineStats(generation_tokens=tokens, num_running=tokens))
            shown.append((metrics.stats.generation_tokens, metrics.stats.num_running))
        assert shown == [(50, 50), (50, 40), (60, 60), (60, 45), (70, 70)]
    finally:
        os.close(memory)


def test_a_taken_port_is_noticed():
    """Also one that another server of this kind has, whose sockets would let it be shared."""
    for options in ((), ((socket.SOL_SOCKET, socket.SO_REUSEPORT, 1),)):
        with socket.socket() as taken:
            for option in options:
                taken.setsockopt(*option)
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            with pytest.raises(ConfigError, match="--port"):
                bind_all("127.0.0.1", taken.getsockname()[1], 2)
    sockets = bind_all("127.0.0.1", 0, 3)
    assert len({s.getsockname() for s in sockets}) == 1
    for sock in sockets:
        sock.close()


# -- processes with mocks


def test_all_serve_and_limits_are_one(fleet):
    one = fleet(max_requests_per_minute=12)
    assert len(one.workers()) == 2
    begun, answered = time.monotonic(), 0
    while (status := ask(one.url).status_code) == 200 and answered < 100:  # each on a connection of its own
        answered += 1
    assert status == 429 and 12 <= answered <= 13 + (time.monotonic() - begun) * 12 / 60
    counts = [metric(one.url, "vllm:request_success_total") for _ in range(8)]
    assert counts == [answered] * 8
    used = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in one.workers()]
    assert len(used) == 2


def test_a_crash_is_mended(fleet):
    one = fleet()
    before = set(one.workers())
    assert ask(one.url).status_code == 200
    for _ in range(2):
        one.kill_one()
        answers = [ask(one.url).status_code for _ in range(6)]  # those for the dead one wait for the new one
        assert answers == [200] * 6
        until(lambda: len(one.workers()) == 2)
    assert len(set(one.workers()) - before) >= 1
    assert metric(one.url, "vllm:request_success_total") == 13
    one.process.send_signal(signal.SIGTERM)
    output = one.end()
    assert one.process.returncode == 0 and output.count("was ended by SIGKILL; its requests are lost, and it is started again") == 2


def test_sigterm_while_a_crash_is_mended(fleet):
    """The new process does not listen yet; that it never will is no fault, and what runs in the other one comes to its end."""
    one = fleet()
    before = {*one.workers()}
    streams = [stream_in(one.url, 200) for _ in range(16)]  # the other one has some of them, but for once in 65,536 times
    one.kill_one()
    until(lambda: {*one.workers()} - before, every=0.001)
    one.process.send_signal(signal.SIGTERM)
    whole = 0
    for chunks in streams:
        with contextlib.suppress(httpx.RemoteProtocolError, httpx.ReadError):
            whole += "[DONE]" in "".join(chunks)
    assert whole
    output = one.end()
    assert one.process.returncode == 0 and output.rstrip().endswith("ended") and "Traceback" not in output, output


def test_processes_that_cannot_run_end_the_server(fleet):
    one = fleet()
    end = time.monotonic() + 120
    while one.process.poll() is None and time.monotonic() < end:
        with contextlib.suppress(OSError):
            for pid in one.workers():
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    output = one.end()
    assert one.process.returncode == 1
    assert "the server gives up" in output or "before it listened" in output
    assert not Path(f"/proc/{one.process.pid}").exists()


def stream_in(url: str, max_tokens: int):
    http = httpx.Client(base_url=url, timeout=60)
    answer = http.send(http.build_request("POST", COMPLETIONS, json={"prompt": "x", "max_tokens": max_tokens, "stream": True}), stream=True)
    chunks = answer.iter_text()
    next(chunks)
    return chunks


def test_sigterm_drains_all(fleet):
    one = fleet()
    streams = [stream_in(one.url, 150) for _ in range(6)]
    one.process.send_signal(signal.SIGTERM)
    until(lambda: refused(one.url))
    for chunks in streams:
        assert "[DONE]" in "".join(chunks)
    output = one.end()
    assert one.process.returncode == 0 and output.rstrip().endswith("ended") and "Traceback" not in output


@pytest.mark.parametrize("how", ["second signal", "timeout"])
def test_running_requests_are_told(fleet, how):
    one = fleet(drain_timeout=0.3 if how == "timeout" else 250.0)
    streams = [stream_in(one.url, 100_000) for _ in range(4)]
    one.process.send_signal(signal.SIGTERM)
    if how == "second signal":
        until(lambda: refused(one.url))  # all have seen the first: two that come together are one
        one.process.send_signal(signal.SIGTERM)
    for chunks in streams:
        text = "".join(chunks)
        assert "shutting down" in text and "[DONE]" not in text
    one.end()
    assert one.process.returncode == 0


def test_the_parents_death_ends_all(fleet):
    one = fleet()
    pids = one.workers()
    one.process.kill()
    one.process.wait()
    assert len(pids) == 2
    until(lambda: not any(map(runs, pids)))


# -- with the model


@pytest.fixture(scope="module")
def real() -> Iterator[RunningServer]:
    server = RunningServer("--api-server-count", "2", "--max-model-len", "2048", "--num-gpu-blocks-override", "600", "--api-key", "k")
    assert ready(server)
    yield server
    assert server.stop() == 0
    assert not server.healthy()


HEADERS = {"Authorization": "Bearer k"}


def http_processes(server: RunningServer) -> list[int]:
    return [pid for pid in server.pids()[1:] if "fleet_worker" in Path(f"/proc/{pid}/cmdline").read_text()]


def test_one_engine_answers_through_all(real):
    """The same tokens through whichever process, streamed and not, many at a time, with equal request ids."""
    body = {"prompt": "Once upon a time", "max_tokens": 24, "temperature": 0}
    first = httpx.post(real.url + COMPLETIONS, json=body, headers=HEADERS, timeout=60).json()["choices"][0]["text"]
    texts: list[str] = []

    def one(i: int) -> None:
        fields = {**body, "request_id": "the-same", "stream": i % 2 == 1}
        answer = httpx.post(real.url + COMPLETIONS, json=fields, headers=HEADERS, timeout=60)
        if i % 2 == 0:
            texts.append(answer.json()["choices"][0]["text"])
        else:
            frames = [json.loads(f[6:]) for f in answer.text.strip().split("\n\n")[:-1]]
            texts.append("".join(f["choices"][0]["text"] for f in frames))

    threads = [threading.Thread(target=one, args=(i,)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == [first] * 16
    assert {real.metric("vllm:request_success_total") for _ in range(6)} == {17.0}
    assert {real.metric("vllm:generation_tokens_total") for _ in range(6)} == {17.0 * 24}


def test_requests_of_a_crashed_process_end_in_the_engine(real):
    with contextlib.ExitStack() as stack:
        http = stack.enter_context(httpx.Client(base_url=real.url, headers=HEADERS, timeout=60))
        body = {"prompt": "x", "max_tokens": 1900, "ignore_eos": True, "stream": True}
        streams = [stack.enter_context(http.stream("POST", COMPLETIONS, json=body)).iter_text() for _ in range(6)]
        for chunks in streams:
            next(chunks)
        until(lambda: real.metric("vllm:num_requests_running") == 6)
        for pid in http_processes(real):
            os.kill(pid, signal.SIGKILL)

        def nothing_runs() -> bool:
            try:
                return real.metric("vllm:num_requests_running") == real.metric("vllm:kv_cache_usage_perc") == 0
            except OSError:
                return False

        until(nothing_runs, 120)
    assert httpx.post(real.url + COMPLETIONS, json={"prompt": "x", "max_tokens": 2}, headers=HEADERS, timeout=60).status_code == 200
    until(lambda: "6 request(s)" in real.output() or real.output().count("were ended in the engine") == 2)


def test_a_client_that_leaves_and_one_that_stops(real):
    body = {"prompt": "Once upon a time", "max_tokens": 1900, "ignore_eos": True, "stream": True}
    before = max(real.metric("vllm:generation_tokens_total") for _ in range(8))
    with httpx.stream("POST", real.url + COMPLETIONS, json=body, headers=HEADERS, timeout=60) as answer:
        next(answer.iter_text())
    time.sleep(0.3)  # each process hears of the engine ten times a second: one may not know yet that something ran
    until(lambda: not any(real.metric("vllm:num_requests_running") for _ in range(8)))
    assert real.metric("vllm:generation_tokens_total") - before < 1900, "it ran to its end"
    stopped = httpx.post(real.url + COMPLETIONS, json={**body, "stream": False, "stop": ["e"]}, headers=HEADERS, timeout=60).json()
    assert stopped["choices"][0]["finish_reason"] == "stop"


def ready(server: RunningServer) -> bool:
    """Healthy is who answers first; this waits for all."""
    return until(lambda: "HTTP processes share" in server.output(), 120)


def test_the_engines_death_is_told_by_all():
    server = RunningServer("--api-server-count", "2", "--max-model-len", "512", "--num-gpu-blocks-override", "100")
    try:
        assert ready(server)
        engine = next(pid for pid in server.pids()[1:] if "engine.process" in Path(f"/proc/{pid}/cmdline").read_text())
        os.kill(engine, signal.SIGKILL)
        until(lambda: {httpx.get(server.url + "/health").status_code for _ in range(6)} == {503})
        error = httpx.post(server.url + COMPLETIONS, json={"prompt": "x"}).json()["error"]
        assert error["code"] == "engine_dead"
    finally:
        server.stop()


def test_what_keeps_a_process_from_starting_is_said():
    with pytest.raises(RuntimeError, match="syntax error"):
        RunningServer("--api-server-count", "2", "--chat-template", "{% if %}{{ x }}")
