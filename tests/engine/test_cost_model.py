"""The fit of step times: it finds the truth, quickly, and nothing that happens once pulls it away."""

from __future__ import annotations

import random
import time

import pytest

from octavo.engine.cost_model import FADE_PROMPT, CostModel, LinearFit, StepWork, pairs_of
from octavo.engine.stopwatch import Stopwatch
from tests.waiting import slowness

TRUTH = (0.0228e-3, 1e-9, 0.01e-3, 3.4e-8, 4e-3)  # a token, a pair, a row, a token of context, a step: 8B on an H200


def random_work(rng: random.Random, prompts: bool) -> StepWork:
    decodes = rng.randint(1, 256)
    work = StepWork(decodes=decodes, context=decodes * rng.randint(10, 4000), rows=decodes)
    if prompts:
        for _ in range(rng.randint(1, 4)):
            count = rng.choice((64, 128, 256, 512))
            work.prompt_tokens += count
            work.pairs += pairs_of(rng.randint(0, 8000), count)
    return work


def true_seconds(work: StepWork) -> float:
    token, pair, row, context, step = TRUTH
    return token * work.prompt_tokens + pair * work.pairs + row * work.rows + context * work.context + step


def taught(steps: int, noise: float = 0.03, seed: int = 0) -> tuple[CostModel, random.Random]:
    rng, costs = random.Random(seed), CostModel()
    for i in range(steps):
        work = random_work(rng, prompts=i % 3 == 0)
        costs.observe(work, true_seconds(work) * rng.uniform(1 - noise, 1 + noise))
    return costs, rng


def worst_error(costs: CostModel, rng: random.Random) -> float:
    works = [random_work(rng, prompts=i % 2 == 0) for i in range(200)]
    errors = sorted(abs(costs.predict(w) / true_seconds(w) - 1) for w in works)
    return errors[-10]


def test_nothing_seen_predicts_nothing() -> None:
    costs = CostModel()
    assert costs.predict(StepWork(decodes=4, context=100, rows=4)) == 0
    assert costs.tokens_within(0.01, 0) == float("inf") and costs.tokens_within(0.0, 0) == costs.tokens_within(-1.0, 5) == 0


def test_the_first_step_is_put_down_to_its_tokens() -> None:
    """So the next chunk is sized in proportion, rather than thought to be free."""
    costs = CostModel()
    costs.observe(StepWork(prompt_tokens=500, pairs=pairs_of(0, 500), rows=1), 0.1)
    assert costs.tokens_within(0.01, 0) == pytest.approx(50)


@pytest.mark.parametrize("seed", range(5))
def test_the_truth_is_found(seed: int) -> None:
    costs, rng = taught(150, seed=seed)
    assert worst_error(costs, rng) < 0.15
    costs, rng = taught(3000, seed=seed)
    assert worst_error(costs, rng) < 0.05
    for found, true in zip(costs.prompt.coefficients[:2], TRUTH, strict=False):
        assert found == pytest.approx(true, rel=0.2)


def test_coefficients_are_never_negative() -> None:
    """Not even when noise, or a cost that falls with a feature, asks for it."""
    rng, fit = random.Random(0), LinearFit(5, FADE_PROMPT)
    for _ in range(2000):
        x = [rng.random() * rng.choice((0, 1, 1000)) for _ in range(4)] + [1.0]
        fit.observe(x, max(1e-4, 5 - 3 * x[0] / 1000 + rng.gauss(0, 2)))
        assert min(fit.coefficients) >= 0


@pytest.mark.parametrize("steps", [0, 3, 600])
def test_captures_and_compiles_do_not_poison(steps: int) -> None:
    """A few steps that take 50 to 4,000 ms, before anything is known or after, are soon or at once of no account."""
    costs, rng = taught(steps)
    for seconds in (4.0, 0.05, 1.3, 0.4):
        costs.observe(random_work(rng, prompts=True), seconds + 0.2)
        costs.observe(random_work(rng, prompts=False), seconds + 0.2)
    if steps > 100:
        assert worst_error(costs, rng) < 0.1
    for i in range(60):
        work = random_work(rng, prompts=i % 2 == 0)
        costs.observe(work, true_seconds(work) * rng.uniform(0.97, 1.03))
    assert worst_error(costs, rng) < 0.25


def test_a_step_that_was_measured_too_short_is_left_out() -> None:
    costs, rng = taught(600)
    for _ in range(3):
        for prompts in (False, True):
            work = random_work(rng, prompts)
            costs.observe(work, true_seconds(work) / 20)
    assert worst_error(costs, rng) < 0.1


