"""What the checks share. They run in a Python that has the client and need not have Octavo: only the standard library here.

    python tests/clients/check_openai.py http://127.0.0.1:8000 MODEL

Checks that need another server than that are left out unless its address is in the environment:
OCTAVO_CLIENTS_KEY (the API key), _EMBED_URL and _EMBED_MODEL (an embedding model; else the server's own),
_MOCK_URL (the mock engine, which calls tools and thinks), _LIMITED_URL (one request of a key at a time).
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import inspect
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MOCK_MODEL = "mock-model"  # of the mock and of the limited server


@dataclass(frozen=True)
class Target:
    url: str
    model: str
    key: str
    embed_url: str
    embed_model: str
    mock_url: str
    limited_url: str


def _target() -> Target:
    if len(sys.argv) != 3:
        sys.exit(f"usage: {sys.argv[0]} BASE_URL MODEL")
    url, model = sys.argv[1].rstrip("/"), sys.argv[2]

    def setting(name: str, default: str = "") -> str:
        return os.environ.get(f"OCTAVO_CLIENTS_{name}", "") or default

    return Target(
        url,
        model,
        setting("KEY", "key"),
        setting("EMBED_URL", url),
        setting("EMBED_MODEL", model),
        setting("MOCK_URL"),
        setting("LIMITED_URL"),
    )


_checks: list[tuple[Callable[[Target], Any], str]] = []


def check(needs: str = "") -> Callable[[Callable[[Target], Any]], Callable[[Target], Any]]:
    """Register a check, a function or a coroutine function. ``needs``: a field of Target without which it is left out."""

    def register(function: Callable[[Target], Any]) -> Callable[[Target], Any]:
        _checks.append((function, needs))
        return function

    return register


def refused(kind: type[BaseException] | tuple[type[BaseException], ...], call: Callable[[], Any]) -> Any:
    """The exception that ``call`` must end with."""
    try:
        call()
    except kind as error:
        return error
    except Exception as error:
        raise AssertionError(f"{type(error).__name__} instead of {kind}: {error}") from error
    raise AssertionError(f"no {kind}")


def same(left: Any, right: Any) -> None:
    assert left == right, f"{left!r} is not {right!r}"


def main(*packages: str) -> None:
    """Run all checks; the exit status is 1 if one failed."""
    target = _target()
    print(", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages), flush=True)
    failed = 0
    for function, needs in _checks:
        if needs and not getattr(target, needs):
            print(f"left out  {function.__name__} (needs {needs})", flush=True)
            continue
        start = time.monotonic()
        try:
            result = function(target)
            if inspect.iscoroutine(result):
                asyncio.run(result)
        except Exception:
            failed += 1
            print(f"FAILED    {function.__name__}\n{traceback.format_exc()}", flush=True)
        else:
            print(f"ok        {function.__name__} ({time.monotonic() - start:.1f} s)", flush=True)
    print(f"{len(_checks)} checks, {failed} failed", flush=True)
    sys.exit(1 if failed else 0)


def strictly(value: Any, model: Any) -> None:
    """Hold an answer's JSON to a pydantic type of a client: strict types, required fields, and no null where none is declared.

    The clients themselves don't validate what comes in. Fields beside the declared ones are allowed: APIs grow.
    """
    import pydantic

    pydantic.TypeAdapter(model).validate_json(value if isinstance(value, (str, bytes)) else json.dumps(value), strict=True)
