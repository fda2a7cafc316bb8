"""The scripts of scripts/gpu as modules, and an engine that pretends to be vllm, to measure."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts" / "gpu"

LLM = """
import os, time
__version__ = "0.0-fake"

class SamplingParams:
    def __init__(self, *, temperature, ignore_eos, max_tokens, detokenize):
        assert ignore_eos and not detokenize
        self.max_tokens = max_tokens

class _Made:
    def __init__(self, count):
        self.token_ids = [0] * count

class _Output:
    def __init__(self, count):
        self.outputs = [_Made(count)]

class LLM:
    def __init__(self, *, model, load_format, skip_tokenizer_init, max_model_len, enable_prefix_caching, gpu_memory_utilization, fault=""):
        assert load_format == "dummy" and skip_tokenizer_init and not enable_prefix_caching
        assert "octavo" not in __import__("sys").modules, "the peer's process must not have octavo in it"
        if fault == "start":
            raise RuntimeError("no room for the cache")
        if fault == "slow":
            time.sleep(1)
        self.fault = fault

    def generate(self, prompts, params, use_tqdm):
        longest = max(p.max_tokens for p in params)
        if self.fault == "die" and len(prompts) == 4:
            os._exit(3)
        if self.fault == "hang" and len(prompts) == 4:
            time.sleep(600)
        time.sleep(0.002 * longest * len(prompts) ** 0.5)
        return [_Output(p.max_tokens - (self.fault == "short" and len(prompts) == 4)) for p in params]
"""

MAIN = """
import sys
assert sys.argv[1] == "serve" and sys.argv[3:5] == ["--load-format", "dummy"], sys.argv
assert sys.argv[sys.argv.index("--served-model-name") + 1] == "m"
if "--fail" in sys.argv:
    sys.exit("cannot serve today")
sys.path.insert(0, {root!r})
from octavo.config import EngineConfig, ServerOptions
from octavo.server.mock import MockEngine
from octavo.server.run import serve

async def start(config, options):
    return MockEngine(tick_s=0.002, length=1000, max_model_len=8192)

port = int(sys.argv[sys.argv.index("--port") + 1])
serve(EngineConfig(), ServerOptions(port=port, served_model_name=("m",), disable_log_requests=True), start_engine=start)
"""


@pytest.fixture(autouse=True)
def scripts_on_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    yield


@pytest.fixture
def peer_site(tmp_path: Path) -> Path:
    """A folder with a package vllm in it, whose LLM sleeps and whose server is Octavo's mock."""
    site = tmp_path / "site"
    for name in ("vllm", "vllm/entrypoints", "vllm/entrypoints/cli"):
        (site / name).mkdir(parents=True)
        (site / name / "__init__.py").write_text("")
    (site / "vllm" / "__init__.py").write_text(LLM)
    (site / "vllm/entrypoints/cli/main.py").write_text(MAIN.format(root=str(ROOT)))
    return site


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    import model_folders

    config = model_folders.MODELS["tiny"] | {"vocab_size": 280}  # the mock knows as many
    model_folders.write(tmp_path / "models" / "tiny", config)
    return tmp_path / "models" / "tiny"


def read_jsonl(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]
