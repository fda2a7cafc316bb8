"""Measures configurations of the small-M linear kernels against cuBLAS, with a cold L2 inside CUDA graphs, and writes the
winners to octavo/kernels/triton/linear_configs.json.

    python scripts/gpu/tune_linear.py [--seconds 170] [--out FILE] [--models qwen3-8b ...] [--rows 1 32 ...]

Shapes in the file that were not measured this time are kept. Results are written as they come, the shapes and row counts that
matter most first, so that a run cut short leaves a usable table. Compilation runs ahead in worker processes, into Triton's
cache on disk; a configuration that does not compile or run is skipped.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch  # noqa: E402

from octavo.kernels.bench.linear import SHAPES, Operands, Shape  # noqa: E402
from octavo.kernels.triton import linear as module  # noqa: E402
from octavo.kernels.triton.linear import TORCH, LinearConfig  # noqa: E402

ROW_ORDER = (1, 32, 8, 2, 64, 16, 4)
GEMV_BLOCKS = [  # rows of W, columns, warps
    (4, 1024, 4), (8, 512, 4), (2, 1024, 4), (4, 512, 2), (2, 2048, 4), (8, 1024, 8), (16, 256, 4), (4, 2048, 8),
    (16, 512, 8), (8, 256, 2), (4, 512, 4),
]  # fmt: skip
DOT_BLOCKS = [  # rows of W, columns, warps, stages
    (64, 128, 4, 4), (64, 256, 4, 3), (128, 128, 4, 3), (32, 256, 4, 3), (16, 256, 4, 4), (128, 64, 4, 5), (64, 64, 4, 6),
    (128, 128, 8, 4),
]  # fmt: skip


def candidates(rows: int, weight_rows: int, k: int) -> Iterator[LinearConfig]:
    """Configurations worth trying for a bucket, the likeliest first."""
    seen = set()
    for config in _candidates(rows, weight_rows, k):
        if config not in seen and config.problem(rows, weight_rows, k) is None:
            seen.add(config)
            yield config


def _candidates(rows: int, weight_rows: int, k: int) -> Iterator[LinearConfig]:
    yield replace(module.heuristic(rows, weight_rows, k), fuse_norm=False)
    if rows <= module.GEMV_ROWS:
        for block_n, block_k, warps in GEMV_BLOCKS:
            if block_n * block_k * rows <= 2048 * warps and block_k < 2 * k:
                yield LinearConfig("gemv", block_n, block_k, warps)
                if weight_rows <= 4096 and k >= 2048 and block_k * 2 <= k:
                    yield LinearConfig("gemv", block_n, block_k, warps, split_k=2)
    if rows >= 2:
        large = weight_rows * k > 2**23
        for block_n, block_k, warps, stages in DOT_BLOCKS:
            tiles = -(-weight_rows // block_n)
            for split in (1, 2, 4, 8):
                programs = tiles * split
                if (split == 1 or programs <= 1056) and k // split >= max(256, block_k) and (programs >= 64 or split == 8):
                    prefetch = 0 if large and split == 1 else min(1024, 1 << (k // split).bit_length() - 1)
                    yield LinearConfig("dot", block_n, block_k, warps, stages, split, prefetch)
                    break_even = programs >= 528
                    if break_even:
                        break


def compile_group(shape: Shape, rows: int) -> int:
    """In a worker: compile into the disk cache. Nothing is launched, which would disturb the parent's timing."""
    done = 0
    x = torch.empty(rows, shape.k, dtype=torch.bfloat16, device="cuda")
    weight = torch.empty(shape.weight_rows, shape.k, dtype=torch.bfloat16, device="cuda")
    for config in candidates(rows, shape.weight_rows, shape.k):
        if config.kernel == "torch":
            continue
        try:
            module.run(config, x, weight, gated=shape.gated, compile_only=True)
            done += 1
        except Exception:  # noqa: BLE001 - the parent meets it again and reports it
            pass
    return done


def jobs_of(shapes: list[Shape], all_rows: list[int]) -> list[tuple[Shape, int]]:
    """Models in the order given; within one, the row counts in order of weight."""
    models = list(dict.fromkeys(shape.name.split()[0] for shape in shapes))
    ordered = [r for r in ROW_ORDER if r in all_rows]
    return [(s, r) for r in ordered for model in models for s in shapes if s.name.startswith(model + " ")]


