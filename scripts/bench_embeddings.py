"""Texts per second of an encoder here and in sentence-transformers, on the same machine: python scripts/bench_embeddings.py MODEL

MODEL is a folder with sentence-transformers' files. Prints one line per distribution of lengths and program, best of several runs.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from functools import partial


def make_texts(count: int, shortest: int, longest: int) -> list[str]:
    rng = random.Random(0)
    words = "the sea ship water letter friend lighthouse night star paper morning clock bread river glass library map island".split()
    return [" ".join(rng.choice(words) for _ in range(rng.randint(shortest, longest))) for _ in range(count)]


def best(run: Callable[[], object], repeats: int) -> float:
    run()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--count", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    import torch

    from octavo import LLM

    llm = LLM(args.model, device=args.device, dtype=args.dtype)
    runs: dict[str, Callable[[list[str]], object]] = {
        "octavo, 32 at a time": lambda texts: [llm.embed(texts[i : i + 32]) for i in range(0, len(texts), 32)],
        "octavo, all at once": lambda texts: llm.embed(texts),
    }
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError:
        print("sentence-transformers is not installed; only Octavo is measured")
    else:
        theirs = SentenceTransformer(args.model, device=args.device, model_kwargs={"dtype": getattr(torch, args.dtype)})
        runs["sentence-transformers, batch_size 32"] = lambda texts: theirs.encode(texts, batch_size=32, show_progress_bar=False)
        runs["sentence-transformers, batch_size 256"] = lambda texts: theirs.encode(texts, batch_size=256, show_progress_bar=False)
        both = make_texts(64, 1, 200)
        ours = torch.tensor([o.outputs.embedding for o in llm.embed(both)])
        difference = (ours - torch.tensor(theirs.encode(both, convert_to_numpy=True)).float()).abs().max()
        print(f"largest difference to sentence-transformers: {difference:.1e}")
    for shortest, longest in ((5, 40), (20, 20), (10, 200)):
        texts = make_texts(args.count, shortest, longest)
        for name, run in runs.items():
            rate = args.count / best(partial(run, texts), args.repeats)
            print(f"{shortest}-{longest} words  {name:40} {rate:9.1f} texts/s", flush=True)


if __name__ == "__main__":
    main()
