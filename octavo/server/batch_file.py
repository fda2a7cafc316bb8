"""Batch files: every line a request, every answer a line; through the application that a server runs, without a port.

Lines are OpenAI's: ``{"custom_id", "method": "POST", "url": "/v1/…", "body": {…}}`` in, and
``{"id", "custom_id", "response": {"status_code", "request_id", "body"}, "error"}`` out. A request that was refused has its
status and error in ``response``; a line that could not become a request has ``response`` null and an ``error``.
"""

from __future__ import annotations

import asyncio
import heapq
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from starlette.routing import Route
from starlette.types import ASGIApp, Message

from octavo.errors import ConfigError, EngineDeadError
from octavo.server.context import new_request_id

# POST routes that answer requests of a batch, beside all under /v1/.
_ALSO = frozenset({"/score", "/rerank", "/v2/rerank"})


class BatchLine(msgspec.Struct, forbid_unknown_fields=True):
    """One request. The body stays as it came: its own route decodes it."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _Streams(msgspec.Struct):
    stream: Any = None


class BatchError(msgspec.Struct):
    code: str
    message: str
    line: int | None = None


class BatchResponse(msgspec.Struct):
    status_code: int
    request_id: str
    body: msgspec.Raw


class BatchResult(msgspec.Struct):
    id: str
    custom_id: str | None
    response: BatchResponse | None
    error: BatchError | None


class _Done(msgspec.Struct):
    """What resuming needs of a result."""

    class Response(msgspec.Struct):
        status_code: int

    custom_id: str | None = None
    response: Response | None = None


_line_decoder = msgspec.json.Decoder(BatchLine)
_streams_decoder = msgspec.json.Decoder(_Streams)
_done_decoder = msgspec.json.Decoder(_Done)


@dataclass
class Counts:
    total: int = 0
    skipped: int = 0  # done by an earlier run
    succeeded: int = 0
    failed: int = 0


class BadLine(Exception):
    """A line that is no request: it gets an error entry."""

    def __init__(self, code: str, message: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.custom_id = custom_id


def local_path(name: str, flag: str) -> Path:
    """A path out of the command line; ConfigError for a URL, which is not fetched."""
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+://", name):
        raise ConfigError(f"{flag} {name}: only local files are read and written; fetch it first.")
    return Path(name).expanduser()


def parse_line(raw: bytes, urls: frozenset[str]) -> BatchLine:
    """The request of a line. BadLine says what is wrong with it."""
    try:
        line = _line_decoder.decode(raw)
    except (msgspec.ValidationError, RecursionError) as error:
        raise BadLine(
            "invalid_line", f"The line is not a request: {error}. It needs custom_id, method, url and body.", _id_of(raw)
        ) from None
    except ValueError as error:
        raise BadLine("invalid_json", f"The line is not valid JSON ({error}).") from None
    if not line.custom_id:
        raise BadLine("invalid_custom_id", "custom_id must not be empty.")
    if line.method.upper() != "POST":
        raise BadLine("invalid_method", f"method must be POST, got {line.method[:80]!r}.", line.custom_id)
    if line.url not in urls:
        raise BadLine("invalid_url", f"url {line.url[:200]!r} is not served here; these are: {', '.join(sorted(urls))}.", line.custom_id)
    try:
        streams = bool(_streams_decoder.decode(line.body).stream)
    except (ValueError, RecursionError):
        streams = False  # its route says what is wrong with it
    if streams:
        raise BadLine("invalid_body", "A batch has no streams; leave stream out of the body.", line.custom_id)
    return line


def _id_of(raw: bytes) -> str | None:
    try:
        return _done_decoder.decode(raw).custom_id
    except (ValueError, RecursionError):
        return None


def batch_urls(app: Any) -> frozenset[str]:
    """The paths of an application that a batch may ask."""
    posts = (route.path for route in app.routes if isinstance(route, Route) and "POST" in (route.methods or {"POST"}))
    return frozenset(path for path in posts if (path.startswith("/v1/") or path in _ALSO) and "{" not in path)


async def call(app: ASGIApp, url: str, body: bytes, request_id: str) -> tuple[int, bytes]:
    """One POST on an ASGI application; (status, body) of the answer."""
    scope: dict[str, Any] = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": url,
        "raw_path": url.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"x-request-id", request_id.encode())],
        "client": ("run-batch", 0),
        "server": ("run-batch", 0),
    }
    status, chunks, sent = 0, [], False

    async def receive() -> Message:
        nonlocal sent
        if sent:  # the connection stays open: whoever waits for its end waits until the answer is there
            await asyncio.get_running_loop().create_future()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        elif message["type"] == "http.response.body":
            chunks.append(message.get("body", b""))

    await app(scope, receive, send)
    return status, b"".join(chunks)


def finished_before(path: Path) -> set[str]:
    """The custom ids that an earlier run answered. Rewrites the file to hold just these: what failed is run again, and a line
    that was cut off is dropped."""
    kept: list[bytes] = []
    done: set[str] = set()
    changed = False
    with path.open("rb") as file:
        for raw in file:
            try:
                result = _done_decoder.decode(raw)
            except (ValueError, RecursionError):
                changed = True
                continue
            if not raw.endswith(b"\n"):
                raw, changed = raw + b"\n", True
            if result.custom_id and result.custom_id not in done and result.response is not None and result.response.status_code == 200:
                done.add(result.custom_id)
                kept.append(raw)
            else:
                changed = True
    if changed:
        beside = path.with_name(path.name + ".tmp")
        beside.write_bytes(b"".join(kept))
        os.replace(beside, path)
    return done


@dataclass
class BatchRun:
    """Runs a file's lines on an application, ``concurrency`` at a time, and writes each result when it is there.

    in_order: results in the order of the lines, each as soon as all before it are written; else as they finish.
    done: custom ids that are left out. progress: called after each result. is_healthy: when it turns False, the run ends with
    EngineDeadError, and what was running is not written: it can be resumed.
    """

    app: Any
    output: Any  # a binary file
    concurrency: int
    in_order: bool = False
    done: set[str] = field(default_factory=set)
    progress: Callable[[Counts], None] = lambda counts: None
    is_healthy: Callable[[], bool] = lambda: True
    counts: Counts = field(default_factory=Counts)

    def __post_init__(self) -> None:
        self.urls = batch_urls(self.app)
        self._stopping = False
        self._seen: set[str] = set()
        self._waiting: list[tuple[int, bytes]] = []  # finished before an earlier one; a heap, by place
        self._next = 0  # place of the next result to write, in order

    async def run(self, lines: Iterator[bytes]) -> Counts:
        places = enumerate(self._work(lines))
        workers = [asyncio.ensure_future(self._worker(places)) for _ in range(self.concurrency)]
        try:
            ended, _ = await asyncio.wait(workers, return_when=asyncio.FIRST_EXCEPTION)
            for worker in ended:
                worker.result()
        finally:
            self._stopping = True
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
        return self.counts

    def _work(self, lines: Iterator[bytes]) -> Iterator[tuple[int, BatchLine | BadLine]]:
        """(line number from 1, what it is); empty lines and those of ``done`` are left out. Read as workers ask for it."""
        for number, raw in enumerate(lines, 1):
            if not raw.strip():
                continue
            self.counts.total += 1
            try:
                line: BatchLine | BadLine = parse_line(raw, self.urls)
                if line.custom_id in self._seen:  # type: ignore[union-attr]
                    raise BadLine("duplicate_custom_id", "Another line has this custom_id.", line.custom_id)
                self._seen.add(line.custom_id)  # type: ignore[union-attr,arg-type]
            except BadLine as error:
                line = error
            if isinstance(line, BatchLine) and line.custom_id in self.done:
                self.counts.skipped += 1
                self.progress(self.counts)
                continue
            yield number, line

    async def _worker(self, places: Iterator[tuple[int, tuple[int, BatchLine | BadLine]]]) -> None:
        for place, (number, line) in places:
            if isinstance(line, BadLine):
                error = BatchError(line.code, str(line), number)
                result, ok = BatchResult(_new_id(), line.custom_id, None, error), False
            else:
                result, ok = await self._answer(line)
            self._write(place, msgspec.json.encode(result) + b"\n")
            if ok:
                self.counts.succeeded += 1
            else:
                self.counts.failed += 1
            self.progress(self.counts)

    async def _answer(self, line: BatchLine) -> tuple[BatchResult, bool]:
        request_id = new_request_id()
        status, body = await call(self.app, line.url, bytes(line.body), request_id)
        if self._stopping:  # a server answers a request that it cancels; here nobody waits for that answer
            raise asyncio.CancelledError
        if status >= 500 and not self.is_healthy():
            raise EngineDeadError("The engine stopped in the middle of the batch; run it again with --resume.")
        response = BatchResponse(status, request_id, msgspec.Raw(body or b"null"))
        return BatchResult(_new_id(), line.custom_id, response, None), status == 200

    def _write(self, place: int, line: bytes) -> None:
        if not self.in_order:
            self.output.write(line)
        else:
            heapq.heappush(self._waiting, (place, line))
            while self._waiting and self._waiting[0][0] == self._next:
                self.output.write(heapq.heappop(self._waiting)[1])
                self._next += 1
        self.output.flush()


def _new_id() -> str:
    return "batch_req_" + new_request_id()
