"""Limits on what a client may send, held before anything is buffered: body size and type, header size.

Bodies are counted while they stream in (Content-Length is only the early answer), so memory stays flat whatever is
sent. Header size cannot be seen from an ASGI application, so it is held in the connection's protocol class.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import struct
from http import HTTPStatus
from typing import Any, TypeVar

import httptools
import msgspec
from starlette.types import Message, Receive, Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from octavo.errors import RequestError
from octavo.server.errors import error_body
from octavo.server.schemas import unknown_field_hint

T = TypeVar("T")
logger = logging.getLogger("octavo.server")

MAX_HEADER_SIZE = 64 * 1024  # bytes, request line and all headers together
LINGER_S = 2.0  # how long a refused connection is still read, so that the client gets to see the answer
IDLE_HEADER_S = 60.0  # a connection that does not complete its headers in this time is closed
IDLE_BODY_S = 60.0  # the longest pause in a body
IDLE_WRITE_S = 60.0  # how long a client may leave a full buffer unread
MAX_UNSENT = 2**30  # bytes in all full buffers together


class ClientDisconnect(Exception):
    """The client went away; nobody waits for an answer."""


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """The whole request body. RequestError 413 when it is, or says that it will be, over ``limit`` bytes;
    415 when it does not claim to be plain JSON; 408 when it stops coming."""
    headers = dict(scope["headers"])
    encoding = headers.get(b"content-encoding", b"identity").decode("latin-1").lower()
    if encoding not in ("", "identity"):
        raise RequestError(f"Content-Encoding {encoding!r} is not supported; send the JSON uncompressed.", status=415)
    kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower().decode("latin-1")
    if kind and kind != "application/json" and not kind.endswith("+json"):
        raise RequestError(f"Content-Type {kind!r} is not supported; send JSON with 'Content-Type: application/json'.", status=415)
    length = headers.get(b"content-length", b"")
    if length.isdigit() and int(length) > limit:
        raise _too_large(limit, int(length))
    chunks: list[bytes] = []
    size = 0
    while True:
        try:
            message = await asyncio.wait_for(receive(), IDLE_BODY_S)
        except asyncio.TimeoutError:  # the builtin is another class in Python 3.10
            raise RequestError(f"The rest of the request body did not come in {IDLE_BODY_S:.0f} seconds.", status=408) from None
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > limit:
            raise _too_large(limit, None)
        chunks.append(chunk)
        if not message.get("more_body", False):
            return b"".join(chunks)


def _too_large(limit: int, length: int | None) -> RequestError:
    size = f"The request body has {length} bytes" if length is not None else "The request body is larger"
    return RequestError(f"{size}; this server takes at most {limit} (--max-body-size).", status=413, code="request_too_large")


def decode(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """Decode a JSON body by its schema. RequestError names the field's path, what was expected and what came."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _explain(error, decoder.type) from None
    except RecursionError:
        raise RequestError("The request body is nested too deeply.") from None
    except RequestError:
        raise
    except ValueError as error:  # msgspec.DecodeError, and int() refusing thousands of digits
        what = "The request body is empty" if not body.strip() else f"The request body is not valid JSON ({_why_no_json(error, body)})"
        raise RequestError(f"{what}; send one JSON object.", code="invalid_json") from None


# An escape: a surrogate pair, half of one, or another.
_ESCAPE = re.compile(rb"\\(?:u[dD][89abAB]..\\u[dD][c-fC-F]..|(u[dD][89a-fA-F]..)|.)", re.DOTALL)
_SEARCHED = 256 * 1024  # bytes: a body that is wrong must not cost more than one that is right


