#!/usr/bin/env python3
"""What a scheduling rule does to served loads, without a GPU: the real engine and scheduler on a clock that is only counted.

    python scripts/simulate_serving.py                      today's rule and the token budget alone, on the loads of docs/performance.md
    python scripts/simulate_serving.py --loads c50 r10 --grid steps.json
    python scripts/simulate_serving.py --loads c50 c200 all1000 --after r10       as scripts/gpu/compare.py runs them

Clients (N at a time, the first N all at once; or arriving at random) send requests; each step takes the time that a formula says,
with numbers fitted to an H200. ``--grid`` corrects it by measurements: a JSON list of objects with ``decodes``, ``context`` (tokens of
each decode), ``prompt_tokens``, ``prompts`` and ``ms``. Rules: ``octavo`` is engine/pace.py, after it has seen the load once as a server
that is warm has; ``greedy`` fills each step up to 8,192 tokens, decodes first, as vLLM does.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, replace

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from octavo.engine.pace import PaceRule, rule_for
from octavo.executor.step_sizes import GRAPH_PROMPT_TOKENS, MAX_PROMPTS, decode_sizes, mixed_decodes, prompt_sizes
from octavo.types import StepPlan
from tests.engine.simulator import MS, Load, Measured, at, simulate

MAX_ROWS = 1024
DECODE_SIZES = decode_sizes(MAX_ROWS)
TILE = 128  # rows that a product computes together


def padded(count: int, sizes: Iterable[int]) -> int:
    return next((size for size in sizes if size >= count), count)


def mixed(decodes: int, tokens: int = 0) -> tuple[int, int]:
    """Rows of decodes and of prompts of a step with both."""
    decodes = padded(decodes, mixed_decodes(MAX_ROWS))
    return decodes, padded(tokens, prompt_sizes(decodes))


@dataclass(frozen=True)
class Gpu:
    """Seconds of a step:  linears(rows) + context · a + pairs · b + drawing rows · c + constant + mixed if it has prompts.

    Linear layers run over decodes and prompts together: for few rows they wait for the weights (``weights`` + ``thin`` a row), for
    many they compute (``start`` + ``token`` a row, of which ``tiled`` is the share that full tiles take). Captured steps are padded.
    """

    weights: float
    thin: float
    start: float
    token: float
    context: float  # one token's K and V
    pair: float  # one query-key pair of a prompt
    row: float
    constant: float
    mixed: float
    tiled: float = 0.8
    host: float = 0.3 * MS
    host_eager: float = 8 * MS  # besides, to launch a step that no graph holds
    graph_prompts: int = MAX_PROMPTS
    corrections: tuple[tuple[float, ...], ...] = ()  # see ``corrected``
    kind: str = "cuda"
    steps_ahead: int = 1
    capture: float = 1e-12
    move: float = 0.0

    def captured(self, plan: StepPlan) -> tuple[int, int] | None:
        """Rows of decodes and of prompts of the graph that holds the step, if one does."""
        chunks = [a.count for a in plan.advances if a.token_ids is not None]
        decodes = len(plan.advances) - len(chunks)
        if not chunks:
            return padded(decodes, DECODE_SIZES), 0
        if len(chunks) > self.graph_prompts or sum(chunks) > GRAPH_PROMPT_TOKENS:
            return None
        return mixed(decodes, sum(chunks))

    def linears(self, rows: int) -> float:
        tiles = -(-rows // TILE) * TILE
        return max(self.weights + self.thin * rows, self.start + self.token * (self.tiled * tiles + (1 - self.tiled) * rows))

    def formula(self, rows: int, context: int, pairs: float, drawing: int) -> float:
        constant = self.constant + (self.mixed if pairs else 0.0)
        return self.linears(rows) + self.context * context + self.pair * pairs + self.row * drawing + constant

    def seconds(self, plan: StepPlan) -> float:
        decodes = context = pairs = drawing = 0
        for a in plan.advances:
            drawing += len(a.sample_rows)
            if a.token_ids is None:
                decodes += 1
                context += a.start + 1
            else:
                pairs += a.count * (a.start + a.count / 2)
        prompt_tokens = plan.num_tokens - decodes
        rows = sum(self.captured(plan) or (mixed(decodes)[0], prompt_tokens))
        return self.formula(rows, context, pairs, drawing) * self._correction(decodes, prompt_tokens)

    def corrected(self, path: str) -> Gpu:
        """With the measured times of a grid: what is between its points is off by as much as they are, in between."""
        with open(path) as file:
            points = json.load(file)
        table: dict[int, dict[int, list[float]]] = {}
        for p in points:
            decodes, tokens, prompts = p["decodes"], p["prompt_tokens"], max(1, p.get("prompts", 1))
            rows = sum(mixed(decodes, tokens)) if tokens else padded(decodes, DECODE_SIZES)
            expected = self.formula(rows, decodes * p["context"], tokens * tokens / prompts / 2, decodes + prompts * (tokens > 0))
            table.setdefault(decodes, {}).setdefault(tokens, []).append(p["ms"] * MS / expected)
        lines = ((d, *(v for t in sorted(row) for v in (t, sum(row[t]) / len(row[t])))) for d, row in sorted(table.items()))
        return replace(self, corrections=tuple(lines))

    def _correction(self, decodes: int, tokens: int) -> float:
        if not self.corrections:
            return 1.0
        of_line = [(line[0], between(list(zip(line[1::2], line[2::2], strict=True)), tokens)) for line in self.corrections]
        return between(of_line, decodes)


def between(points: list[tuple[float, float]], x: float) -> float:
    """The line through ``points`` (x ascending) at ``x``; level beyond its ends."""
    i = bisect_left(points, (x,))
    if i == 0 or i == len(points):
        return points[min(i, len(points) - 1)][1]
    (x0, y0), (x1, y1) = points[i - 1], points[i]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


# Pure decode at 288 tokens of context, batch 1 / 32 / 256: 4.3 / 4.9 / 10.5 ms and 0.8 / 1.2 / 4.1; prompts 43,000 and 356,000 tok/s.
MODELS = {
    "8b": Gpu(3.85 * MS, 0.005 * MS, 0.7 * MS, 0.0222 * MS, 147e3 / 4.1e12, 0.59e6 / 600e12, 0.004 * MS, 0.45 * MS, 0.6 * MS),
    "0.6b": Gpu(0.4 * MS, 0.002 * MS, 0.3 * MS, 0.0023 * MS, 115e3 / 3.9e12, 0.25e6 / 500e12, 0.003 * MS, 0.35 * MS, 0.2 * MS),
}
HTTP = {"intake": 0.3 * MS, "way": 1.5 * MS}  # some 4 ms of a TTFT at low load
LOADS: dict[str, tuple[str, Load]] = {
    "r10": ("8b", Load(200, rate=10, **HTTP)),
    "c1": ("8b", Load(10, concurrency=1, **HTTP)),
    "c10": ("8b", Load(100, concurrency=10, **HTTP)),
    "c50": ("8b", Load(200, concurrency=50, **HTTP)),
    "c200": ("8b", Load(600, concurrency=200, **HTTP)),
    "all1000": ("8b", Load(1000, concurrency=1000, **HTTP)),
    "small-c256": ("0.6b", Load(1024, concurrency=256, **HTTP)),
    "r20": ("8b", Load(400, rate=20, **HTTP)),
    "long-c50": ("8b", Load(200, concurrency=50, prompt=2048, output=128, **HTTP)),
    "mixed-c100": ("8b", Load(400, concurrency=100, prompt=562, output=562, spread=0.82, **HTTP)),
    "chat-c64": ("8b", Load(512, concurrency=64, prompt=150, output=150, chat=True, **HTTP)),
    "chat-r15": ("8b", Load(400, rate=15, prompt=150, output=150, chat=True, **HTTP)),
    "small-chat-c256": ("0.6b", Load(1500, concurrency=256, prompt=150, output=150, chat=True, **HTTP)),
    "small-long-c64": ("0.6b", Load(400, concurrency=64, prompt=2048, output=128, **HTTP)),
}


def play(
    name: str, rule: PaceRule | None, grid: str | None = None, seed: int = 0, noise: float = 0.02, after: str | None = None
) -> Measured:
    """One load under one rule, or under the token budget alone; the cost model has seen ``after`` before, or the same load once."""
    model, load = LOADS[name]
    before = LOADS[after or name][1]
    gpu = MODELS[model]
    if grid:
        gpu = gpu.corrected(grid)
    warm = simulate(
        gpu, replace(before, requests=min(before.requests, 200)), rule, max_num_seqs=MAX_ROWS, seed=seed + 7, noise=noise, pauses=False
    )
    return simulate(gpu, load, rule, max_num_seqs=MAX_ROWS, seed=seed, noise=noise, pace=warm.engine.scheduler.pace, pauses=False)


HEADING = f"{'load':16} {'rule':8} {'tok/s':>7} {'TTFT p50':>9} {'p99':>8} {'TPOT p50':>9} {'ITL p99':>8} {'max':>6} {'E2E p50':>8}"


def line(name: str, rule: str, got: Measured) -> str:
    ttft, tpot, gaps, e2e = ([1e3 * v for v in values] for values in (got.ttft, got.tpot, got.gaps, got.e2e))
    return (
        f"{name:16} {rule:8} {got.throughput:7.0f} {at(ttft, 0.5):9.1f} {at(ttft, 0.99):8.1f} {at(tpot, 0.5):9.2f} "
        f"{at(gaps, 0.99):8.1f} {max(gaps):6.0f} {at(e2e, 0.5):8.0f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS), metavar="LOAD", help=", ".join(LOADS))
    parser.add_argument("--rules", nargs="+", choices=["octavo", "greedy"], default=["octavo", "greedy"])
    parser.add_argument("--itl-slo-ms", type=float, help="for octavo")
    parser.add_argument("--grid", help="a JSON file of measured steps of the loads' model")
    parser.add_argument("--after", choices=LOADS, metavar="LOAD", help="what the cost model has learnt from (default: the load itself)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.grid and len({LOADS[name][0] for name in args.loads}) > 1:
        parser.error("--grid is of one model: choose --loads of that one")
    rules = {"octavo": rule_for("cuda", args.itl_slo_ms), "greedy": None}
    print(HEADING)
    for name in args.loads:
        for label in args.rules:
            print(line(name, label, play(name, rules[label], args.grid, args.seed, after=args.after)), flush=True)


if __name__ == "__main__":
    main()
