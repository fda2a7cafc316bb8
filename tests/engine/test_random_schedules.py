"""Laws 1 and 2 under random schedules: whatever is preempted, shared, aborted or planned ahead, every request gives
the tokens that it would give alone, and every block and row comes back.

OCTAVO_SCHEDULES sets how many schedules are run (default 2,000).
"""

from __future__ import annotations

import os
import random
from collections import Counter, defaultdict
from typing import Any

import pytest

from octavo.engine.core import Engine
from octavo.engine.pace import PaceRule
from octavo.engine.request import derive_seed
from octavo.engine.settings import SchedulerSettings
from octavo.errors import RequestError
from octavo.types import GenerateRequest, StepPlan, TokenDelta, TokenParams

from .fake_executor import FakeExecutor, prompt_truth, truth
from .laws import check_empty, check_laws

NUM_SCHEDULES = int(os.environ.get("OCTAVO_SCHEDULES", "2000"))
NUM_PARTS = 20
SALTS = (None,) * 6 + ("", "none", "\ud800")
SEEN: Counter[str] = Counter()  # what the schedules came across, so that a test that tests nothing is found out


class RandomClock:
    """Steps of a clock that knows nothing of the work: so is every prediction wrong, and no law may depend on one."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.now, self.scale = rng, 0.0, 10.0 ** rng.randint(-5, 0)

    def __call__(self) -> float:
        if self.rng.random() < 0.8:
            self.now += self.rng.expovariate(1.0) * self.scale * self.rng.choice((0.0, 0.1, 1.0, 1.0, 30.0))
        return self.now


def random_rule(rng: random.Random) -> PaceRule | None:
    if rng.random() < 0.3:
        return None
    return PaceRule(
        calm_s=rng.choice((0.0, 0.001, 0.1)),
        patience_s=rng.choice((0.001, 0.1, 10.0)),
        crowd_s=rng.choice((0.001, 0.1, 10.0)),
        crowd_share=rng.choice((2.0, 8.0, 14.0)),
        minimal=rng.choice((1, 1, 4, 16)),
        untried=rng.choice((1, 4, 100)),
        most_tokens=rng.choice((1, 4, 100)),
        most_prompts=rng.choice((1, 2, 100)),
        captured=rng.random() < 0.5,
        itl_slo_s=rng.choice((None, None, 1e-9, 0.001, 1.0)),
    )


def random_swap_tier(rng: random.Random, whole: int) -> dict[str, Any]:
    """``whole``: blocks of one longest sequence. Times are far apart: swapping pays always, sometimes, or never."""
    if rng.random() < 0.25:
        return {}
    num_cpu_blocks = rng.choice((rng.randint(1, whole), rng.randint(whole, 3 * whole), 20 * whole))
    return {"num_cpu_blocks": num_cpu_blocks, "swap_block_s": rng.choice((0.0, 1e-9, 1e-3, 10.0))}


class Trial:
    """One random engine, its random requests, and the truth about them."""

    def __init__(self, number: int) -> None:
        rng = self.rng = random.Random(number)
        self.vocab = rng.choice((2, 8, 50))
        max_num_seqs = rng.randint(1, 6)
        self.max_model_len = rng.randint(4, 48)
        chunked = rng.random() < 0.8
        budget = rng.randint(max_num_seqs, 24) if chunked else self.max_model_len + max_num_seqs
        block_size = rng.choice((1, 2, 3, 4, 8))
        whole = -(-self.max_model_len // block_size)  # blocks of one longest sequence
        self.settings = SchedulerSettings(
            num_blocks=rng.randint(whole, 3 * whole) if rng.random() < 0.9 else rng.randint(1, whole),
            block_size=block_size,
            max_model_len=self.max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            chunked_prefill=chunked,
            prefix_caching=rng.random() < 0.7,
            policy=rng.choice(("fcfs", "priority")),
            pace=random_rule(random.Random(-number)) if chunked else None,
            seed=rng.randint(0, 3),
            **random_swap_tier(random.Random(-number - 10**6), whole),
        )
        self.executor = FakeExecutor(
            self.settings.num_blocks,
            block_size,
            max_num_seqs,
            budget,
            self.vocab,
            rng.choice((0, 1, 1, 2)),
            lazy=rng.random() < 0.5,
            num_cpu_blocks=self.settings.num_cpu_blocks,
        )
        if rng.random() < 0.1:
            self.executor.fail_row = lambda plan: rng.choice(plan.advances).row if rng.random() < 0.05 else None
        self.executor.on_submit = self.check_plan
        self.engine = Engine.from_settings(self.settings, self.executor, RandomClock(random.Random(-1 - number)))
        self.bases = [[rng.randrange(self.vocab) for _ in range(self.max_model_len + 2)] for _ in range(rng.randint(1, 2))]
        self.requests: dict[str, GenerateRequest] = {}
        self.seeds: dict[str, int] = {}
        self.aborted: set[tuple[str, int]] = set()
        self.deltas: dict[tuple[str, int], list[TokenDelta]] = defaultdict(list)
        self.now = 0

    def random_request(self) -> GenerateRequest:
        rng = self.rng
        length = rng.randint(0, self.max_model_len + 1) if rng.random() < 0.2 else rng.randint(1, max(1, self.max_model_len // 2))
        prompt = list(rng.choice(self.bases)[:length])
        if prompt and rng.random() < 0.6:
            at = max(rng.randrange(len(prompt)) for _ in range(3))
            prompt[at:] = [rng.randrange(self.vocab) for _ in prompt[at:]]
        max_tokens = rng.choice((0, 1, 3, 12, 25, 40))
        if rng.random() < 0.8:
            max_tokens = max(0, min(max_tokens, self.max_model_len - length))
        salt = rng.choice(SALTS)
        params = TokenParams(
            n=min(rng.choice((1, 1, 1, 1, 2, 3, 4)), self.settings.max_num_seqs + (rng.random() < 0.1)),
            max_tokens=max_tokens,
            min_tokens=rng.randint(0, min(max_tokens, 4)),
            temperature=rng.choice((0.0, 1.0)),
            seed=rng.choice((None, 7, -(2**63))),
            eos_token_ids=rng.choice(((), (), (1,))),
            stop_token_ids=rng.choice(((), (), (), (0, 1), (5,))),
            bad_words_token_ids=((),) * SALTS.index(salt),
            logprobs=rng.choice((None, None, 2)),
            prompt_logprobs=rng.choice((None, None, None, 1)),
        )
        return GenerateRequest(
            request_id=f"r{len(self.requests)}",
            prompt_token_ids=prompt,
            params=params,
            arrival_time=float(self.now if rng.random() < 0.8 else rng.randint(0, 5)),
            priority=rng.randint(0, 2),
            cache_salt=salt,
        )

    def add(self) -> None:
        request = self.random_request()
        try:
            self.engine.add_request(request)
        except RequestError as error:
            assert self.must_refuse(request), str(error)
            SEEN["refused"] += 1
            return
        assert not self.must_refuse(request)
        self.requests[request.request_id] = request
        seed = request.params.seed
        self.seeds[request.request_id] = derive_seed(self.settings.seed, len(self.seeds)) if seed is None else seed

    def must_refuse(self, request: GenerateRequest) -> bool:
        prompt, params = len(request.prompt_token_ids), request.params
        longest = min(prompt + params.max_tokens, self.max_model_len)
        run = prompt if params.max_tokens == 0 else longest - 1
        return (
            prompt == 0
            or prompt > self.max_model_len
            or (params.max_tokens > 0 and prompt == self.max_model_len)
            or params.n > self.settings.max_num_seqs
            or run > self.settings.num_blocks * self.settings.block_size
        )

    def abort(self) -> None:
        request = self.rng.choice(list(self.requests.values()))
        index = self.rng.choice((None, *range(request.params.n)))
        deltas = self.engine.abort(request.request_id, index)
        assert all(d.finish_reason == "abort" and not d.token_ids for d in deltas)
        self.aborted.update((d.request_id, d.index) for d in deltas)
        SEEN["aborted"] += len(deltas)
        self.take(deltas)

    def take(self, deltas: list[TokenDelta]) -> None:
        for delta in deltas:
            so_far = self.deltas[delta.request_id, delta.index]
            assert not so_far or so_far[-1].finish_reason is None, "a delta after the last one"
            so_far.append(delta)

    def check_plan(self, plan: StepPlan) -> None:
        """No plan past a foreseen end. The first in order is in every plan, unless its end is foreseen: no starvation."""
        running = self.engine.scheduler.running.items
        assert all(s.length <= s.max_length for s in running)
        first = running[0]
        assert first.row in {a.row for a in plan.advances} or first.length >= first.max_length

    def run(self) -> None:
        rng, engine = self.rng, self.engine
        to_add = rng.randint(1, 12)
        rush, abort_rate = rng.random(), rng.choice((0, 0, 0.02, 0.2))
        while to_add or engine.has_work():
            self.now += 1
            assert self.now < 3000, "no progress"
            while to_add and (rng.random() < rush or not engine.has_work()):
                to_add -= 1
                self.add()
            if self.requests and rng.random() < abort_rate:
                self.abort()
                check_laws(engine)
            if rng.random() < 0.01:
                assert engine.reset_prefix_cache()
                check_laws(engine)
            self.take(engine.step())
            check_laws(engine)
        check_empty(engine)
        assert not self.executor.pending
        self.check_outputs()

    def check_outputs(self) -> None:
        num_tokens = 0
        for request in self.requests.values():
            params = request.params
            for index in range(params.n):
                deltas = self.deltas[request.request_id, index]
                assert deltas, "a sequence without an answer"
                num_tokens += sum(len(d.token_ids) for d in deltas)
                self.check_sequence(request, index, deltas)
            all_deltas = [d for i in range(params.n) for d in self.deltas[request.request_id, i]]
            given = [d.prompt_logprobs for d in all_deltas if d.prompt_logprobs is not None]
            whole = self.deltas[request.request_id, 0][0]
            if params.prompt_logprobs is None:
                assert not given
            elif whole.finish_reason not in ("abort", "error"):
                assert given == [prompt_truth(request)] and whole.prompt_logprobs is not None
        stats = self.engine.stats()
        assert stats.generation_tokens == num_tokens
        assert 0 <= stats.prefix_cache_hits <= stats.prefix_cache_queries
        assert self.settings.prefix_caching or stats.prefix_cache_queries == 0
        assert stats.num_running == stats.num_waiting == 0 and stats.kv_cache_usage == 0
        if not any(d[-1].finish_reason in ("abort", "error") for d in self.deltas.values()):
            lengths = [(len(r.prompt_token_ids), r.params) for r in self.requests.values()]
            assert stats.prompt_tokens == sum(n for n, p in lengths if p.max_tokens or (p.prompt_logprobs is not None and n > 1))
        SEEN["preempted"] += stats.num_preemptions
        SEEN["hits"] += stats.prefix_cache_hits
        SEEN["tokens"] += num_tokens
        SEEN["swapped out"] += stats.num_blocks_out
        SEEN["swapped in"] += stats.num_blocks_in
        SEEN["copied"] += sum(len(plan.copies) for plan in self.executor.plans)
        SEEN["ahead"] += self.executor.steps_ahead
        costs = self.engine.scheduler.pace.costs
        SEEN["measured"] += costs.prompt.count
        SEEN["rationed"] += self.settings.pace is not None and costs.prompt.count > 0

    def check_sequence(self, request: GenerateRequest, index: int, deltas: list[TokenDelta]) -> None:
        params = request.params
        expected = truth(request, derive_seed(self.seeds[request.request_id], index), self.vocab, self.max_model_len)
        tokens = [t for d in deltas for t in d.token_ids]
        last = deltas[-1]
        assert all(len(d.token_ids) == 1 for d in deltas[:-1])
        if last.finish_reason in ("abort", "error"):
            assert tokens == expected.token_ids[: len(tokens)]
            assert last.finish_reason == "error" or (request.request_id, index) in self.aborted
            assert (last.error is not None) == (last.finish_reason == "error")
            SEEN[last.finish_reason] += 1
        else:
            assert (tokens, last.finish_reason, last.stop_reason) == (expected.token_ids, expected.finish_reason, expected.stop_reason)
            SEEN[last.finish_reason] += 1
            SEEN["forked"] += index > 0
        logprobs = [entry for d in deltas for entry in d.logprobs or ()]
        assert logprobs == (expected.logprobs[: len(tokens)] if params.logprobs is not None else [])
        for delta in deltas:
            cached = delta.num_cached_tokens
            assert cached % self.settings.block_size == 0 and cached < len(request.prompt_token_ids)
            assert cached == 0 or (self.settings.prefix_caching and not (params.prompt_logprobs and len(request.prompt_token_ids) > 1))


@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_random_schedules(part: int) -> None:
    for number in range(part, NUM_SCHEDULES, NUM_PARTS):
        try:
            Trial(number).run()
        except BaseException:
            print(f"schedule {number}")
            raise


def test_the_same_times_give_the_same_plans() -> None:
    """Ranks that follow, and whoever looks for a fault, rely on it."""
    for number in range(100):
        one, two = Trial(number), Trial(number)
        one.run()
        two.run()
        assert one.executor.plans == two.executor.plans


def test_the_schedules_met_everything() -> None:
    if SEEN["tokens"] == 0:
        pytest.skip("runs after the schedules of this process")
    if NUM_SCHEDULES >= 1000:
        ends = ("refused", "aborted", "stop", "length", "error")
        for what in (*ends, "preempted", "hits", "forked", "copied", "swapped out", "swapped in", "ahead", "measured", "rationed"):
            assert SEEN[what] > 20, (what, SEEN)
    print(dict(SEEN))
