"""``bench_sampling``: drawing tokens, against the time to read the logits once, torch's argmax, and torch's sort alone, which
is what truncation costs there at the least."""

from __future__ import annotations

from functools import partial

import torch

from octavo.kernels.bench.timing import Timing, copies_for, time_graph
from octavo.kernels.triton import sample


def cases(rows: int) -> dict[str, dict[str, torch.Tensor] | None]:
    """Name → parameters; None: greedy."""

    def make(temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> dict[str, torch.Tensor]:
        return {
            "temperature": torch.full((rows,), temperature, device="cuda"),
            "top_k": torch.full((rows,), top_k, dtype=torch.int64, device="cuda"),
            "top_p": torch.full((rows,), top_p, dtype=torch.float64, device="cuda"),
            "min_p": torch.full((rows,), min_p, dtype=torch.float64, device="cuda"),
            "keys": torch.arange(rows, device="cuda") * 7919,
        }

    return {
        "greedy": None, "temperature": make(0.8), "top_k 50": make(0.8, 50), "top_p 0.95": make(0.8, top_p=0.95),
        "min_p 0.05": make(0.8, min_p=0.05), "top_k 50 top_p 0.95": make(0.8, 50, 0.95), "top_k 20000": make(0.8, 20000),
    }  # fmt: skip


def bench_sampling(vocab: int = 151936, all_rows: tuple[int, ...] = (1, 8, 32, 256), scale: float = 4.0) -> list[Timing]:
    """scale: standard deviation of the logits; 4 is about as peaked as a model's, 0.5 flat (everything is searched)."""
    results = []
    for rows in all_rows:
        num_bytes = rows * vocab * 4
        logits = torch.randn(copies_for(num_bytes, 16), rows, vocab, device="cuda") * scale
        positions = torch.arange(rows, device="cuda")
        for name, parameters in cases(rows).items():
            packed = None if parameters is None else sample.pack_parameters(**parameters)
            mode = sample.GREEDY if packed is None else sample.PLAIN if name == "temperature" else sample.TRUNCATED

            draw = partial(sample.sample_rows, packed=packed, row_index=None, positions=positions, mode=mode)
            seconds = time_graph([partial(draw, part) for part in logits])
            results.append(Timing(f"sample R={rows} {name} (std {scale})", seconds, num_bytes))
            print(results[-1], flush=True)
        results.append(Timing(f"torch argmax R={rows}", time_graph([lambda part=part: part.argmax(-1) for part in logits]), num_bytes))
        print(results[-1], flush=True)
        sort = time_graph([lambda part=part: part.sort(-1, descending=True) for part in logits[:2]], rounds=2)
        results.append(Timing(f"torch sort alone R={rows}", sort, num_bytes))
        print(results[-1], flush=True)
    return results


def bench_bitmask(vocab: int = 151936, all_rows: tuple[int, ...] = (1, 64, 256)) -> list[Timing]:
    """Structured output's masks: what is written is -inf for the forbidden tokens, nearly all of them here."""
    from octavo.kernels.token_bitmask import apply_token_bitmask_reference
    from octavo.kernels.triton.bitmask import apply_token_bitmask

    results = []
    for rows in all_rows:
        num_bytes = rows * vocab * 4 + rows * vocab // 8
        logits = torch.randn(copies_for(num_bytes, 16), rows, vocab, device="cuda")
        bits = torch.zeros(rows, -(-vocab // 32), dtype=torch.int32, device="cuda")
        bits[:, ::50] = 5
        places = torch.arange(rows, device="cuda")
        for label, function in (("triton", apply_token_bitmask), ("torch", apply_token_bitmask_reference)):
            seconds = time_graph([partial(function, part, bits, places) for part in logits])
            results.append(Timing(f"token bitmask R={rows} {label}", seconds, num_bytes))
            print(results[-1], flush=True)
    return results


if __name__ == "__main__":
    bench_bitmask()
    bench_sampling()
    bench_sampling(all_rows=(1, 32), scale=0.5)
