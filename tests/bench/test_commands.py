"""The commands as they are typed: against the mock server, against faults, and the shape of what they write."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octavo.bench import report
from octavo.bench.options import ReportOptions, TargetOptions
from octavo.bench.target import connect, headers_of
from octavo.cli.main import main
from octavo.errors import ConfigError, OctavoError
from tests.bench.conftest import TEXT_EVENT, Serving, chunk, event, good_answer, interrupted

# vLLM's names and what they hold; scripts that read its results read these.
SCHEMA: dict[str, Any] = {
    "date": str,
    "endpoint_type": str,
    "backend": str,
    "label": (str, type(None)),
    "model_id": str,
    "tokenizer_id": str,
    "num_prompts": int,
    "request_rate": (float, str),
    "burstiness": float,
    "max_concurrency": (int, type(None)),
    "duration": float,
    "completed": int,
    "failed": int,
    "total_input_tokens": int,
    "total_output_tokens": int,
    "request_throughput": float,
    "request_goodput": (float, type(None)),
    "output_throughput": float,
    "total_token_throughput": float,
    "max_output_tokens_per_s": float,
    "max_concurrent_requests": int,
    **{f"{name}_{metric}_ms": float for metric in ("ttft", "tpot", "itl", "e2el") for name in ("mean", "median", "std", "p90", "p99")},
}
LISTS = ("input_lens", "output_lens", "ttfts", "itls", "start_times", "generated_texts", "errors")
SMALL = ["--random-input-len", "40", "--random-output-len", "6"]


def bench(*words: Any) -> int:
    return main(["bench", *map(str, words)])


def load_result(folder: Path, name: str = "r.json") -> dict[str, Any]:
    return json.loads((folder / name).read_text(encoding="utf-8"))


def test_serve_against_the_mock(mock_port: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["serve", "--port", mock_port, *SMALL, "--num-prompts", 12, "--max-concurrency", 4, "--ignore-eos", "--warmups", 2]
    words += ["--goodput", "ttft:60000", "tpot:60000", "--save-result", "--save-detailed", "--metadata", "gpu=none", "run=1"]
    assert bench(*words, "--result-dir", tmp_path / "new", "--result-filename", "r.json") == 0
    result = load_result(tmp_path / "new")
    for name, kind in SCHEMA.items():
        assert isinstance(result[name], kind), (name, result[name])
    assert (result["completed"], result["failed"], result["failures"]) == (12, 0, {})
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (12 * 40, 12 * 6)  # exact, by the server's count
    assert result["max_concurrent_requests"] == 4 == result["max_concurrency"] and result["request_rate"] == "inf"
    assert result["request_goodput"] == result["request_throughput"]
    assert (result["gpu"], result["run"], result["model_id"]) == ("none", "1", "mock-model")
    assert all(len(result[name]) == 12 for name in LISTS) and all(result["generated_texts"])
    assert 0 < result["mean_ttft_ms"] < result["mean_e2el_ms"] and result["p99_itl_ms"] < 60_000
    text = capsys.readouterr().out
    for part in ("Successful requests: ", "(TTFT)", "p99", "Request goodput", "r.json"):
        assert part in text


def test_chats_have_the_exact_length_too(mock_port: int, tmp_path: Path) -> None:
    words = ["serve", "--base-url", f"http://localhost:{mock_port}/v1", "--backend", "openai-chat", "--num-prompts", 3]
    words += ["--input-len", 60, "--output-len", 3, "--request-rate", 200, "--burstiness", 0.5, "--percentile-metrics", "ttft"]
    assert bench(*words, "--append-result", "--result-dir", tmp_path, "--result-filename", "r.json") == 0
    assert bench(*words, "--append-result", "--result-dir", tmp_path, "--result-filename", "r.json", "--metric-percentiles", "50,99.9") == 0
    first, second = map(json.loads, (tmp_path / "r.json").read_text().splitlines())
    assert first["total_input_tokens"] == 180 and first["endpoint_type"] == "openai-chat" and first["request_rate"] == 200
    assert "input_lens" not in first and "mean_tpot_ms" not in first and "p99.9_ttft_ms" in second and "p90_ttft_ms" not in second


@pytest.mark.parametrize("dataset", ["sonnet", "shared-prefix", "custom"])
def test_datasets_against_the_mock(mock_port: int, tmp_path: Path, dataset: str) -> None:
    (tmp_path / "f.jsonl").write_text('{"prompt": "hello there", "output_len": 2}\n{"prompt": [70, 71, 72]}')
    path = ["--dataset-path", tmp_path / "f.jsonl"] if dataset == "custom" else []
    words = ["serve", "--port", mock_port, "--dataset-name", dataset, *path, "--num-prompts", 4, "--output-len", 2]
    assert bench(*words, "--ignore-eos", "--save-result", "--result-dir", tmp_path, "--result-filename", "r.json") == 0
    result = load_result(tmp_path)
    assert result["completed"] == 4 and result["total_output_tokens"] == 8


def test_requests_say_what_was_asked_for(raw_server: Callable[..., Serving], monkeypatch: pytest.MonkeyPatch) -> None:
    serving = raw_server(good_answer)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    words = ["serve", "--port", serving.port, *SMALL, "--num-prompts", 3, "--top-p", 0.5, "--header", "X-A=b=c", "--seed", 5]
    assert bench(*words, "--extra-body", '{"priority": 2}', "--model", "big/model", "--served-model-name", "short") == 0
    bodies = serving.raw.bodies
    assert len(bodies) == 4 and len({tuple(body["prompt"]) for body in bodies}) == 4  # a trial, then the load; no two alike
    assert all(len(body["prompt"]) == 40 and body["max_tokens"] == 6 for body in bodies)
    rest = {key: value for key, value in bodies[1].items() if key not in ("prompt", "max_tokens")}
    expected = {
        "model": "short",
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.0,
        "top_p": 0.5,
        "priority": 2,
    }
    assert rest == expected
    assert all("Authorization: Bearer sk-secret\r\n" in head and "X-A: b=c\r\n" in head for head in serving.raw.heads)


def test_failures_are_counted_with_their_reason(
    raw_server: Callable[..., Serving], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def answer(body: Any, number: int, writer: asyncio.StreamWriter) -> None:
        if number % 4 == 2:
            data = b'{"error": {"message": "slow down"}}'
            writer.write(b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: %d\r\n\r\n" % len(data) + data)
        elif number % 4 == 3:
            writer.write(b"HTTP/1.1 500 Oh\r\ncontent-length: 0\r\n\r\n")
        elif number > 1 and number % 4 == 0:
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk(TEXT_EVENT))
            await writer.drain()
            writer.close()
        else:
            await good_answer(body, number, writer)

    words = ["serve", "--port", raw_server(answer).port, *SMALL, "--num-prompts", 16, "--max-concurrency", 2, "--save-detailed"]
    assert bench(*words, "--result-dir", tmp_path, "--result-filename", "r.json") == 1
    result = load_result(tmp_path)
    assert (result["completed"], result["failed"]) == (4, 12)
    broken = "the connection was closed in the middle of the answer"
    assert result["failures"] == {"HTTP 429: slow down": 4, "HTTP 500": 4, broken: 4}
    assert result["total_output_tokens"] == 24 and result["errors"].count("") == 4
    assert "4 failed: HTTP 429: slow down" in capsys.readouterr().out


def test_a_server_that_dies_in_the_load(raw_server: Callable[..., Serving], tmp_path: Path) -> None:
    async def answer(body: Any, number: int, writer: asyncio.StreamWriter) -> None:
        if number == 4:
            serving.stop_listening()
        if number >= 4:
            writer.close()
            return
        await good_answer(body, number, writer)

    serving = raw_server(answer)
    words = ["serve", "--port", serving.port, *SMALL, "--num-prompts", 8, "--max-concurrency", 1, "--save-result"]
    assert bench(*words, "--result-dir", tmp_path, "--result-filename", "r.json") == 1
    result = load_result(tmp_path)
    assert (result["completed"], result["failed"]) == (2, 6)
    assert result["failures"]["no connection: connection refused"] >= 5


def test_a_server_that_refuses_the_first_request(raw_server: Callable[..., Serving], capsys: pytest.CaptureFixture[str]) -> None:
    async def answer(body: Any, number: int, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad\r\ncontent-length: 10\r\n\r\nno prompts")

    serving = raw_server(answer)
    assert bench("serve", "--port", serving.port, *SMALL, "--num-prompts", 8) == 1
    assert "The first request, a trial, failed: HTTP 400: no prompts" in capsys.readouterr().err
    assert len(serving.raw.bodies) == 1


def test_a_server_that_takes_connections_and_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        words = ["serve", "--port", silent.getsockname()[1], "--ready-check-timeout-sec", 0.5, "--request-timeout", 5]
        assert bench(*words) == 1
    assert "no answer within 0.5 s" in capsys.readouterr().err


def test_a_server_that_lists_no_models_is_asked_for_the_one_that_was_named() -> None:
    for listed in (b"<html>", b"[1]", b'{"data": [{"id": null}]}'):

        async def models(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, listed: bytes = listed) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(listed) + listed)

        async def name(model: str | None, handler: Any = models) -> str:
            server = await asyncio.start_server(handler, "127.0.0.1", 0)
            async with server:
                port = server.sockets[0].getsockname()[1]
                async with connect(TargetOptions(port=port, model=model), need_counter=False) as target:
                    return target.model

        assert asyncio.run(name("given")) == "given"
        with pytest.raises(OctavoError, match="--model"):
            asyncio.run(name(None))


def test_usage_that_is_no_number_is_no_usage(raw_server: Callable[..., Serving], tmp_path: Path) -> None:
    async def answer(body: Any, number: int, writer: asyncio.StreamWriter) -> None:
        usage = event({"choices": [], "usage": {"prompt_tokens": None, "completion_tokens": "six"}})
        data = TEXT_EVENT * 6 + usage + event(b"[DONE]")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(data) + data)

    words = ["serve", "--port", raw_server(answer).port, *SMALL, "--num-prompts", 2, "--save-result", "--result-dir", tmp_path]
    assert bench(*words, "--result-filename", "r.json") == 0
    result = load_result(tmp_path)
    assert (result["total_output_tokens"], result["output_tokens_counted_by"]) == (12, "chunks")


def test_ctrl_c_keeps_what_has_ended(raw_server: Callable[..., Serving], tmp_path: Path) -> None:
    async def answer(body: Any, number: int, writer: asyncio.StreamWriter) -> None:
        if number > 6:  # a trial, then five that end
            await asyncio.sleep(300)
        await good_answer(body, number, writer)

    serving = raw_server(answer)
    raw = serving.raw
    words = ["serve", "--port", serving.port, *SMALL]
    words += ["--num-prompts", 40, "--max-concurrency", 2, "--save-detailed", "--result-dir", tmp_path, "--result-filename", "r.json"]
    done = interrupted(words, lambda: raw.active == 2 and len(raw.bodies) == 8)
    result = load_result(tmp_path)
    assert done.returncode == 130 and "Traceback" not in done.stderr
    assert (result["interrupted"], result["completed"], result["failed"], result["num_prompts"]) == (True, 5, 0, 40)
    assert result["total_output_tokens"] == 30 and len(result["ttfts"]) == len(result["input_lens"]) == 5
    assert "Interrupted: these are the 5 of 40 requests that had ended" in done.stdout and "(TTFT)" in done.stdout


def test_ctrl_c_before_anything_has_ended(raw_server: Callable[..., Serving]) -> None:
    async def answer(body: Any, number: int, writer: asyncio.StreamWriter) -> None:
        if number > 1:
            await asyncio.sleep(300)
        await good_answer(body, number, writer)

    serving = raw_server(answer)
    done = interrupted(["serve", "--port", serving.port, *SMALL, "--num-prompts", 4], lambda: len(serving.raw.bodies) == 5)
    assert (done.returncode, done.stdout) == (130, "") and "Traceback" not in done.stderr


def test_nothing_listens(free_port: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("serve", "--port", free_port, "--ready-check-timeout-sec", 0.3) == 1
    error = capsys.readouterr().err
    assert "Nothing answers at http://127.0.0.1" in error and "octavo serve" in error


def test_a_chat_without_a_way_to_count(raw_server: Callable[..., Serving], capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("serve", "--port", raw_server(good_answer).port, "--backend", "openai-chat") == 2
    assert "--tokenizer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["serve", "--num-promts", "3"], "unknown flag --num-promts; did you mean --num-prompts?"),
        (["sweep", "--max-concurrency", "3"], "unknown flag --max-concurrency; did you mean --concurrencies?"),
        (["serv"], "did you mean serve?"),
        (["--port", "3"], "flags follow the command"),
        (["latency", "--batchsize", "3"], "did you mean --batch-size?"),
        (["serve", "--request-rate", "0"], "--request-rate must be more than 0"),
        (["serve", "--request-rate", "x"], "'x' is not a number"),
        (["serve", "--burstiness", "0"], "--burstiness"),
        (["serve", "--burstiness", "2", "--ready-check-timeout-sec", "0.1"], "--burstiness shapes the arrivals of --request-rate; without"),
        (
            ["sweep", "--burstiness", "2", "--ready-check-timeout-sec", "0.1"],
            "--burstiness shapes the arrivals of --request-rates; without",
        ),
        (["sweep", "--point-seconds", "3", "--ready-check-timeout-sec", "0.1"], "--point-seconds is for --request-rates"),
        (["serve", "--num-prompts", "0"], "--num-prompts must be at least 1"),
        (["serve", "--goodput", "itl:3"], "--goodput 'itl:3'"),
        (["serve", "--goodput", "ttft"], "--goodput 'ttft': must look like NAME:MS"),
        (["serve", "--goodput", "ttft:3,4"], "--goodput 'ttft:3,4'"),
        (["serve", "--goodput", "ttft:-1"], "--goodput 'ttft:-1'"),
        (["serve", "--endpoint", "v1/completions"], "must begin with a slash"),
        (["serve", "--base-url", "http://me:secret@localhost:9"], "a name and password in the address are not sent"),
        (["serve", "--metric-percentiles", "101"], "--metric-percentiles"),
        (["serve", "--percentile-metrics", "ttft,foo"], "--percentile-metrics"),
        (["serve", "--metadata", "a"], "KEY=VALUE"),
        (["serve", "--endpoint", "/v1/embeddings"], "--endpoint"),
        (["serve", "--backend", "openai-chat", "--endpoint", "/v1/completions"], "--backend openai-chat"),
        (["serve", "--backend", "triton"], "invalid choice"),
        (["serve", "--extra-body", "{"], "--extra-body"),
        (["serve", "--extra-body", "[]"], "not a JSON object"),
        (["sweep", "--concurrencies", "1,x"], "--concurrencies"),
        (["sweep", "--concurrencies", "0,1"], "whole numbers"),
        (["sweep", "--concurrencies", "1", "--request-rates", "1"], "either"),
        (["sweep", "--concurrencies", "inf"], "whole numbers"),
        (["sweep", "--request-rates", "0"], "--request-rates 0: must be numbers above 0"),
        (["sweep", "--request-rates", "1,inf"], "--request-rates 1,inf"),
        (["sweep", "--request-rates", "1", "--point-seconds", "inf"], "--point-seconds"),
        (["sweep", "--slo-ttft-ms", "0"], "--slo-ttft-ms"),
        (["startup", "--repeat", "0"], "--repeat must be at least 1"),
        (["throughput", "--n", "0"], "--n must be at least 1"),
        (["kernels", "nope"], "Unknown kernel benchmark 'nope'"),
    ],
)
def test_refusals(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = bench(*words)
    except SystemExit as error:
        status = int(error.code or 0)
    assert status == 2 and message in capsys.readouterr().err


def test_help_names_the_commands_and_loads_nothing_heavy() -> None:
    code = (
        "import sys; from octavo.cli.main import main\n"
        "for words in (['bench'], ['bench', 'serve', '--help'], ['bench', 'sweep', '--help'], ['bench', 'latency', '--help']):\n"
        "    try: main(words)\n"
        "    except SystemExit: pass\n"
        "print('LOADED', *sorted({name.split('.')[0] for name in sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.splitlines()[-1].split()[1:])
    assert not loaded & {"torch", "numpy", "matplotlib", "asyncio", "uvloop", "tqdm", "msgspec", "tokenizers"}
    for part in (
        "throughput",
        "--random-range-ratio",
        "--num-warmups, --warmups",
        "--slo-ttft-ms",
        "--num-iters-warmup",
        "--max-model-len",
    ):
        assert part in done.stdout


def test_a_run_needs_no_torch_and_no_engine(mock_port: int) -> None:
    words = ["bench", "serve", "--port", str(mock_port), *SMALL, "--num-prompts", "2"]
    code = (
        f"import sys; from octavo.cli.main import main; assert main({words!r}) == 0\n"
        "assert not {'torch', 'octavo.engine', 'octavo.frontend', 'octavo.server'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    assert headers_of(TargetOptions()) == {}
    monkeypatch.setenv("OPENAI_API_KEY", "b")
    assert headers_of(TargetOptions()) == {"Authorization": "Bearer b"}
    monkeypatch.setenv("OCTAVO_API_KEY", "a")
    assert headers_of(TargetOptions()) == {"Authorization": "Bearer a"}
    assert headers_of(TargetOptions(api_key="c", header=("X=y",))) == {"Authorization": "Bearer c", "X": "y"}


def test_default_file_names() -> None:
    result = {"backend": "openai", "model_id": "org/My Model", "max_concurrency": 8, "request_rate": "inf", "date": "D"}
    assert report.default_filename(result, ReportOptions()) == "openai-infqps-concurrency8-My_Model-D.json"
    assert report.default_filename(result | {"max_concurrency": None}, ReportOptions(label="a")) == "a-infqps-My_Model-D.json"


def test_a_result_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="Cannot write"):
        report.save({}, str(tmp_path / "file" / "x.json"))
    assert json.loads(Path(report.save({"a": float("inf")}, str(tmp_path / "x.json"))).read_text()) == {"a": "inf"}
    report.check_writable(str(tmp_path / "x.json"))
    report.check_writable(str(tmp_path / "new" / "y.json"))
    assert (tmp_path / "x.json").read_text() and list((tmp_path / "new").iterdir()) == []


@pytest.mark.parametrize(
    "words",
    [
        ["serve", "--save-result", "--result-dir", "FILE"],
        ["serve", "--save-detailed", "--result-filename", "FOLDER"],
        ["sweep", "--result-dir", "FILE"],
        ["sweep", "--result-dir", "FOLDER", "--plot", "FOLDER"],
        ["throughput", "--model", "FILE", "--output-json", "FOLDER"],
        ["latency", "--model", "FILE", "--output-json", "FILE/r.json"],
        ["startup", "--model", "FILE", "--output-json", "FILE/r.json"],
    ],
)
def test_where_results_go_is_tried_before_anything_is_measured(
    tmp_path: Path, words: list[str], free_port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing listens, and the model is none: the file is what is complained of first."""
    (tmp_path / "file").write_text("")
    words = [word.replace("FILE", str(tmp_path / "file")).replace("FOLDER", str(tmp_path)) for word in words]
    port = ["--port", str(free_port), "--ready-check-timeout-sec", "0.1"] if words[0] in ("serve", "sweep") else []
    if words[0] == "sweep":
        pytest.importorskip("matplotlib")
    assert bench(*words, *port) == 2
    assert "Cannot write" in capsys.readouterr().err


def test_a_kernel_benchmark_that_fails_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """And the others run all the same."""
    from octavo.bench import kernels

    ran: list[str] = []

    def run(words: list[str]) -> subprocess.CompletedProcess[str]:
        ran.append(words[-1])
        return subprocess.CompletedProcess(words, int(words[-1].endswith(("attention.bench", ".linear"))))

    monkeypatch.setattr(kernels, "_has_gpu", lambda: True)
    monkeypatch.setattr(kernels.subprocess, "run", run)
    assert bench("kernels") == 1
    assert {"octavo.attention.bench", "octavo.kernels.cpu.bench"} < set(ran) and len(ran) == 5
    told = [line for line in capsys.readouterr().err.splitlines() if "failed" in line]
    assert len(told) == 2 and "benchmark linear failed" in told[0] and "benchmark attention failed" in told[1]
    assert bench("kernels", "cpu", "ops") == 0 and ran[5:] == ["octavo.kernels.cpu.bench", "octavo.kernels.bench.ops"]