class Table:
    """The file of winners, written after every entry."""

    def __init__(self, path: Path) -> None:
        self.path = path
        old = json.loads(path.read_text(encoding="utf-8"))["entries"] if path.is_file() else []
        self.entries = {(e["weight_rows"], e["k"], e["gated"], e["m"]): e for e in old}

    def add(self, entry: dict) -> None:
        self.entries[entry["weight_rows"], entry["k"], entry["gated"], entry["m"]] = entry
        device = torch.cuda.get_device_name()
        lines = ",\n".join(json.dumps(self.entries[key]) for key in sorted(self.entries))
        text = f'{{"device": {json.dumps(device)}, "torch": {json.dumps(torch.__version__)}, "entries": [\n{lines}\n]}}\n'
        part = self.path.with_suffix(".part")
        part.write_text(text, encoding="utf-8")
        os.replace(part, self.path)


def tune(shape: Shape, rows: int, operands: Operands, deadline: float) -> dict | None:
    """The entry of the fastest configuration; None when time was up before one was tried."""
    base = operands.time(TORCH, rows)
    best, best_time, tried, cut = TORCH, base, [], False
    for config in candidates(rows, shape.weight_rows, shape.k):
        if config.kernel == "torch":
            continue
        if time.monotonic() > deadline:
            cut = True
            break
        try:
            took = operands.time(config, rows)
        except Exception as error:  # noqa: BLE001 - out of resources, or a compiler's refusal: not a candidate then
            print(f"  skipped {config}: {type(error).__name__}: {str(error)[:120]}", flush=True)
            continue
        tried.append((took, config))
        # cuBLAS must be beaten, not met: it needs no compilation
        if took < best_time * (0.97 if best.kernel == "torch" else 1.0):
            best, best_time = config, took
    if cut and not tried:
        return None
    fused = ""
    if best.kernel == "gemv" and shape.normed:
        apart, inside = operands.time_norm_apart(best, rows), operands.time(best, rows, fused_norm=True)
        best = replace(best, fuse_norm=inside < apart)
        fused = f"  norm apart {apart * 1e6:.2f} inside {inside * 1e6:.2f}"
    first = sorted(tried, key=lambda entry: entry[0])[:3]
    leaders = ", ".join(f"{c.kernel}/{c.block_n}/{c.block_k}/w{c.num_warps}/s{c.split_k} {t * 1e6:.2f}" for t, c in first)
    rate = shape.num_bytes / best_time / 1e12
    times = f"cublas {base * 1e6:7.2f} us  best {best_time * 1e6:7.2f} us {rate:5.2f} TB/s"
    print(f"{shape.name:22} m={rows:<3} {times} [{leaders}]{fused}", flush=True)
    name = {"weight_rows": shape.weight_rows, "k": shape.k, "gated": shape.gated, "m": rows}
    return name | asdict(best) | {"us": round(best_time * 1e6, 3), "torch_us": round(base * 1e6, 3)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=170, help="time limit for everything")
    parser.add_argument("--out", type=Path, default=module.CONFIG_FILE)
    parser.add_argument("--models", nargs="*", default=["qwen3-0.6b", "qwen3-8b", "llama-3.2-1b"])
    parser.add_argument("--rows", nargs="*", type=int, default=list(module.BUCKETS))
    parser.add_argument("--workers", type=int, default=min(12, os.cpu_count() or 1))
    args = parser.parse_args()
    deadline = time.monotonic() + args.seconds
    if not torch.cuda.is_available():
        print("tune_linear needs a CUDA GPU.")
        return 1
    shapes = [s for model in args.models for s in SHAPES if s.name.startswith(model + " ")]
    jobs = jobs_of(shapes, args.rows)
    table = Table(args.out)

    with multiprocessing.get_context("spawn").Pool(args.workers) as pool:
        compiling = [pool.apply_async(compile_group, (shape, rows)) for shape, rows in jobs]
        done, broken = 0, False
        operands: dict[str, Operands] = {}
        for (shape, rows), ready in zip(jobs, compiling, strict=True):
            if time.monotonic() > deadline:
                break
            if not broken:
                ready.wait(max(1.0, min(40.0, deadline - time.monotonic())))
                broken = not ready.ready() and done == 0  # workers that never answer: compile here, one after another
            if shape.name not in operands:
                try:
                    operands[shape.name] = Operands(shape, module.MAX_ROWS)
                except torch.cuda.OutOfMemoryError:
                    operands.clear()
                    operands[shape.name] = Operands(shape, module.MAX_ROWS)
            entry = tune(shape, rows, operands[shape.name], deadline)
            if entry is not None:
                table.add(entry)
                done += 1
        pool.terminate()
    print(f"{done} of {len(jobs)} shapes and row counts measured; {len(table.entries)} entries in {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
