from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from octavo.kernels.cpu import build, library
from octavo.kernels.rms_norm import rms_norm, rms_norm_reference

ROOT = Path(__file__).parents[2]


def has_compiler() -> bool:
    try:
        return bool(build.find_compiler())
    except build.BuildError:
        return False


needs_compiler = pytest.mark.skipif(not has_compiler(), reason="no C compiler here")


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """As in a new process with an empty cache; -O0 because what is built here is never timed."""
    monkeypatch.setattr(library, "_loaded", {})
    monkeypatch.setenv("OCTAVO_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("OCTAVO_CPU_FLAGS", "-O0")
    monkeypatch.delenv("OCTAVO_CPU_KERNELS", raising=False)
    return tmp_path / "cache" / "kernels"


@needs_compiler
def test_several_processes_may_build_at_once(fresh: Path) -> None:
    command = [sys.executable, "-m", "octavo.kernels.cpu.build"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    running = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    outputs = {p.communicate(timeout=280)[0] for p in running}
    assert [p.returncode for p in running] == [0, 0, 0]
    assert len(outputs) == 1
    assert [f.suffix for f in fresh.iterdir()] == [".so"]
    assert fresh.stat().st_mode & 0o777 == 0o700
    library.Library(next(fresh.iterdir()))
    assert build.status().startswith("yes")


@needs_compiler
def test_the_name_follows_sources_flags_and_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = build.find_compiler()
    name = build.library_name(compiler)
    assert name == build.library_name(compiler)
    monkeypatch.setenv("OCTAVO_CPU_FLAGS", "-O1 -DNAME_TEST")
    assert name != build.library_name(compiler)
    monkeypatch.delenv("OCTAVO_CPU_FLAGS")
    (tmp_path / "a.c").write_text("int x;")
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    other = build.library_name(compiler)
    (tmp_path / "a.c").write_text("int y;")
    assert len({name, other, build.library_name(compiler)}) == 3


def one_warning(caplog: pytest.LogCaptureFixture) -> str:
    """Runs an operation twice; the references must answer, and warn once."""
    x = torch.randn(3, 16)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert torch.equal(rms_norm(x, torch.ones(16), 1e-5)[0], rms_norm_reference(x, torch.ones(16), 1e-5)[0])
    assert library.library() is None
    assert len(caplog.records) == 1
    return caplog.records[0].getMessage()


def test_without_a_compiler_torch_runs(fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: None)
    assert "pip install ziglang" in one_warning(caplog)
    assert build.status().startswith("no: There is no C compiler")


def test_the_zig_wheel_is_found(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: object() if name == "ziglang" else None)
    assert build.find_compiler() == [sys.executable, "-m", "ziglang", "cc"]


def test_a_failing_compiler_is_told(fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    broken = tmp_path / "mycc"
    broken.write_text("#!/bin/sh\necho mycc: out of ink >&2\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))
    assert "out of ink" in one_warning(caplog)
    assert list(fresh.iterdir()) == []


def test_a_compiler_that_is_not_there_is_told(fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    assert "CC=no-such-compiler" in one_warning(caplog)


@needs_compiler
def test_a_folder_open_to_others_is_refused(fresh: Path, caplog: pytest.LogCaptureFixture) -> None:
    fresh.mkdir(parents=True)
    fresh.chmod(0o777)
    assert "chmod 700" in one_warning(caplog)


@needs_compiler
def test_a_cache_that_cannot_be_made_is_told(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OCTAVO_CACHE_DIR", str(tmp_path / "file" / "below"))
    assert "OCTAVO_CACHE_DIR" in one_warning(caplog)


def test_switched_off(fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("OCTAVO_CPU_KERNELS", "0")
    assert library.library() is None
    assert not caplog.records
