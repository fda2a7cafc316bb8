"""Runs the Triton kernels' tests in Triton's interpreter, and compiles the shipped configurations for sm_90, each in a
process of its own: the interpreter is chosen when triton is imported, and would stay for other tests."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
FILES = [*(f"test_triton_{name}.py" for name in ("elementwise", "linear", "sampling", "rows", "bench")), "test_token_bitmask.py"]

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")]


def _run(args: list[str], **extra: str) -> None:
    keep = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env = keep | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | extra
    done = subprocess.run([sys.executable, *args], cwd=ROOT, env=env, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_kernels_in_the_interpreter() -> None:
    _run(["-m", "pytest", "-q", "-x", "-m", "not gpu", "-p", "no:xdist", *(str(HERE / name) for name in FILES)], TRITON_INTERPRET="1")


def test_kernels_compile_for_sm_90(tmp_path: Path) -> None:
    """Machine code, without a GPU: nothing refused by the compiler, and no kernel spills registers."""
    from triton import backends

    if not (Path(backends.__file__).parent / "nvidia" / "bin" / "ptxas").exists():
        pytest.skip("this triton carries no ptxas")
    _run(["-m", "tests.kernels.compile_sm90"], TRITON_CACHE_DIR=str(tmp_path))
