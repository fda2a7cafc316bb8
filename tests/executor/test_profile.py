"""What the profile runs, on the CPU with a stand-in for the CUDA allocator: the steps themselves are real."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from octavo.attention.reference import ReferenceAttention
from octavo.executor import footprint, profile
from octavo.executor.model_runner import ModelRunner
from octavo.sampling import logprobs
from octavo.sampling.sampler import Sampler
from octavo.types import Advance, RowInit, StepPlan, TokenParams
from tests.models.helpers import load_like, tiny_transformers_model

VOCAB, MAX_LEN, ROWS = 131, 64, 12


@pytest.fixture(scope="module")
def model() -> Any:
    return load_like(tiny_transformers_model("Qwen3", seed=1))


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports 1000 bytes at the peak, 700 held."""
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 1000)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 700)


def make_runner(model: Any, use_graphs: bool, **options: Any) -> ModelRunner:
    backend, device = ReferenceAttention(), torch.device("cpu")
    caches = [backend.make_kv_cache(1, 16, s.num_kv_heads, s.head_dim, torch.float32, device) for s in model.attention_layers]
    options = {"max_rows": ROWS, "max_model_len": MAX_LEN, "use_graphs": use_graphs, **options}
    return ModelRunner(model, backend, caches, block_size=16, vocab_size=VOCAB, device=device, **options)


def greedy(runner: ModelRunner) -> list[int]:
    params = TokenParams(temperature=0.0)
    prompt = [1, 2, 3, 4, 5]
    step = runner.execute(StepPlan(-1, [Advance(3, 0, 5, prompt, (3,))], [RowInit(3, params, 0, prompt, [], [0])])).to_result()
    return step.token_ids + runner.execute(StepPlan(-1, [Advance(3, 5, 1, None, (3,))])).to_result().token_ids


@pytest.mark.parametrize("use_graphs", [False, True])
@pytest.mark.parametrize("budget", [12, 100, 3000])
def test_runs_the_heaviest_and_leaves_nothing(
    model: Any, allocator: None, monkeypatch: pytest.MonkeyPatch, use_graphs: bool, budget: int
) -> None:
    runner = make_runner(model, use_graphs)
    before = greedy(make_runner(model, use_graphs))
    seen: list[tuple[int, ...]] = []
    forward = runner.model.forward
    monkeypatch.setattr(runner.model, "forward", lambda ids, context: seen.append(tuple(ids.shape)) or forward(ids, context))
    drawn: list[tuple[int, int, int]] = []
    sample = Sampler.sample
    monkeypatch.setattr(
        Sampler,
        "sample",
        lambda self, logits, rows, positions: (
            drawn.append((len(rows), max(positions), len(self.state.select(rows).logprobs))) or sample(self, logits, rows, positions)
        ),
    )
    assert profile.step_peak_bytes(runner, token_budget=budget, max_rows=ROWS) == 300 + footprint.SLACK
    tokens = min(budget, ROWS * (MAX_LEN - 1))  # more than the rows can hold never comes
    assert max(seen)[0] >= tokens
    assert (ROWS, MAX_LEN - 1, ROWS) in drawn  # every row, as long as can be, each with log-probabilities
    assert not runner.sampler.state._used - {ROWS}
    assert greedy(runner) == before


@pytest.mark.parametrize(
    ("budget", "max_rows", "max_model_len"), [(40, 12, 128), (300, 12, 128), (300, 100, 128), (8192, 12, 128), (8192, 3, 50)]
)
def test_no_captured_step_is_larger_than_those_measured(
    model: Any, allocator: None, monkeypatch: pytest.MonkeyPatch, budget: int, max_rows: int, max_model_len: int
) -> None:
    runner = make_runner(model, True, max_rows=max_rows, max_model_len=max_model_len, token_budget=budget)
    graphs, seen = runner.graphs, []
    forward = graphs._forward
    monkeypatch.setattr(graphs, "_forward", lambda ids, *rest, **options: seen.append(len(ids)) or forward(ids, *rest, **options))
    profile.step_peak_bytes(runner, token_budget=budget, max_rows=max_rows)
    measured = max(seen)

    pool = graphs.pool
    monkeypatch.setattr(pool, "on_gpu", True)
    monkeypatch.setattr(pool, "prepare", lambda key, body: pool.steps.setdefault(key, None))
    while graphs.capture_next():
        pass
    mixed = [key for key in pool.steps if key[0] == "mixed"]
    assert len(mixed) >= 6 and ("mixed", 0, 16, 8, "greedy") in mixed
    # --max-num-seqs may miss a multiple of 16
    assert max(decodes + tokens for _, decodes, tokens, *_ in mixed) < measured + 16


def test_whole_vocabularies_come_in_parts(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bound on memory must change no number."""
    rows, sizes = list(range(ROWS)), []
    results = []
    gather = logprobs.gather_logprobs
    monkeypatch.setattr("octavo.sampling.sampler.gather_logprobs", lambda values, *a: sizes.append(len(values)) or gather(values, *a))
    for elements in (2**22, 5 * VOCAB):
        monkeypatch.setattr(logprobs, "_CHUNK_ELEMENTS", elements)
        monkeypatch.setattr(logprobs, "FEW_ELEMENTS", elements)
        runner = make_runner(model, False)
        for row in rows:
            params = TokenParams(temperature=0.0, logprobs=-1 if row % 4 else 3, presence_penalty=0.3 * (row % 2))
            runner.sampler.state.init_row(RowInit(row, params, row, [1, 2], [], [0]))
        values = torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(0))
        results.append(runner.sampler.sample(values, rows, [2] * ROWS).to_host())
    assert sizes == [3, 9, 3, 5, 4] and results[0] == results[1]


def test_constants_agree() -> None:
    assert footprint.LOGPROBS_ELEMENTS == logprobs.FEW_ELEMENTS
