"""What a step costs the host. Printed (``pytest -s``), not asserted: machines differ."""

from __future__ import annotations

import time

from octavo.engine.scheduler import Scheduler
from octavo.engine.settings import SchedulerSettings
from octavo.types import GenerateRequest, StepResult, TokenParams


def timed_decode(num_seqs: int, steps: int, prompt_len: int = 64) -> tuple[float, float]:
    """Median seconds of schedule() and of apply() with ``num_seqs`` decoding sequences."""
    settings = SchedulerSettings(
        num_blocks=num_seqs * (prompt_len + steps + 150) // 16,
        block_size=16,
        max_model_len=4096,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=8192,
    )
    scheduler = Scheduler(settings)
    for i in range(num_seqs):
        params = TokenParams(max_tokens=steps + 100, eos_token_ids=(0,))
        length = prompt_len + i % 16  # so that blocks fill evenly over the steps
        scheduler.add(GenerateRequest(request_id=str(i), prompt_token_ids=[i + 1] * length, params=params))
    plans: list[float] = []
    results: list[float] = []
    for step in range(steps):
        t0 = time.perf_counter()
        plan = scheduler.schedule(step)
        t1 = time.perf_counter()
        rows = [row for advance in plan.advances for row in advance.sample_rows]
        result = StepResult(step, rows, [step % 1000 + 1] * len(rows))
        t2 = time.perf_counter()
        scheduler.apply(result)
        t3 = time.perf_counter()
        if len(rows) == num_seqs and len(plan.advances) == plan.num_tokens:
            plans.append(t1 - t0)
            results.append(t3 - t2)
    assert len(plans) > steps // 2
    return sorted(plans)[len(plans) // 2], sorted(results)[len(results) // 2]


def test_print_the_cost_of_a_step() -> None:
    for num_seqs in (1, 32, 256, 1024):
        plan, result = timed_decode(num_seqs, steps=64)
        print(f"{num_seqs:5} sequences: schedule {plan * 1e6:7.0f} µs, apply {result * 1e6:7.0f} µs")
