"""How much of prompts a step takes on, and what it does to those who wait for tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest

from octavo.config import EngineConfig
from octavo.engine.cost_model import StepWork, pairs_of
from octavo.engine.pace import RULES, SLO_SHARE, Line, Pace, Room, even, rule_for
from octavo.engine.settings import SchedulerSettings
from octavo.errors import ConfigError

from .simulator import CPU_135M, H200_06B, H200_8B, Device, Load, Measured, at, simulate

BUDGET, ROWS = 8192, 1024
TOKEN, STEP = 0.02e-3, 4e-3  # seconds
DECODES = StepWork(decodes=50, context=50_000, rows=50)


def make(itl_slo_ms: float | None = None, device: str = "cuda", max_num_seqs: int = ROWS) -> Pace:
    """A pace that has learnt: steps take STEP, and TOKEN a prompt token."""
    pace = Pace(BUDGET, rule_for(device, itl_slo_ms), max_num_seqs=max_num_seqs)
    for i in range(3000):
        count = (64, 512, 128, 2048)[i % 4]
        work = StepWork(decodes=i % 50, context=1000 * (i % 50), prompt_tokens=count, pairs=pairs_of(0, count), rows=i % 50 + 1)
        pace.observe(work, STEP + TOKEN * count)
        pace.observe(replace(work, prompt_tokens=0, pairs=0.0, rows=i % 50), STEP)
    return pace


def taken(room: Room, prompts: list[int]) -> list[int]:
    """What a step takes of each prompt, from its beginning on."""
    counts = []
    for wanted in prompts:
        count = room.fit(0, wanted)
        if count == 0:
            break
        room.take(0, count)
        counts.append(count)
    return counts


def a_line(first: int, behind: int, prompts: int | None = None) -> Line:
    """Prompts of 512 tokens behind the first, unless said."""
    return Line(0, first, behind, 1 + behind // 512 if prompts is None else prompts)


def seconds_of(counts: list[int]) -> float:
    return STEP + TOKEN * sum(counts)


def test_without_decodes_the_whole_budget_is_spent() -> None:
    assert taken(make(itl_slo_ms=5).whole_room(StepWork()), [5000, 5000, 5000]) == [5000, 3192]


def test_without_a_rule_the_budget_is_all() -> None:
    pace = Pace(BUDGET, None, max_num_seqs=ROWS)
    pace.observe(StepWork(decodes=1, context=10, rows=1), 1.0)
    assert pace.costs.decode.count == 0
    assert taken(pace.room(DECODES, a_line(9000, 0)), [9000]) == [BUDGET - 50]


@pytest.mark.parametrize("slo", [6, 10, 25, 60])
def test_an_slo_bounds_the_step(slo: float) -> None:
    """Also when a crowd waits."""
    for behind in (0, 100_000):
        counts = taken(make(slo).room(DECODES, a_line(3000, behind)), [3000] * (1 + behind // 3000))
        assert seconds_of(counts) <= slo / 1e3
        assert seconds_of(counts) > SLO_SHARE * slo / 1e3 / 2 or sum(counts) == RULES["cuda"].most_tokens  # sizes are even


@pytest.mark.parametrize("slo", [0.001, 3])
def test_prompts_progress_whatever_the_slo(slo: float) -> None:
    minimal = RULES["cuda"].minimal
    assert taken(make(slo).room(DECODES, a_line(3000, 3000)), [3000, 3000]) == [minimal]
    assert taken(make(slo).room(DECODES, a_line(10, 3000)), [10, 3000]) == [10]
    assert taken(make(slo).room(StepWork(decodes=BUDGET - 5, context=BUDGET, rows=BUDGET - 5), a_line(3000, 0)), [3000]) == [5]


def test_the_limit_grows_with_the_line() -> None:
    """Calm, a line, a crowd; and one long prompt is no crowd."""
    rule, pace = RULES["cuda"], make()
    pace.costs.most_tokens = BUDGET

    def seconds(first: int, behind: int, prompts: int | None = None) -> float:
        return seconds_of(taken(pace.room(DECODES, a_line(first, behind, prompts)), [first] + [512] * (behind // 512)))

    assert seconds(512, 0) <= rule.calm_s
    assert rule.calm_s < seconds(4000, 0) <= rule.patience_s
    assert seconds(100_000, 0) <= rule.patience_s
    assert seconds(512, 4500) <= rule.patience_s  # 90 ms of prompts behind the first: a line yet
    assert seconds(512, 7200) <= rule.patience_s  # 144 ms, but of 15 prompts for 50 streams
    assert seconds(512, 7200, 25) <= rule.patience_s and seconds(512, 4500, 40) <= rule.patience_s
    assert rule.crowd_s * 0.9 < seconds(512, 7200, 26) <= rule.crowd_s  # of 26: a crowd
    assert seconds(512, 18_500, 20) <= rule.patience_s  # 370 ms
    assert rule.crowd_s * 0.9 < seconds(512, 19_000, 20) <= rule.crowd_s  # 380: a crowd, however few they are
    assert rule.crowd_s * 0.9 < seconds(512, 10**6) <= rule.crowd_s


def test_a_crowds_step_grows_with_its_decodes() -> None:
    """To ``crowd_share`` times what they take alone, or prompts would stand still beside long decodes."""
    pace = make()
    pace.costs.most_tokens = BUDGET
    pace.costs.decode.coefficients[:] = pace.costs.prompt.coefficients[2:] = [0.0, 0.0, 3 * STEP]
    share = RULES["cuda"].crowd_share
    assert share * 3 * STEP > RULES["cuda"].crowd_s
    counts = taken(pace.room(DECODES, a_line(512, 10**6)), [512] * 2000)
    assert 0.9 < (3 * STEP + TOKEN * sum(counts)) / (share * 3 * STEP) <= 1.0


def test_beside_decodes_steps_are_what_graphs_hold_but_in_a_crowd() -> None:
    pace = make(itl_slo_ms=500)
    assert taken(pace.room(DECODES, a_line(5000, 0)), [5000]) == [2048 - 64]  # 50 decodes are padded to 64
    assert taken(pace.room(DECODES, a_line(10, 190)), [10] * 20) == [10] * 8
    assert taken(pace.room(DECODES, a_line(100, 10**6)), [100] * 200) == [100] * 40  # twice what was tried


@pytest.mark.parametrize(("max_num_seqs", "padded"), [(1024, 192), (140, 140), (130, 130)])
def test_decodes_are_padded_to_no_more_than_there_can_be(max_num_seqs: int, padded: int) -> None:
    """Prompts are not cut shorter for decodes that never come."""
    pace, decodes = make(itl_slo_ms=500, max_num_seqs=max_num_seqs), replace(DECODES, decodes=130, rows=130)
    assert taken(pace.room(decodes, a_line(5000, 0)), [5000]) == [(2048 - padded) // 16 * 16]


def test_a_chunk_far_into_a_prompt_is_smaller() -> None:
    pace = make(itl_slo_ms=25)
    pace.costs.prompt.coefficients[1] = 1e-9
    counts = [pace.room(DECODES, Line(start, 5000, 0, 1)).fit(start, 5000) for start in (0, 20_000, 200_000)]
    assert counts[0] > counts[1] > counts[2] >= RULES["cuda"].minimal
    room = pace.room(DECODES, a_line(100, 5000))  # the first is short, the second lies far out
    room.take(0, 100)
    assert 0 < room.fit(200_000, 5000) < counts[0] - 100


def test_what_was_not_tried_is_approached_by_doubling() -> None:
    pace = Pace(BUDGET, rule_for("cuda", 1000), max_num_seqs=ROWS)
    line, got = a_line(100_000, 10**9), []
    for _ in range(6):
        count = pace.room(DECODES, line).fit(0, 100_000)  # a crowd, once it is known how long prompts take
        got.append(count)
        pace.observe(replace(DECODES, prompt_tokens=count, pairs=pairs_of(0, count)), 1e-6 * count)
    assert got == [rows - 64 for rows in (512, 768, 1024, 1536, 2560, 4608)]


def test_no_crumbs() -> None:
    """What is left of a step's room is not worth one more prompt's first few tokens, unless they are all of it."""
    room = Room(make().costs, 1000, minimal=64)
    room.take(0, 950)
    assert room.fit(0, 500) == 0 and room.fit(0, 40) == 40 and room.fit(0, 64) == 0


@pytest.mark.parametrize(("tokens", "size"), [(-3, 0), (0, 0), (1, 1), (3, 2), (191, 128), (2047, 1024), (2048, 2048), (3000, 2560)])
def test_even(tokens: int, size: int) -> None:
    assert even(tokens) == size
    assert size <= even(tokens, fine=True) <= max(0, tokens)


# -- flags --------------------------------------------------------------------------------------------------------------


def settings(device: str = "cuda", **flags) -> SchedulerSettings:
    return SchedulerSettings.from_config(EngineConfig(**flags), num_blocks=1000, max_model_len=4096, device_type=device)


def test_auto_rations_and_a_number_does_not() -> None:
    assert settings().pace == RULES["cuda"] and settings("cpu").pace == RULES["cpu"]
    assert settings(max_num_batched_tokens="auto") == settings()
    assert settings().max_num_batched_tokens == 8192 and settings("cpu").max_num_batched_tokens == 2048
    fixed = settings(max_num_batched_tokens=4096)
    assert fixed.pace is None and fixed.max_num_batched_tokens == 4096
    both = settings(max_num_batched_tokens=4096, itl_slo_ms=20)
    assert both.pace.itl_slo_s == 0.02 and both.max_num_batched_tokens == 4096
    assert settings(enable_chunked_prefill=False).pace is None


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"itl_slo_ms": 0}, "--itl-slo-ms"),
        ({"itl_slo_ms": float("nan")}, "--itl-slo-ms"),
        ({"itl_slo_ms": 20, "enable_chunked_prefill": False}, "chunked"),
        ({"max_num_batched_tokens": "many"}, "is not a number"),
        ({"block_size": "auto"}, "is not a number"),
    ],
)
def test_refused(flags: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**flags)


def test_a_pace_without_chunks_is_refused() -> None:
    with pytest.raises(ConfigError, match="chunked_prefill"):
        replace(settings(max_num_batched_tokens=8192), chunked_prefill=False, pace=RULES["cuda"])


# -- what clients see, simulated ----------------------------------------------------------------------------------------


def compare(device: Device, load: Load) -> tuple[Measured, Measured]:
    rule = rule_for(device.kind, None)
    fixed, paced = simulate(device.warm, load, None), simulate(device.warm, load, rule)
    assert len(paced.ttft) == len(fixed.ttft) == load.requests and paced.tokens == fixed.tokens
    return fixed, paced


@pytest.mark.parametrize(
    ("device", "load", "better"),
    [
        (H200_8B, Load(120, rate=10), 1.4),
        (H200_8B, Load(200, concurrency=50, spread=0.1), 1.5),
        (H200_8B, Load(600, concurrency=200), 1.25),
        (H200_06B, Load(512, concurrency=256), 1.0),
        (CPU_135M, Load(48, concurrency=8, prompt=512, output=128), 3.0),
    ],
    ids=["8B-10/s", "8B-50-clients", "8B-200-clients", "0.6B-256-clients", "CPU-8-clients"],
)
def test_the_longest_gaps_shrink_and_throughput_stays(device: Device, load: Load, better: float) -> None:
    """Against the token budget alone: ITL p99 ``better`` times shorter, at most 3% fewer output tokens a second, and the last of a
    burst's first tokens not much later."""
    fixed, paced = compare(device, load)
    print("fixed", fixed.line(), "\npaced", paced.line())
    assert at(paced.gaps, 0.99) * better < at(fixed.gaps, 0.99)
    assert paced.throughput > 0.97 * fixed.throughput
    assert at(paced.ttft, 0.99) < 1.3 * at(fixed.ttft, 0.99)


