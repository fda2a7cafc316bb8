"""Keys, metrics, clients that vanish, engines that die, servers that stop."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from octavo.config import EngineConfig, ServerOptions
from octavo.errors import ConfigError
from octavo.metrics.prometheus import Metrics
from octavo.server import generation
from octavo.server.mock import MockEngine
from octavo.server.run import api_keys, bind
from tests.waiting import until

MODEL = "mock-model"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]
LONG = {"messages": HELLO, "max_tokens": 1500}


# -- API keys


def test_wrong_keys(start_server):
    running = start_server(api_key=("k1", "k\u00e9"))
    for value in ("Bearer k", "Bearer k11", "Bearer", "k1", "Basic k1", "Bearer k1 k1", "Token k1", ""):
        assert httpx.get(running.url + "/v1/models", headers={"Authorization": value}).status_code == 401, value
    for value in ("Bearer k1", "bearer k1", "Bearer  k1"):
        assert httpx.get(running.url + "/v1/models", headers={"Authorization": value}).status_code == 200, value
    twice = [("Authorization", "Bearer k1"), ("Authorization", "Bearer k1")]
    assert httpx.get(running.url + "/v1/models", headers=twice).status_code == 401
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=running.url + "/v1", api_key="no", max_retries=0).models.list()
    assert openai.OpenAI(base_url=running.url + "/v1", api_key="k1").models.list().data[0].id == MODEL


def test_a_big_body_without_a_key_is_not_read(start_server):
    running = start_server(api_key=("k",))
    answer = httpx.post(running.url + CHAT, content=b"x" * (64 * 2**20))
    assert answer.status_code == 401


def test_keys_from_the_environment(monkeypatch):
    monkeypatch.setenv("OCTAVO_API_KEY", "from-environment")
    assert api_keys(ServerOptions(api_key=("a",))) == ("a", "from-environment")
    monkeypatch.setenv("OCTAVO_API_KEY", "")
    assert api_keys(ServerOptions()) == ()
    with pytest.raises(ConfigError, match="api-key"):
        api_keys(ServerOptions(api_key=("",)))


# -- models, tokens, metrics


def test_models(client, http):
    models = client.models.list().data
    assert [m.id for m in models] == [MODEL, "second-name"] and models[0].max_model_len == 2048
    assert client.models.retrieve("second-name").id == "second-name"
    assert http.get("/version").json()["version"]


def test_tokenize_and_back(http):
    text = " the caf\u00e9 \U0001f600 octopus"
    sent = http.post("/tokenize", json={"model": MODEL, "prompt": text, "return_token_strs": True}).json()
    assert sent["count"] == len(sent["tokens"]) == len(sent["token_strs"]) and sent["max_model_len"] == 2048
    assert http.post("/detokenize", json={"tokens": sent["tokens"]}).json() == {"prompt": text}
    chat = http.post("/tokenize", json={"messages": HELLO}).json()
    assert chat["count"] == http.post(CHAT, json={"messages": HELLO, "max_tokens": 1}).json()["usage"]["prompt_tokens"]
    for path, body in (
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "x", "messages": HELLO}),
        ("/tokenize", {"prompt": "x", "add_generation_prompt": True}),
        ("/tokenize", {"prompt": "x", "model": "no"}),
        ("/detokenize", {"tokens": [99999]}),
        ("/detokenize", {"tokens": ["a"]}),
    ):
        answer = http.post(path, json=body)
        assert answer.status_code in (400, 404) and answer.json()["error"]["message"]


def scrape(url: str) -> dict[str, float]:
    """name{sorted labels but model_name and le} -> value."""
    values = {}
    for family in text_string_to_metric_families(httpx.get(url + "/metrics").text):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name") == MODEL
            values[sample.name + "".join(f"{{{k}={v}}}" for k, v in sorted(labels.items()))] = sample.value
    return values


def test_metrics(start_server):
    running = start_server(MockEngine(tick_s=0.005))
    body = {"prompt": " the octopus reads books about deep water and writes letters to a friend", "max_tokens": 10}
    httpx.post(running.url + COMPLETIONS, json=body)
    httpx.post(running.url + COMPLETIONS, json={**body, "stream": True})
    httpx.post(running.url + CHAT, json={"messages": HELLO})
    values = scrape(running.url)
    assert values["vllm:num_requests_running"] == values["vllm:num_requests_waiting"] == 0
    assert values["vllm:kv_cache_usage_perc"] == values["vllm:gpu_cache_usage_perc"] == 0
    assert values["vllm:generation_tokens_total"] == 45
    assert values["vllm:prompt_tokens_total"] == values["vllm:prefix_cache_queries_total"] > 0
    assert "vllm:prefix_cache_hits_total" in values and "vllm:num_preemptions_total" in values
    assert values["vllm:request_success_total{finished_reason=length}"] == 2
    assert values["vllm:request_success_total{finished_reason=stop}"] == 1
    assert values["vllm:time_to_first_token_seconds_count"] == values["vllm:e2e_request_latency_seconds_count"] == 3
    assert values["vllm:inter_token_latency_seconds_count"] == values["vllm:time_per_output_token_seconds_count"]
    assert 10 < values["vllm:inter_token_latency_seconds_count"] <= 42  # fewer when first tokens come together
    assert values["vllm:request_time_per_output_token_seconds_count"] == 3
    assert values["vllm:request_generation_tokens_sum"] == 45
    assert 0 < values["vllm:inter_token_latency_seconds_sum"] < values["vllm:e2e_request_latency_seconds_sum"]
    assert any(name.startswith("vllm:cache_config_info") and "block_size=16" in name for name in values)


def test_times_of_a_run(monkeypatch):
    """By a clock that the test sets: what is observed of outputs of 2, 3 and 1 tokens."""
    clock = SimpleNamespace(now=100.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(generation, "time", clock)
    metrics = Metrics(MODEL)
    run = generation.PromptRun(0, SimpleNamespace(token_ids=[1, 2, 3]), metrics, clock.now, 1)
    for now, tokens, reason in ((100.5, 2, None), (101.25, 3, None), (103.25, 1, "stop")):
        clock.now = now
        output = SimpleNamespace(index=0, token_ids=[7] * tokens, finish_reason=reason, stop_reason=None)
        run.observe(SimpleNamespace(num_cached_tokens=0, outputs=[output]))
    assert metrics.first_token.read()[1] == 0.5 and metrics.inter_token.read()[1] == 2.75
    assert dict(metrics.inter_token.read()[0])["+Inf"] == 4  # a token is an interval, but for those of the first output


def test_histogram_against_a_slow_truth():
    import random

    from octavo.metrics.prometheus import Histogram

    numbers = random.Random(0)
    histogram, values = Histogram((1.0, 2.0, 5.0)), [numbers.choice((0.0, 1.0, 1.5, 2.0, 4.9, 5.0, 7.0)) for _ in range(300)]
    for value in values:
        histogram.observe(value)
    histogram.observe(3.0, 4)
    values += [3.0] * 4
    buckets, value_sum = histogram.read()
    assert value_sum == pytest.approx(sum(values))
    assert dict(buckets) == {**{str(b): sum(v <= b for v in values) for b in (1.0, 2.0, 5.0)}, "+Inf": len(values)}


def test_access_log(start_server, caplog):
    running = start_server(api_key=("very-secret-key",))
    with caplog.at_level(logging.INFO, "octavo.access"):
        headers = {"Authorization": "Bearer very-secret-key", "x-request-id": "id-1"}
        httpx.post(running.url + COMPLETIONS + "?key=very-secret-query", json={"prompt": "secret-prompt", "max_tokens": 3}, headers=headers)
        httpx.get(running.url + "/nope%0Aforged line", headers=headers)
        until(lambda: len([r for r in caplog.records if r.name == "octavo.access"]) >= 2)  # a line is written after its answer was sent
    lines = [r.getMessage() for r in caplog.records if r.name == "octavo.access"]
    assert len(lines) == 2
    assert '"POST /v1/completions" 200' in lines[0] and "id=id-1" in lines[0] and "generated=3" in lines[0]
    assert "secret" not in "".join(lines) and "\n" not in lines[1] and " 404 " in lines[1]


def test_access_log_can_be_off(start_server, caplog):
    running = start_server(disable_log_requests=True)
    with caplog.at_level(logging.INFO, "octavo.access"):
        httpx.get(running.url + "/version")
    assert not [r for r in caplog.records if r.name == "octavo.access"]


# -- clients that vanish


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("fields", [{"stream": True}, {}, {"stream": True, "n": 3}, {"n": 2}])
def test_disconnect_aborts(slow_server, path, fields):
    body = {**(LONG if path == CHAT else {"prompt": ["a", "b"], "max_tokens": 1500}), **fields}
    data = json.dumps(body).encode()
    aborts = "vllm:request_success_total{finished_reason=abort}"
    before = scrape(slow_server.url)[aborts]
    with socket.create_connection(("127.0.0.1", slow_server.port)) as sock:
        sock.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
        if "stream" in fields:
            sock.settimeout(60)
            received = b""
            while received.count(b"data: ") < 5:
                received += sock.recv(4096)
        until(lambda: slow_server.engine.runs)
    slow_server.wait_idle()
    until(lambda: scrape(slow_server.url)[aborts] > before)


def test_disconnect_before_the_first_token(start_server):
    running = start_server(MockEngine(first_s=30))
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(running.url + CHAT, json={**LONG, "stream": True}, timeout=httpx.Timeout(60, read=0.3))
    running.wait_idle()


def test_openai_client_closes_a_stream(slow_server):
    client = openai.OpenAI(base_url=slow_server.url + "/v1", api_key="x")
    stream = client.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
    for _, _chunk in zip(range(4), stream):
        pass
    stream.close()
    slow_server.wait_idle()


async def test_many_vanish_at_once(slow_server):
    """Streams that live are not touched by those that die around them."""
    async with httpx.AsyncClient(base_url=slow_server.url, timeout=60) as http:

        async def whole() -> str:
            answer = await http.post(CHAT, json={**LONG, "max_tokens": 40, "stream": True, "stream_options": {"include_usage": True}})
            frames = answer.text.strip().split("\n\n")
            chunks = [json.loads(f[6:]) for f in frames[:-1]]
            assert frames[-1] == "data: [DONE]" and chunks[-1]["usage"]["completion_tokens"] == 40
            return "".join(c["choices"][0]["delta"].get("content", "") for c in chunks[:-1])

        async def cut() -> None:
            async with http.stream("POST", CHAT, json={**LONG, "stream": True}) as answer:
                async for _ in answer.aiter_bytes():
                    return

        results = await asyncio.gather(*(whole() if i % 2 else cut() for i in range(40)))
    texts = [r for r in results if r is not None]
    assert len(texts) == 20 and len(set(texts)) == 1
    slow_server.wait_idle()


def test_slow_reader_gets_all(start_server):
    """A client that reads nothing for a while holds up its own stream only, and loses nothing."""
    running = start_server(MockEngine(length=10**6, max_model_len=60_000))
    body = json.dumps({"prompt": "x", "max_tokens": 20_000, "stream": True, "stream_options": {"include_usage": True}}).encode()
    with socket.create_connection(("127.0.0.1", running.port)) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        sock.sendall(f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        time.sleep(1.0)
        # Before anything is read of the first: one that waited for it would wait for ever.
        assert httpx.post(running.url + COMPLETIONS, json={"prompt": "y", "max_tokens": 20}, timeout=20).status_code == 200
        sock.settimeout(60)
        received = bytearray()
        while chunk := sock.recv(2**16):
            received += chunk
    assert b'"completion_tokens":20000' in received and b"[DONE]" in received


# -- engines that die


def test_dead_engine(start_server):
    running = start_server(MockEngine(length=10**6))
    running.engine.fail_after = 10
    answer = httpx.post(running.url + CHAT, json={**LONG, "stream": True})
    assert answer.status_code == 200
    last = answer.text.strip().split("\n\n")[-1]
    assert json.loads(last[6:])["error"]["code"] == "engine_dead" and "[DONE]" not in answer.text
    for path, body in ((CHAT, LONG), (CHAT, {**LONG, "stream": True}), (COMPLETIONS, {"prompt": "x"})):
        answer = httpx.post(running.url + path, json=body)
        assert answer.status_code == 503 and answer.json()["error"]["type"] == "server_error"
    assert httpx.get(running.url + "/health").status_code == 503
    assert httpx.get(running.url + "/metrics").status_code == 200
    with pytest.raises(openai.APIError):
        openai.OpenAI(base_url=running.url + "/v1", api_key="x", max_retries=0).completions.create(model=MODEL, prompt="x")


def test_error_event_reaches_openais_client(start_server):
    running = start_server(MockEngine(length=10**6))
    running.engine.fail_after = 10
    client = openai.OpenAI(base_url=running.url + "/v1", api_key="x", max_retries=0)
    with pytest.raises(openai.APIError, match="engine"):
        list(client.chat.completions.create(model=MODEL, messages=HELLO, stream=True))


def test_a_fault_of_ours_says_nothing_of_it(start_server, caplog):
    running = start_server()

    def broken(*args):
        raise RuntimeError("private detail")

    running.engine.check_prompt = broken
    answer = httpx.post(running.url + COMPLETIONS, json={"prompt": "x"})
    assert answer.status_code == 500 and "private" not in answer.text and answer.json()["error"]["code"] == "internal_error"
    assert "private detail" in caplog.text
    running.engine.tokenizer.encode = broken
    assert httpx.post(running.url + "/tokenize", json={"prompt": "x"}).status_code == 500
    assert httpx.get(running.url + "/health").status_code == 200


def test_priority_needs_the_policy(start_server):
    fcfs = start_server(scheduling_policy="fcfs")
    answer = httpx.post(fcfs.url + COMPLETIONS, json={"prompt": "x", "priority": 3})
    assert answer.status_code == 400 and "--scheduling-policy" in answer.text
    assert httpx.post(fcfs.url + COMPLETIONS, json={"prompt": "x", "priority": 0, "max_tokens": 1}).status_code == 200
    priority = start_server(scheduling_policy="priority")
    assert httpx.post(priority.url + COMPLETIONS, json={"prompt": "x", "priority": 3, "max_tokens": 1}).status_code == 200
    assert priority.engine.last_request["priority"] == 3


def test_without_a_tokenizer(start_server):
    engine = MockEngine()
    engine.tokenizer = engine.chat_template = None
    running = start_server(engine)
    assert "token ids" in httpx.post(running.url + COMPLETIONS, json={"prompt": "x"}).json()["error"]["message"]
    assert httpx.post(running.url + CHAT, json=LONG).status_code == 400
    answer = httpx.post(running.url + COMPLETIONS, json={"prompt": [65, 66], "max_tokens": 2, "logprobs": 1, "echo": True})
    assert answer.status_code == 200


# -- the process


def test_port_taken_and_bad_host():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match="--port"):
            bind("127.0.0.1", taken.getsockname()[1])
    with pytest.raises(ConfigError, match="--host"):
        bind("no.such.host.invalid", 80)
    with pytest.raises(ConfigError, match="--port"):
        bind("127.0.0.1", 99999)


ENVIRONMENT = {**os.environ, "PYTHONPATH": os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))}
SCRIPT = """
import asyncio, logging, signal, sys
from octavo.config import EngineConfig, ServerOptions
from octavo.server.run import serve
logging.basicConfig(level=logging.INFO, format="%(name)s %(message)s", stream=sys.stdout)

