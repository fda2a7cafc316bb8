"""Measures what a step needs besides weights and KV cache, by running the heaviest ones."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import torch

from octavo.types import Advance, RowInit, StepPlan, TokenParams

if TYPE_CHECKING:
    from octavo.executor.model_runner import ModelRunner

GRAPH_RESERVE = 512 * 2**20  # private memory of captured decode graphs
SLACK = 256 * 2**20  # allocator fragmentation and libraries' workspaces made later


def step_peak_bytes(runner: ModelRunner, *, token_budget: int, max_rows: int) -> int:
    """Most bytes that the caching allocator held during the heaviest steps, beyond what it holds now.

    The runner's caches may be of one block: every block table names block 0, whose contents don't matter here. Steps run: a
    prompt of the whole token budget (in sequences of the longest length), with log-probabilities of the prompt; then draws on
    every row with and without truncation, and with penalties and log-probabilities.
    """
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    heavy = TokenParams(temperature=1.0, top_p=0.9, top_k=50, presence_penalty=0.5, repetition_penalty=1.1, logprobs=20)
    plain = TokenParams(temperature=1.0)
    _prompt(runner, token_budget, max_rows, plain)
    for params in (plain, TokenParams(temperature=1.0, top_p=0.9), heavy):
        _draws(runner, max_rows, params)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    for row in range(max_rows):
        runner.sampler.state.clear_row(row)
    gc.collect()
    torch.cuda.empty_cache()
    return peak + GRAPH_RESERVE + SLACK


def _prompt(runner: ModelRunner, token_budget: int, max_rows: int, params: TokenParams) -> None:
    longest = min(runner.max_model_len - 1, token_budget)
    counts = [longest] * (token_budget // longest) + ([token_budget % longest] if token_budget % longest else [])
    advances, inits = [], []
    for row, count in enumerate(counts[:max_rows]):
        inits.append(_init(row, params, count, runner))
        targets = [0] * count if row == 0 else None
        advances.append(Advance(row, 0, count, [0] * count, (row,), 1 if row == 0 else None, targets))
    runner.execute(StepPlan(-1, advances, inits))


def _draws(runner: ModelRunner, max_rows: int, params: TokenParams) -> None:
    rows = list(range(max_rows))
    plan = StepPlan(-1, [Advance(r, 1, 1, [0], (r,)) for r in rows], [_init(r, params, 1, runner) for r in rows])
    runner.execute(plan)


def _init(row: int, params: TokenParams, count: int, runner: ModelRunner) -> RowInit:
    return RowInit(row, params, row, [0], [], [0] * (-(-(count + 1) // runner.block_size)))