def test_an_slo_holds_under_load() -> None:
    """Steps beside decodes are predicted, so most are short enough once the model has been learnt, in any crowd."""
    for slo in (12.0, 30.0):
        got = simulate(H200_8B.warm, Load(200, concurrency=100), rule_for("cuda", slo))
        beside = [seconds for decodes, prompt, seconds in got.steps[100:] if decodes and prompt]
        assert at(beside, 0.95) < slo / 1e3 < 3 * at(beside, 0.5)


def test_cold_graphs_do_not_poison_the_model() -> None:
    """Captures of 50 to 2,400 ms all through the run; what is learnt of prompts is right all the same."""
    got = simulate(H200_8B, Load(150, rate=10), rule_for("cuda", None))
    assert len(got.engine.executor.seen) >= 5
    assert got.engine.scheduler.pace.costs.chunk_seconds(0, 512) == pytest.approx(512 * H200_8B.token, rel=0.35)
    beside = [seconds for decodes, prompt, seconds in got.steps[200:] if decodes and prompt]
    assert at(beside, 0.95) < RULES["cuda"].patience_s


def test_a_whole_load_is_planned_alike_twice() -> None:
    runs = [simulate(H200_06B, Load(60, rate=50), rule_for("cuda", None), seed=3) for _ in range(2)]
    assert runs[0].steps == runs[1].steps and runs[0].gaps == runs[1].gaps
