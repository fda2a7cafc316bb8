"""Sweeps: the knee on curves whose knee is known, the recommendation, the plot, and the command."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octavo.bench.knee import knee, recommend
from octavo.bench.options import SweepOptions
from octavo.bench.serve import measure
from octavo.bench.sweep import conclusions, judge
from octavo.cli.main import main
from octavo.errors import OctavoError
from tests.bench.conftest import Serving, good_answer, interrupted

LOADS = [1, 2, 4, 8, 16, 32, 64]


@pytest.mark.parametrize(
    ("throughputs", "expected"),
    [
        ([min(n, 16) for n in LOADS], 16),  # a sharp bend
        ([min(n, 8) + n / 100 for n in LOADS], 8),
        ([100 * n for n in LOADS], None),  # a straight line: not saturated yet
        ([min(n, 32) - (n > 32) * 10 for n in LOADS], 32),  # overloaded after the best, straight up to it
        ([5, 4, 3, 2, 1, 1, 1], 1),  # saturated from the start
        ([1 - 1 / (1 + n / 10) for n in LOADS], 16),  # n / (n + 10), smooth
    ],
)
def test_knee(throughputs: list[float], expected: float | None) -> None:
    index = knee(LOADS, throughputs)
    assert (None if index is None else LOADS[index]) == expected


def test_the_knee_does_not_depend_on_the_units() -> None:
    curve = [1 - 1 / (1 + n / 10) for n in LOADS]
    assert knee(LOADS, curve) == knee([3 * n for n in LOADS], [50 * y + 7 for y in curve])


def test_no_knee_of_two_points() -> None:
    assert knee([1, 2], [1, 1]) is None and knee([1, 2, 4], [3, 3, 3]) == 0


def point(load: float, ttft: float | None, tpot: float | None, failed: int = 0, completed: int = 5) -> dict[str, Any]:
    values = {f"{name}_{metric}_ms": v for metric, v in (("ttft", ttft), ("tpot", tpot)) for name in ("median", "p90", "p99")}
    return values | {
        "load": load,
        "failed": failed,
        "completed": completed,
        "max_concurrent_requests": int(2 * load),
        "output_throughput": 10.0 * min(load, 4),
        "request_throughput": 1.0,
    }


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        ([point(1, 10, 5), point(2, 90, 5), point(4, 110, 5)], 1),
        ([point(1, 10, 5), point(2, 90, 21), point(4, 10, 5)], 0),  # the third passed by luck
        ([point(1, 101, 5)], None),
        ([point(1, 10, 5), point(2, 10, 5, failed=1)], 0),
        ([point(1, 10, None)], 0),  # answers of one token have no TPOT
        ([point(1, None, None, completed=0)], None),
    ],
)
def test_recommendation(points: list[dict[str, Any]], expected: int | None) -> None:
    assert recommend(points, "p99", 100.0, 20.0) == expected
    assert recommend(points, "p99", 1e9, None) is not None or points[0]["completed"] == 0


def swept(**options: Any) -> dict[str, Any]:
    shared = {"model_id": "m", "date": "d", "request_rate": "inf", "max_concurrency": None, "num_prompts": 3}
    points = [point(n, 10.0 * n, 5.0 + n) for n in (1, 2, 4, 8, 16)]
    return judge(shared, points, SweepOptions(concurrencies="1,2,4,8,16", **options))


def test_judgement() -> None:
    at_knee = swept()
    assert (at_knee["knee"], at_knee["recommended_load"], at_knee["recommended_max_num_seqs"]) == (4, 4, 8)
    assert "at the knee" in conclusions(at_knee)[1]
    limited = swept(slo_ttft_ms=85.0)
    assert (limited["recommended_load"], limited["recommended_max_num_seqs"]) == (8, 16)
    assert "--max-num-seqs 16 keeps TTFT ≤ 85 ms at p99" in conclusions(limited)[1]
    assert "higher one may" in conclusions(swept(slo_ttft_ms=1000.0, slo_tpot_ms=1000.0))[2]
    none = swept(slo_tpot_ms=1.0)
    assert none["recommended_max_num_seqs"] is None and "Even the lowest" in conclusions(none)[1]
    assert "request_rate" not in none and none["sweep_over"] == "max_concurrency"


def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from octavo.bench.plot import plot_sweep

    path = tmp_path / "x.png"
    plot_sweep(swept(slo_ttft_ms=85.0, slo_tpot_ms=1e6), str(path))
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG") and len(data) > 10_000


def test_a_plot_without_matplotlib_is_an_error_before_the_load(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], free_port: int
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["bench", "sweep", "--port", str(free_port), "--plot", "mine.png"]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err


def test_the_plot_that_was_not_asked_for_is_left_out_without_matplotlib(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from octavo.bench.plot import plot_name

    assert plot_name("none") is None and plot_name("mine.png") == "mine.png" and plot_name(None) == "sweep.png"
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert plot_name(None) is None
    assert "No plot: matplotlib is not installed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "loads", "counts"),
    [
        (["--concurrencies", "4,1,2"], [1, 2, 4], [16, 16, 16]),
        (["--request-rates", "100,400", "--point-seconds", "0.2"], [100, 400], [20, 80]),
    ],
)
def test_the_command(
    mock_port: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], loads: list[float], counts: list[int]
) -> None:
    command = ["bench", "sweep", "--port", str(mock_port), "--input-len", "20", "--output-len", "4", *words, "--plot", "none"]
    assert main([*command, "--slo-percentile", "95", "--slo-ttft-ms", "60000", "--result-dir", str(tmp_path)]) == 0
    sweep = json.loads((tmp_path / "sweep.json").read_text())
    assert [p["load"] for p in sweep["points"]] == loads and [p["completed"] for p in sweep["points"]] == counts
    assert all("p95_ttft_ms" in p and "p99_tpot_ms" in p for p in sweep["points"])
    assert len({p["seed"] for p in sweep["points"]}) == len(loads)
    assert sweep["recommended_max_num_seqs"] == sweep["points"][-1]["max_concurrent_requests"]
    text = capsys.readouterr().out
    assert "TTFT p95" in text and "Knee" in text and "Recommended: --max-num-seqs" in text


def sweep_of_two(port: int, folder: Path) -> list[str]:
    words = ["sweep", "--port", str(port), "--concurrencies", "1,2", "--input-len", "20", "--output-len", "4", "--num-prompts", "4"]
    return [*words, "--plot", "none", "--result-dir", str(folder)]


def check_first_load_kept(folder: Path) -> None:
    sweep = json.loads((folder / "sweep.json").read_text())
    assert sweep["interrupted"] and [(p["load"], p["completed"]) for p in sweep["points"]] == [(1, 4)]


def test_ctrl_c_keeps_the_loads_before(raw_server: Callable[..., Serving], tmp_path: Path) -> None:
    async def answer(body: Any, number: int, writer: asyncio.StreamWriter) -> None:
        if number > 7:  # a trial, four of the first load, two of the second
            await asyncio.sleep(300)
        await good_answer(body, number, writer)

    serving = raw_server(answer)
    done = interrupted(sweep_of_two(serving.port, tmp_path), lambda: len(serving.raw.bodies) == 9)
    assert done.returncode == 130 and "Interrupted: 1 of 2 loads were measured" in done.stdout and "Traceback" not in done.stderr
    check_first_load_kept(tmp_path)


def test_an_error_keeps_the_loads_before(mock_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the server ends, and no prompts can be counted for the second."""
    measured: list[Any] = []

    async def once(target: Any, point: Any, *, trial: bool = True) -> Any:
        if measured:
            raise OctavoError("gone")
        measured.append(point)
        return await measure(target, point, trial=trial)

    monkeypatch.setattr("octavo.bench.sweep.measure", once)
    assert main(["bench", *sweep_of_two(mock_port, tmp_path)]) == 1
    check_first_load_kept(tmp_path)