@pytest.mark.parametrize("factor", [0.2, 1.5, 6.0])
def test_a_lasting_change_is_followed(factor: float) -> None:
    """Another process comes to the device, or leaves it."""
    costs, rng = taught(600)
    for i in range(300):
        work = random_work(rng, prompts=i % 3 == 0)
        costs.observe(work, factor * true_seconds(work) * rng.uniform(0.97, 1.03))
    works = [random_work(rng, prompts=i % 2 == 0) for i in range(100)]
    assert sorted(abs(costs.predict(w) / (factor * true_seconds(w)) - 1) for w in works)[90] < 0.15


def test_long_decoding_forgets_nothing_of_prompts() -> None:
    costs, rng = taught(600)
    before = list(costs.prompt.coefficients)
    for _ in range(5000):
        work = random_work(rng, prompts=False)
        costs.observe(work, true_seconds(work))
    assert costs.prompt.coefficients == before


def test_steps_that_are_all_alike_leave_the_rest_as_it_was() -> None:
    """Forgetting must not wind up: what such steps say nothing about stays, and their own time stays right."""
    costs, rng = taught(600)
    work = StepWork(decodes=50, context=50 * 600, rows=50, prompt_tokens=512, pairs=pairs_of(0, 512))
    for _ in range(20000):
        costs.observe(work, true_seconds(work) * rng.uniform(0.95, 1.05))
    assert costs.predict(work) == pytest.approx(true_seconds(work), rel=0.03)
    assert worst_error(costs, rng) < 0.5


@pytest.mark.parametrize("start", [0, 1000, 100_000])
def test_tokens_within_inverts_chunk_seconds(start: int) -> None:
    costs, _ = taught(600)
    for count in (1, 64, 2048):
        assert costs.tokens_within(costs.chunk_seconds(start, count), start) == pytest.approx(count)


def test_print_the_cost() -> None:
    """Printed (``pytest -s``); asserted only far above what it is, because machines differ."""
    costs, rng = taught(600)
    works = [random_work(rng, prompts=True) for _ in range(200)]
    best = {"predict": 1.0, "observe": 1.0, "tokens_within": 1.0}
    for _ in range(20):
        for name, call in (
            ("predict", costs.predict),
            ("observe", lambda work: costs.observe(work, true_seconds(work))),
            ("tokens_within", lambda work: costs.tokens_within(0.01, 500)),
        ):
            begun = time.perf_counter()
            for work in works:
                call(work)
            best[name] = min(best[name], (time.perf_counter() - begun) / len(works))
    print({name: f"{seconds * 1e6:.2f} µs" for name, seconds in best.items()})
    assert best["predict"] < 20e-6 * slowness() and best["observe"] < 200e-6 * slowness()


# -- whose time it was --------------------------------------------------------------------------------------------------


class Hands:
    """A clock that is moved by hand, and a host and device that use it."""

    def __init__(self, steps_ahead: int) -> None:
        self.now = 0.0
        self.free_at = 0.0
        self.done: list[float] = []
        self.watch = Stopwatch(steps_ahead, lambda: self.now)

    def submit(self, host: float, device: float) -> None:
        self.watch.submitting()
        self.now += host
        self.free_at = max(self.now, self.free_at) + device
        self.done.append(self.free_at)

    def collect(self) -> float | None:
        self.watch.collecting()
        self.now = max(self.now, self.done.pop(0))
        return self.watch.collected()


def test_a_full_pipe_is_timed_from_result_to_result() -> None:
    hands = Hands(1)
    hands.submit(1, 10)
    times = []
    for device in (20, 5, 30):
        hands.submit(1, device)
        times.append(hands.collect())
    assert times == [11, 20, 5]  # the first began on an empty pipe: with its submission


def test_a_host_that_comes_late_spoils_two_steps() -> None:
    hands = Hands(1)
    hands.submit(1, 10)
    hands.submit(500, 10)  # a graph was captured while the first ran, and nobody waited for it
    assert hands.collect() is None
    hands.submit(1, 10)
    assert hands.collect() is None
    hands.submit(1, 10)
    assert hands.collect() == 10


def test_a_capture_on_an_empty_pipe_is_not_the_steps_time() -> None:
    hands = Hands(1)
    hands.submit(100, 10)
    assert hands.collect() is None
    hands.submit(2, 10)
    assert hands.collect() == 12


def test_without_steps_ahead_submit_is_the_step() -> None:
    hands = Hands(0)
    for host in (3, 7):
        hands.submit(host, 0)
        assert hands.collect() == host
        hands.now += 100  # idle


def test_nothing_is_in_flight_after_forget() -> None:
    hands = Hands(1)
    hands.submit(1, 10)
    hands.watch.forget()
    hands.done.clear()
    hands.submit(1, 10)
    assert hands.collect() == 20  # the device still had the forgotten one to do
