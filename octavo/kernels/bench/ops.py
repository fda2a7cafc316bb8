"""``bench_ops``: norm and gated activations against the floor."""

from __future__ import annotations

import torch

from octavo.kernels.bench.timing import Timing, copies_for, time_graph
from octavo.kernels.silu_and_mul import silu_and_mul_reference
from octavo.kernels.triton import rows as rows_module
from octavo.kernels.triton.activation import silu_and_mul
from octavo.kernels.triton.embedding import embedding, embedding_reference
from octavo.kernels.triton.norm import rms_norm, rms_norm_reference

SIZES = [(1, 1024), (1, 4096), (32, 4096), (256, 4096), (2048, 1024), (2048, 4096), (16384, 1024), (8192, 4096)]


def bench_rms_norm(rows: int, width: int) -> list[Timing]:
    num_bytes = 4 * rows * width * 2
    xs = torch.randn(2, copies_for(num_bytes), rows, width, dtype=torch.bfloat16, device="cuda")
    weight = torch.randn(width, dtype=torch.bfloat16, device="cuda")
    pairs = list(zip(xs[0], xs[1], strict=True))
    results = []
    for label, f in (("triton", rms_norm), ("torch", rms_norm_reference)):
        seconds = time_graph([lambda p=p, f=f: f(p[0], weight, 1e-6, p[1]) for p in pairs])
        results.append(Timing(f"rms_norm+residual {rows}x{width} {label}", seconds, num_bytes))
    return results


def bench_silu_and_mul(rows: int, width: int) -> list[Timing]:
    num_bytes = 3 * rows * width * 2
    xs = torch.randn(copies_for(num_bytes), rows, 2 * width, dtype=torch.bfloat16, device="cuda")
    return [
        Timing(f"silu_and_mul {rows}x{width} {label}", time_graph([lambda x=x, f=f: f(x) for x in xs]), num_bytes)
        for label, f in (("triton", silu_and_mul), ("torch", silu_and_mul_reference))
    ]


def bench_embedding(rows: int, vocab: int = 151936, width: int = 4096) -> list[Timing]:
    weight = torch.randn(vocab, width, dtype=torch.bfloat16, device="cuda")
    ids = [torch.randint(0, vocab, (rows,), device="cuda") for _ in range(32)]
    return [
        Timing(f"embedding {rows}x{width} {label}", time_graph([lambda i=i, f=f: f(i, weight) for i in ids]), 2 * rows * width * 2)
        for label, f in (("triton", embedding), ("torch", embedding_reference))
    ]


def bench_rows(places: int, max_blocks: int = 2560) -> list[Timing]:
    """The step's ends: inputs from rows, tokens back to them."""
    last, computed = (torch.randint(0, 1000, (places + 1,), device="cuda") for _ in range(2))
    table = torch.randint(0, 9999, (places + 1, max_blocks), dtype=torch.int32, device="cuda")
    index = torch.randperm(places, device="cuda")
    results = []
    for tables in (None, max_blocks):
        out = rows_module.DecodeInputs.empty(places, "cuda", tables)

        def step(out: rows_module.DecodeInputs = out) -> None:
            rows_module.decode_inputs(index, last, computed, table, out, block_size=16, dummy_row=places)
            rows_module.store_tokens(index, out.token_ids, last, computed, dummy_row=places)

        num_bytes = places * (120 if tables is None else 120 + 8 * 64)
        results.append(Timing(f"decode inputs + store, {places} places, tables={tables is not None}", time_graph([step] * 16), num_bytes))
        computed.fill_(1000)
    return results


def bench_ops() -> list[Timing]:
    results = []
    for rows, width in SIZES:
        for timing in (*bench_rms_norm(rows, width), *bench_silu_and_mul(rows, 3 * width)):
            results.append(timing)
            print(timing, flush=True)
    for rows in (1, 32, 256, 8192):
        for timing in (*bench_embedding(rows), *(bench_rows(rows) if rows <= 256 else ())):
            results.append(timing)
            print(timing, flush=True)
    return results


if __name__ == "__main__":
    bench_ops()
