"""First look at a GPU: a dummy model end to end, eager against graphs, and how long the parts of start-up take.

usage: python scripts/gpu/smoke.py MODELDIR [backend …]
"""

from __future__ import annotations

import random
import sys
import time

from octavo import LLM, SamplingParams


def main() -> None:
    folder, backends = sys.argv[1], sys.argv[2:] or ["triton"]
    rng = random.Random(0)
    prompts = [{"prompt_token_ids": [rng.randint(10, 9000) for _ in range(rng.randint(5, 700))]} for _ in range(40)]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, detokenize=False)
    sampled = SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=40, ignore_eos=True, detokenize=False)
    results: dict[str, list[list[int]]] = {}
    for backend in backends:
        for eager in (True, False):
            begun = time.perf_counter()
            llm = LLM(
                model=folder, load_format="dummy", skip_tokenizer_init=True, max_model_len=4096, enforce_eager=eager,
                attention_backend=backend, enable_prefix_caching=False, gpu_memory_utilization=0.4,
            )  # fmt: skip
            ready = time.perf_counter() - begun
            for name, p in (("greedy", params), ("sampled", sampled)):
                begun = time.perf_counter()
                out = llm.generate(prompts, p, use_tqdm=False)
                results[f"{backend} {eager} {name}"] = [o.outputs[0].token_ids for o in out]
                print(
                    backend,
                    "eager" if eager else "graphs",
                    name,
                    f"ready {ready:.1f} s, run {time.perf_counter() - begun:.2f} s",
                    llm.executor.timings,
                )
            llm.shutdown()
            del llm
    first = {name: next(v for k, v in results.items() if k.endswith(name)) for name in ("greedy", "sampled")}
    for key, tokens in results.items():
        same = sum(a == b for a, b in zip(tokens, first[key.split()[-1]]))
        print(f"{key}: {same} of {len(tokens)} equal to the first")


if __name__ == "__main__":
    main()
