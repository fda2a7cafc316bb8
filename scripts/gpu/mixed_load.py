"""The mixed load (random prompts and answers of 100 to 1,024 tokens), step by step: which steps are captured, what each kind costs
the host, and how long the host waits for the GPU."""

from __future__ import annotations

import argparse
import random
import time
from collections import defaultdict

from octavo import LLM, SamplingParams
from octavo.executor.step_graphs import fits_graph, split_mixed
from octavo.frontend.inputs import Prompt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a folder; weights are dummies")
    parser.add_argument("requests", type=int, nargs="*", default=[256, 256], help="of each run, one after another (256 256)")
    args = parser.parse_args()
    llm = LLM(model=args.model, load_format="dummy", skip_tokenizer_init=True, max_model_len=4096, enable_prefix_caching=False)
    for run, count in enumerate(args.requests):
        measure(llm, count, run)


def measure(llm: LLM, count: int, run: int) -> None:
    rng = random.Random(0)
    tokens = 0
    for _ in range(count):
        prompt = Prompt(None, [rng.randint(10, 9000) for _ in range(rng.randint(100, 1024))])
        length = rng.randint(100, 1024)
        tokens += length
        params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=length, detokenize=False)
        llm.engine.add_request(llm._request(prompt, params, 0))
    submit, collect = llm.executor.submit, llm.executor.collect
    spent: dict[str, list[float]] = defaultdict(list)
    captured = len(llm.executor.runner.graphs.pool.steps)

    def timed_submit(plan):  # noqa: ANN001, ANN202
        split = split_mixed(plan)
        kind = "eager" if split is None or not fits_graph(split[1]) else "mixed" if split[1] else "decode"
        begun = time.perf_counter()
        submit(plan)
        spent[f"submit {kind}"].append(time.perf_counter() - begun)

    def timed_collect():  # noqa: ANN202
        begun = time.perf_counter()
        result = collect()
        spent["collect (waiting)"].append(time.perf_counter() - begun)
        return result

    llm.executor.submit, llm.executor.collect = timed_submit, timed_collect
    begun = time.perf_counter()
    while llm.engine.has_work():
        llm.engine.step()
    wall = time.perf_counter() - begun
    llm.executor.submit, llm.executor.collect = submit, collect
    print(f"run {run}: {count} requests, {tokens} tokens in {wall:.2f} s: {tokens / wall:.0f} tok/s")
    for name, values in sorted(spent.items()):
        values.sort()
        print(
            f"  {name:18s} {len(values):5d} x median {values[len(values) // 2] * 1e3:7.2f} ms, "
            f"p99 {values[int(len(values) * 0.99)] * 1e3:8.2f} ms, sum {sum(values):6.2f} s"
        )
    captured = len(llm.executor.runner.graphs.pool.steps) - captured
    print(f"  scheduler and the rest {wall - sum(map(sum, spent.values())):.2f} s; {captured} captures")


if __name__ == "__main__":
    main()
