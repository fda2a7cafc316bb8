"""A lean HTTP/1.1 client on asyncio's protocols: for a thousand streams at once on a machine that the server shares.

Made by hand, because an HTTP library's own work (parsing into objects, a coroutine switch a chunk) costs several times
what the measurement needs, and would be measured with it: here a callback takes each piece of a body straight from the
socket, with the time at which it came. Connections are kept alive and reused.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import ssl
import urllib.parse
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Any, TypeVar

from octavo.errors import ConfigError

T = TypeVar("T")
OnBody = Callable[[bytes, float], None]  # a piece of the body; when it came (perf_counter)

_MAX_HEAD = 65536
_HEAD, _CHUNKED, _TRAILERS, _LENGTH, _UNTIL_CLOSE, _IDLE = range(6)


class HttpError(Exception):
    """An answer that could not be had or read, or was not 200. ``status`` is None where none came."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class _Closed(HttpError):
    """The connection ended; ``untouched``: before the first byte of an answer, so that asking again is safe."""

    def __init__(self, message: str, untouched: bool) -> None:
        super().__init__(message)
        self.untouched = untouched


@dataclass(frozen=True)
class Address:
    """Where a server is. ``prefix``: path before its routes, without a slash at the end."""

    host: str
    port: int
    tls: bool
    prefix: str

    @property
    def header(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"


def parse_address(url: str) -> Address:
    """``http://host:port/prefix``; a ``/v1`` at the end is dropped, routes bring it. Raises ConfigError."""
    parts = urllib.parse.urlsplit(url if "://" in url else f"http://{url}")
    try:
        port = parts.port
    except ValueError:
        port = -1
    if parts.scheme not in ("http", "https") or not parts.hostname or port == -1 or parts.query:
        raise ConfigError(f"--base-url {url}: must look like http://127.0.0.1:8000.")
    if parts.username is not None or parts.password is not None:
        raise ConfigError('--base-url: a name and password in the address are not sent. Use --header "Authorization=Basic …" or --api-key.')
    tls = parts.scheme == "https"
    prefix = parts.path.rstrip("/")
    prefix = prefix[:-3] if prefix.endswith("/v1") else prefix
    return Address(parts.hostname, port or (443 if tls else 80), tls, prefix)


class _Connection(asyncio.Protocol):
    """One connection; one exchange at a time. The answer's status and, unless it is streamed, body come as a future."""

    def __init__(self, idle: list[_Connection]) -> None:
        self._idle = idle
        self._transport: asyncio.Transport | None = None
        self._state = _IDLE
        self._buffer = b""
        self._left = 0  # of a chunk with its CRLF, or of a body of known length
        self._status = 0
        self._keep = False
        self._touched = False
        self._body: list[bytes] = []
        self._sink: OnBody | None = None
        self._on_body: OnBody = self._collect
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def send(self, request: bytes, sink: OnBody | None) -> asyncio.Future[tuple[int, bytes]]:
        """Write a request. ``sink`` gets the body of a 200; every other body is collected."""
        assert self._transport is not None and self._state == _IDLE
        self._state, self._touched, self._body, self._sink, self._buffer = _HEAD, False, [], sink, b""
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return self._answer

    def data_received(self, data: bytes) -> None:
        now = perf_counter()
        self._touched = True
        if self._buffer:
            data, self._buffer = self._buffer + data, b""
        try:
            if self._state == _HEAD:
                data = self._read_head(data)
            if self._state == _CHUNKED:
                self._read_chunks(data, now)
            elif data:
                self._read_plain(data, now)
        except Exception as error:  # an answer that is no HTTP, or a sink that could not read it, fails this exchange only
            self._fail(error if isinstance(error, HttpError) else HttpError(f"not a readable answer ({type(error).__name__}: {error})"))

    def _read_head(self, data: bytes) -> bytes:
        """Take status and headers; returns what follows them."""
        while True:
            end = data.find(b"\r\n\r\n")
            if end < 0:
                if len(data) > _MAX_HEAD:
                    raise HttpError("the answer's headers are too long")
                self._buffer = data
                return b""
            lines = data[:end].split(b"\r\n")
            data = data[end + 4 :]
            version, _, rest = lines[0].partition(b" ")
            if not version.startswith(b"HTTP/1.") or not rest[:3].isdigit():
                raise HttpError(f"not an HTTP answer: {lines[0][:80]!r}")
            self._status = int(rest[:3])
            if self._status >= 200:
                break
        pairs = (line.partition(b":") for line in lines[1:])
        headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        connection = headers.get(b"connection", b"").lower()
        self._keep = connection != b"close" if version == b"HTTP/1.1" else connection == b"keep-alive"
        self._on_body = self._sink if self._sink is not None and self._status == 200 else self._collect
        if self._status in (204, 304):
            self._finish()
        elif headers.get(b"transfer-encoding", b"").lower().endswith(b"chunked"):
            self._state, self._left = _CHUNKED, 0
        elif b"content-length" in headers:
            self._state, self._left = _LENGTH, int(headers[b"content-length"])
            if self._left == 0:
                self._finish()
        else:
            self._state, self._keep = _UNTIL_CLOSE, False
        return data

    def _read_chunks(self, data: bytes, now: float) -> None:
        at, size = 0, len(data)
        while at < size:
            if self._left > 2:  # payload
                piece = data[at : at + self._left - 2]
                at += len(piece)
                self._left -= len(piece)
                self._on_body(piece, now)
            elif self._left:  # the CRLF after it
                skip = min(self._left, size - at)
                at += skip
                self._left -= skip
            else:
                end = data.find(b"\r\n", at)
                if end < 0:
                    self._buffer = data[at:]
                    return
                length = int(data[at:end].partition(b";")[0], 16)
                if length == 0:
                    self._state = _TRAILERS
                    self._read_plain(data[end:], now)
                    return
                at, self._left = end + 2, length + 2

    def _read_plain(self, data: bytes, now: float) -> None:
        if self._state == _TRAILERS:  # begins with the CRLF of the last chunk's size
            if b"\r\n\r\n" in data:
                self._finish()
            else:
                self._buffer = data
        elif self._state == _LENGTH:
            piece = data[: self._left]
            self._left -= len(piece)
            self._on_body(piece, now)
            if self._left == 0:
                self._finish()
        elif self._state == _UNTIL_CLOSE:
            self._on_body(data, now)

    def _collect(self, data: bytes, now: float) -> None:
        self._body.append(data)

    def _finish(self) -> None:
        assert self._transport is not None
        self._state = _IDLE
        if self._answer is not None and not self._answer.done():
            self._answer.set_result((self._status, b"".join(self._body)))
        if self._keep and not self._transport.is_closing():
            self._idle.append(self)
        else:
            self._transport.close()

    def _fail(self, error: HttpError) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)
        self._state = _IDLE
        self.close()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        if self in self._idle:
            self._idle.remove(self)
        if self._state == _UNTIL_CLOSE and error is None:
            self._finish()
        elif self._state != _IDLE:
            why = f" ({error.strerror or error})" if isinstance(error, OSError) else ""
            where = "before" if not self._touched else "in the middle of"
            self._fail(_Closed(f"the connection was closed {where} the answer{why}", not self._touched))


