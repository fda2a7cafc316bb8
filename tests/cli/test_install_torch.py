"""Which torch is installed where: the decisions of scripts/install_torch.py, without installing."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("install_torch", ROOT / "scripts" / "install_torch.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_plan(script: ModuleType) -> None:
    def steps(environ: dict[str, str], gpu: bool = False, linux: bool = True) -> list[list[str]]:
        return [arguments for _, arguments in script.plan(environ, gpu=gpu, cpu_index_matters=linux)]

    assert steps({}, gpu=True) == [["torch>=2.11"]]
    assert steps({}, linux=False) == [["torch>=2.11"]]
    cpu = steps({})
    assert cpu[0][:3] == ["torch>=2.11", "--index-url", script.CPU_INDEX]
    assert cpu[1:] == [["torch==2.13.0"], ["torch>=2.11"]]
    assert steps({"OCTAVO_TORCH_SPEC": "torch==2.12"}, gpu=True) == [["torch==2.12"]]
    assert steps({"OCTAVO_TORCH_INDEX_URL": "http://i"}) == [["torch>=2.11", "--index-url", "http://i"]]


def test_no_visible_device_is_no_gpu(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script.glob, "glob", lambda pattern: ["/proc/driver/nvidia/gpus/0"])
    assert script.has_nvidia_gpu({})
    assert script.has_nvidia_gpu({"CUDA_VISIBLE_DEVICES": "0"})
    assert not script.has_nvidia_gpu({"CUDA_VISIBLE_DEVICES": ""})
    assert not script.has_nvidia_gpu({"CUDA_VISIBLE_DEVICES": "-1"})
    monkeypatch.setattr(script.glob, "glob", lambda pattern: [])
    monkeypatch.setattr(script.shutil, "which", lambda name: None)
    assert not script.has_nvidia_gpu({})


def fake_torch(version: str, cuda: str | None) -> Any:
    return SimpleNamespace(__version__=version, version=SimpleNamespace(cuda=cuda), cuda=SimpleNamespace(is_available=lambda: True))


@pytest.mark.parametrize(
    ("torch", "gpu", "problem"),
    [
        (fake_torch("2.13.0+cpu", None), False, None),
        (fake_torch("2.11.0+cu130", "13.0"), True, None),
        (fake_torch("2.11.0+cu130", "13.0"), False, None),
        (fake_torch("2.13.0+cpu", None), True, "is a CPU build"),
        (fake_torch("2.10.1", None), False, "older than 2.11"),
        (None, False, "not installed yet"),
    ],
)
def test_what_is_there(script: ModuleType, monkeypatch: pytest.MonkeyPatch, torch: Any, gpu: bool, problem: str | None) -> None:
    monkeypatch.setitem(sys.modules, "torch", torch)
    found = script.installed_problem(gpu)
    assert found is None if problem is None else problem in found


def test_a_broken_torch_says_what_is_wrong(script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import a_module_that_is_not_there")
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    found = script.installed_problem(False)
    assert found is not None and "can't be imported" in found and "a_module_that_is_not_there" in found


def test_every_step_is_tried_until_one_works(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[list[str]] = []

    def run(command: list[str], **kwargs: Any) -> Any:
        tried.append(command[command.index("--disable-pip-version-check") + 1 :])
        return SimpleNamespace(returncode=0 if command[-1] == "torch>=2.11" else 1)

    monkeypatch.setattr(script.subprocess, "run", run)
    monkeypatch.setattr(script, "has_nvidia_gpu", lambda environ: False)
    monkeypatch.setattr(script, "reachable", lambda index: False)
    monkeypatch.setattr(script, "check_in_new_process", lambda gpu: "nothing" if not tried or tried[-1] != ["torch>=2.11"] else None)
    for name in ("OCTAVO_TORCH_SPEC", "OCTAVO_TORCH_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(script.sys, "platform", "linux")
    monkeypatch.setattr(script.platform, "machine", lambda: "x86_64")
    assert script.main() == 0
    assert tried == [["torch==2.13.0"], ["torch>=2.11"]]  # the index that does not answer is left out


def test_an_index_that_is_not_there_is_known_within_seconds(script: ModuleType, free_port: int) -> None:
    assert not script.reachable(f"http://127.0.0.1:{free_port}")
    assert not script.reachable("not a url")


def test_find_python(tmp_path: Path) -> None:
    script = str(ROOT / "scripts" / "find_python.sh")
    done = subprocess.run(["sh", script, sys.executable], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, sys.executable)
    done = subprocess.run(["/bin/sh", script], capture_output=True, text=True, env={"PATH": str(tmp_path)})
    assert done.returncode == 1 and "Python 3.10 or newer is needed" in done.stderr


def test_ci_script_is_sound() -> None:
    assert subprocess.run(["bash", "-n", str(ROOT / ".ci" / "run")]).returncode == 0
