"""A request that runs as several of the engine's (beams, bounded reasoning) keeps its place in the queue with each of them."""

from __future__ import annotations

import time
from typing import Any

import httpx
import pytest

from octavo.server.mock import MockEngine

MESSAGES = [{"role": "user", "content": "hello"}]


class Recording(MockEngine):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.asked: list[tuple[str, float | None]] = []

    def generate(self, *args: Any, **named: Any) -> Any:
        self.asked.append((named["request_id"], named.get("arrival_time")))
        return super().generate(*args, **named)


@pytest.mark.parametrize(
    "fields",
    [{"use_beam_search": True, "beam_width": 3, "max_tokens": 4, "temperature": 0}, {"thinking_token_budget": 2, "max_tokens": 30}],
)
def test_every_part_arrived_with_the_request(start_server: Any, fields: dict[str, Any]) -> None:
    engine = Recording(tick_s=0.01)
    running = start_server(engine, reasoning_parser="deepseek_r1")
    start = time.time()
    answer = httpx.post(running.url + "/v1/chat/completions", json={"messages": MESSAGES, **fields})
    assert answer.status_code == 200, answer.text
    assert len(engine.asked) > 1
    arrivals = {arrival for _, arrival in engine.asked}
    assert len(arrivals) == 1 and start <= arrivals.pop() <= time.time()
