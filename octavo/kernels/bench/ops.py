"""``bench_ops``: norm, gated activations, embedding, and the kernels at a step's ends, against torch and the floor."""

from __future__ import annotations

import torch

from octavo.kernels.bench.timing import DEVICE, Timing, copies_for, equal_parts, time_eager, time_graph
from octavo.kernels.silu_and_mul import silu_and_mul_reference
from octavo.kernels.triton import rows as rows_module
from octavo.kernels.triton.activation import silu_and_mul
from octavo.kernels.triton.embedding import embedding, embedding_reference
from octavo.kernels.triton.norm import rms_norm, rms_norm_reference

SIZES = [(1, 1024), (1, 4096), (32, 4096), (256, 4096), (2048, 1024), (2048, 4096), (16384, 1024), (8192, 4096)]


def bench_rms_norm(rows: int, width: int) -> list[Timing]:
    num_bytes = 4 * rows * width * 2
    xs = torch.randn(2, copies_for(num_bytes), rows, width, dtype=torch.bfloat16, device=DEVICE)
    weight = torch.randn(width, dtype=torch.bfloat16, device=DEVICE)
    pairs = list(zip(xs[0], xs[1], strict=True))
    results = []
    for label, f in (("triton", rms_norm), ("torch", rms_norm_reference)):
        seconds = time_graph([lambda p=p, f=f: f(p[0], weight, 1e-6, p[1]) for p in pairs])
        results.append(Timing(f"rms_norm+residual {rows}x{width} {label}", seconds, num_bytes))
    return results


def bench_silu_and_mul(rows: int, width: int) -> list[Timing]:
    num_bytes = 3 * rows * width * 2
    xs = torch.randn(copies_for(num_bytes), rows, 2 * width, dtype=torch.bfloat16, device=DEVICE)
    return [
        Timing(f"silu_and_mul {rows}x{width} {label}", time_graph([lambda x=x, f=f: f(x) for x in xs]), num_bytes)
        for label, f in (("triton", silu_and_mul), ("torch", silu_and_mul_reference))
    ]


def bench_embedding(rows: int, vocab: int = 151936, width: int = 4096) -> list[Timing]:
    weight = torch.randn(vocab, width, dtype=torch.bfloat16, device=DEVICE)
    ids = [torch.randint(0, vocab, (rows,), device=DEVICE) for _ in range(32)]
    return [
        Timing(f"embedding {rows}x{width} {label}", time_graph([lambda i=i, f=f: f(i, weight) for i in ids]), 2 * rows * width * 2)
        for label, f in (("triton", embedding), ("torch", embedding_reference))
    ]


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
        results.append(Timing(f"decode inputs + store, {what}", time_graph(calls[0]), num_bytes))
        results.append(Timing(f"  the same in torch ({equal_parts(ours, theirs)})", time_eager(calls[1]), num_bytes))
    return results


def bench_scatter(count: int, rows: int = 256, max_blocks: int = 2560) -> list[Timing]:
    """What the host uploads between steps, put to its places: ``count`` new blocks in the block table."""
    targets = [torch.zeros(rows, max_blocks, dtype=torch.int32, device=DEVICE) for _ in range(2)]
    pairs = torch.stack([torch.randperm(rows * max_blocks)[:count], torch.arange(1, count + 1)], dim=1).to(DEVICE)
    scatter, reference = rows_module.scatter_pairs, rows_module.scatter_pairs_reference
    scatter(pairs, targets[0]), reference(pairs, targets[1])
    same, num_bytes = equal_parts(*targets), count * (16 + 4)
    return [
        Timing(f"scatter {count} pairs", time_graph([lambda: scatter(pairs, targets[0])] * 16), num_bytes),
        Timing(f"  the same in torch ({same})", time_eager([lambda: reference(pairs, targets[1])] * 16), num_bytes),
    ]


def bench_ops() -> list[Timing]:
    results = []
    for rows, width in SIZES:
        for timing in (*bench_rms_norm(rows, width), *bench_silu_and_mul(rows, 3 * width)):
            results.append(timing)
            print(timing, flush=True)
    for rows in (1, 32, 256, 8192):
        for timing in (*bench_embedding(rows), *((*bench_rows(rows), *bench_scatter(rows)) if rows <= 256 else ())):
            results.append(timing)
            print(timing, flush=True)
    return results


if __name__ == "__main__":
    bench_ops()
