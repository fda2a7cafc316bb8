"""The swap tier: what is moved and when, what is not, and that it pays."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from octavo.engine.core import Engine
from octavo.engine.cost_model import CostModel, StepWork
from octavo.engine.kv_manager import KVManager
from octavo.engine.pace import rule_for
from octavo.engine.policy import SwapPreemption
from octavo.engine.request import Sequence, Status
from octavo.engine.settings import SchedulerSettings
from octavo.engine.swap_tier import AWAY, SwapTier
from octavo.errors import ConfigError
from octavo.types import GenerateRequest, PoolingParams, StepPlan, TokenDelta, TokenParams

from .fake_executor import FakeExecutor, truth
from .laws import check_empty, check_laws
from .simulator import CPU_135M, H200_06B, H200_8B, Device, Load, Measured, at, simulate
from .test_kv_manager import prefill, sequence

VOCAB = 1000

# -- the KV manager, by hand ----------------------------------------------------------------------------------------------


def manager(num_blocks: int = 8, num_cpu_blocks: int = 8, prefix_caching: bool = True) -> KVManager:
    return KVManager(num_blocks, 4, prefix_caching, SwapTier(num_cpu_blocks, 0.0))


def decoded(kv: KVManager, seq: Sequence, count: int, step: int) -> None:
    """As if it had drawn ``count`` tokens and run all but the last."""
    kv.begin_step(step)
    for i in range(count):
        seq.tokens.append(500 + i)
        seq.length += 1
        if i < count - 1:
            assert kv.grow(seq, StepPlan(step))
            seq.num_computed += 1
    kv.publish(seq)


def test_out_and_in_again() -> None:
    kv = manager()
    seq = sequence(list(range(10)))
    prefill(kv, seq)
    decoded(kv, seq, 4, step=1)  # 13 of 14 tokens computed: three full blocks and a token
    device = list(seq.blocks)
    kv.begin_step(2)
    kv.swap_out(seq, 1)
    assert kv.swap.take_moves() == ([], [(block, i) for i, block in enumerate(device)])
    assert (seq.blocks, seq.num_computed, kv.pool.num_free, kv.swap.usage, kv.swap.num_sequences) == ([], 0, 8, 0.5, 1)
    thief = sequence([9] * 30)  # takes all blocks: nothing is left in the prefix cache
    prefill(kv, thief, step=2)
    kv.release(thief, 2)
    kv.begin_step(3)
    found = kv.find_cached(seq)
    assert found == [AWAY] * 4 and kv.start_of(seq, found) == 13
    assert kv.fits(seq, found, 4) and not kv.fits(seq, found, 5)
    kv.admit(seq, found)
    assert kv.swap.take_moves() == ([(i, block) for i, block in enumerate(seq.blocks)], [])
    assert (seq.num_computed, seq.num_prefill, seq.writable, seq.swapped) == (13, 14, 16, None)
    assert (kv.swap.pool.num_free, kv.swap.pool.num_freeing) == (4, 4), "this step reads them"
    kv.begin_step(4)
    assert kv.swap.pool.num_free == 8 and kv.swap.usage == 0 == kv.swap.num_sequences
    kv.publish(seq)
    assert kv.find_cached(sequence([*range(10), 500, 501, 502])) == seq.blocks[:3], "they hold what they held"


def test_what_the_cache_still_has_is_not_brought_in() -> None:
    kv = manager(num_blocks=16)
    seq = sequence(list(range(10)))
    prefill(kv, seq)
    decoded(kv, seq, 1, step=1)
    first = list(seq.blocks)
    kv.swap_out(seq, 1)
    assert len(kv.swap.take_moves()[1]) == 3
    kv.begin_step(2)
    found = kv.find_cached(seq)
    assert found == [*first[:2], AWAY], "the third is not full, so only its copy has it"
    assert kv.fits(seq, found, 13) and not kv.fits(seq, found, 14), "the two hits are free, and will be taken, too"
    kv.admit(seq, found)
    assert kv.swap.take_moves() == ([(2, seq.blocks[2])], []) and seq.blocks[:2] == first[:2]


def test_what_others_hold_is_left_to_the_cache_and_if_it_goes_all_is_recomputed() -> None:
    kv = manager(num_blocks=9)
    one, two = sequence(list(range(12))), sequence([*range(8), 50, 51, 52, 53, 54])
    prefill(kv, one)
    assert prefill(kv, two, step=1) == one.blocks[:2]
    kv.begin_step(2)
    assert kv.num_left(two) == 2
    last = two.blocks[2:]
    kv.swap_out(two, 1)
    assert kv.swap.take_moves() == ([], [(last[0], 0), (last[1], 1)])
    assert two.swapped is not None and (two.swapped.left, two.swapped.num_computed) == (2, 13)
    two.tokens.append(7)
    kv.begin_step(3)
    assert kv.find_cached(two) == [*one.blocks[:2], last[0], AWAY]
    kv.release(one, 2)
    kv.begin_step(4)
    thief = sequence([9] * 36)
    prefill(kv, thief, step=4)
    kv.release(thief, 4)
    kv.begin_step(5)
    assert kv.find_cached(two) == [] and two.swapped is None, "its copies are of no use without the beginning"
    kv.begin_step(6)
    assert kv.swap.pool.num_free == 8 and kv.swap.num_sequences == 0


def test_shared_blocks_that_nobody_could_find_again_are_copied() -> None:
    kv = manager(prefix_caching=False)
    parent = sequence([1] * 6, n=2)
    child = parent.request.sequences[1]
    prefill(kv, parent)
    kv.fork(parent, child)
    assert kv.num_left(child) == 0
    shared = list(child.blocks)
    kv.swap_out(child, 0)
    assert kv.swap.take_moves()[1] == [(shared[0], 0), (shared[1], 1)]
    assert [kv.pool.refs[b] for b in shared] == [1, 1], "the parent's"


def test_nothing_from_before_a_reset_is_ever_hit() -> None:
    kv = manager()
    seq = sequence([1] * 9)
    prefill(kv, seq)
    kv.swap_out(seq, 0)
    kv.reset_prefix_cache()
    kv.begin_step(1)
    prefill(kv, other := sequence([1] * 9), step=1)  # the same tokens, computed since
    seq.tokens.append(2)
    found = kv.find_cached(seq)
    assert found == [AWAY] * 3, "what it has computed before and what was computed since are not mixed"
    kv.admit(seq, found)
    seq.num_computed = len(seq.tokens)
    kv.publish(seq)
    assert kv.find_cached(sequence([1] * 9)) == other.blocks[:2] and len(kv.cache) == 2


def test_an_end_or_an_heir_while_swapped_out() -> None:
    kv = manager()
    leader = sequence(list(range(10)), n=2)
    heir = leader.request.sequences[1]
    prefill(kv, leader)
    kv.swap_out(leader, 0)
    record = leader.swapped
    kv.hand_over(leader, heir)
    assert heir.swapped is record and leader.swapped is None and kv.swap.num_sequences == 1
    kv.begin_step(1)
    kv.release(leader, 0)
    assert kv.swap.usage == 3 / 8
    kv.release(heir, 0)
    assert kv.swap.usage == 0 and kv.swap.pool.num_freeing == 3, "the copy out may be planned, but not run yet"


# -- the decision ----------------------------------------------------------------------------------------------------------


def costs(token_s: float) -> CostModel:
    model = CostModel()
    for count in (64, 128, 256, 512) * 50:
        model.observe(StepWork(prompt_tokens=count), token_s * count)
    return model


def goes_out(kv: KVManager, seq: Sequence, model: CostModel) -> bool:
    SwapPreemption(model).take(seq, kv, 0)
    assert not seq.blocks
    return seq.swapped is not None


def long_sequence(kv: KVManager, **changes: Any) -> Sequence:
    seq = sequence(list(range(400)), **changes)
    prefill(kv, seq)
    return seq


def test_only_what_is_cheaper_is_moved() -> None:
    def out(token_s: float, block_s: float, num_cpu_blocks: int = 200) -> bool:
        kv = KVManager(150, 4, True, SwapTier(num_cpu_blocks, block_s))
        return goes_out(kv, long_sequence(kv), costs(token_s))

    assert out(token_s=1e-4, block_s=1e-4)  # 100 blocks there and back: 20 ms + 1; 400 tokens: 40 ms
    assert not out(token_s=5e-5, block_s=1e-4)
    assert not out(token_s=1e-4, block_s=1e-4, num_cpu_blocks=99), "no room"
    assert not out(token_s=2e-6, block_s=1e-9), "little is recomputed sooner than anything is moved"


def test_while_nothing_is_known_it_is_moved() -> None:
    kv = KVManager(150, 4, True, SwapTier(200, 1.0))
    assert goes_out(kv, long_sequence(kv), CostModel())


def test_what_will_still_be_cached_costs_nothing_to_recompute() -> None:
    kv = KVManager(300, 4, True, SwapTier(200, 1e-4))
    assert not goes_out(kv, long_sequence(kv), costs(1e-4)), "with so many free blocks nobody will overwrite them"
    kv = KVManager(300, 4, False, SwapTier(200, 1e-4))
    assert goes_out(kv, long_sequence(kv), costs(1e-4)), "but without a prefix cache nobody would find them"
    kv = KVManager(150, 4, True, SwapTier(200, 1e-4))
    one = long_sequence(kv)
    two = sequence([*one.tokens, 1, 2, 3])
    prefill(kv, two, step=1)
    assert not goes_out(kv, two, costs(1e-4)), "the other one keeps them"


def test_some_have_nothing_to_move() -> None:
    kv = KVManager(150, 4, True, SwapTier(200, 0.0))
    ending = long_sequence(kv)
    ending.max_length = ending.num_computed + 1
    assert not goes_out(kv, ending, CostModel()), "its last token is in flight"
    kv.begin_step(1)
    seq = sequence([5] * 40)
    kv.admit(seq, [])
    assert not goes_out(kv, seq, CostModel()), "nothing computed"
    kv.begin_step(2)
    pooled = long_sequence(kv)
    pooled.request.pooling = PoolingParams(kind="mean")
    assert not goes_out(kv, pooled, CostModel()), "a part of its vector is in the row"


@pytest.mark.parametrize("name", ["num_cpu_blocks", "swap_block_s"])
def test_settings(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} must not be negative"):
        make(**{name: -1})


# -- the scheduler ---------------------------------------------------------------------------------------------------------


def make(steps_ahead: int = 0, num_cpu_blocks: int = 64, **changes: Any) -> Engine:
    base = {"num_blocks": 10, "block_size": 4, "max_model_len": 40, "max_num_seqs": 4, "max_num_batched_tokens": 32}
    settings = SchedulerSettings(**{**base, "num_cpu_blocks": num_cpu_blocks, **changes})
    executor = FakeExecutor(
        settings.num_blocks, 4, settings.max_num_seqs, settings.max_num_batched_tokens, VOCAB, steps_ahead, True, num_cpu_blocks
    )
    clock = itertools.count(0.0, 1.0)  # steps take seconds, so that nothing is worth recomputing
    return Engine.from_settings(settings, executor, lambda: next(clock))


def ask(engine: Engine, name: str, prompt: int = 8, *, priority: int = 0, **params: Any) -> GenerateRequest:
    tokens = [hash((name, i)) % VOCAB for i in range(prompt)]
    request = GenerateRequest(
        request_id=name,
        prompt_token_ids=tokens,
        params=TokenParams(**{"max_tokens": 20, "temperature": 0.0, "seed": 0, **params}),
        priority=priority,
    )
    engine.add_request(request)
    return request


def step(engine: Engine) -> list[TokenDelta]:
    deltas = engine.step()
    check_laws(engine)
    return deltas


def drain(engine: Engine) -> dict[str, list[int]]:
    out: dict[str, list[int]] = {}
    for _ in range(1000):
        if not engine.has_work():
            check_empty(engine)
            return out
        for delta in step(engine):
            out.setdefault(delta.request_id, []).extend(delta.token_ids)
    raise AssertionError("no progress")


def until_swapped(engine: Engine) -> tuple[Sequence, dict[str, list[int]]]:
    """The sequence that went out first, and all tokens until then."""
    out: dict[str, list[int]] = {}
    for _ in range(100):
        for delta in step(engine):
            out.setdefault(delta.request_id, []).extend(delta.token_ids)
        for seq in engine.scheduler.waiting.items:
            if seq.swapped is not None:
                return seq, out
    raise AssertionError("nobody was swapped out")


@pytest.mark.parametrize("steps_ahead", [0, 1, 2])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_a_swapped_sequence_goes_on_where_it_was(steps_ahead: int, prefix_caching: bool) -> None:
    engine = make(steps_ahead, prefix_caching=prefix_caching)
    requests = [ask(engine, name) for name in "abc"]
    seq, out = until_swapped(engine)
    assert seq.request.id == "c" and seq.status is Status.WAITING and seq.swapped is not None
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_swapped) == (2, 0, 1) and stats.cpu_cache_usage > 0
    ask(engine, "later", max_tokens=1)
    ran: list[str] = []
    computed = seq.swapped.num_computed
    executor = engine.executor
    executor.on_submit = lambda plan: ran.extend(  # type: ignore[attr-defined]
        s.request.id for s in engine.scheduler.running.items for a in plan.advances if a.row == s.row and a.token_ids is not None
    )
    for name, tokens in drain(engine).items():
        out[name] = out.get(name, []) + tokens
    assert ran.index("c") < ran.index("later"), "it comes back before anyone new starts"
    assert not any(
        a.token_ids is not None and a.start < computed and a.row == seq.row
        for plan in executor.plans[-30:]  # type: ignore[attr-defined]
        for a in plan.advances
        if seq.row >= 0
    )
    for request in requests:
        assert out[request.request_id] == truth(request, 0, VOCAB, 40).token_ids
    stats = engine.stats()
    assert stats.num_swapped == stats.cpu_cache_usage == 0 < stats.num_blocks_in <= stats.num_blocks_out


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_no_token_is_computed_twice(steps_ahead: int) -> None:
    engine = make(steps_ahead, prefix_caching=False)
    for name in "abcd":
        ask(engine, name)
    drain(engine)
    assert engine.stats().num_preemptions > 0
    computed = sum(plan.num_tokens for plan in engine.executor.plans)  # type: ignore[attr-defined]
    assert computed <= 4 * (8 + 19) + (4 if steps_ahead else 0), "what was in flight at a preemption counts, too"
    recomputing = make(steps_ahead, num_cpu_blocks=0, prefix_caching=False)
    for name in "abcd":
        ask(recomputing, name)
    drain(recomputing)
    assert sum(plan.num_tokens for plan in recomputing.executor.plans) > computed + 10  # type: ignore[attr-defined]


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_abort_while_swapped_out(steps_ahead: int) -> None:
    engine = make(steps_ahead)
    for name in "abc":
        ask(engine, name)
    until_swapped(engine)
    [delta] = engine.abort("c")
    assert delta.finish_reason == "abort" and engine.stats().num_swapped == 0 == engine.stats().cpu_cache_usage
    check_laws(engine)
    for name in "defg":
        ask(engine, name)
    assert set(drain(engine)) == set("abdefg")


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_the_whole_engine_forgets(steps_ahead: int) -> None:
    engine = make(steps_ahead)
    for name in "abc":
        ask(engine, name)
    until_swapped(engine)
    engine.abandon()
    check_empty(engine)
    request = ask(engine, "new")
    assert drain(engine)["new"] == truth(request, 0, VOCAB, 40).token_ids


def test_moves_of_a_plan_that_came_to_nothing_are_made_by_the_next() -> None:
    """a has drawn all it will, and its end is in flight; b finds no block and gives way: nothing can run."""
    engine = make(1, num_blocks=6, max_model_len=24, max_num_seqs=2)
    a, b = ask(engine, "a", 4, max_tokens=2), ask(engine, "b", 15, max_tokens=9)
    out: dict[str, list[int]] = {}
    seen = False
    kv = engine.scheduler.kv
    for _ in range(100):
        if not engine.has_work():
            break
        for delta in step(engine):
            out.setdefault(delta.request_id, []).extend(delta.token_ids)
        seen |= bool(kv.swap.outs)
    assert seen, "the case did not come up"
    assert out == {r.request_id: truth(r, 0, VOCAB, 24).token_ids for r in (a, b)}
    check_empty(engine)


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_a_higher_priority_swaps_a_lower_one_out(steps_ahead: int) -> None:
    engine = make(steps_ahead, policy="priority", max_num_seqs=2, prefix_caching=False)
    slow = ask(engine, "slow", 20, priority=5, max_tokens=12)
    for _ in range(4):
        step(engine)
    urgent = ask(engine, "urgent", 24, priority=0, max_tokens=5)
    seq, out = until_swapped(engine)
    assert seq.request.id == "slow"
    equal = ask(engine, "equal", 8, priority=5, max_tokens=2)
    order: list[str] = []
    while engine.has_work():
        for delta in step(engine):
            order.append(delta.request_id)
            out.setdefault(delta.request_id, []).extend(delta.token_ids)
    assert order.index("urgent") < order.index("slow") < order.index("equal")
    assert out["urgent"] == truth(urgent, 0, VOCAB, 40).token_ids and out["equal"] == truth(equal, 0, VOCAB, 40).token_ids
    assert out["slow"] == truth(slow, 0, VOCAB, 40).token_ids[-len(out["slow"]) :]
    assert engine.stats().num_blocks_in > 0


def test_the_cost_model_learns_where_the_token_budget_alone_rules_and_not_from_moves() -> None:
    engine = make(pace=None)
    assert engine.scheduler.pace.learns and not make(num_cpu_blocks=0).scheduler.pace.learns
    model = CostModel()
    model.observe(StepWork(decodes=1, rows=1, context=5, moves=1), 1.0)
    assert model.decode.count == 0
    for name in "abc":
        ask(engine, name)
    drain(engine)
    learnt = engine.scheduler.pace.costs
    plans = engine.executor.plans  # type: ignore[attr-defined]
    assert learnt.prompt.count > 0
    assert learnt.prompt.count + learnt.decode.count <= sum(not (p.swap_ins or p.swap_outs) for p in plans) < len(plans)


# -- whether it pays -------------------------------------------------------------------------------------------------------


def compared(device: Device, load: Load, num_blocks: int) -> tuple[Measured, Measured]:
    """Recomputing, and swapping: the same load on the same device."""
    rule = rule_for(device.kind, None)
    return tuple(simulate(device.warm, load, rule, num_blocks=num_blocks, num_cpu_blocks=n) for n in (0, 1 << 14))  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("device", "load", "num_blocks", "gain"),
    [
        (H200_8B, Load(300, concurrency=100, prompt=512, output=512, spread=0.5), 3000, 1.02),
        (CPU_135M, Load(48, concurrency=8, prompt=128, output=256, spread=0.5), 100, 1.15),
    ],
    ids=["8B", "CPU"],
)
def test_more_tokens_and_shorter_gaps(device: Device, load: Load, num_blocks: int, gain: float) -> None:
    recomputing, swapping = compared(device, load, num_blocks)
    print(f"recompute {recomputing.line()}\nswap      {swapping.line()}")
    assert recomputing.engine is not None and recomputing.engine.stats().num_preemptions > 20
    assert swapping.throughput > gain * recomputing.throughput
    assert at(swapping.gaps, 0.99) < 1.02 * at(recomputing.gaps, 0.99) and at(swapping.ttft, 0.99) < at(recomputing.ttft, 0.99)


def test_a_model_that_computes_faster_than_it_is_moved() -> None:
    recomputing, swapping = compared(H200_06B, Load(300, concurrency=100, prompt=512, output=512, spread=0.5), 3000)
    assert swapping.engine is not None and swapping.engine.stats().num_preemptions > 20
    assert swapping.engine.stats().num_blocks_out == 0 and swapping.throughput == recomputing.throughput
