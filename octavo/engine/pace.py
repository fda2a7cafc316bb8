"""How much of prompts a step takes on: the token budget, and beside decodes as much as the streams can wait for.

Every running stream waits for the whole step, so prompt tokens beside decodes are rationed by predicted time. With
``--itl-slo-ms`` X a step is predicted to take at most ``SLO_SHARE`` of X. Without one the limit follows the line of prompts:

    calm      ``CALM_SHARE`` times what the decodes alone would take, or ``calm_s`` if that is longer. Up to there prompts cost
              the streams little, and on a device that waits for its weights part of their time is hidden behind the decodes.
    a line    so long that the line is done in ``LINE_STEPS`` steps, up to ``patience``: ``PATIENCE_SHARE`` times the decodes
              alone (prompts then get three quarters of the device, however slow decodes are) or ``patience_s``, a gap that no
              reader notices.
    a crowd   when the prompts *behind* the first in line would take ``CROWD_LINE`` times ``patience``, and all in line are more
              than ``MANY`` times the decodes, or they would take ``LONG_LINE`` times ``patience`` however many streams there are:
              ``crowd_share`` times the decodes alone, or ``crowd_s``, until the crowd is gone. Each step pays for its decodes
              again, so all who wait would pay for many small steps; but where few wait, many streams would for a few long ones.
              One long prompt alone is no crowd, and slows nobody further.

What fits within the limit is then cut to an even size, on a GPU to one with which decodes and prompts together fill whole tiles of
rows (executor/step_sizes.py): a part of a tile would cost as much, and pay for it with time of all streams.

``minimal`` tokens are always taken on: prompts progress whatever was predicted. With nothing to decode nobody waits for the
step, and the whole token budget is spent. There is no clock in here: the same times measured give the same plans.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

from octavo.engine.cost_model import CostModel, StepWork
from octavo.executor.step_sizes import GRAPH_PROMPT_TOKENS, MAX_PROMPTS, filling_tokens

SLO_SHARE = 0.9  # predictions err by some percent, and the token has a way to go to its reader
CALM_SHARE = 2.0
LINE_STEPS = 4
PATIENCE_SHARE = 4.0
CROWD_LINE = 5.0
MANY = 0.5
LONG_LINE = 15.0
NO_LIMIT = 1 << 30


@dataclass(frozen=True, kw_only=True)
class PaceRule:
    """A device's numbers; seconds and tokens. ``itl_slo_s``: the longest step wanted; None leaves it to the rule above."""

    calm_s: float
    patience_s: float
    crowd_s: float
    crowd_share: float
    minimal: int  # prompt tokens; also the least that is worth starting one more prompt for
    untried: int  # prompt tokens beside decodes before a step with prompts was measured; after that twice the most measured
    most_tokens: int = NO_LIMIT  # prompt tokens beside decodes, but for a crowd
    most_prompts: int = NO_LIMIT  # prompts beside decodes, but for a crowd
    captured: bool = False  # steps are captured, in the sizes of executor/step_sizes.py
    itl_slo_s: float | None = None


# Where steps are captured, beside decodes only what a graph holds is taken on: other steps are launched kernel by kernel, which costs
# the host some milliseconds. On a CPU a token of a small model's prompt takes about a millisecond.
RULES = {
    "cuda": PaceRule(
        calm_s=0.010,
        patience_s=0.025,
        crowd_s=0.150,
        crowd_share=14.0,
        minimal=64,
        untried=512,
        most_tokens=GRAPH_PROMPT_TOKENS,
        most_prompts=MAX_PROMPTS,
        captured=True,
    ),
    "cpu": PaceRule(calm_s=0.050, patience_s=0.150, crowd_s=0.200, crowd_share=8.0, minimal=16, untried=64),
}


def rule_for(device_type: str, itl_slo_ms: float | None) -> PaceRule:
    """``device_type``: cpu or cuda."""
    return replace(RULES[device_type], itl_slo_s=None if itl_slo_ms is None else itl_slo_ms / 1e3)


@dataclass(slots=True)
class Line:
    """The prompts that could run now, those begun before those that wait, as far as there are rows for them."""

    start: int  # computed tokens of the first
    first: int  # tokens of the first that are still to run
    behind: int  # tokens of the others that are still to run
    prompts: int  # how many they are


