"""``octavo bench kernels cpu``: every kernel beside its reference and its floor, and a wrong one is told."""

from __future__ import annotations

import re

import pytest
import torch

from octavo.kernels.cpu import bench
from octavo.kernels.cpu.library import library

pytestmark = pytest.mark.skipif(library() is None, reason="there are no CPU kernels here")
WORDS = ["--layers", "2", "--seconds", "0.01", "--cases", "decode 8 x 256"]
LINE = re.compile(r"  (\w+) +([\d.]+) +([\d.]+) +([\d.]+)x +([\d.]+) +(\d+)% +(\d\.\de[-+]\d+)( +WRONG)?")


@pytest.fixture(autouse=True)
def small_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    measure = bench.measure_machine
    monkeypatch.setattr(bench, "measure_machine", lambda dtype, budget_s: measure(dtype, budget_s, megabytes=8, size=256))


def lines(text: str) -> dict[str, re.Match[str]]:
    return {match[1]: match for match in map(LINE.fullmatch, text.splitlines()) if match}


@torch.inference_mode()
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_each_kernel_has_a_reference_and_a_floor(capsys: pytest.CaptureFixture[str], dtype: str) -> None:
    assert bench.main([*WORDS, "--dtype", dtype]) == 0
    found = lines(capsys.readouterr().out)
    assert set(found) == {"attention", "norms", "silu", *bench.WIDTHS, "head", "sample", "layers"}
    for match in found.values():
        ours, reference = float(match[2]), float(match[3])
        assert ours > 0 and reference > 0 and not match[8]
    parts = [found[name] for name in ("attention", "norms", "silu", *bench.WIDTHS)]
    assert sum(float(m[5]) for m in parts) == pytest.approx(float(found["layers"][5]), abs=0.006)  # of the floors, rounded


@torch.inference_mode()
def test_a_wrong_kernel_is_told(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "silu_and_mul", lambda x: 1.1 * bench.silu_and_mul_reference(x))
    assert bench.main(WORDS) == 1
    out, err = capsys.readouterr()
    assert [name for name, match in lines(out).items() if match[8]] == ["silu", "layers"]
    assert "silu of decode 8 x 256" in err


def test_floors() -> None:
    machine = bench.Machine(bandwidth=1e9, flops=1e12)
    assert machine.floor(2e9) == 2.0 and machine.floor(1e9, 5e12) == 5.0
