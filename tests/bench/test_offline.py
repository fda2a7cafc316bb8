"""Throughput and latency with a stand-in for the LLM; start-up with processes that fail, and with stand-ins for marks."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from octavo.bench import startup
from octavo.bench.http import run_loop
from octavo.bench.offline import latency_result, repeat, throughput_result
from octavo.cli.bench import engine_words
from octavo.cli.main import main
from octavo.errors import OctavoError
from octavo.server.mock import FakeTokenizer


class FakeLLM:
    """Answers at once with as many tokens as are asked for."""

    made: list[FakeLLM] = []

    def __init__(self, **options: Any) -> None:
        self.options, self.calls = options, []
        self.model_config, self.max_model_len = SimpleNamespace(vocab_size=300), 256
        FakeLLM.made.append(self)

    def get_tokenizer(self) -> Any:
        return None if self.options.get("skip_tokenizer_init") else FakeTokenizer()

    def generate(self, prompts: list[Any], params: Any, *, use_tqdm: bool = True) -> list[Any]:
        params = params if isinstance(params, list) else [params] * len(prompts)
        self.calls.append((prompts, params))
        ids = [p["prompt_token_ids"] if isinstance(p, dict) else FakeTokenizer().encode(p) for p in prompts]
        return [
            SimpleNamespace(prompt_token_ids=i, outputs=[SimpleNamespace(token_ids=[1] * q.max_tokens)] * q.n)
            for i, q in zip(ids, params, strict=True)
        ]


@pytest.fixture
def fake_llm(monkeypatch: pytest.MonkeyPatch) -> list[FakeLLM]:
    module = types.ModuleType("octavo.frontend.llm")
    module.LLM = FakeLLM  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "octavo.frontend.llm", module)
    FakeLLM.made = []
    return FakeLLM.made


@pytest.mark.parametrize("ids", [True, False])
def test_throughput(fake_llm: list[FakeLLM], tmp_path: Path, capsys: pytest.CaptureFixture[str], ids: bool) -> None:
    words = ["bench", "throughput", "--num-prompts", "9", "--input-len", "30", "--output-len", "5", "--n", "2", "--seed", "3"]
    words += ["--skip-tokenizer-init"] if ids else []
    assert main([*words, "--model", "m", "--output-json", str(tmp_path / "r.json")]) == 0
    result = json.loads((tmp_path / "r.json").read_text())
    assert (result["num_requests"], result["total_input_tokens"], result["total_output_tokens"]) == (9, 270, 90)
    assert result["total_num_tokens"] == 360 and result["tokens_per_second"] == pytest.approx(360 / result["elapsed_time"])
    assert fake_llm[0].options == {"model": "m", "seed": 3} | ({"skip_tokenizer_init": True} if ids else {})
    prompts, params = fake_llm[0].calls[-1]
    assert isinstance(prompts[0], dict) == ids and all(p.ignore_eos and p.n == 2 for p in params)
    assert "requests/s" in capsys.readouterr().out


def test_latency(fake_llm: list[FakeLLM], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "bench",
        "latency",
        "--batch-size",
        "3",
        "--input-len",
        "7",
        "--output-len",
        "5",
        "--num-iters",
        "4",
        "--num-iters-warmup",
        "2",
    ]
    assert main([*words, "--output-json", str(tmp_path / "r.json"), "--disable-detokenize"]) == 0
    result = json.loads((tmp_path / "r.json").read_text())
    assert len(result["latencies"]) == 4 and set(result["percentiles"]) == {"10", "25", "50", "75", "90", "99"}
    llm = fake_llm[0]
    assert llm.options == {"enable_prefix_caching": False} and len(llm.calls) == 6
    prompts, params = llm.calls[-1]
    assert [len(p["prompt_token_ids"]) for p in prompts] == [7] * 3 and params[0].max_tokens == 5 and not params[0].detokenize
    assert main([*words, "--enable-prefix-caching"]) == 0 and fake_llm[1].options == {"enable_prefix_caching": True}
    assert "Average latency" in capsys.readouterr().out


def test_ctrl_c_keeps_the_iterations_before(
    fake_llm: list[FakeLLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = FakeLLM.generate

    def generate(self: FakeLLM, *args: Any, **options: Any) -> list[Any]:
        if len(self.calls) == fine:
            raise KeyboardInterrupt
        return answer(self, *args, **options)

    monkeypatch.setattr(FakeLLM, "generate", generate)
    words = ["bench", "latency", "--num-iters-warmup", "1", "--num-iters", "9", "--output-json", str(tmp_path / "r.json")]
    fine = 4  # a warm-up and three
    assert main(words) == 130
    result = json.loads((tmp_path / "r.json").read_text())
    assert len(result["latencies"]) == 3 and result["interrupted"]
    assert "Interrupted: these are 3 of 9 iterations" in capsys.readouterr().out
    fine = 1
    (tmp_path / "r.json").unlink()
    assert main(words) == 130 and not (tmp_path / "r.json").exists()


@pytest.mark.parametrize(("end", "status"), [(KeyboardInterrupt(), 130), (OctavoError("it died"), 1)])
def test_the_starts_before_an_end_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, end: BaseException, status: int) -> None:
    done: list[float] = []

    def start(*_: Any) -> dict[str, float]:
        if len(done) == 2:
            raise end
        done.append(1.0)
        return {"first_token": 1.0}

    monkeypatch.setattr(startup, "start_llm", start)
    words = ["bench", "startup", "--what", "llm", "--repeat", "5", "--output-json", str(tmp_path / "r.json")]
    assert main(words) == status
    assert json.loads((tmp_path / "r.json").read_text())["llm"]["starts"] == [{"first_token": 1.0}] * 2


@pytest.mark.parametrize("command", ["latency", "throughput"])
def test_lengths_beyond_the_context(fake_llm: list[FakeLLM], command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", command, "--input-len", "250", "--output-len", "7"]) == 2
    assert "257 tokens" in capsys.readouterr().err


def test_results_of_known_times() -> None:
    found = latency_result([1.0, 2.0, 3.0, 4.0])
    assert (found["avg_latency"], found["percentiles"]["50"]) == (2.5, 2.5) and found["percentiles"]["99"] == pytest.approx(3.97)
    assert throughput_result(2.0, [(10, 5), (20, 5)])["tokens_per_second"] == 20
    calls: list[int] = []
    assert len(repeat(lambda: calls.append(1), 3, 2)) == 2 and len(calls) == 5


def test_engine_words_are_flags_of_serve() -> None:
    import argparse

    from octavo.cli import options
    from octavo.cli.flags import Parser

    values = {"model": "a b", "max_model_len": 64, "enforce_eager": True, "enable_prefix_caching": False, "swap_space": 1.5}
    parser = Parser(prog="x")
    options.add_engine_flags(parser)
    assert options.engine_options(argparse.Namespace(**vars(parser.parse(engine_words(values))))) == values


def test_a_start_that_fails_says_why(tmp_path: Path) -> None:
    with startup.caches(True) as environment:
        folders = {environment[name] for name in startup.CACHES}
        assert len(folders) == 3 and not any(Path(folder).exists() for folder in folders)
        with pytest.raises(OctavoError, match="ended with status 1 before it answered(.|\n)*nonexistent"):
            run_loop(startup.start_server(["--model=/nonexistent/m"], environment, 240.0))
        with pytest.raises(OctavoError, match="ended with status 1(.|\n)*nonexistent"):
            startup.start_llm({"model": "/nonexistent/m"}, environment, 240.0)


def test_startup_with_a_server_that_answers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The mock in the place of ``octavo serve``, and a program that only prints marks in the place of the LLM's."""
    popen = startup.subprocess.Popen

    def start(command: list[str], **options: Any) -> Any:
        if "serve" in command:
            command = [sys.executable, "-m", "octavo.server.mock", command[command.index("--port") + 1]]
        return popen(command, **options)

    monkeypatch.setattr(startup.subprocess, "Popen", start)
    monkeypatch.setattr(startup, "LLM_PROGRAM", "import time; print('MARKS{\"model_loaded\": %f}' % time.monotonic())")
    assert main(["bench", "startup", "--repeat", "2", "--output-json", str(tmp_path / "r.json"), "--max-model-len", "64"]) == 0
    result = json.loads((tmp_path / "r.json").read_text())
    assert list(result["serve"]["starts"][0]) == ["ready", "first_token", "second_token"] and len(result["serve"]["starts"]) == 2
    for start_ in (*result["serve"]["starts"], *result["llm"]["starts"]):
        assert 0 < list(start_.values())[0] and list(start_.values()) == sorted(start_.values())
    text = capsys.readouterr().out
    assert "octavo serve: seconds until" in text and "model loaded" in text and "median" in text
