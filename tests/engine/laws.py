"""The engine's laws, checked from outside against everything that it holds."""

from __future__ import annotations

from collections import Counter

from octavo.engine.core import Engine
from octavo.engine.request import Status


def check_laws(engine: Engine) -> None:
    scheduler = engine.scheduler
    kv, pool = scheduler.kv, scheduler.kv.pool
    sequences = [s for r in scheduler.requests.values() for s in r.live]
    running = [s for s in sequences if s.status is Status.RUNNING]
    waiting = [s for s in sequences if s.status is Status.WAITING]
    assert scheduler.running.items == sorted(running, key=lambda s: s.order)
    assert scheduler.waiting.items == sorted(waiting, key=lambda s: s.order)

    # Law 1: every block is owned.
    holders = Counter(block for s in sequences for block in s.blocks)
    assert holders == Counter({b: n for b, n in enumerate(pool.refs) if n})
    assert all(not s.blocks for s in sequences if s.status is not Status.RUNNING)
    free = pool.free_list()
    assert len(free) == len(set(free)) == pool.num_free
    assert not set(free) & set(holders)
    assert pool.num_free + pool.num_freeing + len(holders) == pool.num_blocks
    assert abs(kv.usage - len(holders) / pool.num_blocks) < 1e-9
    cached = {b: h for b, h in enumerate(kv.cache.hash_of) if h is not None}
    assert {h: b for b, h in cached.items()} == kv.cache._block_of

    # The swap tier: CPU blocks are owned, by waiting sequences alone, and by one each.
    tier = kv.swap
    swapped = [s for s in sequences if s.swapped is not None]
    places = [place for s in swapped for place in s.swapped.blocks]
    assert len(places) == len(set(places))
    assert set(places) == {b for b, n in enumerate(tier.pool.refs) if n} and all(n <= 1 for n in tier.pool.refs)
    assert tier.pool.num_free + tier.pool.num_freeing + len(places) == tier.pool.num_blocks
    assert tier.num_sequences == len(swapped) and all(s.status is Status.WAITING for s in swapped)
    assert not tier.ins, "what comes in is read by the step that it was planned for"
    for s in swapped:
        assert 0 < s.swapped.num_computed < s.length and s.swapped.left * kv.block_size <= s.swapped.num_computed
        assert s.swapped.left + len(s.swapped.blocks) == kv.blocks_for(s.swapped.num_computed)

    rows = [s.row for s in sequences if s.row >= 0]
    assert sorted(rows + scheduler.free_rows) == list(range(scheduler.settings.max_num_seqs))
    assert all((s.row >= 0) == (s.status is Status.RUNNING) for s in sequences if s.status is not Status.HELD)
    for s in running:
        assert s.num_computed <= s.length and len(s.blocks) * kv.block_size >= s.num_computed
        assert s.length <= s.max_length and s.num_in_flight <= len(scheduler.in_flight)
    assert len(scheduler.in_flight) <= engine.executor.steps_ahead


def check_empty(engine: Engine) -> None:
    """After the last request: every block free (or about to be), every row free, nothing in flight."""
    check_laws(engine)
    scheduler = engine.scheduler
    assert not scheduler.requests and not scheduler.in_flight and not scheduler.waiting.items and not scheduler.running.items
    assert not any(scheduler.kv.pool.refs) and not any(scheduler.kv.swap.pool.refs)
    assert len(scheduler.free_rows) == scheduler.settings.max_num_seqs
    assert not engine.has_work()
