"""The scheduler's promises, one by one."""

from __future__ import annotations

import pytest

from octavo.config import EngineConfig
from octavo.engine.core import Engine
from octavo.engine.request import Request, Status, derive_seed
from octavo.engine.settings import SchedulerSettings
from octavo.errors import ConfigError, RequestError
from octavo.types import EngineStats, GenerateRequest, TokenDelta, TokenLogprobs, TokenParams

from .fake_executor import FakeExecutor, prompt_truth, truth
from .laws import check_empty, check_laws

VOCAB = 1000


def make(steps_ahead: int = 0, **changes) -> Engine:
    settings = SchedulerSettings(
        **{"num_blocks": 64, "block_size": 4, "max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 16, **changes}
    )
    executor = FakeExecutor(
        settings.num_blocks, settings.block_size, settings.max_num_seqs, settings.max_num_batched_tokens, VOCAB, steps_ahead, lazy=True
    )
    return Engine.from_settings(settings, executor)


def ask(engine: Engine, name: str, prompt: list[int] | int = 4, *, priority: int = 0, arrival: float = 0.0, **params) -> GenerateRequest:
    tokens = [hash((name, i)) % VOCAB for i in range(prompt)] if isinstance(prompt, int) else prompt
    params = {"max_tokens": 4, "temperature": 0.0, "seed": 0, **params}
    request = GenerateRequest(
        request_id=name, prompt_token_ids=tokens, params=TokenParams(**params), priority=priority, arrival_time=arrival
    )
    engine.add_request(request)
    return request


def drain(engine: Engine) -> dict[tuple[str, int], list[TokenDelta]]:
    out: dict[tuple[str, int], list[TokenDelta]] = {}
    for _ in range(1000):
        if not engine.has_work():
            check_empty(engine)
            return out
        for delta in engine.step():
            out.setdefault((delta.request_id, delta.index), []).append(delta)
        check_laws(engine)
    raise AssertionError("no progress")


def tokens_of(deltas: list[TokenDelta]) -> list[int]:
    return [t for d in deltas for t in d.token_ids]


def running(engine: Engine) -> list[str]:
    return [s.request.id for s in engine.scheduler.running.items]


# -- settings and refusals ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"num_blocks": 0}, ["num_blocks"]),
        ({"max_num_batched_tokens": 3}, ["max_num_batched_tokens", "3", "4"]),
        ({"chunked_prefill": False, "max_num_batched_tokens": 67}, ["67", "68", "max_model_len"]),
        ({"policy": "lottery"}, ["fcfs", "lottery"]),
    ],
)
def test_settings_that_would_stall_are_refused(changes: dict, names: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        make(**changes)
    assert all(name in str(error.value) for name in names)


@pytest.mark.parametrize(
    ("prompt", "params", "names", "param"),
    [
        ([], {}, ["empty"], "prompt"),
        (65, {}, ["65", "64"], "prompt"),
        (64, {}, ["64"], "prompt"),
        (65, {"max_tokens": 0}, ["65", "64"], "prompt"),
        (4, {"n": 5}, ["5", "4"], "n"),
        (4, {"n": 0}, ["0"], "n"),
        (4, {"max_tokens": -1}, ["-1"], "max_tokens"),
        (30, {"max_tokens": 12}, ["11", "10"], "max_tokens"),
    ],
)
def test_what_can_never_finish_is_refused_with_the_numbers(prompt, params: dict, names: list[str], param: str) -> None:
    engine = make(num_blocks=10)
    with pytest.raises(RequestError) as error:
        ask(engine, "a", prompt, **params)
    assert all(name in str(error.value) for name in names) and error.value.param == param
    assert not engine.has_work()
    check_empty(engine)


def test_what_just_fits_is_taken() -> None:
    engine = make(num_blocks=10)
    ask(engine, "a", 30, max_tokens=11)  # the last token drawn is never run: 40 positions
    assert len(tokens_of(drain(engine)["a", 0])) == 11
    whole = make()
    ask(whole, "b", 63, max_tokens=100)  # cut by max_model_len
    (last,) = drain(whole)["b", 0]
    assert last.finish_reason == "length"


def test_an_id_in_use_is_refused_and_free_again_afterwards() -> None:
    engine = make()
    ask(engine, "a")
    with pytest.raises(RequestError, match="'a'"):
        ask(engine, "a")
    drain(engine)
    ask(engine, "a")
    assert drain(engine)


# -- ends ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_stop_ids_eos_and_min_tokens(steps_ahead: int) -> None:
    engine = make(steps_ahead, max_num_seqs=8)
    free = truth(ask(engine, "free", [1, 2, 3], max_tokens=8), derive_seed(0, 0), VOCAB, 64).token_ids
    ask(engine, "eos", [1, 2, 3], max_tokens=8, eos_token_ids=(free[2],))
    ask(engine, "stop", [1, 2, 3], max_tokens=8, stop_token_ids=(free[4], free[2]))
    ask(engine, "both", [1, 2, 3], max_tokens=8, stop_token_ids=(free[2],), eos_token_ids=(free[2],))
    ask(engine, "late", [1, 2, 3], max_tokens=8, stop_token_ids=(free[2], free[4]), min_tokens=4)
    out = drain(engine)
    ends = {name: (len(tokens_of(d)), d[-1].finish_reason, d[-1].stop_reason) for (name, _), d in out.items()}
    assert ends == {
        "free": (8, "length", None),
        "eos": (3, "stop", None),
        "stop": (3, "stop", free[2]),
        "both": (3, "stop", None),
        "late": (5, "stop", free[4]),
    }
    assert engine.stats().generation_tokens == 8 + 3 + 3 + 3 + 5


def test_a_length_limit_is_foreseen_and_an_end_is_learnt_a_step_late() -> None:
    engine = make(steps_ahead=1)
    out = truth(ask(engine, "a", max_tokens=5), derive_seed(0, 0), VOCAB, 64).token_ids
    drain(engine)
    assert sum(len(p.advances) for p in engine.executor.plans) == 5, "prefill and four decodes: no overshoot"
    engine = make(steps_ahead=1)
    ask(engine, "a", max_tokens=5, eos_token_ids=(out[2],))
    assert tokens_of(drain(engine)["a", 0]) == out[:3]
    assert sum(len(p.advances) for p in engine.executor.plans) == 4, "one step of overshoot"


def test_max_tokens_zero_finishes_without_a_step() -> None:
    engine = make()
    ask(engine, "a", max_tokens=0, n=2)
    ask(engine, "b", 1, max_tokens=0, prompt_logprobs=1)
    assert engine.has_work()
    deltas = engine.step()
    assert [(d.request_id, d.index, d.token_ids, d.finish_reason) for d in deltas] == [
        ("a", 0, [], "length"),
        ("a", 1, [], "length"),
        ("b", 0, [], "length"),
    ]
    assert deltas[2].prompt_logprobs == []
    assert not engine.executor.plans and not engine.has_work()


@pytest.mark.parametrize("steps_ahead", [0, 1])
@pytest.mark.parametrize("max_tokens", [0, 3])
def test_prompt_logprobs_are_gathered_over_chunks_and_come_once(steps_ahead: int, max_tokens: int) -> None:
    engine = make(steps_ahead, max_num_batched_tokens=7)
    first = ask(engine, "a", list(range(22)), max_tokens=max_tokens, prompt_logprobs=2, n=2)
    out = drain(engine)
    assert len({a.start for p in engine.executor.plans for a in p.advances if a.prompt_logprobs is not None}) >= 3
    assert out["a", 0][0].prompt_logprobs == prompt_truth(first)
    assert [d.prompt_logprobs for d in out["a", 0][1:] + out["a", 1]] == [None] * (2 * max(max_tokens, 1) - 1)
    again = ask(engine, "b", list(range(22)), max_tokens=max_tokens, prompt_logprobs=2)
    assert drain(engine)["b", 0][0].prompt_logprobs == prompt_truth(again), "not cut short by the prefix cache"


def test_logprobs_go_through() -> None:
    engine = make(1)
    a, _ = ask(engine, "a", logprobs=0), ask(engine, "b")
    out = drain(engine)
    expected = truth(a, derive_seed(0, 0), VOCAB, 64)
    assert [d.logprobs for d in out["a", 0]] == [[entry] for entry in expected.logprobs]
    assert all(isinstance(d.logprobs[0], TokenLogprobs) for d in out["a", 0])
    assert all(d.logprobs is None for d in out["b", 0])


@pytest.mark.parametrize("steps_ahead", [0, 1])
@pytest.mark.parametrize("when", range(6))
def test_abort_at_any_step_frees_everything_and_says_so_once(steps_ahead: int, when: int) -> None:
    engine = make(steps_ahead, max_num_batched_tokens=4)
    ask(engine, "a", 10, n=3)
    other = ask(engine, "b", 5, max_tokens=6)
    deltas: list[TokenDelta] = []
    for _ in range(when):
        deltas += engine.step()
    assert [d.index for d in engine.abort("a", 0)] == [0]
    check_laws(engine)
    rest = engine.abort("a")
    assert [(d.index, d.finish_reason, d.token_ids) for d in rest] == [(1, "abort", []), (2, "abort", [])]
    assert engine.abort("a") == [] and engine.abort("nobody", 3) == []
    check_laws(engine)
    after = drain(engine)
    assert {name for name, _ in after} == {"b"}
    deltas += [d for ds in after.values() for d in ds]
    assert tokens_of([d for d in deltas if d.request_id == "b"]) == truth(other, derive_seed(0, 0), VOCAB, 64).token_ids


@pytest.mark.parametrize("when", range(5))
def test_the_prompt_goes_on_when_the_sequence_that_computes_it_is_aborted(when: int) -> None:
    engine = make(1, max_num_batched_tokens=4)
    request = ask(engine, "a", 10, n=2, temperature=1.0)
    for _ in range(when):
        assert all(d.finish_reason is None for d in engine.step())
    engine.abort("a", 0)
    got = tokens_of(drain(engine).get(("a", 1), []))
    expected = truth(request, derive_seed(0, 1), VOCAB, 64).token_ids
    assert got == expected[len(expected) - len(got) :] and len(got) >= 2
    assert sum(a.count for p in engine.executor.plans for a in p.advances if a.token_ids is not None) == 10, "nothing is run twice"


def test_an_error_on_one_row_ends_only_its_request() -> None:
    engine = make(1)
    a = ask(engine, "a", 5, n=2, max_tokens=10)
    b = ask(engine, "b", 5, max_tokens=10)
    engine.executor.fail_row = lambda plan: plan.advances[1].row if plan.step == 2 else None
    deltas = [d for _ in range(2) for d in engine.step()]
    assert len(engine.scheduler.kv.cache) == 2 and not deltas[0].error
    out = drain(engine)
    assert len(engine.scheduler.kv.find_cached(Request(a, (9,), 64, 0).sequences[0])) == 0, "its K and V are not trusted"
    assert [(out["a", i][-1].finish_reason, out["a", i][-1].error) for i in (0, 1)] == [("error", "the row's logits are not finite")] * 2
    deltas += out["b", 0]
    assert tokens_of([d for d in deltas if d.request_id == "b"]) == truth(b, derive_seed(0, 0), VOCAB, 64).token_ids


# -- order, budget, rows ------------------------------------------------------------------------------------------------


def test_decodes_come_first_and_prompts_share_the_rest_of_the_budget() -> None:
    engine = make(max_num_batched_tokens=8, prefix_caching=False)
    ask(engine, "a", 3, max_tokens=9)
    engine.step()
    ask(engine, "b", 12)
    ask(engine, "c", 12)
    shapes = []
    for _ in range(5):
        engine.step()
        shapes.append([(a.start, a.count) for a in engine.executor.plans[-1].advances])
    assert shapes == [
        [(3, 1), (0, 7)],
        [(4, 1), (7, 5), (0, 2)],
        [(5, 1), (12, 1), (2, 6)],
        [(6, 1), (13, 1), (8, 4)],
        [(7, 1), (14, 1), (12, 1)],
    ]


def test_without_chunks_a_prompt_runs_whole_or_waits() -> None:
    engine = make(chunked_prefill=False, max_num_batched_tokens=68)
    for name in "abc":
        ask(engine, name, 30)
    engine.step()
    assert [a.count for a in engine.executor.plans[-1].advances] == [30, 30]
    engine.step()
    assert [a.count for a in engine.executor.plans[-1].advances] == [1, 1, 30]
    drain(engine)


def test_n_sequences_need_n_rows_and_share_the_prompt() -> None:
    engine = make(max_num_seqs=3)
    ask(engine, "a", 5, max_tokens=3)
    ask(engine, "b", 6, n=3, max_tokens=3, temperature=1.0)
    ask(engine, "c", 5, max_tokens=3)
    engine.step()
    assert running(engine) == ["a"], "b waits for three rows, and nobody overtakes it"
    for _ in range(3):
        engine.step()
    assert running(engine) == ["b"] * 3
    plan = engine.executor.plans[-1]
    assert [(a.count, len(a.sample_rows)) for a in plan.advances] == [(6, 3)]
    assert len({init.seed for init in plan.row_inits}) == 3
    out = drain(engine)
    assert len({tuple(tokens_of(out["b", i])) for i in range(3)}) == 3


def test_seeds_do_not_depend_on_company_and_are_drawn_when_missing() -> None:
    def seeds(engine: Engine, **params) -> list[int]:
        ask(engine, "x", **params)
        drain(engine)
        return [init.seed for plan in engine.executor.plans for init in plan.row_inits]

    assert seeds(make(), seed=5, n=1) == seeds(make(), seed=5, n=3)[:1]
    assert seeds(make(seed=1), seed=None) == seeds(make(seed=1), seed=None)
    assert seeds(make(seed=1), seed=None) != seeds(make(seed=2), seed=None)
    engine = make()
    first = seeds(engine, seed=None)
    assert seeds(engine, seed=None)[-1] != first[0]


def test_fcfs_goes_by_arrival_and_priority_by_number_first() -> None:
    fcfs = make(max_num_seqs=1)
    for name, arrival in (("late", 2.0), ("early", 1.0), ("later", 2.0)):
        ask(fcfs, name, arrival=arrival, priority=-int(arrival))
    assert list(dict.fromkeys(name for name, _ in drain(fcfs))) == ["early", "late", "later"]
    priority = make(max_num_seqs=1, policy="priority")
    for name, number, arrival in (("c", 5, 0.0), ("b", 1, 3.0), ("a", 1, 2.0), ("d", 5, 0.0)):
        ask(priority, name, priority=number, arrival=arrival)
    assert list(dict.fromkeys(name for name, _ in drain(priority))) == ["a", "b", "c", "d"]


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_a_higher_priority_takes_rows_and_blocks_an_equal_one_waits(steps_ahead: int) -> None:
    engine = make(steps_ahead, max_num_seqs=2, policy="priority", prefix_caching=False)
    a, b = ask(engine, "a", priority=5, max_tokens=20), ask(engine, "b", priority=5, max_tokens=20)
    deltas = [d for _ in range(4) for d in engine.step()]
    ask(engine, "equal", priority=5)
    deltas += engine.step()
    assert running(engine) == ["a", "b"]
    ask(engine, "urgent", priority=1)
    deltas += engine.step()
    assert running(engine) == ["urgent", "a"]
    assert engine.stats().num_preemptions == 1
    rest = drain(engine)
    for request in (a, b):
        got = tokens_of([d for d in deltas if d.request_id == request.request_id] + rest[request.request_id, 0])
        assert got == truth(request, derive_seed(0, 0), VOCAB, 64).token_ids


# -- preemption ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_a_tiny_pool_preempts_the_last_and_never_the_first(steps_ahead: int, prefix_caching: bool) -> None:
    engine = make(steps_ahead, num_blocks=8, prefix_caching=prefix_caching)
    requests = [ask(engine, name, 6, max_tokens=20) for name in "abc"]
    out: dict[str, list[int]] = {name: [] for name in "abc"}
    ended: list[str] = []
    while engine.has_work():
        for delta in engine.step():
            out[delta.request_id] += delta.token_ids
            ended += [delta.request_id] if delta.finish_reason else []
        live = [name for name in "abc" if name not in ended]
        if live and engine.scheduler.running.items:
            assert running(engine)[0] == live[0], "the first in order always runs"
        check_laws(engine)
    assert ended == ["a", "b", "c"] and engine.stats().num_preemptions > 0
    for request in requests:
        assert out[request.request_id] == truth(request, derive_seed(0, 0), VOCAB, 64).token_ids
    inits = [i for p in engine.executor.plans for i in p.row_inits if i.output_token_ids]
    assert inits and all(len(i.prompt_token_ids) == 6 for i in inits), "resumed rows know their outputs"
    assert engine.stats().prompt_tokens == 18


def test_nothing_resumes_while_its_newest_token_is_in_flight() -> None:
    engine = make(steps_ahead=1, num_blocks=5, prefix_caching=False)
    ask(engine, "a", 7, max_tokens=12)
    ask(engine, "b", 7, max_tokens=12)
    while engine.scheduler.stats.num_preemptions == 0:
        engine.step()
    (victim,) = engine.scheduler.waiting.items
    assert victim.status is Status.WAITING and victim.num_in_flight == 0, "its value came with the step that ended just now"
    known = list(victim.tokens)
    for _ in range(200):
        if victim.status is Status.RUNNING:
            break
        engine.step()
    init = next(i for p in engine.executor.plans for i in p.row_inits if i.output_token_ids)
    assert init.prompt_token_ids + init.output_token_ids == known
    drain(engine)


def test_blocks_come_free_only_after_the_step_in_flight() -> None:
    engine = make(steps_ahead=1)
    first = truth(ask(engine, "x", [1, 2, 3]), derive_seed(0, 0), VOCAB, 64).token_ids[0]
    drain(engine)
    ask(engine, "a", [1, 2, 3], max_tokens=8, eos_token_ids=(first,))
    engine.step()
    (delta,) = engine.step()  # the end is learnt while the next step, which still writes to the block, is in flight
    assert delta.finish_reason == "stop" and len(engine.scheduler.in_flight) == 1
    assert engine.scheduler.kv.pool.num_freeing == 1 and engine.stats().kv_cache_usage == 0
    ask(engine, "b", [1, 2, 3], max_tokens=1)
    engine.step()
    assert engine.scheduler.kv.pool.num_freeing == 0
    drain(engine)


def test_admission_leaves_room_to_grow() -> None:
    engine = make(num_blocks=4)
    ask(engine, "a", 8, max_tokens=4)
    ask(engine, "b", 8, max_tokens=4)
    engine.step()
    assert running(engine) == ["a"], "b would fit, and be preempted at once"
    drain(engine)
    assert engine.stats().num_preemptions == 0


# -- statistics, pipe, configuration ------------------------------------------------------------------------------------


def test_statistics() -> None:
    engine = make(max_num_seqs=2, num_blocks=20)
    assert engine.stats() == EngineStats()
    prompt = list(range(9))
    ask(engine, "a", prompt, max_tokens=2)
    ask(engine, "b", [500] * 9, max_tokens=2)
    ask(engine, "c", prompt, max_tokens=2)
    engine.step()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_steps) == (2, 1, 1)
    assert stats.kv_cache_usage == pytest.approx(6 / 20)
    out = drain(engine)
    assert [d.num_cached_tokens for d in out["c", 0]] == [8, 8]
    stats = engine.stats()
    assert (stats.prompt_tokens, stats.generation_tokens) == (27, 6)
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (27, 8)
    assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0)


