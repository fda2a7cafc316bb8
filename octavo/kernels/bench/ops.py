"""``bench_ops``: norm, gated activations, embedding, and the kernels at a step's ends, against torch and the floor."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import torch

from octavo.kernels.bench.timing import DEVICE, Check, Timing, close, copies_for, equal, exit_status, shown, time_eager, time_graph
from octavo.kernels.silu_and_mul import silu_and_mul_reference
from octavo.kernels.triton import rows as rows_module
from octavo.kernels.triton.activation import silu_and_mul
from octavo.kernels.triton.embedding import embedding, embedding_reference
from octavo.kernels.triton.norm import rms_norm, rms_norm_reference

TOLERANCE = 6e-3  # of bfloat16's roundings, of which some fall to the other side
SIZES = [(1, 1024), (1, 4096), (32, 4096), (256, 4096), (2048, 1024), (2048, 4096), (16384, 1024), (8192, 4096)]


def bench_rms_norm(rows: int, width: int, dtype: torch.dtype = torch.bfloat16) -> list[Timing]:
    num_bytes = 4 * rows * width * 2
    xs = torch.randn(2, copies_for(num_bytes), rows, width, dtype=dtype, device=DEVICE)
    weight = torch.randn(width, dtype=dtype, device=DEVICE)
    both = [[lambda p=p, f=f: f(p[0], weight, 1e-6, p[1]) for p in zip(*xs, strict=True)] for f in (rms_norm, rms_norm_reference)]
    right = close(*zip(both[0][0](), both[1][0](), strict=True), tolerance=TOLERANCE)
    return _beside_torch(f"rms_norm+residual {rows}x{width}", both, num_bytes, right)


def bench_silu_and_mul(rows: int, width: int, dtype: torch.dtype = torch.bfloat16) -> list[Timing]:
    num_bytes = 3 * rows * width * 2
    xs = torch.randn(copies_for(num_bytes), rows, 2 * width, dtype=dtype, device=DEVICE)
    both = [[lambda x=x, f=f: f(x) for x in xs] for f in (silu_and_mul, silu_and_mul_reference)]
    right = close((both[0][0](), both[1][0]()), tolerance=TOLERANCE)
    return _beside_torch(f"silu_and_mul {rows}x{width}", both, num_bytes, right)


def bench_embedding(rows: int, vocab: int = 151936, width: int = 4096) -> list[Timing]:
    weight = torch.randn(vocab, width, dtype=torch.bfloat16, device=DEVICE)
    ids = [torch.randint(0, vocab, (rows,), device=DEVICE) for _ in range(32)]
    both = [[lambda i=i, f=f: f(i, weight) for i in ids] for f in (embedding, embedding_reference)]
    return _beside_torch(f"embedding {rows}x{width}", both, 2 * rows * width * 2, equal(both[0][0](), both[1][0]()))


def _beside_torch(name: str, both: Sequence[Sequence[Callable[[], object]]], num_bytes: float, check: Check) -> list[Timing]:
    """``both``: the calls of the kernel and of its reference."""
    ours, theirs = (time_graph(calls) for calls in both)
    return [Timing(f"{name} triton", ours, num_bytes, check=check), Timing(f"{name} torch", theirs, num_bytes)]


def bench_rows(places: int, max_blocks: int = 2560) -> list[Timing]:
    """The step's ends: inputs from rows, tokens back to them. torch's way waits for the device, so no graph can hold it."""
    ends = [torch.randint(0, 1000, (places + 1,), device=DEVICE) for _ in range(2)]
    table = torch.randint(0, 9999, (places + 1, max_blocks), dtype=torch.int32, device=DEVICE)
    index = torch.randperm(places, device=DEVICE)
    ends[1] %= 16 * max_blocks - 100  # what is timed counts these up
    results = []
    for tables in (None, max_blocks):
        states = {}
        for label in ("triton", "torch"):
            states[label] = (*(t.clone() for t in ends), rows_module.DecodeInputs.empty(places, DEVICE, tables))

        def step(label: str, states: dict[str, tuple] = states) -> None:
            last, computed, out = states[label]
            inputs, store = rows_module.decode_inputs, rows_module.store_tokens
            if label == "torch":
                inputs, store = rows_module.decode_inputs_reference, rows_module.store_tokens_reference
            inputs(index, last, computed, table, out, block_size=16, dummy_row=places)
            store(index, out.token_ids, last, computed, dummy_row=places)

        step("triton"), step("torch")
        (*ours, made), (*theirs, expected) = states["triton"], states["torch"]
        names = ("token_ids", "positions", "slots", "seq_lens") + (("block_tables",) if tables else ())
        ours, theirs = (torch.cat([t.flatten().long() for t in ts]) for ts in (
            [*ours, *(getattr(made, n) for n in names)], [*theirs, *(getattr(expected, n) for n in names)],
        ))  # fmt: skip
        num_bytes = places * (120 if tables is None else 120 + 8 * 64)
        what = f"{places} places, tables={tables is not None}"
        calls = [[lambda label=label: step(label)] * 16 for label in states]
        check = equal(ours, theirs)
        results.append(Timing(f"decode inputs + store, {what}", time_graph(calls[0]), num_bytes, check=check))
        results.append(Timing("  the same in torch", time_eager(calls[1]), num_bytes))
    return results


def bench_scatter(count: int, rows: int = 256, max_blocks: int = 2560) -> list[Timing]:
    """What the host uploads between steps, put to its places: ``count`` new blocks in the block table."""
    targets = [torch.zeros(rows, max_blocks, dtype=torch.int32, device=DEVICE) for _ in range(2)]
    pairs = torch.stack([torch.randperm(rows * max_blocks)[:count], torch.arange(1, count + 1)], dim=1).to(DEVICE)
    scatter, reference = rows_module.scatter_pairs, rows_module.scatter_pairs_reference
    scatter(pairs, targets[0]), reference(pairs, targets[1])
    check, num_bytes = equal(*targets), count * (16 + 4)
    return [
        Timing(f"scatter {count} pairs", time_graph([lambda: scatter(pairs, targets[0])] * 16), num_bytes, check=check),
        Timing("  the same in torch", time_eager([lambda: reference(pairs, targets[1])] * 16), num_bytes),
    ]


def bench_ops() -> list[Timing]:
    results: list[Timing] = []
    for rows, width in SIZES:
        results += map(shown, (*bench_rms_norm(rows, width), *bench_silu_and_mul(rows, 3 * width)))
    for rows in (1, 32, 256, 8192):
        results += map(shown, (*bench_embedding(rows), *((*bench_rows(rows), *bench_scatter(rows)) if rows <= 256 else ())))
    return results


if __name__ == "__main__":
    torch.manual_seed(0)
    sys.exit(exit_status(bench_ops()))
