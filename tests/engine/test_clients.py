"""Several front ends on one engine: each gets its own deltas, all hear how the engine is, and one that goes leaves nothing behind."""

from __future__ import annotations

from octavo.engine.clients import STATS_S, Clients
from octavo.types import EngineStats, Heartbeat, StepOutputs, TokenDelta


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def delta(request_id: str) -> TokenDelta:
    return TokenDelta(request_id=request_id, index=0, token_ids=[1])


def made(*names: str) -> tuple[Clients, dict[str, list], Clock]:
    clock, sent = Clock(), {name: [] for name in ("", *names)}
    clients = Clients(sent[""].append, clock)
    for name in names:
        clients.add(name, sent[name].append)
    return clients, sent, clock


def ids(messages: list) -> list[str]:
    return [d.request_id for m in messages if isinstance(m, StepOutputs) for d in m.deltas]


BUSY = EngineStats(num_running=3)


def test_alone_everything_is_its_own():
    clients, sent, _ = made()
    clients.send_outputs([delta("a"), delta("1:b")], BUSY)
    assert ids(sent[""]) == ["a", "1:b"]


def test_deltas_find_their_way_back():
    clients, sent, _ = made("1", "2", "11")
    clients.send_outputs([delta(i) for i in ("1:a", "2:a", "11:a", "1:x:y", "plain", "3:gone", "2:b")], BUSY)
    wanted = {"": ["plain"], "1": ["1:a", "1:x:y"], "2": ["2:a", "2:b"], "11": ["11:a"]}
    assert {name: ids(messages) for name, messages in sent.items()} == wanted
    assert clients.owns("1", "1:a") and not clients.owns("1", "11:a")


def test_statistics_come_when_due_and_at_once_when_idle():
    clients, sent, clock = made("1", "2")
    for step in range(100):
        clock.now = step * 0.01
        clients.send_outputs([delta("1:a")], BUSY)
    assert len(sent["1"]) == 100 and 1.0 / STATS_S - 3 <= len(sent["2"]) <= 1.0 / STATS_S + 1
    count = len(sent["2"])
    clients.send_outputs([delta("1:a")], EngineStats())
    assert len(sent["2"]) == count + 1 and sent["2"][-1].stats.num_running == 0


def test_heartbeats_go_to_the_quiet_ones():
    clients, sent, clock = made("1")
    clock.now = 5.0
    clients.send_outputs([delta("1:a")], BUSY)
    clock.now = 5.5
    clients.send_outputs([delta("1:a")], BUSY)
    clock.now = 6.2
    clients.send_outputs([delta("1:a")], BUSY)
    clients.send_all(Heartbeat(), older_than_s=1.0)
    assert not any(isinstance(m, Heartbeat) for m in sent["1"] + sent[""])  # the other one had statistics
    clock.now = 7.5
    clients.send_all(Heartbeat(), older_than_s=1.0)
    assert all(isinstance(m[-1], Heartbeat) for m in sent.values())


def test_who_has_gone_gets_nothing():
    clients, sent, _ = made("1", "2")
    clients.drop("1")
    clients.drop("1")
    clients.send_outputs([delta("1:a"), delta("2:b")], EngineStats())
    assert sent["1"] == [] and ids(sent["2"]) == ["2:b"]
