"""What a step costs: milliseconds on the GPU of steps with D decodes and T prompt tokens beside them, as a table and as JSON for
scripts/simulate_serving.py.

usage: step_costs.py MODELDIR [--decodes 0 16 50 …] [--tokens 0 64 128 …] [--context N] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections import defaultdict
from typing import Any

import torch

from octavo import LLM, SamplingParams
from octavo.frontend.inputs import parse_prompts

REPEATS = 7  # the first two run and capture
PROMPT = 512  # prompt tokens are those of prompts of this length


class Meter:
    """GPU milliseconds of each submitted step, by (decodes, prompt tokens)."""

    def __init__(self, llm: LLM) -> None:
        self.marks: list[tuple[tuple[int, int], torch.cuda.Event, torch.cuda.Event]] = []
        self.submit, self.rest = llm.executor.submit, llm.executor.rest
        llm.executor.submit = self.measured

    def measured(self, plan) -> None:  # noqa: ANN001
        counts = [advance.count for advance in plan.advances]
        prompt_tokens = sum(count for count in counts if count > 1)
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record()
        self.submit(plan)
        after.record()
        self.marks.append(((counts.count(1), prompt_tokens), before, after))

    def take(self) -> dict[tuple[int, int], list[float]]:
        self.rest()
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
    llm = LLM(model=args.model, load_format="dummy", skip_tokenizer_init=True, max_model_len=4096, enable_prefix_caching=False)
    rng = random.Random(0)

    def add(length: int, max_tokens: int) -> None:
        prompt = {"prompt_token_ids": [rng.randint(10, 2000) for _ in range(length)]}
        params = SamplingParams(temperature=0.6, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        llm.engine.add_request(llm._request(parse_prompts(prompt, None)[0], params, 0))

    meter, rows = Meter(llm), []
    for decodes in args.decodes:
        for _ in range(decodes):
            add(args.context, 2000)
        for _ in range(40 if decodes else 0):
            llm.engine.step()
        meter.take()
        for tokens in args.tokens:
            if not decodes + tokens:
                continue
            times: list[float] = []
            for _ in range(REPEATS):
                for start in range(0, tokens, PROMPT):
                    add(min(PROMPT, tokens - start), 1)
                for _ in range(4):
                    llm.engine.step()
                times += meter.take().get((decodes, tokens), [])
            took = statistics.median(times[2:]) if len(times) > 2 else None
            rows.append({"decodes": decodes, "context": args.context, "prompt_tokens": tokens, "prompts": -(-tokens // PROMPT), "ms": took})
        line = [f"{row['prompt_tokens']}: {row['ms']:.2f}" for row in rows if row["decodes"] == decodes and row["ms"] is not None]
        print(f"{decodes} decodes and prompt tokens: ms   " + "  ".join(line), flush=True)
        for request_id in list(llm.engine.scheduler.requests):
            llm.engine.abort(request_id)
        while llm.engine.has_work():
            llm.engine.step()
    if args.out:
        save(args.out, rows)


def save(path: str, rows: list[dict[str, Any]]) -> None:
    """The steps that were seen, as scripts/simulate_serving.py reads them."""
    with open(path, "w") as file:
        json.dump([row for row in rows if row["ms"] is not None], file)


if __name__ == "__main__":
    main()
