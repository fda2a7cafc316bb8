"""How long a step takes, learnt from the steps that ran. No clocks here: the engine measures, this fits.

A step's time is taken to be linear in what the host knows of it:

    steps that only decode    rows, context, constant
    steps with prompts        prompt tokens, query-key pairs, rows, context, constant

The two are fitted apart, because the same decode costs another time in each: alone it waits for the weights and the cache
to be read, beside prompts it is a token more of a long product. Decoding sequences, their tokens and the rows that draw are
nearly always the same number, which no fit could tell apart, so ``rows`` stands for all three.

Every fit is a least-squares fit of *relative* errors over a fading window, with coefficients that are never negative:

    minimize over c >= 0    sum of f^age * (1 - c·x / seconds)^2

A step that took far too long (a kernel was compiled, a graph captured) adds at most 1 to that sum and hardly pulls at it;
once a fit has seen a few steps it leaves such ones out altogether, until they come in a row and so are the new truth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, sqrt
from operator import mul

MATURE = 8  # steps after which a fit is trusted enough to call a step odd
ODD = 2.5  # a step this many times longer or shorter than predicted is odd: left out …
PERSISTENT = 8  # … unless it is the n-th odd one in a row: then the past is discounted, and the steps count
DISCOUNT = 1e-3
FADE_DECODE = 0.99  # a window of about a hundred steps
FADE_PROMPT = 0.98  # of about fifty, since they come seldom; each fit fades only with steps of its own kind


@dataclass(slots=True)
class StepWork:
    """What a step does, in numbers that its time depends on."""

    decodes: int = 0  # sequences that run their newest token
    context: int = 0  # tokens whose K and V the decodes read, summed over them
    prompt_tokens: int = 0  # tokens of prompts, in chunks
    pairs: float = 0.0  # query-key pairs of the chunks: see pairs_of
    rows: int = 0  # rows that draw a token
    moves: int = 0  # blocks swapped out and in


def pairs_of(start: int, count: int) -> float:
    """Query-key pairs of a chunk that runs positions [start, start + count): each token reads those before it."""
    return count * (start + 0.5 * count)


class LinearFit:
    """seconds ≈ coefficients · x, fitted step by step. Coefficients are at least 0; they start at 0.

    A sweep of coordinate descent a step, over moments that are kept up to date, rather than recursive least squares: it
    holds the bound at 0 exactly, needs no inverse that could lose its footing when features stay constant for long, and
    leaves what the steps say nothing about as it is. The first coordinates are fitted first, so what the first steps leave
    open is put down to them.
    """

    __slots__ = ("coefficients", "count", "fade", "gram", "moment", "odd")

    def __init__(self, size: int, fade: float) -> None:
        self.fade = fade
        self.coefficients = [0.0] * size
        self.gram = [[0.0] * size for _ in range(size)]  # sum of f^age * u uᵀ, u = x / seconds
        self.moment = [0.0] * size  # sum of f^age * u
        self.count = 0
        self.odd = 0  # odd steps in a row

    def predict(self, x: Sequence[float]) -> float:
        """Seconds; 0 before the first step was seen."""
        return sum(map(mul, self.coefficients, x))

    def observe(self, x: Sequence[float], seconds: float) -> bool:
        """Learn from a step; False if it was left out as odd. ``seconds`` > 0."""
        fade = self.fade
        if self.count >= MATURE:
            expected = self.predict(x)
            if not expected <= ODD * seconds <= ODD * ODD * expected:
                self.odd += 1
                if self.odd < PERSISTENT:
                    return False
                fade *= DISCOUNT
        self.odd = 0
        self.count += 1
        moment, coefficients = self.moment, self.coefficients
        u = [value / seconds for value in x]
        for i, (row, ui) in enumerate(zip(self.gram, u, strict=True)):
            if ui:
                row[:] = [fade * g + ui * uj for g, uj in zip(row, u, strict=True)]
            else:
                row[:] = [fade * g for g in row]
            moment[i] = fade * moment[i] + ui
        for i, row in enumerate(self.gram):
            if (diagonal := row[i]) > 0.0:
                value = coefficients[i] + (moment[i] - sum(map(mul, row, coefficients))) / diagonal
                coefficients[i] = value if value > 0.0 else 0.0
        return True


class CostModel:
    """Predicts a step's seconds from its ``StepWork``."""

    def __init__(self) -> None:
        self.decode = LinearFit(3, FADE_DECODE)
        self.prompt = LinearFit(5, FADE_PROMPT)
        self.most_tokens = 0  # the most prompt tokens of a step that was learnt from: how far the fit was tried

    def predict(self, work: StepWork) -> float:
        """Seconds; 0 while no step of the kind was seen."""
        if work.prompt_tokens:
            return self.prompt.predict((work.prompt_tokens, work.pairs, work.rows, work.context, 1.0))
        return self.decode.predict((work.rows, work.context, 1.0))

    def beside_prompts(self, work: StepWork) -> float:
        """Seconds of a step with prompts that its decodes (and the step as such) take."""
        return self.prompt.predict((0.0, 0.0, work.rows, work.context, 1.0))

    def observe(self, work: StepWork, seconds: float) -> None:
        """Learn that a step took ``seconds`` (> 0). One that also moved blocks is left out: no feature stands for that."""
        if work.moves:
            return
        if not work.prompt_tokens:
            self.decode.observe((work.rows, work.context, 1.0), seconds)
        elif self.prompt.observe((work.prompt_tokens, work.pairs, work.rows, work.context, 1.0), seconds):
            self.most_tokens = max(self.most_tokens, work.prompt_tokens)

    def chunk_seconds(self, start: int, count: int) -> float:
        """What a chunk that runs positions [start, start + count) adds to a step."""
        per_token, per_pair = self.prompt.coefficients[:2]
        return per_token * count + per_pair * pairs_of(start, count)

    def tokens_within(self, seconds: float, start: int) -> float:
        """Tokens of a prompt, from position ``start`` on, that add ``seconds`` to a step; inf if they cost nothing.

        The positive root n of  per_pair / 2 * n² + (per_token + per_pair * start) * n = seconds.
        """
        if seconds <= 0.0:
            return 0.0
        per_token, per_pair = self.prompt.coefficients[:2]
        linear = per_token + per_pair * start
        bottom = linear + sqrt(linear * linear + 2.0 * per_pair * seconds)
        return 2.0 * seconds / bottom if bottom > 0.0 else inf
