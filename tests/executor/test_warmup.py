"""Compiling kernels ahead: what is compiled is what the engine will ask Triton for; and no failure reaches the engine."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from octavo.config import EngineConfig
from octavo.engine.process import startup_tree
from octavo.executor import warmup
from octavo.executor.kernel_keys import begin_library_key
from octavo.executor.warmup import KernelWarmup, describe, stamp_path
from octavo.models.config import ModelConfig, RopeConfig

ROOT = Path(__file__).resolve().parents[2]
MODEL: dict[str, Any] = {
    "path": "memory", "weights_format": "dummy", "architecture": "Qwen3ForCausalLM", "model_type": "qwen3", "vocab_size": 512,
    "hidden_size": 128, "intermediate_size": 256, "num_layers": 5, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "max_position": 64,
    "norm_eps": 1e-6, "hidden_act": "silu", "rope": RopeConfig(rotary_dim=32), "tie_word_embeddings": True, "qk_norm": True,
}  # fmt: skip


def model(**changes: Any) -> ModelConfig:
    return ModelConfig(**{**MODEL, **changes})


def run(code: str, cache: Path, timeout: float = 120) -> str:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache), "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=timeout, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


REAL_LAUNCHES = """
import json, sys, torch, triton
from octavo.executor.kernel_trace import Driver
from octavo.executor.warmup import Gpu
from triton import knobs
from triton.runtime.jit import JITFunction

from octavo.executor.kernel_keys import settle_cache_keys
gpu = Gpu((9, 0), 132)
triton.runtime.driver.set_active(Driver(gpu))
torch.Tensor.is_cuda = property(lambda self: True)
from octavo.kernels.triton import activation, embedding, launch, linear, norm, rows, sample
from octavo.kernels.write_kv import write_kv
from octavo.attention import triton as attention
from octavo.attention.base import AttentionLayerSpec, AttentionMetadata, ForwardContext
attention._multiprocessors = lambda device: 132
launch._supported = lambda index: True
launch.remember_launches(False)
settle_cache_keys()
hits, run = [], JITFunction.run
knobs.compilation.listener = lambda **found: hits.append((found["src"].name, found["cache_hit"]))
JITFunction.run = lambda kernel, *a, grid, warmup, **o: run(kernel, *a, grid=(1,), warmup=True, **o)  # real tensors, no launch

H, V, Q, W, MAX = 128, 512, (4 + 2 * 2) * 32, 256, 2
def x(*shape, dtype=torch.bfloat16): return torch.zeros(*shape, dtype=dtype)
def ints(*shape): return x(*shape, dtype=torch.int64)
for m in (1, 2):
    norm.rms_norm(x(m, H), x(H), 1e-6)
    norm.rms_norm(x(m, H), x(H), 1e-6, x(m, H))
    linear.norm_linear(x(m, H), x(H), 1e-6, x(Q, H))
    linear.norm_linear(x(m, H), x(H), 1e-6, x(2 * W, H), None, x(m, H), gated=True)
    linear.linear(x(m, 128), x(H, 128))
    linear.linear(x(m, W), x(H, W))
    linear.linear(x(m, H), x(V, H))
    embedding.embedding(ints(m), x(V, H))
    table = x(MAX + 1, 4, dtype=torch.int32)
    rows.decode_inputs(ints(MAX)[:m], ints(MAX + 1), ints(MAX + 1), table, rows.DecodeInputs.empty(m, "cpu"), block_size=16, dummy_row=MAX)
    rows.store_tokens(ints(MAX)[:m], ints(m), ints(MAX + 1), ints(MAX + 1), dummy_row=MAX)
    cache = x(7, 2, 2, 16, 32)
    write_kv(x(m, Q), cache, ints(m), ints(m), 4, 2, x(64, 32, dtype=torch.float32), False, x(32), x(32), 1e-6, pdl=True)
    for most in (64, 0):  # decodes that write their K and V in the attention kernel, and decodes that don't
        metadata = AttentionMetadata(
            num_tokens=m, num_seqs=m, num_decodes=m, max_query_len=1, max_seq_len=64, block_size=16, positions=ints(m), slots=ints(m),
            query_start=x(m + 1, dtype=torch.int32), seq_lens=x(m, dtype=torch.int32), block_tables=table,
            extra={"row_index": ints(MAX)[:m]},
        )
        backend = attention.TritonAttention(pdl=True, fused_write=most)
        for _ in range(2):  # the first layer makes the plan
            layer = AttentionLayerSpec(0, 4, 2, 32, 32**-0.5, x(64, 32, dtype=torch.float32), False, x(32), x(32))
            backend.forward(x(m, Q), layer, cache, ForwardContext(metadata, backend, [cache]))
    for mode, kind in ((sample.GREEDY, torch.bfloat16), (sample.PLAIN, torch.bfloat16), (sample.TRUNCATED, torch.float32)):
        sample.sample_rows(x(m, V, dtype=kind), ints(MAX + 2, 5), ints(MAX)[:m], ints(m), mode=mode)
