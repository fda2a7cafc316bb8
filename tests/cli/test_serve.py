"""``octavo serve``: from words on the command line, a file and the environment to the two configurations."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from octavo.cli.main import main
from octavo.config import EngineConfig, ServerOptions
from octavo.errors import EngineDeadError, ModelError

Served = list[tuple[Any, Any]]


def parsed(served: Served, *words: str) -> tuple[Any, Any]:
    assert main(["serve", *words]) == 0
    return served[-1]


def test_no_flags_are_the_defaults(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    assert parsed(served) == (EngineConfig(), ServerOptions())
    assert "No model given: serving the embedded demo model SmolLM2-135M-Instruct" in capsys.readouterr().err


def test_a_model_has_no_demo_line(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    config, _ = parsed(served, "my/model")
    assert config.model == "my/model"
    assert "demo" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        (["--model", "m"], "model", "m"),
        (["m"], "model", "m"),
        (["--port", "9000", "m"], "model", "m"),
        (["m", "--port", "9000"], "port", 9000),
        (["--max-model-len", "4096"], "max_model_len", 4096),
        (["--max_model_len", "4096"], "max_model_len", 4096),
        (["--max_model_len=4096"], "max_model_len", 4096),
        (["--max-model-len", "32k"], "max_model_len", 32000),
        (["--max-num-batched-tokens", "4k"], "max_num_batched_tokens", 4000),
        (["--max-num-batched-tokens", "auto"], "max_num_batched_tokens", None),
        (["--itl-slo-ms", "20"], "itl_slo_ms", 20.0),
        (["--max-model-len", "32K"], "max_model_len", 32768),
        (["--kv-cache-memory", "2G"], "kv_cache_memory", 2 * 2**30),
        (["--kv-cache-memory", "512M"], "kv_cache_memory", 512 * 2**20),
        (["--kv-cache-memory", "1.5GiB"], "kv_cache_memory", 3 * 2**29),
        (["--kv-cache-memory", "2GB"], "kv_cache_memory", 2 * 10**9),
        (["--kv-cache-memory-bytes", "1000"], "kv_cache_memory", 1000),
        (["-tp", "2"], "tensor_parallel_size", 2),
        (["--tensor-parallel-size", "2"], "tensor_parallel_size", 2),
        (["--seed", "-3"], "seed", -3),
        (["--swap-space", "0.5"], "swap_space", 0.5),
        (["--swap-space", "auto"], "swap_space", None),
        (["--enable-prefix-caching"], "enable_prefix_caching", True),
        (["--no-enable-prefix-caching"], "enable_prefix_caching", False),
        (["--no_enable_prefix_caching"], "enable_prefix_caching", False),
        (["--no-enable-prefix-caching", "--enable-prefix-caching"], "enable_prefix_caching", True),
        (["--enforce-eager"], "enforce_eager", True),
        (["--disable-log-requests"], "disable_log_requests", True),
        (["--enable-log-requests"], "disable_log_requests", False),
        (["--no-enable-log-requests"], "disable_log_requests", True),
        (["-asc", "2"], "api_server_count", 2),
        (["--generation-config", "vllm"], "generation_config", "vllm"),
        (["--load-format", "dummy"], "load_format", "dummy"),
        (["--api-key", "a", "--api-key", "b"], "api_key", ("a", "b")),
        (["--api-key", "a_b", "m"], "api_key", ("a_b",)),
        (["--served-model-name", "a", "b"], "served_model_name", ("a", "b")),
        (["--served-model-name", "a", "--served-model-name", "b"], "served_model_name", ("a", "b")),
        (["--host", "0.0.0.0"], "host", "0.0.0.0"),
        (["--max-body-size", "1M"], "max_body_size", 2**20),
    ],
)
def test_flags(served: Served, words: list[str], field: str, value: Any) -> None:
    config, options = parsed(served, *words)
    holder = config if hasattr(config, field) else options
    assert getattr(holder, field) == value
    assert type(getattr(holder, field)) is type(value)


def test_every_field_has_a_flag(served: Served) -> None:
    """One field = one flag: each can be set, and setting it changes nothing else."""
    examples = {bool: None, int: "7", float: "0.5", str: "x"}
    for cls, index in ((EngineConfig, 0), (ServerOptions, 1)):
        for field in dataclasses.fields(cls):
            if field.name == "trust_remote_code":
                continue
            flag = "--" + field.name.replace("_", "-")
            if isinstance(field.default, bool):
                words, value = (["--no-" + flag[2:]], False) if field.default else ([flag], True)
            else:
                base = next(t for name, t in (("int", int), ("float", float), ("str", str)) if name in str(field.type))
                text = str(field.metadata["choices"][-1]) if "choices" in field.metadata else examples[base]
                special = {"quantization": "none", "max_num_batched_tokens": "512", "pooler_config": '{"normalize": true}'}
                text = special.get(field.name, text)
                words, value = [flag, str(text)], base(text)
                value = (value,) if field.metadata.get("repeat") else value
            got = parsed(served, *words)[index]
            assert dataclasses.asdict(got) == dataclasses.asdict(cls()) | {field.name: value}, words


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--prt", "9"], "unknown flag --prt; did you mean --port?"),
        (["--max_model_lenn=5"], "did you mean --max-model-len?"),
        (["--enable-prefix-cachin"], "did you mean --enable-prefix-caching?"),
        (["--zzzzzzzz"], "unknown flag --zzzzzzzz; see octavo serve --help"),
        (["--max-model", "5"], "unknown flag --max-model"),  # no abbreviations
        (["-c", "4096"], "unknown flag -c; write --max-model-len"),  # llama.cpp
        (["m.gguf", "-ngl", "99"], "unknown flag -ngl; leave it out"),
        (["--n_gpu_layers=99"], "unknown flag --n-gpu-layers; leave it out"),
        (["--enable-prefix-caching=False"], "--enable-prefix-caching takes no value; write --enable-prefix-caching or --no-enable-"),
        (["--disable_log_requests=1"], "write --disable-log-requests or --enable-log-requests"),
        (["-pp", "2"], "-pp is a flag of vLLM that Octavo does not have. A model runs on one GPU"),
        (["--pipeline_parallel_size", "2"], "--pipeline-parallel-size is a flag of vLLM"),
        (["--enable-lora"], "--enable-lora is a flag of vLLM"),
        (["--no-enable-lora"], "--no-enable-lora is a flag of vLLM"),
        (["--hf-overrides.rope_theta", "1"], "is a flag of vLLM"),
        (["--data-parallel-size", "2"], "Start a server for each GPU"),
        (["--moe-backend", "x"], "--moe-backend is a flag of vLLM that Octavo does not have. Leave it out."),
        (["-O3"], "-O3 is a flag of vLLM"),
        (["-q", "awq"], "--quantization awq is not supported yet; serve the unquantized model, or a GGUF file"),
        (["--port", "x"], "--port: 'x' is not a number"),
        (["--port"], "--port: expected one argument"),
        (["--port", "70000"], "--port must be between 0"),
        (["--port", "-1"], "--port must be between 0"),
        (["--swap-space", "much"], "--swap-space: 'much' is not a number, nor auto"),
        (["--max-num-batched-tokens", "all"], "such as 512M, 2G or 1GiB, nor auto"),
        (["--swap-space", "-1"], "--swap-space must be a number of GiB, at least 0"),
        (["--swap-space", "nan"], "--swap-space must be a number of GiB, at least 0"),
        (["--drain-timeout", "-1"], "--drain-timeout must be between 0 and"),
        (["--drain-timeout", "nan"], "--drain-timeout must be between 0 and"),
        (["--served-model-name", ""], "--served-model-name must not be empty"),
        (["--kv-cache-memory", "2X"], "'2X' is not a number with an optional suffix"),
        (["--max-model-len", "1.5"], "'1.5' is not a whole number"),
        (["--max-model-len", "auto"], "'auto' is not a number"),
        (["--itl-slo-ms", "0"], "--itl-slo-ms must be a number of milliseconds above 0"),
        (["--max-model-len", "0"], "--max-model-len must be at least 1"),
        (["--block-size", "3"], "--block-size: invalid choice: 3"),
        (["--load-format", "pickle"], "--load-format: invalid choice"),
        (["--gpu-memory-utilization", "1.5"], "--gpu-memory-utilization must be in (0, 1]"),
        (["--api-key", ""], "--api-key must not be empty"),
        (["--max-n", "0"], "--max-n must be at least 1"),
        (["--trust-remote-code"], "--trust-remote-code is refused"),
        (["a", "b"], "unexpected argument 'b'"),
        (["a", "--model", "b"], "Two models given"),
        (["--config", "/nonexistent.yaml"], "/nonexistent.yaml: No such file"),
    ],
)
def test_refusals(served: Served, capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    try:
        status = main(["serve", *words])
    except SystemExit as error:
        status = error.code
    stderr = capsys.readouterr().err
    assert status == 2
    assert message in stderr
    assert stderr.startswith("octavo: error: ") and len(stderr.splitlines()) == 1
    assert served == []


def test_keys_from_the_environment(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_API_KEY", "one, two,")
    monkeypatch.setenv("VLLM_API_KEY", "three,one")
    assert parsed(served, "--api-key", "zero")[1].api_key == ("zero", "one", "two", "three")
    assert parsed(served)[1].api_key == ("one", "two", "three")


def test_log_level_from_the_environment(served: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("OCTAVO_LOG_LEVEL", "error")
    assert parsed(served)[1].log_level == "error"
    assert parsed(served, "--log-level", "info")[1].log_level == "info"
    monkeypatch.setenv("OCTAVO_LOG_LEVEL", "loud")
    assert main(["serve"]) == 2
    assert "OCTAVO_LOG_LEVEL must be one of debug, info, warning, error; got 'loud'" in capsys.readouterr().err


YAML = """
model: a/model
max-model-len: 8k
max_num_seqs: 32
served-model-name: [x, y]
api-key: k
enable-prefix-caching: false
swap-space: 1
revision: null
"""


def test_configuration_file(served: Served, tmp_path: Path) -> None:
    path = tmp_path / "octavo.yaml"
    path.write_text(YAML)
    config, options = parsed(served, "--config", str(path), "--max-num-seqs", "64")
    assert (config.model, config.max_model_len, config.max_num_seqs) == ("a/model", 8000, 64)
    assert (config.enable_prefix_caching, config.swap_space, config.revision) == (False, 1.0, None)
    assert (options.served_model_name, options.api_key) == (("x", "y"), ("k",))
    assert parsed(served, "--config", str(path), "b/model")[0].model == "b/model"


def test_switches_in_a_configuration_file(served: Served, tmp_path: Path) -> None:
    path = tmp_path / "octavo.yaml"
    path.write_text("enable-log-requests: false\nno-enable-prefix-caching: true\noverride-pooler-config: '{}'\ngeneration-config: vllm\n")
    config, options = parsed(served, "--config", str(path))
    assert (options.disable_log_requests, config.enable_prefix_caching) == (True, False)
    assert (config.pooler_config, config.generation_config) == ("{}", "vllm")


def test_configuration_file_json(served: Served, tmp_path: Path) -> None:
    path = tmp_path / "octavo.json"
    path.write_text(json.dumps({"port": 9000, "kv-cache-memory-bytes": "1G", "max-num-batched-tokens": "auto", "itl-slo-ms": 20}))
    config, options = parsed(served, "--config", str(path))
    assert (options.port, config.kv_cache_memory) == (9000, 2**30)
    assert (config.max_num_batched_tokens, config.itl_slo_ms) == (None, 20.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max-model-lenn: 4", "unknown option 'max-model-lenn'. Did you mean 'max-model-len'?"),
        ("port: true", "port must be of type int"),
        ("port: [1]", "port must be of type int"),
        ("max-model-len: lots", "'lots' is not a number"),
        ("enforce-eager: yes please", "enforce-eager must be of type bool"),
        ("load-format: pickle", "--load-format must be one of"),
        ("log-level: loud", "--log-level must be one of"),
        ("enable-lora: true", "'enable-lora' is an option of vLLM that Octavo does not have. Serve a merged checkpoint"),
        ("moe_backend: x", "'moe_backend' is an option of vLLM that Octavo does not have. Leave it out."),
        ("ctx-size: 5", "unknown option 'ctx-size'; write --max-model-len."),
        ("no-port: true", "no-port must be of type int"),
        ("just text", "must hold a mapping"),
        ("a: [", "not valid YAML"),
        ("trust-remote-code: true", "--trust-remote-code is refused"),
    ],
)
def test_configuration_file_refusals(served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str) -> None:
    path = tmp_path / "octavo.yaml"
    path.write_text(text)
    assert main(["serve", "--config", str(path)]) == 2
    assert message in capsys.readouterr().err
    assert served == []


@pytest.mark.parametrize(
    ("error", "status"), [(ModelError("no such model"), 1), (EngineDeadError("it died"), 1), (KeyboardInterrupt(), 130)]
)
def test_errors_are_one_line(fake_module: Any, capsys: pytest.CaptureFixture[str], error: BaseException, status: int) -> None:
    def serve(config: Any, options: Any) -> None:
        raise error

    fake_module("octavo.server.run", serve=serve)
    assert main(["serve", "m"]) == status
    stderr = capsys.readouterr().err
    assert "Traceback" not in stderr
    if status == 1:
        assert stderr.splitlines()[-1] == f"octavo: error: {error}"
        for words in (["--log-level", "debug"], ["--log_level=debug"]):
            assert main(["serve", "m", *words]) == 1
            stderr = capsys.readouterr().err
            assert "Traceback" in stderr and stderr.splitlines()[-1] == f"octavo: error: {error}"


def test_a_fault_of_ours_keeps_its_traceback(fake_module: Any) -> None:
    def serve(config: Any, options: Any) -> None:
        raise RuntimeError("a bug")

    fake_module("octavo.server.run", serve=serve)
    with pytest.raises(RuntimeError, match="a bug"):
        main(["serve", "m"])