def _why_no_json(error: ValueError, body: bytes) -> str:
    """Clients that cut a text within a character (an emoji, in JavaScript) send half of it, and want to hear that."""
    text = str(error)
    if "surrogate" in text or "truncated" in text:
        half = next((found for found in _ESCAPE.finditer(body, 0, _SEARCHED) if found[1]), None)
        if half is not None:
            return f"{half[0].decode(errors='replace')} at byte {half.start()} is half of a character: the text was cut in the middle of it"
    if body.startswith((b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")):
        return "it begins with a byte order mark; send UTF-8 without one"
    return text


def _explain(error: msgspec.ValidationError, schema: Any) -> RequestError:
    """``Expected `int`, got `str` - at `$.max_tokens``` -> param ``max_tokens`` and a sentence."""
    text, _, path = str(error).partition(" - at `$")
    path = path.rstrip("`").lstrip(".")
    if match := re.match(r"Object contains unknown field `(.*)`", text):
        name = match.group(1)
        where = f" in {path}" if path else ""
        hint = unknown_field_hint(name, schema if not path else None)
        return RequestError(f"Unknown field {name!r}{where}; {hint}", param=_join(path, name), code="unknown_field")
    if match := re.match(r"Object missing required field `(.*)`", text):
        where = f" in {path}" if path else ""
        return RequestError(f"Field {match.group(1)!r} is missing{where}.", param=_join(path, match.group(1)), code="missing_field")
    text = text.replace("`", "")
    if path.endswith(".role") and text.startswith("Invalid value"):
        text += "; the roles are system, developer, user, assistant and tool"
    if not path:
        return RequestError(f"The request body is not what is expected: {text}.", code="invalid_type")
    return RequestError(f"{path}: {text[:1].lower() + text[1:]}.", param=path, code="invalid_type")


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


class ChunkSink:
    """The way of a stream's chunks to the connection: a token's frame costs one formatting and one write.

    The ASGI ``send`` of the same response does the same, and more each time; heads and ends go there.
    """

    __slots__ = ("cycle", "flow", "transport_write")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self.cycle = cycle
        self.flow = cycle.flow
        self.transport_write = cycle.transport.write

    def ready(self) -> bool:
        """Whether a chunk of the response, which has begun, can be sent now. Else use ``send``, which waits if it must."""
        cycle = self.cycle
        return not (self.flow.write_paused or cycle.disconnected or cycle.response_complete) and cycle.chunked_encoding is True

    def put(self, data: bytes) -> None:
        """Send one chunk; it is not empty, and the sink is ready."""
        self.transport_write(b"%x\r\n%b\r\n" % (len(data), data))


class Unframed:
    """The ``send`` of an answer over HTTP/1.0, which knows no chunks: an answer without a length ends with its connection."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self.cycle = cycle
        self.cycle_send = cycle.send
        self.unframed = False

    async def send(self, message: Message) -> None:
        cycle = self.cycle
        if message["type"] == "http.response.start":
            self.unframed = all(name.lower() != b"content-length" for name, _ in message.get("headers", ()))
            if self.unframed:
                cycle.chunked_encoding = False
        elif self.unframed:
            cycle.expected_content_length = len(message.get("body", b""))
        await self.cycle_send(message)  # type: ignore[arg-type]


class Unsent:
    """Connections whose buffer is full, the one that has been so for longest first. Over ``limit`` bytes it is cut off.

    The newest never is: an answer in one piece may be large, and its client has had no time to read it.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.sizes: dict[LimitedProtocol, int] = {}
        self.total = 0

    def add(self, connection: LimitedProtocol) -> None:
        self.remove(connection)
        self._count(connection)
        if self.total > self.limit:
            for other in list(self.sizes):  # what they have read meanwhile
                self.total -= self.sizes[other]
                self._count(other)
        while self.total > self.limit and len(self.sizes) > 1:
            oldest = next(iter(self.sizes))
            self.remove(oldest)
            oldest.cut_off()

    def _count(self, connection: LimitedProtocol) -> None:
        self.sizes[connection] = connection.transport.get_write_buffer_size()
        self.total += self.sizes[connection]

    def remove(self, connection: LimitedProtocol) -> None:
        self.total -= self.sizes.pop(connection, 0)


class LimitedProtocol(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 protocol with a limit on the headers' size and time, and with JSON errors.

    A request to upgrade the connection (Java's client asks for HTTP/2 so) is answered in HTTP/1.1 as if it had not asked.

    The parser underneath buffers a header of any length; here bytes are counted from the start of a message until its
    headers are complete. After a refusal the connection is half closed and what still comes is thrown away for a
    moment: closing at once would reset the connection and the client would never see the answer.
    """

    _header_bytes = 0  # of headers that are not complete yet
    _in_headers = True
    _headers_ended = False  # in the chunk that is being parsed
    _body_bytes = 0  # of the current message
    _framing_bytes = 0  # what came after its headers and was not body: chunk sizes, trailers
    _refused = False
    _upgrading = False  # in a message that asks for an upgrade: it is parsed once more, without that
    _running: RequestResponseCycle | None = None  # whose answer is being made; ``cycle`` is the newest, that may wait behind it
    _header_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None
    write_timeout_s = IDLE_WRITE_S
    unsent: Unsent

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_header_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_header_timer()
        self._stop_write_timer()
        self.unsent.remove(self)
        # uvicorn tells only the newest of pipelined requests, which has not begun.
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """The connection's buffer is full. Its client reads on in time, or it is cut off: what waits for it takes memory."""
        super().pause_writing()
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(self.write_timeout_s, self.cut_off)
        self.unsent.add(self)

    def resume_writing(self) -> None:
        self._stop_write_timer()
        self.unsent.remove(self)
        super().resume_writing()

    def cut_off(self) -> None:
        self._stop_write_timer()
        if self.transport is None or self.transport.is_closing():
            return
        waits = self.transport.get_write_buffer_size()
        logger.warning("A client does not read its answer (%s): its connection is cut off, with %d bytes unread.", self.client, waits)
        sock = self.transport.get_extra_info("socket")
        if sock is not None:  # a reset, so that the system drops its megabytes of this connection too
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._headers_ended = False
        was_in_headers, body_bytes = self._in_headers, self._body_bytes
        self._feed(data)
        # Only a chunk that was inside of headers from its first to its last byte counts; the rest is held by what
        # on_headers_complete sees. Nothing larger than a chunk escapes.
        if was_in_headers and self._in_headers and not self._headers_ended:
            self._header_bytes += len(data)
            if self._header_bytes > MAX_HEADER_SIZE:
                self._refuse_headers()
        elif not was_in_headers and not self._in_headers and not self._headers_ended:
            # Inside of one body. Trailers would be buffered without end; the smallest honest chunks cost 6 bytes a byte.
            self._framing_bytes += len(data) - (self._body_bytes - body_bytes)
            if self._framing_bytes > MAX_HEADER_SIZE + 16 * self._body_bytes:
                self._refuse_headers()

    def _feed(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
        except httptools.HttpParserUpgrade as upgrade:  # the parser has left off behind the headers
            if self._upgrading:
                self._upgrading = False
                self._feed(self._head_without_upgrade() + data[upgrade.args[0] :])

    def _head_without_upgrade(self) -> bytes:
        """The message's head once more, for a parser that has read nothing yet."""
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        lines += [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def on_message_begin(self) -> None:
        self._body_bytes = self._framing_bytes = 0
        self._start_header_timer()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_headers = False
        self._headers_ended = True
        self._header_bytes = 0
        self._stop_header_timer()
        if self._refused:
            return
        if len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers) > MAX_HEADER_SIZE:
            self._refuse_headers()
            return
        if self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT":
            self._upgrading = True
            return
        super().on_headers_complete()
        if self.cycle is not None and self.cycle.scope is self.scope:
            if self.parser.get_http_version() != "1.1":
                self.cycle.send = Unframed(self.cycle).send  # type: ignore[method-assign]
            self.scope["octavo.sink"] = ChunkSink(self.cycle)  # type: ignore[typeddict-unknown-key]

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_headers = True
        if not self._refused and not self._upgrading:
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, f"{msg} This server speaks HTTP/1.1.")

    def _refuse_headers(self) -> None:
        self._refuse(431, f"The request's headers are larger than {MAX_HEADER_SIZE} bytes.", "headers_too_large")

    def _refuse(self, status: int, message: str, code: str | None = None) -> None:
        if self._refused or self.transport.is_closing():
            return
        self._refused = True
        if self.cycle is not None and not self.cycle.response_complete:
            if self.cycle is not self._running or self.cycle.response_started or not self.cycle.more_body:
                self.transport.close()  # in the middle of an earlier answer: nothing can be said here
                return
            self.cycle.disconnected = True  # its body is broken: this is its answer
            self.cycle.message_event.set()
        body = error_body(message, status, code=code)
        head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
        head += f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        self.transport.write(head.encode() + body)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(LINGER_S, self.transport.close)

    def _headers_timed_out(self) -> None:
        if self.transport is not None:
            self._refuse(408, f"No complete request came in {IDLE_HEADER_S:.0f} seconds.")

    def _start_header_timer(self) -> None:
        if self._header_timer is None:
            self._header_timer = self.loop.call_later(IDLE_HEADER_S, self._headers_timed_out)

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None


def limited_protocol(write_timeout_s: float) -> type[LimitedProtocol]:
    """The protocol class for a server with ``--client-write-timeout``."""
    return type("LimitedProtocol", (LimitedProtocol,), {"write_timeout_s": write_timeout_s, "unsent": Unsent(MAX_UNSENT)})
