"""What a step costs: milliseconds on the GPU of steps with D decodes and T prompt tokens beside them, as a table and as JSON for
scripts/simulate_serving.py.

usage: step_costs.py MODELDIR [--decodes 0 16 50 …] [--tokens 0 64 128 …] [--context N] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from typing import Any

import torch
from random_requests import RandomRequests

REPEATS = 7
WARM_UP = 2  # of them: these run without a graph, and are captured
PROMPT = 512  # prompt tokens are those of prompts of this length


class Meter:
    """GPU milliseconds of each submitted step, by (decodes, prompt tokens)."""

    def __init__(self, requests: RandomRequests) -> None:
        self.marks: list[tuple[tuple[int, int], torch.cuda.Event, torch.cuda.Event]] = []
        self.requests, executor = requests, requests.llm.executor
        self.submit, executor.submit = executor.submit, self.measured

    def measured(self, plan) -> None:  # noqa: ANN001
        counts = [advance.count for advance in plan.advances]
        prompt_tokens = sum(count for count in counts if count > 1)
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record()
        self.submit(plan)
        after.record()
        self.marks.append(((counts.count(1), prompt_tokens), before, after))

    def take(self) -> dict[tuple[int, int], list[float]]:
        torch.cuda.synchronize()
        times = defaultdict(list)
        for key, before, after in self.marks:
            times[key].append(before.elapsed_time(after))
        self.marks.clear()
        return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--decodes", type=int, nargs="*", default=[0, 16, 50, 128, 200, 256])
    parser.add_argument("--tokens", type=int, nargs="*", default=[0, 64, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096])
    parser.add_argument("--context", type=int, default=400)
    parser.add_argument("--out")
    args = parser.parse_args()
    requests = RandomRequests(args.model, temperature=0.6)
    meter, rows = Meter(requests), []
    for decodes in args.decodes:
        for _ in range(decodes):
            requests.add(args.context, 2000)
        requests.step(40 if decodes else 0)
        meter.take()
        for tokens in args.tokens:
            if not decodes + tokens:
                continue
            times: list[float] = []
            for i in range(REPEATS):
                for start in range(0, tokens, PROMPT):
                    requests.add(min(PROMPT, tokens - start), 1)
                requests.step(4)
                seen = meter.take().get((decodes, tokens), [])
                if i >= WARM_UP:
                    times += seen
            took = statistics.median(times) if times else None
            rows.append({"decodes": decodes, "context": args.context, "prompt_tokens": tokens, "prompts": -(-tokens // PROMPT), "ms": took})
        line = [f"{row['prompt_tokens']}: {row['ms']:.2f}" for row in rows if row["decodes"] == decodes and row["ms"] is not None]
        print(f"{decodes} decodes and prompt tokens: ms   " + "  ".join(line), flush=True)
        requests.end_all()
    if args.out:
        save(args.out, rows)


def save(path: str, rows: list[dict[str, Any]]) -> None:
    """The steps that were seen, as scripts/simulate_serving.py reads them."""
    with open(path, "w") as file:
        json.dump([row for row in rows if row["ms"] is not None], file)


if __name__ == "__main__":
    main()
