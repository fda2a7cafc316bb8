"""Prefix cache and KV manager, by hand."""

from __future__ import annotations

from octavo.engine.kv_manager import KVManager
from octavo.engine.prefix_cache import PrefixCache
from octavo.engine.request import Request, Sequence
from octavo.types import GenerateRequest, StepPlan, TokenParams


def sequence(prompt: list[int], *, salt: str | None = None, n: int = 1, prompt_logprobs: int | None = None) -> Sequence:
    params = TokenParams(n=n, prompt_logprobs=prompt_logprobs)
    source = GenerateRequest(request_id="r", prompt_token_ids=prompt, params=params, cache_salt=salt)
    return Request(source, (0,), len(prompt) + 16, 0).sequences[0]


def prefill(kv: KVManager, seq: Sequence, step: int = 0) -> list[int]:
    """Admit, run all known tokens and publish; returns the cached blocks that were used."""
    kv.begin_step(step)
    cached = kv.find_cached(seq)
    assert kv.fits(seq, cached, 0)
    kv.admit(seq, cached)
    seq.num_computed = seq.num_prefill
    kv.publish(seq)
    return cached


def hashes(tokens: list[int], salt: str | None = None, cache: PrefixCache | None = None) -> list[bytes]:
    out: list[bytes] = []
    (cache or PrefixCache(8, 2)).extend_hashes(out, tokens, len(tokens) // 2, salt)
    return out


def test_a_hash_covers_tokens_parents_and_salt() -> None:
    plain = hashes([1, 2, 3, 4])
    assert hashes([1, 2, 3, 4, 5]) == plain
    assert hashes([1, 2, 3, 5])[0] == plain[0] and hashes([1, 2, 3, 5])[1] != plain[1]
    assert hashes([9, 2, 3, 4])[1] != plain[1], "same tokens after another beginning"
    roots = [hashes([1, 2], salt)[0] for salt in (None, "", "a", "none", "\ud800")]
    assert len(set(roots)) == 5
    assert hashes([-1, 2**40])[0] != plain[0]
    assert len(plain[0]) == 32


def test_hits_stop_at_the_first_miss_and_leave_the_last_token() -> None:
    kv = KVManager(16, 4)
    first = sequence(list(range(12)))
    assert prefill(kv, first) == []
    assert prefill(kv, sequence(list(range(12)))) == first.blocks[:2], "never the whole prompt"
    assert prefill(kv, sequence([*range(12), 99])) == first.blocks
    assert prefill(kv, sequence([0, 1, 2, 3, 9, 9, 9, 9, 8, 9, 10, 11, 12])) == first.blocks[:1]
    assert (kv.queries, kv.hits) == (12 + 12 + 13 + 13, 0 + 8 + 12 + 4)


def test_salt_and_prompt_logprobs_and_the_switch() -> None:
    kv = KVManager(32, 4)
    prompt = list(range(9))
    prefill(kv, sequence(prompt, salt="a"))
    assert prefill(kv, sequence(prompt)) == []
    assert len(prefill(kv, sequence(prompt, salt="a"))) == 2
    assert prefill(kv, sequence(prompt, salt="a", prompt_logprobs=0)) == []
    off = KVManager(32, 4, prefix_caching=False)
    prefill(off, sequence(prompt))
    assert prefill(off, sequence(prompt)) == [] and len(off.cache) == 0 and off.queries == 0


def test_free_blocks_stay_cached_until_evicted_tail_first() -> None:
    kv = KVManager(4, 4)
    seq = sequence(list(range(12)))
    prefill(kv, seq)
    blocks = seq.blocks
    kv.release(seq, 0)
    kv.begin_step(1)
    assert kv.pool.free_list() == [3, *reversed(blocks)]
    assert kv.usage == 0
    other = sequence([50] * 5)  # takes the fresh block, and the end of the chain
    prefill(kv, other, step=1)
    assert len(kv.find_cached(sequence([*range(12), 1]))) == 2
    again = sequence([*range(8), 1])
    assert not kv.fits(again, kv.find_cached(again), 0), "its two hits are the only free blocks, and it needs a third"
    kv.release(other, 1)
    kv.begin_step(2)
    assert prefill(kv, again, step=2) == blocks[:2]


def test_equal_content_is_published_once() -> None:
    kv = KVManager(8, 4)
    kv.begin_step(0)
    a, b = sequence([1] * 5), sequence([1] * 5)
    for seq in (a, b):  # admitted in the same step: neither sees the other
        kv.admit(seq, kv.find_cached(seq))
    for seq in (a, b):
        seq.num_computed = 5
        kv.publish(seq)
    assert len(kv.cache) == 1
    kv.release(a, 0)
    kv.begin_step(1)
    assert kv.find_cached(sequence([1] * 5)) == [0]


def test_reset_forgets_also_what_runs() -> None:
    kv = KVManager(8, 4)
    seq = sequence([1] * 9)
    prefill(kv, seq)
    kv.reset_prefix_cache()
    assert kv.find_cached(sequence([1] * 9)) == []
    seq.tokens += [1] * 3  # computed partly before the reset: nothing of it may be published
    seq.num_computed = len(seq.tokens)
    kv.publish(seq)
    assert len(kv.cache) == 0 and kv.find_cached(sequence([1] * 9)) == []
    waiting = sequence([1] * 9)
    kv.find_cached(waiting)
    old = list(waiting.hashes)
    kv.reset_prefix_cache()
    kv.find_cached(waiting)
    assert waiting.hashes and waiting.hashes != old


def test_copy_on_write_the_last_owner_keeps_the_block() -> None:
    kv = KVManager(8, 4)
    parent = sequence([1] * 6, n=3)
    children = parent.request.sequences[1:]
    prefill(kv, parent)
    for row, child in enumerate(children, start=1):
        kv.fork(parent, child)
        child.row = row
    tail = parent.blocks[1]
    assert kv.pool.refs[tail] == 3
    kv.begin_step(1)
    plan = StepPlan(1)
    for seq in (parent, *children):
        assert seq.num_computed >= seq.writable, "nobody writes into a shared block without asking"
        assert kv.grow(seq, plan)
    assert plan.copies == [(tail, parent.blocks[1]), (tail, children[0].blocks[1])]
    assert [(a.offset, a.block_ids) for a in plan.block_appends] == [(1, [parent.blocks[1]]), (1, [children[0].blocks[1]])]
    assert children[1].blocks[1] == tail
    assert len({s.blocks[1] for s in (parent, *children)}) == 3
    assert {s.blocks[0] for s in (parent, *children)} == {parent.blocks[0]}


def test_the_source_of_a_copy_is_not_reused_within_the_step() -> None:
    kv = KVManager(8, 4)
    parent = sequence([1] * 6, n=2)
    child = parent.request.sequences[1]
    prefill(kv, parent)
    kv.fork(parent, child)
    tail = parent.blocks[1]
    kv.begin_step(1)
    assert kv.grow(parent, StepPlan(1))
    kv.release(child, 0)  # its own last step was 0, but step 1 copies from the block
    assert kv.pool.refs[tail] == 0 and not kv.pool.is_free(tail)
    kv.begin_step(2)
    assert kv.pool.is_free(tail)


def test_a_prompt_that_fills_its_blocks_forks_without_copies() -> None:
    kv = KVManager(8, 4)
    parent = sequence([1] * 8, n=2)
    child = parent.request.sequences[1]
    prefill(kv, parent)
    kv.fork(parent, child)
    plan = StepPlan(1)
    assert kv.grow(parent, plan) and kv.grow(child, plan)
    assert not plan.copies and [a.offset for a in plan.block_appends] == [2, 2]
    assert parent.blocks[2] != child.blocks[2]


def test_growth_fails_without_a_free_block_and_changes_nothing() -> None:
    kv = KVManager(1, 4)
    seq = sequence([1] * 4)
    prefill(kv, seq)
    plan = StepPlan(1)
    assert not kv.grow(seq, plan)
    assert plan == StepPlan(1) and len(seq.blocks) == 1
