"""Notice a client that goes away, and end its work at once."""

from __future__ import annotations

import asyncio
from types import TracebackType

from starlette.types import Receive


class DisconnectWatch:
    """``async with``: cancels the body when the client disconnects, and swallows that cancellation.

    ``disconnected`` tells afterwards whether that happened. Costs one task a request, and nothing a token. Any other
    cancellation passes through.
    """

    def __init__(self, receive: Receive) -> None:
        self.receive = receive
        self.disconnected = False
        self._open = False

    async def __aenter__(self) -> DisconnectWatch:  # noqa: PYI034 (Self needs Python 3.11)
        self._task = asyncio.current_task()
        self._open = True
        self._watcher = asyncio.ensure_future(self._wait())
        self._watcher.add_done_callback(self._on_done)
        return self

    async def _wait(self) -> None:
        while (await self.receive())["type"] != "http.disconnect":
            pass

    def _on_done(self, watcher: asyncio.Future[None]) -> None:
        if self._open and not watcher.cancelled():
            self.disconnected = True
            if self._task is not None:
                self._task.cancel()

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        self._open = False
        self._watcher.cancel()
        if self.disconnected and kind is not None and issubclass(kind, asyncio.CancelledError):
            if hasattr(self._task, "uncancel"):  # Python 3.11: the request to cancel has been dealt with
                self._task.uncancel()  # type: ignore[union-attr]
            return True
        return False

    def close(self) -> None:
        """The answer is complete: from here on the end of the connection is no disconnect."""
        self._open = False
