"""Run cases one after the other against a server, and write down what came of each."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass

from octavo.conformance.client import Failed, Server, Skipped, expect

OK, FAIL, SKIPPED = "ok", "fail", "skipped"

Check = Callable[[Server], "str | None"]


@dataclass(frozen=True)
class Case:
    """``check`` raises Failed or Skipped; a text that it returns is a remark about a case that is ok."""

    id: str
    what: str
    check: Check


@dataclass(frozen=True)
class Result:
    case: str
    what: str
    status: str  # ok, fail or skipped
    why: str
    seconds: float


def run_case(case: Case, server: Server) -> Result:
    """Run one case, then see that the server is well: it answers /health (if it has one) and a plain request."""
    start = time.monotonic()
    try:
        status, why = OK, case.check(server) or ""
    except Skipped as skipped:
        status, why = SKIPPED, str(skipped)
    except Failed as failed:
        status, why = FAIL, str(failed)
    except (OSError, http.client.HTTPException) as error:
        status, why = FAIL, f"the connection failed: {type(error).__name__}: {error}"
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        status, why = FAIL, f"an answer does not have the shape of OpenAI's: {type(error).__name__}: {error}"
    seconds = time.monotonic() - start
    try:
        check_health(server)
    except (Failed, OSError, http.client.HTTPException) as error:
        status, why = FAIL, f"{why}; afterwards the server is not well: {error}".lstrip("; ")
    return Result(case.id, case.what, status, why, round(seconds, 3))


def check_health(server: Server) -> None:
    status = server.get("/health").status
    expect(status in (200, 404), f"/health answers {status}")  # 404: a server without that path
    text = server.complete("Hello", max_tokens=2)["choices"][0]["text"]
    expect(isinstance(text, str), "a plain request has no text")


def run_cases(cases: Iterable[Case], server: Server) -> Iterator[Result]:
    for case in cases:
        yield run_case(case, server)


def table(results: list[Result]) -> str:
    """Lines of text, a result each: case, status, what, why."""
    width = max((len(r.what) for r in results), default=0)
    lines = [f"{'case':>4}  {'result':7}  {'what':<{width}}  why"]
    lines += [f"{r.case:>4}  {r.status:7}  {r.what:<{width}}  {r.why}".rstrip() for r in results]
    counts = {status: sum(r.status == status for r in results) for status in (OK, FAIL, SKIPPED)}
    return "\n".join([*lines, "", ", ".join(f"{n} {status}" for status, n in counts.items())])


def as_json(results: list[Result], server: Server) -> str:
    base_url = f"{server.scheme}://{server.host}:{server.port}{server.root}/v1"
    return json.dumps({"base_url": base_url, "model": server.model, "results": [asdict(r) for r in results]}, indent=2)
