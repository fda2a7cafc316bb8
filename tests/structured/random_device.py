"""A device without a model: what a row draws is a hash of its tokens and its seed, among what its mask allows.

It keeps the contract of a step in two halves strictly, and draws what ends an output more often, so that outputs end.
"""

from __future__ import annotations

import hashlib
from collections import deque
from dataclasses import dataclass

import numpy as np

from octavo.types import StepPlan, StepResult, TokenMasks, TokenParams


@dataclass
class Row:
    params: TokenParams
    seed: int
    num_prompt: int
    tokens: list[int]


class RandomDevice:
    num_cpu_blocks = 0
    whole_prompts = False

    def __init__(self, vocab_size: int, *, steps_ahead: int = 0, num_blocks: int = 4096, favoured: list[int] | None = None) -> None:
        self.vocab_size, self.steps_ahead, self.num_blocks = vocab_size, steps_ahead, num_blocks
        self.favoured = np.zeros(vocab_size, bool)
        self.favoured[favoured or []] = True
        self.rows: dict[int, Row] = {}
        self.pending: deque[StepResult] = deque()
        self.waiting: StepPlan | None = None  # for its masks
        self.num_masked = self.num_ahead = 0

    def submit(self, plan: StepPlan) -> None:
        assert self.waiting is None, "a step before the second half of the last one"
        for init in plan.row_inits:
            self.rows[init.row] = Row(init.params, init.seed, len(init.prompt_token_ids), init.prompt_token_ids + init.output_token_ids)
        wants = any(self.rows[r].params.grammar is not None for a in plan.advances for r in a.sample_rows)
        assert plan.masked == wants
        self.pending.append(StepResult(plan.step, [r for a in plan.advances for r in a.sample_rows], []))
        assert len(self.pending) <= self.steps_ahead + 1
        if plan.masked:
            self.waiting = plan
            self.num_masked += 1
            self.num_ahead += len(self.pending) > 1
        else:
            self._draw({})

    def sample(self, masks: TokenMasks) -> None:
        assert self.waiting is not None and len(self.pending) == 1, "the step before must have been collected"
        self.waiting = None
        assert masks.bits.dtype == np.int32 and masks.bits.shape == (len(masks.places), -(-self.vocab_size // 32))
        self._draw(dict(zip(masks.places, masks.bits, strict=True)))

    def _draw(self, masks: dict[int, np.ndarray]) -> None:
        result = self.pending[-1]
        for place, number in enumerate(result.rows):
            row = self.rows[number]
            allowed = np.ones(self.vocab_size, bool)
            if place in masks:
                allowed = np.unpackbits(masks[place].view(np.uint8), bitorder="little")[: self.vocab_size].astype(bool)
            narrow(row.params, len(row.tokens) - row.num_prompt, allowed)
            token = draw(row.tokens, row.seed, allowed, self.favoured)
            row.tokens.append(token)
            result.token_ids.append(token)

    def collect(self) -> StepResult:
        assert len(self.pending) > 1 or self.waiting is None, "a step without its second half"
        return self.pending.popleft()

    def forget(self) -> None:
        self.pending.clear()
        self.waiting = None

    def shutdown(self) -> None: ...


def narrow(params: TokenParams, num_outputs: int, allowed: np.ndarray) -> None:
    """What a device's sampler forbids besides grammars."""
    if num_outputs < params.min_tokens:
        allowed[[*params.eos_token_ids, *params.stop_token_ids]] = False
    if params.allowed_token_ids is not None:
        kept = allowed[list(params.allowed_token_ids)]
        allowed[:] = False
        allowed[list(params.allowed_token_ids)] = kept


def draw(tokens: list[int], seed: int, allowed: np.ndarray, favoured: np.ndarray) -> int:
    """One of the allowed tokens (0 if there is none), two times in three a favoured one if that is allowed."""
    number = int.from_bytes(hashlib.blake2b(repr((tokens, seed)).encode(), digest_size=8).digest(), "little")
    if number % 3 and (allowed & favoured).any():
        allowed = allowed & favoured
    ids = np.flatnonzero(allowed)
    return int(ids[(number // 3) % len(ids)]) if len(ids) else 0