print(json.dumps(hits))
"""


@pytest.fixture(scope="module")
def warmed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str], Path]:
    """(Triton's cache, what the process said, its stamp) after the warm-up of a small model for an H200, which nobody here has."""
    cache = tmp_path_factory.mktemp("triton")
    stamp = cache / "octavo-test.done"
    task = describe(EngineConfig(max_num_seqs=2, attention_backend="triton"), model(), 64)
    request = {**task, "gpu": [9, 0, 132], "processes": 2, "stamp": str(stamp)}
    code = (
        "import os, sys, json; from octavo.executor import warmup as w; from octavo.executor.warmup import KernelWarmup\n"
        f"k = KernelWarmup(w._spawn(json.loads({json.dumps(request)!r})))\n"
        "k.wait_first(200); print(k._seen.split()); k.wait_all(200); print(k._seen.split()); k.stop()"
    )
    return cache, run(code, cache, 250).splitlines(), stamp


def test_the_process_compiles_and_says_so(warmed: tuple[Path, list[str], Path]) -> None:
    cache, said, stamp = warmed
    assert json.loads(said[0].replace("'", '"'))[0] == "first"
    assert json.loads(said[1].replace("'", '"')) == ["first", "all"]
    assert stamp.exists() and not list(cache.glob("octavo-*.[0-9]*"))
    names = {path.stem for path in cache.glob("*/*.cubin")}
    assert {"gemv_kernel", "_decode_kernel", "_extend_kernel", "_write_kv_kernel", "_choose_kernel", "_scatter_kernel"} <= names


def test_the_key_of_tritons_library_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a gigabyte is hashed for it."""
    cache = pytest.importorskip("triton.runtime.cache")
    cache.triton_key.cache_clear()
    begin_library_key().join()
    assert cache.triton_key.cache_info().currsize == 1
    monkeypatch.delattr(cache, "triton_key")  # other versions have it elsewhere, or nowhere
    begin_library_key().join()


def test_what_compiles_longest_is_begun_first(tmp_path: Path) -> None:
    task = describe(EngineConfig(max_num_seqs=2, attention_backend="triton"), model(), 64)
    code = (
        "import json; from octavo.executor import kernel_trace; from octavo.executor.warmup import Gpu\n"
        f"parts = kernel_trace.trace(json.loads({json.dumps(task)!r}), Gpu((9, 0), 132))\n"
        "print(json.dumps([[launch.name for launch in part] for part in parts]))"
    )
    first, others = json.loads(run(code, tmp_path).splitlines()[-1])
    assert first[:2] == ["_decode_kernel", "_extend_kernel"] and len(set(first)) > 8
    assert others and others[0] != "_decode_kernel"


def test_launches_with_real_tensors_find_what_was_compiled(warmed: tuple[Path, list[str], Path]) -> None:
    before = sorted(path.name for path in warmed[0].iterdir())
    hits = json.loads(run(REAL_LAUNCHES, warmed[0]).splitlines()[-1])
    assert len(hits) > 20 and not [name for name, hit in hits if not hit]
    assert {"_decode_plan_kernel", "_decode_kernel", "_write_kv_kernel"} <= {name for name, _ in hits}
    assert sorted(path.name for path in warmed[0].iterdir()) == before


KEYS = """
from octavo.executor.kernel_keys import settle_cache_keys
FIRST
settle_cache_keys()
from octavo.kernels.triton import draw, sample
print([f.cache_key for f in (sample._choose_kernel, sample._scan_kernel, draw.search)])
"""


def test_keys_do_not_depend_on_what_was_imported_first(tmp_path: Path) -> None:
    first = ("", "import octavo.kernels.triton.sample", "import octavo.kernels.extend_attention, octavo.kernels.triton.gemv")
    assert len({run(KEYS.replace("FIRST", line), tmp_path) for line in first}) == 1


POOL = """
import os, sys, time
from octavo.executor.warmup import compile_all
def job(i):
    def run():
        time.sleep(0.01 * (i == 0))
        if i == 7: raise ValueError("no")
        open(f"{sys.argv[1]}/{i}", "w").close()
    return run
print("failed", compile_all([job(i) for i in range(20)], 3, {5: "first", 20: "second", 0: "zero"}), flush=True)
"""


def test_children_share_the_jobs(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", POOL, str(tmp_path)], stdin=subprocess.PIPE, capture_output=True, text=True, cwd=ROOT, timeout=120
    )  # closes standard input at once: with it, the engine is gone
    assert done.returncode == 0 and "failed" in done.stdout
    with subprocess.Popen(
        [sys.executable, "-c", POOL, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        assert process.stdout is not None
        words = process.stdout.read().split()
    assert words[0] == "zero" and words.index("first") < words.index("second") and words[-2:] == ["failed", "1"]
    assert sorted(int(path.name) for path in tmp_path.iterdir()) == [i for i in range(20) if i != 7]


def test_children_stop_when_the_engine_is_gone() -> None:
    code = (
        "import time; from octavo.executor.warmup import compile_all\n"
        "print(compile_all([lambda: time.sleep(0.5)] * 500, 2, {1: 'begun'}), flush=True)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        begun = time.monotonic()
        process.stdin.close()
        assert int(process.stdout.read()) > 400 and time.monotonic() - begun < 60  # of 125 s


@pytest.fixture
def with_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(warmup, "_has_gpu", lambda: True)
    monkeypatch.setattr(warmup, "_processes", lambda: 2)
    return tmp_path


def test_started_only_where_it_helps(with_gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spawned: list[dict[str, Any]] = []
    monkeypatch.setattr(warmup, "_spawn", lambda request: spawned.append(request))
    config = EngineConfig()
    for never in (EngineConfig(device="cpu"), EngineConfig(attention_backend="reference")):
        KernelWarmup.start(never, model(), 64)
    assert not spawned
    KernelWarmup.start(config, model(), 64)
    assert json.loads(json.dumps(spawned[0]))["max_model_len"] == 64
    warmup._write_stamp(Path(spawned[0]["stamp"]))
    KernelWarmup.start(config, model(), 64)
    assert len(spawned) == 1  # all is there
    KernelWarmup.start(config, model(vocab_size=1024), 64)
    monkeypatch.setattr(warmup, "_has_gpu", lambda: False)
    KernelWarmup.start(config, model(hidden_size=256), 64)
    assert len(spawned) == 2


def test_the_stamp_is_of_everything_that_matters(with_gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stamp(config: EngineConfig | None = None, max_model_len: int = 64, **changes: Any) -> str:
        path = stamp_path(describe(config or EngineConfig(), model(**changes), max_model_len))
        assert path.parent == with_gpu
        return path.name

    same = stamp()
    assert same == stamp() == stamp(path="elsewhere", eos_token_ids=(3,)) == stamp(EngineConfig(seed=5, gpu_memory_utilization=0.5))
    others = {stamp(max_model_len=65), stamp(num_heads=8), stamp(EngineConfig(max_num_seqs=8)), stamp(EngineConfig(dtype="float16"))}
    for name, value in (("_versions", ["torch 9"]), ("_sources", "edited"), ("_gpus", ["H300"])):
        with monkeypatch.context() as patch:
            patch.setattr(warmup, name, lambda value=value: value)
            others.add(stamp())
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "0")
    others.add(stamp())
    assert len(others) == 8 and same not in others


def test_failures_cost_nothing(with_gpu: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def broken(request: dict[str, Any]) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr(warmup, "_spawn", broken)
    with caplog.at_level(logging.DEBUG, "octavo.executor"):
        kernels = KernelWarmup.start(EngineConfig(), model(), 64)
    assert "no more processes" in caplog.text
    kernels.wait_first()
    kernels.stop()
    kernels.stop()


def test_a_process_that_dies_is_not_waited_for(tmp_path: Path) -> None:
    kernels = KernelWarmup(warmup._spawn({"processes": 1, "stamp": str(tmp_path / "x")}))  # no model, and no driver here
    begun = time.monotonic()
    kernels.wait_first(200)
    assert time.monotonic() - begun < 100 and not kernels.wait_all(1)
    kernels.stop()


@pytest.mark.parametrize(
    ("window", "layers", "count", "windowed"),
    [(None, None, 2, None), (8, None, 2, None), (8, (0, 1, 2, 3, 4), 2, None), (8, (), 2, ()), (8, (1, 3), 4, (2, 3))],
)
def test_few_layers_keep_every_kind(
    window: int | None, layers: tuple[int, ...] | None, count: int, windowed: tuple[int, ...] | None
) -> None:
    from octavo.executor.kernel_trace import few_layers

    found = few_layers(model(sliding_window=window, sliding_window_layers=layers))
    assert (found.num_layers, found.sliding_window_layers) == (count, windowed)


def test_nothing_heavy_is_imported() -> None:
    code = "import sys, octavo.executor.warmup; print(sorted({'torch', 'triton', 'numpy'} & set(sys.modules)))"
    assert run(code, ROOT).strip() == "[]"


def test_startup_tree() -> None:
    lines = startup_tree({"config": 0.1, "imports": 3.0, "kv_cache": 0.4, "total": 4.0}).splitlines()
    assert lines[0].split() == ["start-up", "4.00", "s"] and lines[3].split() == ["├─", "kv", "cache", "0.40", "s", "10%"]
    assert lines[-1].split() == ["└─", "rest", "0.50", "s", "12%"]
