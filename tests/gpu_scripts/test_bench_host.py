"""scripts/bench_host.py: a line of figures for each place and batch, and refusals."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.e2e.demo import demo_model_path
from tests.gpu_scripts.conftest import ROOT


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(ROOT / "scripts" / "bench_host.py"), *words], capture_output=True, text=True, timeout=120)


def test_each_place_is_measured() -> None:
    demo_model_path()
    done = run("--rows", "1,3", "--gpu-ms", "0,20", "--tokens", "12", "--repeats", "1")
    assert done.returncode == 0, done.stderr
    heading, _, *lines = [[word.strip() for word in line.strip("|").split("|")] for line in done.stdout.splitlines()]
    assert [line[:3] for line in lines] == [[place, *case] for place in ("ids", "text", "served") for case in (["1", "0"], ["3", "20"])]
    for line in lines:
        mean, p50, p99, longest, idle = (float(x.replace(",", "")) for x in line[3:8])
        assert 0 < p50 <= p99 <= longest and mean <= longest
        assert idle >= 0 and 0 < int(line[8]) < 12


@pytest.mark.parametrize("words", [["--rows", "1,2", "--gpu-ms", "1"], ["--only", "ids,nowhere", "--rows", "1", "--gpu-ms", "1"]])
def test_what_does_not_fit_is_refused(words: list[str]) -> None:
    done = run(*words)
    assert done.returncode == 2 and "--gpu-ms needs as many values as --rows" in done.stderr