class Client:
    """Requests to one server. Belongs to one event loop; ``close`` at the end."""

    def __init__(
        self, address: Address, *, headers: Mapping[str, str] | None = None, timeout: float = 600.0, insecure: bool = False
    ) -> None:
        self.address = address
        self._timeout = timeout
        self._idle: list[_Connection] = []
        self._resolved: str | None = None
        lines = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        self._headers = f"Host: {address.header}\r\nAccept: */*\r\n{lines}"
        self._tls: ssl.SSLContext | None = None
        if address.tls:
            self._tls = ssl.create_default_context()
            if insecure:
                self._tls.check_hostname = False
                self._tls.verify_mode = ssl.CERT_NONE

    def encode(self, method: str, path: str, body: bytes | None = None) -> bytes:
        """A request as it goes over the wire, for ``send``: built before the clock runs."""
        head = f"{method} {self.address.prefix}{path} HTTP/1.1\r\n{self._headers}"
        if body is None:
            return f"{head}\r\n".encode("latin-1")
        return f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode("latin-1") + body

    async def send(self, request: bytes, sink: OnBody | None = None) -> tuple[int, bytes]:
        """Status and body of the answer; the body of a 200 goes to ``sink`` if there is one.

        Raises HttpError when no complete answer comes, within the timeout too.
        """
        while True:
            reused = bool(self._idle)
            connection = self._idle.pop() if reused else await self._connect()
            answer = connection.send(request, sink)
            timer = asyncio.get_running_loop().call_later(
                self._timeout, connection._fail, HttpError(f"no complete answer within {self._timeout:g} s")
            )
            try:
                return await answer
            except _Closed as error:
                if not (reused and error.untouched):  # the server let go of a connection that was idle for long
                    raise
            except asyncio.CancelledError:
                connection.close()
                raise
            finally:
                timer.cancel()

    async def get_json(self, path: str, body: Any = None) -> Any:
        """GET, or POST where there is a body. Raises HttpError unless a 200 with JSON comes."""
        data = None if body is None else json.dumps(body).encode()
        status, content = await self.send(self.encode("GET" if data is None else "POST", path, data))
        if status != 200:
            raise HttpError(describe_failure(status, content), status)
        try:
            return json.loads(content)
        except ValueError:
            raise HttpError(f"{path}: the answer is not JSON: {content[:80]!r}", status) from None

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        address = self.address
        try:
            if self._resolved is None:  # once: a lookup for each connection would be a thread and a wait
                found = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
                self._resolved = str(found[0][4][0])
                if len(found) > 1:  # localhost is both ::1 and 127.0.0.1; take the one that listens
                    self._resolved = await self._first_listening([str(entry[4][0]) for entry in found])
            tls: dict[str, Any] = {"ssl": self._tls, "server_hostname": address.host} if self._tls is not None else {}
            making = loop.create_connection(lambda: _Connection(self._idle), self._resolved, address.port, **tls)
            _, connection = await asyncio.wait_for(making, self._timeout)
            return connection
        except asyncio.TimeoutError:
            raise HttpError(f"no connection within {self._timeout:g} s") from None
        except OSError as error:
            raise HttpError(f"no connection: {_reason(error)}") from None

    async def _first_listening(self, hosts: list[str]) -> str:
        for host in dict.fromkeys(hosts):
            try:
                _, writer = await asyncio.open_connection(host, self.address.port)
            except OSError:
                continue
            writer.close()
            return host
        return hosts[0]

    def close(self) -> None:
        for connection in list(self._idle):
            connection.close()


