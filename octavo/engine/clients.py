"""Who the engine works for: one front end, or several that share it, each with a pair of sockets of its own.

A front end that shares begins its request ids with its name and a colon; so a delta finds its way back by its id alone,
and ids of two front ends never meet. The first one ("", the engine's parent) is always there and learns of everything
but the others' deltas.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from octavo.types import EngineStats, StepOutputs, TokenDelta

STATS_S = 0.1  # those who got no delta lately hear how the engine is this often, and at once when it becomes idle

Send = Callable[[Any], None]


class Clients:
    """Front ends by name, and what they are sent."""

    def __init__(self, parent: Send, clock: Callable[[], float] = time.monotonic) -> None:
        self.sends: dict[str, Send] = {"": parent}
        self.clock = clock
        self.last_sent = dict.fromkeys(self.sends, clock())

    def add(self, name: str, send: Send) -> None:
        self.sends[name] = send
        self.last_sent[name] = self.clock()

    def drop(self, name: str) -> None:
        self.sends.pop(name, None)
        self.last_sent.pop(name, None)

    def owns(self, name: str, request_id: str) -> bool:
        return request_id.startswith(name + ":")

    def send_outputs(self, deltas: list[TokenDelta], stats: EngineStats) -> None:
        """Each front end gets its own deltas; one without any gets the statistics when they are due."""
        now = self.clock()
        if len(self.sends) == 1:
            self._send("", StepOutputs(deltas=deltas, stats=stats, timestamp=now), now)
            return
        parts: dict[str, list[TokenDelta]] = {name: [] for name in self.sends}
        for delta in deltas:
            name, colon, _ = delta.request_id.partition(":")
            part = parts.get(name if colon else "")
            if part is not None:  # else: of a front end that has gone
                part.append(delta)
        idle = not (stats.num_running or stats.num_waiting)
        for name, part in parts.items():
            if part or idle or now - self.last_sent[name] > STATS_S:
                self._send(name, StepOutputs(deltas=part, stats=stats, timestamp=now), now)

    def send_all(self, message: Any, older_than_s: float = 0.0) -> None:
        """To all who were not sent anything for so long."""
        now = self.clock()
        for name in self.sends:
            if now - self.last_sent[name] >= older_than_s:
                self._send(name, message, now)

    def _send(self, name: str, message: Any, now: float) -> None:
        self.sends[name](message)
        self.last_sent[name] = now
