"""``octavo generate`` with a stand-in for ``LLM``: what it is handed, and what is printed."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octavo.cli import sampling_flags
from octavo.cli.generate import parse_lines
from octavo.cli.main import main
from octavo.errors import ConfigError
from octavo.frontend.outputs import CompletionOutput, Logprob, RequestOutput
from octavo.frontend.params import SamplingParams
from octavo.frontend.structured import StructuredOutput


class FakeLLM:
    """Answers every prompt with itself in capitals, n times."""

    instances: list[FakeLLM] = []
    default = SamplingParams(temperature=0.25, top_k=7)

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.calls: list[tuple[str, list[Any], SamplingParams]] = []
        FakeLLM.instances.append(self)

    def get_default_sampling_params(self) -> SamplingParams:
        return self.default.clone()

    def generate(self, prompts: list[Any], params: SamplingParams, use_tqdm: bool) -> list[RequestOutput]:
        self.calls.append(("generate", prompts, params))
        return [self._answer(p if isinstance(p, str) else str(p["prompt_token_ids"]), params) for p in prompts]

    def chat(self, conversations: list[Any], params: SamplingParams, use_tqdm: bool) -> list[RequestOutput]:
        self.calls.append(("chat", conversations, params))
        return [self._answer(f"chat:{c[-1]['content']}", params) for c in conversations]

    @staticmethod
    def _answer(text: str, params: SamplingParams) -> RequestOutput:
        logprobs = [{5: Logprob(-0.5, 1, "x")}] if params.logprobs is not None else None
        outputs = [CompletionOutput(i, text.upper(), [5, 6], -1.0, logprobs, "stop") for i in range(params.n)]
        return RequestOutput("r", text, [1, 2], outputs, True)


@pytest.fixture(autouse=True)
def llm(fake_module: Callable[..., Any]) -> type[FakeLLM]:
    FakeLLM.instances = []
    fake_module("octavo.frontend.llm", LLM=FakeLLM)
    return FakeLLM


def test_one_prompt_prints_the_text_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "hello there", "--model", "m", "--max-model-len", "1k"]) == 0
    assert capsys.readouterr().out == "HELLO THERE\n"
    (llm,) = FakeLLM.instances
    assert llm.options == {"model": "m", "max_model_len": 1000}
    name, prompts, params = llm.calls[0]
    assert (name, prompts) == ("generate", ["hello there"])
    assert (params.temperature, params.top_k, params.max_tokens) == (0.25, 7, 256)  # the model's defaults, our length


def test_flags_win_over_the_models_defaults() -> None:
    main(["generate", "a", "b", "--temperature", "0", "--max_tokens", "5", "--seed", "9", "--n", "2", "--stop", "X", "--stop", "Y"])
    params = FakeLLM.instances[0].calls[0][2]
    assert (params.temperature, params.max_tokens, params.seed, params.n, params.stop, params.top_k) == (0, 5, 9, 2, ["X", "Y"], 7)
    assert "seed" not in FakeLLM.instances[0].options  # --seed is the request's


def test_several_outputs_are_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    main(["generate", "a", "b", "--n", "2"])
    assert capsys.readouterr().out.count("### prompt") == 4


def test_standard_input_is_one_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("two\nlines\n"))
    assert main(["generate"]) == 0
    assert FakeLLM.instances[0].calls[0][1] == ["two\nlines\n"]


def test_json_lines_in_and_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "in.jsonl"
    lines = [
        '"plain"',
        "",
        '{"prompt": "text", "id": 7}',
        '{"prompt_token_ids": [3, 4]}',
        '{"messages": [{"role": "user", "content": "hé"}], "id": "m"}',
    ]
    path.write_text("\n".join(lines), encoding="utf-8")
    assert main(["generate", "first", "--input", str(path), "--json", "--logprobs", "1"]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [r["outputs"][0]["text"] for r in records] == ["FIRST", "PLAIN", "TEXT", "[3, 4]", "CHAT:HÉ"]
    assert [r.get("id") for r in records] == [None, None, 7, None, "m"]
    assert records[0]["outputs"][0]["logprobs"] == [{"5": {"logprob": -0.5, "rank": 1, "decoded_token": "x"}}]
    assert records[0]["prompt_token_ids"] == [1, 2] and records[0]["outputs"][0]["finish_reason"] == "stop"
    assert [call[0] for call in FakeLLM.instances[0].calls] == ["generate", "chat"]


def test_chat_makes_messages() -> None:
    main(["generate", "hi", "--chat"])
    assert FakeLLM.instances[0].calls[0][:2] == ("chat", [[{"role": "user", "content": "hi"}]])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a", "--temperature", "-1"], "--temperature: temperature must be at least 0"),
        (["a", "--top-p", "0"], "--top-p: top_p must be greater than 0"),
        (["a", "--n", "0"], "--n: n must be at least 1"),
        (["a", "--min-tokens", "300"], "min_tokens (300) must not exceed max_tokens (256)"),
        (["a", "--stop-token-ids", "1,x"], "'1,x' is not a list of token ids"),
        (["a", "--logit-bias", "[1]"], "'[1]' is not a JSON object"),
        (["a", "--logit-bias", '{"1": 200}'], "--logit-bias: logit_bias[1] must be between -100 and 100"),
        (["a", "--temprature", "1"], "unknown flag --temprature; did you mean --temperature?"),
        (["a", "--port", "1"], "unknown flag --port"),
        ([""], "The prompt is empty"),
        (["--input", "/nonexistent.jsonl"], "/nonexistent.jsonl: No such file"),
        (["a", "--max-model-len", "0"], "--max-model-len must be at least 1"),
    ],
)
def test_refusals_come_before_the_model(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main(["generate", *words])
    except SystemExit as error:
        status = error.code
    assert status == 2
    assert message in capsys.readouterr().err
    assert FakeLLM.instances == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: not JSON"),
        ("5", "line 2: must be a string or an object"),
        ("{}", "needs exactly one of prompt, prompt_token_ids, messages, got 0"),
        ('{"prompt": "a", "messages": []}', "needs exactly one"),
        ('{"prompt": "a", "temperature": 1}', "unknown key 'temperature'"),
        ('{"prompt": 1}', "prompt must be a string"),
        ('{"prompt_token_ids": []}', "must be a list of integers"),
        ('{"prompt_token_ids": [true]}', "must be a list of integers"),
        ('{"messages": []}', "must be a list of objects"),
        ('{"messages": ["a"]}', "must be a list of objects"),
    ],
)
def test_bad_lines_are_named(line: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_lines(['"fine"', line], "f.jsonl")
    assert message in str(error.value) and str(error.value).startswith("f.jsonl, line 2")


def test_every_sampling_field_has_a_flag_and_a_help_text() -> None:
    fields = set(SamplingParams.__struct_fields__)
    assert set(sampling_flags.HELP) | sampling_flags.WITHOUT_FLAG == fields


def test_every_sampling_flag_reaches_its_field() -> None:
    values = {
        "stop_token_ids": "1,2",
        "allowed_token_ids": "3",
        "stop": "s",
        "bad_words": "b",
        "logit_bias": '{"4": -1}',
        "top_p": "0.5",
        "min_p": "0.5",
        "structured_outputs": '{"regex": "a+"}',
    }
    expected = {
        "stop_token_ids": [1, 2],
        "allowed_token_ids": [3],
        "stop": ["s"],
        "bad_words": ["b"],
        "logit_bias": {4: -1.0},
        "top_p": 0.5,
        "min_p": 0.5,
        "structured_outputs": StructuredOutput("regex", "a+", "structured_outputs.regex"),
    }
    for name in sampling_flags.HELP:
        default = getattr(SamplingParams(), name)
        flag = "--" + name.replace("_", "-")
        if isinstance(default, bool):
            words, value = ["--no-" + flag[2:] if default else flag], not default
        else:
            words, value = [flag, values.get(name, "2")], expected.get(name, 2)
        assert main(["generate", "p", *words]) == 0
        assert getattr(FakeLLM.instances[-1].calls[0][2], name) == value, name