def _reason(error: OSError) -> str:
    """The kind of an OSError without the address in it, so that equal failures count as equal."""
    if isinstance(error, ssl.SSLError):
        return f"TLS: {error.reason or error}"
    return os.strerror(error.errno).lower() if error.errno and error.errno > 0 else str(error)


def describe_failure(status: int, body: bytes) -> str:
    """``HTTP 429: too many requests``, from an OpenAI-shaped error object or whatever the body is."""
    text = body.decode("utf-8", "replace").strip()
    try:
        data = json.loads(text)
        found = data.get("error", data.get("message", data.get("detail"))) if isinstance(data, dict) else None
        found = found.get("message") if isinstance(found, dict) else found
        text = found if isinstance(found, str) else text
    except ValueError:
        pass
    return f"HTTP {status}" + (f": {text[:300]}" if text else "")


def run_loop(main: Coroutine[Any, Any, T]) -> T:
    """``asyncio.run`` on uvloop's event loop where it is installed: half the client's CPU time."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    loop = uvloop.new_event_loop()
    try:
        asyncio.set_event_loop(loop)
        task = loop.create_task(main)
        try:
            return loop.run_until_complete(task)
        except KeyboardInterrupt:
            task.cancel()
            loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
            raise
    finally:
        for other in asyncio.all_tasks(loop):
            other.cancel()
            loop.run_until_complete(asyncio.gather(other, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
        asyncio.set_event_loop(None)
        loop.close()


def raise_file_limit(streams: int) -> None:
    """Allow ``streams`` connections. Raises ConfigError where the system's hard limit is lower."""
    try:
        import resource
    except ImportError:  # not on Windows, whose limit is none
        return
    need = streams + 64
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= need:
        return
    if hard != resource.RLIM_INFINITY and hard < need:
        raise ConfigError(f"{streams} connections need {need} open files; the limit is {hard}. Raise it (ulimit -Hn), or lower the load.")
    resource.setrlimit(resource.RLIMIT_NOFILE, (need, hard))
