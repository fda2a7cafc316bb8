"""scripts/gpu/check.sh with a python3 that only pretends: which tests it runs, what it says of them, and how it ends."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "gpu" / "check.sh"
JOBS = 15
# Ends as $FAKE_<first file's name> says; else with tests that passed.
PYTHON = r"""#!/usr/bin/env bash
if [ "$2" = pip ]; then exit 0; fi
if [ "$1" = -c ]; then exit "${FAKE_GPU:-0}"; fi
if [ "$1" != -m ]; then echo "0.5 s for $3"; exit "${FAKE_OFFLINE:-0}"; fi
shift 4
for last in "$@"; do echo "$last" >> "$FAKE_LOG"; done
name=FAKE_$(basename "$1" .py)
case "${!name:-ok}" in
    fail) echo "FAILED $1::test_x - assert 1 == 2"; echo "1 failed, 3 passed in 0.1s"; exit 1 ;;
    skip) echo "4 skipped in 0.1s" ;;
    crash) echo "Segmentation fault"; exit 139 ;;
    hang) exec sleep 300 ;;
    *) echo "4 passed, 1 skipped in 0.1s" ;;
esac
"""


def check(tmp_path: Path, *words: str, **fakes: str) -> tuple[int, list[str], set[str]]:
    """(exit status, lines, test files that were run)."""
    bin_folder, log = tmp_path / "bin", tmp_path / "log"
    bin_folder.mkdir()
    (bin_folder / "python3").write_text(PYTHON)
    (bin_folder / "python3").chmod(0o755)
    log.touch()
    path = f"{bin_folder}:{os.environ['PATH']}"
    seconds = "5" if "hang" in fakes.values() else "150"
    env = {"PATH": path, "FAKE_LOG": str(log), "OCTAVO_GPU_SITE": str(tmp_path / "site"), "CHECK_SECONDS": seconds, **fakes}
    models = tmp_path / "models"
    (models / "tiny").mkdir(parents=True)
    done = subprocess.run(
        ["bash", str(SCRIPT), str(models), str(tmp_path / "out"), *words], cwd=ROOT, env=env, capture_output=True, text=True, timeout=250
    )
    assert not done.stderr, done.stderr
    return done.returncode, done.stdout.splitlines(), {word for word in log.read_text().split() if "/" in word}


def test_all_pass(tmp_path: Path) -> None:
    status, lines, _ = check(tmp_path)
    assert status == 0 and len(lines) == JOBS
    assert all(re.fullmatch(r"\w+ +ok: 4 passed, 1 skipped in 0.1s", line) for line in lines)
    assert (tmp_path / "out" / "engine.txt").read_text().startswith("4 passed")


@pytest.mark.parametrize(
    ("how", "said"),
    [("fail", "FAILED (status 1): 1 failed"), ("skip", "but none passed"), ("crash", "status 139"), ("hang", "out of time")],
)
def test_one_that_does_not_pass(tmp_path: Path, how: str, said: str) -> None:
    status, lines, _ = check(tmp_path, FAKE_test_gpu_engine=how)
    assert status == 1
    (line,) = [line for line in lines if line.split()[0] == "engine"]
    assert said in line and sum(" ok: " in line for line in lines) == JOBS - 1
    assert ("FAILED tests/e2e/test_gpu_engine.py::test_x - assert 1 == 2" in lines) == (how == "fail")


def test_no_gpu(tmp_path: Path) -> None:
    status, lines, ran = check(tmp_path, FAKE_GPU="1")
    assert status == 1 and "no CUDA GPU" in lines[0] and not ran


@pytest.mark.parametrize("status", ["0", "1"])
def test_the_benchmark(tmp_path: Path, status: str) -> None:
    found, lines, _ = check(tmp_path, "bench.py", FAKE_OFFLINE=status)
    failed = "offline_tiny FAILED: " if status == "1" else ""
    assert found == int(status) and lines[-1] == f"{failed}0.5 s for {tmp_path / 'models' / 'tiny'}"


def test_no_gpu_test_is_left_out(tmp_path: Path) -> None:
    """Whatever is marked gpu, or runs on a GPU where there is one."""
    uses = re.compile(r"mark\.gpu|^from tests\.(kernels\.triton_cases|kernels_gpu\.attention_cases) import", re.MULTILINE)
    here = Path(__file__).resolve()
    wanted = [p for p in sorted((ROOT / "tests").rglob("test_*.py")) if p != here and uses.search(p.read_text())]
    wanted = [p for p in wanted if not p.stem.endswith("_interpreted")]
    assert len(wanted) >= 11
    _, _, ran = check(tmp_path)
    assert all((ROOT / name).exists() for name in ran)
    missing = [p for p in wanted if not any(p == ROOT / name or ROOT / name in p.parents for name in ran)]
    assert not missing, "add them to scripts/gpu/check.sh"