def test_outputs_are_cached_for_the_next_turn() -> None:
    engine = make(1)
    first = ask(engine, "a", 6, max_tokens=7)
    answer = tokens_of(drain(engine)["a", 0])
    ask(engine, "b", first.prompt_token_ids + answer + [1, 2])
    assert drain(engine)["b", 0][0].num_cached_tokens == 12
    assert engine.reset_prefix_cache()
    ask(engine, "c", first.prompt_token_ids + answer + [1, 2])
    assert drain(engine)["c", 0][0].num_cached_tokens == 0


@pytest.mark.parametrize("steps_ahead", [0, 1, 2])
def test_the_pipe_is_kept_full_and_never_fuller(steps_ahead: int) -> None:
    engine = make(steps_ahead)
    ask(engine, "a", max_tokens=6)
    calls, seen = 0, []
    while engine.has_work():
        seen += engine.step()
        calls += 1
        assert len(engine.executor.pending) <= steps_ahead
    assert len(seen) == 6 and calls == 6 + steps_ahead
    ask(engine, "one", max_tokens=1)
    assert engine.step() == [] if steps_ahead else True
    assert not steps_ahead or tokens_of(engine.step()), "nothing to plan ahead: collected at once"


def test_an_answer_that_does_not_fit_the_plan_is_an_error() -> None:
    engine = make(1)
    ask(engine, "a", n=2)
    plan = engine.scheduler.schedule(0)
    engine.executor.submit(plan)
    result = engine.executor.collect()
    result.token_ids.pop()
    with pytest.raises(RuntimeError, match="1 tokens.*expected step 0 with 2"):
        engine.scheduler.apply(result)


@pytest.mark.parametrize(
    ("config", "steps_ahead", "budget"),
    [
        ({}, 0, 2048),
        ({}, 1, 8192),
        ({"device": "cpu"}, 1, 2048),
        ({"device": "cuda", "max_num_seqs": 9000}, 1, 9000),
        ({"max_num_batched_tokens": 512}, 1, 512),
        ({"max_num_batched_tokens": 1256, "enable_chunked_prefill": False}, 1, 1256),
    ],
)
def test_an_engine_from_the_command_lines_configuration(config: dict, steps_ahead: int, budget: int) -> None:
    executor = FakeExecutor(100, 16, 256, 10_000, VOCAB, steps_ahead)
    engine = Engine(EngineConfig(**config), executor, max_model_len=1000)
    assert engine.settings.max_num_batched_tokens == budget
    ask(engine, "a", 40)
    ask(engine, "b", 40)
    engine.step()
    assert {d.finish_reason for d in engine.shutdown()} == {"abort"}
    assert not executor.running and not engine.scheduler.requests
