"""Where a request's outputs wait for their reader, and the short way past it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from octavo.frontend.outputs import RequestOutput


class Outputs(Protocol):
    """What has come of a request and was not read yet."""

    def drain(self) -> RequestOutput: ...


Taker = Callable[[Outputs], bool]
"""Called in the loop that receives the engine's messages, while a request's reader waits and there is something for it:
it may ``drain`` the outputs and use them there and then, which saves a switch of tasks for every token. True: all is
taken, the reader can go on waiting. False: wake it. It is never called with a request's last output, and what it raises
is raised by the iterator."""


class Mailbox:
    """A request's: the receiver adds to ``outputs`` and delivers; the reader drains all that came meanwhile."""

    __slots__ = ("broken", "failed", "outputs", "taker", "touched", "waiter")

    def __init__(self, outputs: Any, taker: Taker | None = None) -> None:
        self.outputs = outputs  # RequestOutputs, or PooledOutputs
        self.taker = taker
        self.touched = False  # it is among those that outputs will be delivered to
        self.waiter: asyncio.Future[None] | None = None  # there while the reader waits
        self.failed: str | None = None  # the engine's death
        self.broken: Exception | None = None  # a fault of ours on this request alone

    async def wait(self, loop: asyncio.AbstractEventLoop) -> None:
        self.waiter = loop.create_future()
        try:
            await self.waiter
        finally:
            self.waiter = None

    def deliver(self) -> None:
        """Give the outputs to the taker, or wake the reader. A reader that does not wait finds them when it comes."""
        self.touched = False
        waiter = self.waiter
        if waiter is None or waiter.done():
            return
        outputs = self.outputs
        if self.taker is not None and self.broken is None and not outputs.finished and outputs.error is None:
            try:
                if self.taker(outputs):
                    return
            except Exception as error:  # noqa: BLE001 (it is the reader's, who must hear of it)
                self.broken = error
        waiter.set_result(None)

    def give_up(self, why: Exception) -> None:
        """Of a reader that does not wait: it finds ``why`` when it comes, and what waited for it is dropped."""
        self.broken, self.outputs = why, None

    def wake(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)
