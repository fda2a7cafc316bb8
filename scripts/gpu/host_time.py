"""What the host spends on a step that runs prompts beside decodes, which no graph holds.   usage: host_time.py MODELDIR"""

from __future__ import annotations

import cProfile
import pstats
import random
import sys
import time

import torch

from octavo import LLM, SamplingParams


def main() -> None:
    llm = LLM(model=sys.argv[1], load_format="dummy", skip_tokenizer_init=True, max_model_len=4096, enable_prefix_caching=False)
    rng = random.Random(0)

    def prompts(count: int, length: int) -> list[dict[str, list[int]]]:
        return [{"prompt_token_ids": [rng.randint(10, 9000) for _ in range(length)]} for _ in range(count)]

    once = SamplingParams(temperature=0.6, max_tokens=1, ignore_eos=True, detokenize=False)
    for _ in range(3):
        llm.generate(prompts(1, 560), once, use_tqdm=False)
    begun = time.perf_counter()
    for _ in range(20):
        llm.generate(prompts(1, 560), once, use_tqdm=False)
    torch.cuda.synchronize()
    print(f"one prompt of 560, one token: {(time.perf_counter() - begun) / 20 * 1e3:.2f} ms")
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(20):
        llm.generate(prompts(1, 560), once, use_tqdm=False)
    profile.disable()
    pstats.Stats(profile).sort_stats("tottime").print_stats(28)
    longer = [prompts(16, 512) for _ in range(12)]
    for batch in longer[:2]:
        llm.generate(batch, once, use_tqdm=False)
    profile = cProfile.Profile()
    begun = time.perf_counter()
    for i, batch in enumerate(longer[2:]):
        if i == 5:
            print(f"16 prompts of 512, one token: {(time.perf_counter() - begun) / 5 * 1e3:.2f} ms")
            profile.enable()
        llm.generate(batch, once, use_tqdm=False)
    profile.disable()
    pstats.Stats(profile).sort_stats("tottime").print_stats(28)
    for batch in (33, 100, 190, 250, 3, 60):
        begun = time.perf_counter()
        llm.generate(prompts(batch, 20), SamplingParams(temperature=0.6, max_tokens=4, ignore_eos=True, detokenize=False), use_tqdm=False)
        first = time.perf_counter() - begun
        begun = time.perf_counter()
        llm.generate(prompts(batch, 20), SamplingParams(temperature=0.6, max_tokens=4, ignore_eos=True, detokenize=False), use_tqdm=False)
        print(f"batch {batch}: first {first * 1e3:.0f} ms (captures), again {(time.perf_counter() - begun) * 1e3:.0f} ms")


if __name__ == "__main__":
    main()
