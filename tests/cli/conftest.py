"""Stand-ins for what the commands call, so that the command line is tested without model and engine."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OCTAVO_API_KEY", "VLLM_API_KEY", "OCTAVO_LOG_LEVEL", "OCTAVO_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def fake_module(monkeypatch: pytest.MonkeyPatch) -> Callable[..., types.ModuleType]:
    """Put a module with the given attributes in the place of a real one, for one test."""

    def put(name: str, **attributes: Any) -> types.ModuleType:
        module = types.ModuleType(name)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
        return module

    return put


@pytest.fixture
def served(fake_module: Callable[..., types.ModuleType]) -> list[tuple[Any, Any]]:
    """What ``octavo serve`` handed to the server: (EngineConfig, ServerOptions) a call."""
    calls: list[tuple[Any, Any]] = []

    def serve(config: Any, options: Any) -> None:
        calls.append((config, options))

    fake_module("octavo.server.run", serve=serve)
    return calls
