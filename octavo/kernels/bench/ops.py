"""``bench_ops``: norm and gated activations against the floor."""

from __future__ import annotations

import torch

from octavo.kernels.bench.timing import Timing, copies_for, time_graph
from octavo.kernels.triton.activation import silu_and_mul, silu_and_mul_reference
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


def bench_ops() -> list[Timing]:
    results = []
    for rows, width in SIZES:
        for timing in (*bench_rms_norm(rows, width), *bench_silu_and_mul(rows, 3 * width)):
            results.append(timing)
            print(timing, flush=True)
    return results


if __name__ == "__main__":
    bench_ops()
