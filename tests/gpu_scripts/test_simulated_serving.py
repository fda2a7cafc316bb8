"""scripts/simulate_serving.py, and that it reads what scripts/gpu/step_costs.py measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.gpu_scripts.conftest import ROOT

SCRIPT = ROOT / "scripts" / "simulate_serving.py"


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *words], capture_output=True, text=True, timeout=120)


def tpots(done: subprocess.CompletedProcess[str]) -> dict[str, float]:
    """Median TPOT of each rule's line."""
    lines = [line.split() for line in done.stdout.splitlines()[1:]]
    return {line[1]: float(line[5]) for line in lines}


def test_measured_steps_correct_the_formula(tmp_path: Path) -> None:
    """Steps that took twice as long as the formula says for one sequence: so does a lonely client's token."""
    import step_costs

    grid = tmp_path / "steps.json"
    point = {"decodes": 1, "context": 640, "prompt_tokens": 0, "prompts": 0}
    step_costs.save(str(grid), [{**point, "ms": 8.6}, {**point, "decodes": 2, "ms": None}])
    assert [row["ms"] for row in json.loads(grid.read_text())] == [8.6]
    plain, corrected = (tpots(run("--loads", "c1", *words)) for words in ((), ("--grid", str(grid))))
    assert set(plain) == {"octavo", "greedy"}
    assert all(4.0 < plain[rule] < 4.8 and 8.0 < corrected[rule] < 9.2 for rule in plain), (plain, corrected)


def test_a_grid_is_of_one_model(tmp_path: Path) -> None:
    done = run("--loads", "c1", "small-c256", "--grid", str(tmp_path / "steps.json"))
    assert done.returncode == 2 and "one model" in done.stderr
