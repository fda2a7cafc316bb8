"""How much of prompts a step takes on: the token budget, and beside decodes as much as the streams can wait for.

Every running stream waits for the whole step, so prompt tokens beside decodes are rationed by predicted time:

- With ``--itl-slo-ms`` X the step is predicted to take at most ``SLO_SHARE`` of X.
- Without one it may take ``DECODES_SHARE`` times what its decodes alone would take, or ``least_step_s`` if that is longer.
  Three times: prompts then get two thirds of the device at least, so a queue drains at a fair rate however slow decodes are.
  The least: a gap that no reader notices, and below which chunks become too small to fill the device.
- When more prompts are in line (with a row free for each) than ``DRAIN_STEPS`` such steps could run, the step grows until
  they can, up to ``CROWDED`` times as long: each step spends some time on its decodes again, and in a crowd that would be
  paid by all who wait. The first in line doesn't count, so one long prompt alone slows nobody. An SLO stays a bound.
- ``minimal`` tokens are always taken on: prompts progress whatever was predicted.

With nothing to decode, nobody waits for the step, and the whole token budget is spent. The scheduler has no clock; ranks or
replays that see the same times plan the same steps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

from octavo.engine.cost_model import CostModel, StepWork

SLO_SHARE = 0.9  # predictions err by some percent, and the token has a way to go to its reader
DECODES_SHARE = 3.0
DRAIN_STEPS = 32
CROWDED = 4.0
NEVER_MORE = 1 << 30


@dataclass(frozen=True, kw_only=True)
class PaceRule:
    """A device's numbers. ``itl_slo_s``: the longest wanted step in seconds; None leaves it to the rule above."""

    least_step_s: float
    minimal: int  # prompt tokens; also the least that is worth starting another prompt for
    untried: int  # prompt tokens beside decodes before any step with prompts was measured; then at most twice the most measured
    most_tokens: int  # prompt tokens beside decodes, but for a crowd
    most_prompts: int  # prompts beside decodes, but for a crowd
    itl_slo_s: float | None = None


# CUDA graphs hold steps of up to 2,048 prompt tokens in 8 prompts (executor/step_graphs.py); others are launched kernel by
# kernel, which costs the host some milliseconds. On a CPU a prompt's tokens take about a millisecond each.
RULES = {
    "cuda": PaceRule(least_step_s=0.025, minimal=64, untried=512, most_tokens=2048, most_prompts=8),
    "cpu": PaceRule(least_step_s=0.150, minimal=16, untried=64, most_tokens=NEVER_MORE, most_prompts=NEVER_MORE),
}


def rule_for(device_type: str, itl_slo_ms: float | None) -> PaceRule:
    """``device_type``: cpu or cuda."""
    return replace(RULES[device_type], itl_slo_s=None if itl_slo_ms is None else itl_slo_ms / 1e3)


class Room:
    """What one step can still take on of prompts."""

    __slots__ = ("costs", "empty", "minimal", "prompts", "seconds", "tokens")

    def __init__(self, costs: CostModel, tokens: int, prompts: int = NEVER_MORE, seconds: float = inf, minimal: int = 1) -> None:
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

    def take(self, start: int, count: int) -> None:
        self.empty = False
        self.tokens -= count
        self.prompts -= 1
        if self.seconds < inf:
            self.seconds -= self.costs.chunk_seconds(start, count)


class Pace:
    """The rule at work: holds the cost model, and says how much each step may take on."""

    def __init__(self, token_budget: int, rule: PaceRule | None) -> None:
        """Without a rule the token budget is the only bound."""
        self.token_budget = token_budget
        self.rule = rule
        self.costs = CostModel()

    def observe(self, work: StepWork, seconds: float) -> None:
        """Learn that a step took ``seconds``."""
        if self.rule is not None and seconds > 0.0:
            self.costs.observe(work, seconds)

    def room(self, work: StepWork, start: int, behind: int) -> Room:
        """The room of a step whose decodes are planned, and are all that ``work`` has yet.

        ``start``: computed tokens of the first prompt in line; ``behind``: prompt tokens that could be run at once, of those
        behind it.
        """
        rule, costs = self.rule, self.costs
        left = self.token_budget - work.decodes
        if rule is None or not work.decodes:
            return Room(costs, left)
        decodes_s = costs.beside_prompts(work)
        crowd_s = decodes_s + behind * costs.prompt.coefficients[0] / DRAIN_STEPS
        limit = rule.itl_slo_s * SLO_SHARE if rule.itl_slo_s else max(DECODES_SHARE * costs.predict(work), rule.least_step_s)
        crowded = crowd_s > limit
        if crowded and rule.itl_slo_s is None:
            limit = min(crowd_s, CROWDED * limit)
        seconds = limit - decodes_s
        most = min(left, costs.tokens_within(seconds, start), max(rule.untried, 2 * costs.most_tokens))
        if not crowded:
            most = min(most, rule.most_tokens)
        tokens = max(even(int(most)), min(rule.minimal, left))
        return Room(costs, tokens, NEVER_MORE if crowded else rule.most_prompts, seconds, rule.minimal)


def even(tokens: int) -> int:
    """The largest of 1, 2, 4 … 64, 128, 192, 256, 384, 512, 768 … that is at most ``tokens``; 0 for less than 1.

    Steps of few sizes: a device keeps a graph or a kernel for each size of step, pads to the next, and is slow at a new one.
    """
    if tokens < 1:
        return 0
    power = 1 << (tokens.bit_length() - 1)
    return power + power // 2 if power >= 128 and tokens >= power + power // 2 else power
