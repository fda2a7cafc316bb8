"""Limits of each API key: requests and tokens a minute, and requests at the same time.

A bucket a key and kind fills evenly up to what one minute allows. A request takes one from the first at its start; its
tokens are taken from the second when it has ended and they are known, which may leave a debt that later requests wait
for. So the first request of a key is never refused for its size, and over time no key gets more than its share.
Without API keys all clients share one bucket.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.config import ServerOptions
from octavo.metrics.cells import Cells
from octavo.server.errors import retry_headers
from octavo.server.messages_errors import refusal_for

COUNTED = frozenset({"POST"})  # what makes work
BUSY_RETRY_S = 1.0  # when a request may end, nobody knows
REQUESTS, TOKENS, STAMP = range(3)


@dataclass
class Refusal:
    message: str
    code: str
    retry_after: float


class KeyLimits:
    """The buckets of all keys, in numbers that all HTTP processes of the server share."""

    def __init__(self, options: ServerOptions, num_keys: int, cells: Cells, clock: Callable[[], float] = time.monotonic) -> None:
        self.requests = options.max_requests_per_minute
        self.tokens = options.max_tokens_per_minute
        self.concurrent = options.max_concurrent_requests_per_key
        self.cells, self.clock = cells, clock
        self.buckets = cells.common(3 * num_keys)  # what is left of requests and of tokens, and when that was
        self.start = cells.position
        self.running = cells.own(num_keys)
        for key in range(num_keys):
            self.running[key] = 0.0  # of a process before this one that ended early
        self.num_keys = num_keys

    @staticmethod
    def wanted(options: ServerOptions) -> bool:
        limits = (options.max_requests_per_minute, options.max_tokens_per_minute, options.max_concurrent_requests_per_key)
        return any(limit is not None for limit in limits)

    def enter(self, key: int) -> Refusal | None:
        """Count a request in, or say why not. Whoever is let in must ``leave``."""
        with self.cells.locked():
            self._refill(key)
            refusal = self._refusal(key)
            if refusal is None:
                self.buckets[3 * key + REQUESTS] -= 1
                self.running[key] += 1
            return refusal

    def leave(self, key: int, tokens: int) -> None:
        with self.cells.locked():
            self._refill(key)
            self.buckets[3 * key + TOKENS] -= tokens
            self.running[key] -= 1

    def headers(self, key: int) -> list[tuple[bytes, bytes]]:
        """OpenAI's x-ratelimit headers, for the kinds that are limited."""
        result = []
        for name, kind, limit in (("requests", REQUESTS, self.requests), ("tokens", TOKENS, self.tokens)):
            if limit is not None:
                left = self.buckets[3 * key + kind]
                reset = 60 * (limit - left) / limit
                values = (("limit", str(limit)), ("remaining", str(max(int(left), 0))), ("reset", duration(reset)))
                result += [(f"x-ratelimit-{what}-{name}".encode(), value.encode()) for what, value in values]
        return result

    def _refill(self, key: int) -> None:
        now, at = self.clock(), 3 * key
        then = self.buckets[at + STAMP]
        for kind, limit in ((REQUESTS, self.requests), (TOKENS, self.tokens)):
            if limit is not None:
                full = not then  # never used before
                left = limit if full else self.buckets[at + kind] + (now - then) * limit / 60
                self.buckets[at + kind] = min(left, limit)
        self.buckets[at + STAMP] = now

    def _refusal(self, key: int) -> Refusal | None:
        if self.concurrent is not None:
            running = sum(part[key] for part in self.cells.all(self.start, self.num_keys)) if self.cells.count > 1 else self.running[key]
            if running >= self.concurrent:
                message = f"This API key has {int(running)} requests running, which is all that it may have at the same time"
                return Refusal(f"{message}; wait until one has ended.", "concurrency_limit_exceeded", BUSY_RETRY_S)
        for name, kind, limit, least in (("requests", REQUESTS, self.requests, 1.0), ("tokens", TOKENS, self.tokens, 0.0)):
            left = self.buckets[3 * key + kind]
            if limit is not None and (left < least if least else left <= 0):
                wait = 60 * (least - left) / limit + 0.001
                message = f"Rate limit reached for this API key: {limit} {name} a minute. Try again in {duration(wait)}."
                return Refusal(message, "rate_limit_exceeded", wait)
        return None


def duration(seconds: float) -> str:
    """As OpenAI writes them: 20ms, 8.64s, 6m0s."""
    if seconds < 1:
        return f"{max(round(1000 * seconds), 0)}ms"
    minutes, rest = divmod(seconds, 60)
    shown = f"{rest:.2f}".rstrip("0").rstrip(".")
    return f"{int(minutes)}m{shown}s" if minutes else f"{shown}s"


class KeyLimitMiddleware:
    """Hold requests that make work to the limits of the key they came with (``scope["octavo.key"]``)."""

    def __init__(self, app: ASGIApp, limits: KeyLimits) -> None:
        self.app = app
        self.limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] not in COUNTED:
            await self.app(scope, receive, send)
            return
        limits, key = self.limits, scope.get("octavo.key", 0)
        refusal = limits.enter(key)
        if refusal is not None:
            extra = {name.decode(): value.decode() for name, value in limits.headers(key)}
            headers = {**extra, **retry_headers(refusal.retry_after)}
            await refusal_for(scope["path"], refusal.message, 429, code=refusal.code, headers=headers)(scope, receive, send)
            return

        def send_with_headers(message: Message) -> Any:
            if message["type"] == "http.response.start":
                message["headers"].extend(limits.headers(key))
            return send(message)

        try:
            await self.app(scope, receive, send_with_headers)
        finally:
            usage = scope.get("octavo.usage")
            limits.leave(key, usage.total_tokens if usage is not None else 0)