class Room:
    """What one step can still take on of prompts."""

    __slots__ = ("costs", "empty", "minimal", "prompts", "seconds", "tokens")

    def __init__(self, costs: CostModel, tokens: int, prompts: int = NO_LIMIT, seconds: float = inf, minimal: int = 1) -> None:
        self.costs = costs
        self.tokens = tokens
        self.prompts = prompts
        self.seconds = seconds
        self.minimal = minimal
        self.empty = True  # nothing was taken on yet

    def fit(self, start: int, wanted: int) -> int:
        """How many of the ``wanted`` (>= 1) tokens from position ``start`` on the step takes; 0: no more prompts.

        The first prompt gets ``minimal`` at least, as far as there are tokens; later ones that or nothing, or all they want.
        """
        count = min(wanted, self.tokens)
        if count <= 0 or self.prompts <= 0:
            return 0
        if self.seconds < inf:
            count = int(min(count, self.costs.tokens_within(self.seconds, start)))
        if count < wanted and count < self.minimal:
            return min(self.minimal, wanted, self.tokens) if self.empty else 0
        return count

    def charge(self, seconds: float) -> None:
        """Something else in the step takes ``seconds``."""
        self.seconds -= seconds

    def take(self, start: int, count: int) -> None:
        self.empty = False
        self.tokens -= count
        self.prompts -= 1
        if self.seconds < inf:
            self.seconds -= self.costs.chunk_seconds(start, count)


class Pace:
    """The rule at work: holds the cost model, and says how much each step may take on."""

    def __init__(self, token_budget: int, rule: PaceRule | None, *, max_num_seqs: int, learns: bool = False) -> None:
        """Without a rule the token budget is the only bound. ``learns``: the cost model is wanted all the same."""
        self.token_budget = token_budget
        self.max_num_seqs = max_num_seqs
        self.rule = rule
        self.learns = learns or rule is not None
        self.costs = CostModel()

    def observe(self, work: StepWork, seconds: float) -> None:
        """Learn that a step took ``seconds``."""
        if self.learns and seconds > 0.0:
            self.costs.observe(work, seconds)

    def whole_room(self, work: StepWork) -> Room:
        """The room of a step that nobody waits for, or without a rule: what its decodes leave of the token budget."""
        return Room(self.costs, self.token_budget - work.decodes)

    def room(self, work: StepWork, line: Line) -> Room:
        """The room of a step beside its decodes. They are planned, and are all that ``work`` has yet."""
        rule, costs = self.rule, self.costs
        if rule is None:
            return self.whole_room(work)
        decodes_s = costs.beside_prompts(work)
        limit, crowded = self._limit(rule, work, decodes_s, line)
        left = self.token_budget - work.decodes
        most = min(left, costs.tokens_within(limit - decodes_s, line.start), max(rule.untried, 2 * costs.most_tokens))
        if not crowded:
            most = min(most, rule.most_tokens)
        full = filling_tokens(work.decodes, int(most), self.max_num_seqs) if rule.captured else 0
        tokens = max(full or even(int(most), crowded), min(rule.minimal, left))
        return Room(costs, tokens, NO_LIMIT if crowded else rule.most_prompts, limit - decodes_s, rule.minimal)

    def _limit(self, rule: PaceRule, work: StepWork, decodes_s: float, line: Line) -> tuple[float, bool]:
        """The longest step, in seconds, and whether a crowd is waiting. ``decodes_s``: the decodes' share of it."""
        alone_s = max(self.costs.predict(work), decodes_s)  # the fit of decodes alone forgets large batches while prompts never cease
        behind_s = self.costs.chunk_seconds(0, line.behind)
        if rule.itl_slo_s is not None:
            limit = rule.itl_slo_s * SLO_SHARE
            return limit, behind_s > CROWD_LINE * limit
        patience = max(PATIENCE_SHARE * alone_s, rule.patience_s)
        lines = behind_s / patience
        if lines > LONG_LINE or (lines > CROWD_LINE and line.prompts > MANY * work.decodes):
            return max(rule.crowd_share * alone_s, rule.crowd_s), True
        calm = max(CALM_SHARE * alone_s, rule.calm_s)
        lined = decodes_s + (self.costs.chunk_seconds(line.start, line.first) + behind_s) / LINE_STEPS
        return max(calm, min(lined, patience)), False


def even(tokens: int, fine: bool = False) -> int:
    """The largest of 1, 2, 4 … 1,024, 2,048, 2,560, 3,072 … that is at most ``tokens``; 0 for less than 1.

    ``fine`` has 192, 384, 768 and 1,536 too: a crowd is there long enough to make use of them, and needs all of a step's room.
    Steps of few sizes: a device keeps a kernel for each size of step, and is slow at a new one.
    Above 2,048 a step is long enough that none of this shows.
    """
    if tokens >= 2048:
        return tokens // 512 * 512
    if tokens < 1:
        return 0
    power = 1 << (tokens.bit_length() - 1)
    return power * 3 // 2 if fine and power >= 128 and tokens >= power * 3 // 2 else power
