"""``bench_sampling``: drawing tokens, against the same in torch, the time to read the logits once, and torch's sort alone, which is
what truncation costs there at the least."""

from __future__ import annotations

import sys
from functools import partial

import torch

from octavo.kernels.bench.timing import DEVICE, Check, Timing, agree, copies_for, equal, exit_status, shown, time_graph
from octavo.kernels.triton import sample

CLOSE = 1e-4  # scores that differ by less are the same in float32: kernel and reference may draw one or the other token


def cases(rows: int) -> dict[str, dict[str, torch.Tensor] | None]:
    """Name → parameters; None: greedy."""

    def make(temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> dict[str, torch.Tensor]:
        return {
            "temperature": torch.full((rows,), temperature, device=DEVICE),
            "top_k": torch.full((rows,), top_k, dtype=torch.int64, device=DEVICE),
            "top_p": torch.full((rows,), top_p, dtype=torch.float64, device=DEVICE),
            "min_p": torch.full((rows,), min_p, dtype=torch.float64, device=DEVICE),
            "keys": torch.arange(rows, device=DEVICE) * 7919,
        }

    return {
        "greedy": None, "temperature": make(0.8), "top_k 50": make(0.8, 50), "top_p 0.95": make(0.8, top_p=0.95),
        "min_p 0.05": make(0.8, min_p=0.05), "top_k 50 top_p 0.95": make(0.8, 50, 0.95), "top_k 20000": make(0.8, 20000),
    }  # fmt: skip


def reference(logits: torch.Tensor, parameters: dict[str, torch.Tensor] | None, positions: torch.Tensor, mode: int) -> torch.Tensor:
    """The tokens as torch draws them, with no more work than the mode asks for."""
    if parameters is None:
        return logits.argmax(-1)
    if mode == sample.PLAIN:
        noise = sample.gumbel_reference(parameters["keys"], positions, logits.shape[1])
        return (logits.double() / parameters["temperature"].double()[:, None] + noise).argmax(-1)
    return sample.sample_tokens_reference(logits, **parameters, positions=positions)


def compare(
    ours: torch.Tensor, theirs: torch.Tensor, logits: torch.Tensor, parameters: dict[str, torch.Tensor] | None, positions: torch.Tensor
) -> Check:
    """Drawn tokens: the same, or of the same score, up to ``CLOSE``."""
    same = ours == theirs
    if parameters is None or bool(same.all()):
        return agree(same)
    noise = sample.gumbel_reference(parameters["keys"], positions, logits.shape[1])
    scores = logits.double() / parameters["temperature"].double()[:, None] + noise
    known = (ours >= 0) & (ours < logits.shape[1])
    gaps = scores.gather(1, theirs[:, None]) - scores.gather(1, ours.where(known, 0)[:, None])
    return agree(same, same | (known & (gaps[:, 0].abs() <= CLOSE)))


def bench_sampling(vocab: int = 151936, all_rows: tuple[int, ...] = (1, 8, 32, 256), scale: float = 4.0) -> list[Timing]:
    """scale: standard deviation of the logits; 4 is about as peaked as a model's, 0.5 flat (everything is searched)."""
    results = []
    for rows in all_rows:
        num_bytes = rows * vocab * 4
        logits = torch.randn(copies_for(num_bytes, 16), rows, vocab, device=DEVICE) * scale
        positions = torch.arange(rows, device=DEVICE)
        for name, parameters in cases(rows).items():
            packed = None if parameters is None else sample.pack_parameters(**parameters)
            mode = sample.GREEDY if packed is None else sample.PLAIN if name == "temperature" else sample.TRUNCATED

            draw = partial(sample.sample_rows, packed=packed, row_index=None, positions=positions, mode=mode)
            ask = partial(reference, parameters=parameters, positions=positions, mode=mode)
            check = compare(draw(logits[0]), ask(logits[0]), logits[0], parameters, positions)
            seconds = time_graph([partial(draw, part) for part in logits])
            results.append(shown(Timing(f"sample R={rows} {name} (std {scale})", seconds, num_bytes, check=check)))
            seconds = time_graph([partial(ask, part) for part in logits[: len(logits) if mode == sample.GREEDY else 2]], rounds=2)
            results.append(shown(Timing("  the same in torch", seconds, num_bytes)))
        sort = time_graph([lambda part=part: part.sort(-1, descending=True) for part in logits[:2]], rounds=2)
        results.append(shown(Timing(f"torch sort alone R={rows}", sort, num_bytes)))
    return results


def bench_bitmask(vocab: int = 151936, all_rows: tuple[int, ...] = (1, 64, 256)) -> list[Timing]:
    """Structured output's masks: what is written is -inf for the forbidden tokens, nearly all of them here."""
    from octavo.kernels.token_bitmask import apply_token_bitmask_reference
    from octavo.kernels.triton.bitmask import apply_token_bitmask

    results = []
    for rows in all_rows:
        num_bytes = rows * vocab * 4 + rows * vocab // 8
        logits = torch.randn(copies_for(num_bytes, 16), rows, vocab, device=DEVICE)
        bits = torch.zeros(rows, -(-vocab // 32), dtype=torch.int32, device=DEVICE)
        bits[:, ::50] = 5
        places = torch.arange(rows, device=DEVICE)
        masked = [logits[0].clone() for _ in range(2)]
        apply_token_bitmask(masked[0], bits, places)
        apply_token_bitmask_reference(masked[1], bits, places)
        for label, function, check in (("triton", apply_token_bitmask, equal(*masked)), ("torch", apply_token_bitmask_reference, None)):
            seconds = time_graph([partial(function, part, bits, places) for part in logits])
            results.append(shown(Timing(f"token bitmask R={rows} {label}", seconds, num_bytes, check=check)))
    return results


if __name__ == "__main__":
    torch.manual_seed(0)
    sys.exit(exit_status([*bench_bitmask(), *bench_sampling(), *bench_sampling(all_rows=(1, 32), scale=0.5)]))
