"""Measures what steps need besides weights and KV cache, by a trial of the heaviest ones."""

from __future__ import annotations

import gc
import logging
from typing import TYPE_CHECKING

import torch

from octavo.executor.footprint import LOGITS_CHUNK, MIB, SLACK
from octavo.executor.step_sizes import GRAPH_PROMPT_TOKENS, MAX_PROMPTS
from octavo.sampling.logprobs import gather_logprobs, rows_at_once
from octavo.types import Advance, RowInit, StepPlan, TokenParams

if TYPE_CHECKING:
    from octavo.executor.model_runner import ModelRunner

logger = logging.getLogger("octavo.executor")

GRAPHS_MARGIN = 1.15  # of what the largest captured steps take: graphs of all sizes share the pool, with gaps between
GRAPHS_SLACK = 32 * MIB


def step_peak_bytes(runner: ModelRunner, *, token_budget: int, max_rows: int) -> int:
    """Most bytes that any step will need beyond what is held when this returns. Also sets the captured steps' memory aside.

    The runner's caches may be of one block: every block table names block 0, whose contents don't matter here. What runs:

    - a prompt of the whole token budget, in sequences of the longest length, with log-probabilities of one;
    - with that step's hidden states still there: the whole vocabulary's log-probabilities of a prompt, as many positions as are
      worked on at a time; and draws on every row at the end of the longest sequence, with all that keeps or gathers something
      (penalties touch every token a row has had), truncation, and log-probabilities, a few rows' of the whole vocabulary;
    - the largest bodies of captured steps, apart: their memory is a pool of its own.

    Triton's kernels are left out: what a step allocates does not depend on them, and none needs to be compiled for it. (They
    allocate nothing themselves; libraries' kernels, which may, do run.)
    """
    from octavo.kernels.triton.launch import skipped_launches

    with skipped_launches():
        graphs = 0 if runner.graphs is None else _graph_bytes(runner, token_budget, max_rows)
        if runner.graphs is not None:
            runner.graphs.pool.reserve(graphs)
        start = _begin()
        _prompt(runner, token_budget, max_rows)
        first = torch.cuda.max_memory_allocated()
        _draws(runner, token_budget, max_rows)
        torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    for row in range(max_rows):
        runner.sampler.state.clear_row(row)
    gc.collect()
    held = torch.cuda.memory_allocated()  # what sampling keeps stays allocated, so it is not needed once more
    torch.cuda.empty_cache()
    logger.debug(
        "profile: a prompt's step %d MiB, draws %d MiB, kept %d MiB, captured steps %d MiB",
        *((n // MIB) for n in (first - start, peak - start, held - start, graphs)),
    )
    return peak - held + SLACK


def _begin() -> int:
    """Start measuring: bytes that are allocated now."""
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def _graph_bytes(runner: ModelRunner, token_budget: int, max_rows: int) -> int:
    """What the pool of captured steps needs: the largest step's memory. Smaller ones, captured later, use the same."""
    assert runner.graphs is not None
    start = _begin()
    prompts, inits = prompts_of(runner, min(token_budget, GRAPH_PROMPT_TOKENS), min(max_rows, MAX_PROMPTS))
    with torch.inference_mode():
        for init in inits:
            runner.sampler.state.init_row(init)
        runner.sampler.state.select([init.row for init in inits])  # uploads their parameters
        runner.rows.update(inits, [])
        runner.graphs.run_largest(prompts)
    torch.cuda.synchronize()
    return int((torch.cuda.max_memory_allocated() - start) * GRAPHS_MARGIN) + GRAPHS_SLACK


def prompts_of(runner: ModelRunner, tokens: int, max_rows: int) -> tuple[list[Advance], list[RowInit]]:
    """Prompts of ``tokens`` tokens together, as long as can be, on rows 0, 1, …; fewer tokens if the rows don't hold them."""
    longest = min(max(runner.max_model_len - 1, 1), tokens)
    counts = [longest] * (tokens // longest) + ([tokens % longest] if tokens % longest else [])
    advances, inits = [], []
    for row, count in enumerate(counts[:max_rows]):
        inits.append(_init(row, TokenParams(temperature=1.0), count, runner))
        advances.append(Advance(row, 0, count, [0] * count, (row,)))
    return advances, inits


def _prompt(runner: ModelRunner, token_budget: int, max_rows: int) -> None:
    advances, inits = prompts_of(runner, token_budget, max_rows)
    scored = min(advances[0].count, LOGITS_CHUNK)
    # Besides their memory, log-probabilities keep the step out of the captured ones, whose caches are not there yet.
    advances[0].prompt_logprobs, advances[0].next_token_ids = 1, [0] * scored
    runner.execute(StepPlan(-1, advances, inits))


@torch.inference_mode()
def _draws(runner: ModelRunner, token_budget: int, max_rows: int) -> None:
    """No layers: they have run, with more tokens."""
    state, vocab = runner.sampler.state, runner.vocab_size
    weight = next(runner.model.parameters())
    hidden = torch.zeros(max(token_budget, max_rows), runner.model.config.hidden_size, dtype=weight.dtype, device=runner.device)

    at_once = rows_at_once(vocab, vocab)
    logits = runner._logits(hidden[:LOGITS_CHUNK])
    gather_logprobs(logits[:at_once], torch.zeros(len(logits[:at_once]), dtype=torch.int64, device=runner.device), vocab)
    del logits

    rows = list(range(max_rows))
    for row in rows:
        params = TokenParams(
            temperature=1.0,
            top_p=0.9,
            top_k=50,
            presence_penalty=0.5,
            repetition_penalty=1.1,
            logprobs=-1 if row < at_once else 20,
            min_tokens=2**30,
            eos_token_ids=(0,),
            logit_bias={0: 1.0},
            allowed_token_ids=(0, 1),
        )
        state.init_row(_init(row, params, 1, runner))
    runner.sampler.sample(runner._logits(hidden[:max_rows]), rows, [max(runner.max_model_len - 1, 1)] * max_rows)


def _init(row: int, params: TokenParams, count: int, runner: ModelRunner) -> RowInit:
    return RowInit(row, params, row, [0], [], [0] * (-(-(count + 1) // runner.block_size)))