async def start(config, options):
    from octavo.server.mock import MockEngine
    engine = MockEngine(tick_s=0.02, length=10**6)
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, setattr, engine, "tick_s", 0.0)  # from now on it hurries
    return engine

options = ServerOptions(port=int(sys.argv[1]), served_model_name=("mock-model",), drain_timeout=float(sys.argv[2]))
serve(EngineConfig(), options, start_engine=start)
assert "torch" not in sys.modules
print("ended", flush=True)
"""


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=120, env=ENVIRONMENT)


class Process:
    def __init__(self, drain: float = 10, port: int = 0) -> None:
        command = [sys.executable, "-c", SCRIPT, str(port), str(drain)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ENVIRONMENT)
        self.lines = []
        while "Octavo serves" not in (line := self.process.stdout.readline()):
            assert line, self.lines
            self.lines.append(line)
        self.lines.append(line)
        self.url = line.split(" on ")[1].strip()

    def end(self) -> str:
        text, _ = self.process.communicate(timeout=60)
        return "".join(self.lines) + text


@pytest.fixture
def process():
    made = []

    def start(**kwargs):
        made.append(Process(**kwargs))
        return made[-1]

    yield start
    for p in made:
        if p.process.poll() is None:
            p.process.kill()
            p.process.communicate()


def stream_in(url: str, max_tokens: int):
    http = httpx.Client(base_url=url, timeout=60)
    answer = http.send(http.build_request("POST", CHAT, json={"messages": HELLO, "max_tokens": max_tokens, "stream": True}), stream=True)
    chunks = answer.iter_text()
    next(chunks)
    return chunks


def refused(url: str) -> bool:
    """Whether nobody listens there any more."""
    try:
        httpx.get(url + "/health")
    except httpx.ConnectError:
        return True
    except httpx.HTTPError:  # one that was about to be accepted
        pass
    return False


def test_sigterm_drains(process):
    p = process(drain=250)
    chunks = stream_in(p.url, 1900)
    p.process.send_signal(signal.SIGTERM)
    until(lambda: refused(p.url))
    p.process.send_signal(signal.SIGUSR1)
    assert "[DONE]" in "".join(chunks)
    output = p.end()
    assert p.process.returncode == 0 and output.count("Octavo serves") == 1 and "finishing 1 running" in output
    assert output.rstrip().endswith("ended") and "Traceback" not in output


def test_sigterm_idle_ends_at_once(process):
    p = process(drain=250)
    with httpx.Client(base_url=p.url) as http:
        assert http.get("/health").status_code == 200  # an idle connection holds nothing up
        p.process.send_signal(signal.SIGTERM)
        p.end()
    assert p.process.returncode == 0


@pytest.mark.parametrize("how", ["second signal", "timeout"])
def test_running_requests_are_told(process, how):
    p = process(drain=0.3 if how == "timeout" else 250)
    chunks = stream_in(p.url, 100_000)
    p.process.send_signal(signal.SIGTERM)
    if how == "second signal":
        until(lambda: refused(p.url))  # it has seen the first: two that come together are one
        p.process.send_signal(signal.SIGTERM)
    text = "".join(chunks)
    assert "shutting down" in text and "[DONE]" not in text
    output = p.end()
    assert p.process.returncode == 0, output


def test_sigint_while_starting():
    first = "    from octavo.server.mock"
    hang = "    import asyncio, os, signal; os.kill(os.getpid(), signal.SIGINT); await asyncio.sleep(110)\n"
    done = python(SCRIPT.replace(first, hang + first), "0", "1")
    assert done.returncode == 0 and "Stopped before" in done.stdout and done.stdout.rstrip().endswith("ended"), done


def test_run_is_light_to_import():
    heavy = ("torch", "uvicorn", "starlette", "msgspec", "prometheus_client")
    done = python(f"import sys, octavo.server.run; print([m for m in {heavy} if m in sys.modules])")
    assert done.stdout.strip() == "[]", done


def test_default_names():
    from octavo.server.run import model_names

    assert model_names(EngineConfig(model="/models/x"), ServerOptions()) == ("/models/x",)
    assert model_names(EngineConfig(model="x"), ServerOptions(served_model_name=("a", "b"))) == ("a", "b")
