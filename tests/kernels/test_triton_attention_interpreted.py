"""The Triton attention kernels on the CPU. A process of its own: the interpreter must be chosen before Triton is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize(
    "file", ["test_attention_kernels.py", "test_attention_backends.py", "test_new_tokens.py", "test_engine_interpreted.py"]
)
def test_under_the_interpreter(file: str) -> None:
    env = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"tests/kernels_gpu/{file}"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
