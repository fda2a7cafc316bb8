"""How often garbage is collected while a batch runs."""

from __future__ import annotations

import gc
from typing import Any

import pytest


def thresholds_seen(engine: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """The garbage collector's thresholds at each request and step to come."""
    seen: list[tuple[int, int, int]] = []
    add_request, step = engine.add_request, engine.step

    def look() -> None:
        seen.append(gc.get_threshold())

    monkeypatch.setattr(engine, "add_request", lambda request: (look(), add_request(request)))
    monkeypatch.setattr(engine, "step", lambda: (look(), step())[1])
    return seen
