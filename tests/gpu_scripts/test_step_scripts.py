"""profile_step.py and step_costs.py where there is no GPU: steps run, events count them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch


class Event:
    """Each is recorded a millisecond after the one before."""

    now = 0.0

    def __init__(self, enable_timing: bool = False) -> None:
        self.at = 0.0

    def record(self) -> None:
        Event.now += 1.0
        self.at = Event.now

    def elapsed_time(self, other: Event) -> float:
        return other.at - self.at


@pytest.fixture
def folder(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("OCTAVO_DECODE_GRAPHS", "1")
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    yield model_folder


def test_a_profile_tells_steps_from_gaps(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import profile_step

    monkeypatch.setattr(torch.profiler, "profile", lambda **_: _NoProfile())
    monkeypatch.setattr(sys, "argv", ["profile_step.py", str(folder), "2", "--context", "8"])
    profile_step.main()
    shown = capsys.readouterr().out
    assert "== batch 2, context 8, prompt 0" in shown
    assert "1000 us from its first kernel to its last, 1000 us from there to the next" in shown


def test_step_costs_are_what_events_measured(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import step_costs

    out = tmp_path / "costs.json"
    words = ["--decodes", "0", "2", "--tokens", "0", "8", "--context", "6", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["step_costs.py", str(folder), *words])
    step_costs.main()
    rows = json.loads(out.read_text())
    assert [(row["decodes"], row["prompt_tokens"], row["ms"]) for row in rows] == [(0, 8, 1.0), (2, 0, 1.0), (2, 8, 1.0)]


class _NoProfile:
    def __enter__(self) -> Any:
        return SimpleNamespace(events=list)

    def __exit__(self, *exc: object) -> None:
        pass
