"""Measures configurations of decode attention as a decode step meets it: KV write and attention of several layers in one CUDA
graph, with dependent launches and a cold L2. Prints a table against the memory's bandwidth and FlashAttention 3, and writes the
winners to octavo/kernels/decode_attention_configs.json.

    python scripts/gpu/tune_attention.py [--seconds 150] [--out FILE] [--shapes 16/8x128 ...] [--table-only] [--fused]

What a configuration may depend on is the head shape and the number of sequences, as contexts vary while a graph stays; and the
first three fields of DecodeConfig on the head shape alone, so that a sequence's result does not depend on its batch.
With --fused what is tuned is attention that writes K and V itself; the table shows both ways in any case.
Compilation runs ahead in worker processes. A run cut short leaves what it has.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch  # noqa: E402

from octavo.kernels import decode_config as table_module  # noqa: E402
from octavo.kernels.attention_plan import make_decode_plan, plan_decode  # noqa: E402
from octavo.kernels.bench.timing import time_graph  # noqa: E402
from octavo.kernels.decode_attention import attention_reference, decode_attention, make_decode_workspace, max_chunks  # noqa: E402
from octavo.kernels.decode_config import BATCHES, FIXED, DecodeConfig, batch_class, decode_config, heuristic  # noqa: E402
from octavo.kernels.flash_attention_3 import available, flash_attention_3, make_schedule  # noqa: E402
from octavo.kernels.new_tokens import NewTokens  # noqa: E402
from octavo.kernels.write_kv import write_kv  # noqa: E402

BANDWIDTH = 4.3e12
BLOCK_SIZE = 16
DEVICE = "cuda"
POOL_BYTES = 36 << 30
SHAPES = {"16/8x128": (16, 8, 128), "32/8x128": (32, 8, 128), "32/8x64": (32, 8, 64), "9/3x64": (9, 3, 64)}
BATCH_SIZES = (1, 8, 32, 64, 128, 256, 512, 1024)
CONTEXTS = (128, 310, 600, 1024, 2048, 8192, "mixed")
TUNED = (  # (batch, context, weight) that decide, the most telling first
    (256, 310, 3), (32, 310, 2), (1, 310, 1), (256, 1024, 2), (32, 1024, 2), (64, 600, 1), (8, 1024, 1), (256, "mixed", 2),
    (64, 2048, 1), (128, 600, 1), (1024, 310, 1), (1, 2048, 1), (8, 310, 1), (512, "mixed", 1),
)  # fmt: skip
SHARED = 227 << 10  # bytes of a Hopper multiprocessor
MULTIPROCESSORS = 132

Context = int | str


def first_configs(dim: int) -> list[DecodeConfig]:
    """What is tried everywhere: tile sizes and depths, with as many programs as fit beside each other, or one fewer."""
    found = []
    for block_n, warps, stages in [
        (64, 4, 3), (32, 4, 4), (64, 4, 4), (32, 2, 4), (32, 4, 3), (64, 8, 3), (64, 2, 3), (32, 2, 3), (32, 4, 5), (128, 8, 3), (32, 2, 5)
    ]:  # fmt: skip
        shared = (stages - 1) * 2 * block_n * dim * 2 + (8 << 10)
        fit = min(SHARED // (shared + 1024), 16 // warps if warps > 2 else 5)
        found += [DecodeConfig(block_n, warps, 256, stages, f) for f in (fit, fit - 1) if 1 <= f <= 5]
    return found


def lengths_of(batch: int, context: Context) -> list[int]:
    if context == "mixed":
        return torch.randint(100, 2049, (batch,), generator=torch.Generator().manual_seed(batch)).tolist()
    assert isinstance(context, int)
    return [context] * batch


class Pool:
    """One large KV cache whose blocks all cases share, seen in the shape of whichever heads are measured."""

    def __init__(self) -> None:
        self.memory = torch.empty(POOL_BYTES // 2, dtype=torch.bfloat16, device=DEVICE)
        for part in self.memory.split(1 << 28):
            part.normal_()

    def cache(self, kv_heads: int, dim: int, block_size: int) -> torch.Tensor:
        size = 2 * kv_heads * block_size * dim
        return self.memory[: len(self.memory) // size * size].view(-1, 2, kv_heads, block_size, dim)


class Case:
    """``layers`` copies of one step: batch sequences, each copy in blocks of its own."""

    def __init__(self, pool: Pool, shape: tuple[int, int, int], batch: int, context: Context, block_size: int = BLOCK_SIZE) -> None:
        self.heads, self.kv_heads, self.dim = shape
        self.cache = pool.cache(self.kv_heads, self.dim, block_size)
        self.lengths = lengths_of(batch, context)
        self.bytes = sum(self.lengths) * self.kv_heads * self.dim * 4
        needed = [-(-n // block_size) for n in self.lengths]
        room = self.cache.shape[0] // sum(needed)
        if room < 1:
            raise ValueError("too large for the pool")
        self.layers = max(1, min(room, 96, max(4, math.ceil(200e6 / self.bytes))))
        order = torch.randperm(sum(needed) * self.layers, device=DEVICE, dtype=torch.int64).int()
        self.tables, self.slots, at = [], [], 0
        lengths = torch.tensor(self.lengths, device=DEVICE)
        starts = torch.tensor([0, *needed[:-1]], device=DEVICE).cumsum(0)
        column = torch.arange(max(needed), device=DEVICE)
        for _ in range(self.layers):
            spread = (at + starts[:, None] + column[None, :]).clamp(max=len(order) - 1)
            table = order[spread].contiguous()
            last = table[torch.arange(batch, device=DEVICE), (lengths - 1) // block_size].long()
            self.tables.append(table)
            self.slots.append(last * block_size + (lengths - 1) % block_size)
            at += sum(needed)
        self.seq_lens = lengths.int()
        self.positions = lengths - 1
        self.qkv = torch.randn(batch, (self.heads + 2 * self.kv_heads) * self.dim, device=DEVICE).bfloat16()
        self.norm = torch.ones(self.dim, device=DEVICE, dtype=torch.bfloat16)
        self.rope = torch.randn(8193, self.dim, device=DEVICE)
        self.out = torch.empty(batch, self.heads * self.dim, device=DEVICE, dtype=torch.bfloat16)

    def write(self, layer: int, qkv: torch.Tensor | None = None) -> None:
        write_kv(
            self.qkv if qkv is None else qkv, self.cache, self.positions, self.slots[layer], self.heads, self.kv_heads,
            self.rope, False, self.norm, self.norm, pdl=True,
        )  # fmt: skip

    def ours(self, config: DecodeConfig, fused: bool = False) -> Callable[[int], None]:
        """``fused``: with the KV write in it."""
        plan = make_decode_plan(
            len(self.lengths), MULTIPROCESSORS * config.programs_per_sm, torch.device(DEVICE),
            block_n=config.block_n, min_chunk=config.min_chunk,
            max_chunks=max_chunks(self.heads, self.kv_heads, self.dim, MULTIPROCESSORS),
        )  # fmt: skip
        plan_decode(plan, self.seq_lens, len(self.lengths), self.kv_heads, min_tiles=config.min_tiles, seam=config.seam)
        workspace = make_decode_workspace(plan, self.heads, self.kv_heads, self.dim)

        new = [NewTokens(self.positions, slots, self.rope, False, self.norm, self.norm) if fused else None for slots in self.slots]

        def run(layer: int, compile_only: bool = False) -> None:
            decode_attention(
                self.qkv, self.cache, self.tables[layer], plan, workspace, self.out,
                num_heads=self.heads, scale=self.dim**-0.5, config=config, pdl=True, compile_only=compile_only, new=new[layer],
            )  # fmt: skip

        return run

    def fa3(self) -> Callable[[int], None]:
        schedule = make_schedule(self.seq_lens, self.cache, self.tables[0], self.heads)

        def run(layer: int) -> None:
            flash_attention_3(
                self.qkv, self.cache, self.out, 0, len(self.lengths),
                block_tables=self.tables[layer], seq_lens=self.seq_lens, num_heads=self.heads, scale=self.dim**-0.5, schedule=schedule,
            )  # fmt: skip

        return run

    def error(self, run: Callable[[int], None], fused: bool = False) -> float:
        """Largest difference from the reference, of a few sequences, over the largest value; NaN where anything is not finite."""
        self.out.fill_(float("nan"))
        run(0)
        rotated = self.qkv
        if fused:  # the cache has the same afterwards
            rotated = self.qkv.clone()
            self.write(0, rotated)
        q, out = (x[:, : self.heads * self.dim].unflatten(1, (self.heads, -1)) for x in (rotated, self.out))
        worst = 0.0
        for s in {0, len(self.lengths) // 2, len(self.lengths) - 1}:
            theirs = attention_reference(q[s : s + 1], self.cache, self.tables[0][s], self.lengths[s], self.dim**-0.5)
            worst = max(worst, float((out[s : s + 1].float() - theirs).abs().max() / theirs.abs().max()))
        return worst if bool(self.out.isfinite().all()) else float("nan")

    def time(self, run: Callable[[int], None], write: bool) -> float:
        """Seconds a layer."""
        calls: list[Callable[[], None]] = []
        for layer in range(self.layers):
            if write:
                calls.append(lambda i=layer: self.write(i))
            calls.append(lambda i=layer: run(i))
        return time_graph(calls) * (2 if write else 1)


def compile_config(shape: tuple[int, int, int], config: DecodeConfig, block_size: int = BLOCK_SIZE, fused: bool = False) -> str:
    """In a worker: compile into the disk cache, and the plan's kernel for few and for many sequences. What went wrong, or nothing."""
    try:
        pool = Pool.__new__(Pool)
        pool.memory = torch.zeros(1 << 24, dtype=torch.bfloat16, device=DEVICE)
        case = Case(pool, shape, 8, 64, block_size)
        case.ours(config, fused)(0, compile_only=True)  # type: ignore[call-arg]
        case.seq_lens = torch.ones(1024, dtype=torch.int32, device=DEVICE)
        case.lengths = [1] * 1024
        case.ours(config)
    except Exception as error:  # noqa: BLE001 - the parent meets it again
        return f"{label(config)}: {type(error).__name__}: {str(error)[:200]}"
    return ""


class Tuner:
    """``compiling`` compiles configurations beside each other, and waits for them."""

    def __init__(
        self, shape: tuple[int, int, int], pool: Pool, deadline: float,
        compiling: Callable[[list[DecodeConfig]], None] = lambda configs: None, block_size: int = BLOCK_SIZE, fused: bool = False,
    ) -> None:  # fmt: skip
        self.shape, self.pool, self.deadline, self.compiling, self.block_size = shape, pool, deadline, compiling, block_size
        self.fused = fused
        self.cases: dict[tuple[int, Context], Case | None] = {}
        self.times: dict[tuple[int, Context], dict[DecodeConfig, float]] = defaultdict(dict)
        self.broken: set[tuple[Any, ...]] = set()

    def case(self, batch: int, context: Context) -> Case | None:
        """None for what does not fit the pool."""
        key = (batch, context)
        if key not in self.cases:
            try:
                self.cases[key] = Case(self.pool, self.shape, batch, context, self.block_size)
            except ValueError:
                self.cases[key] = None
        return self.cases[key]

    def measure(self, config: DecodeConfig, batch: int, context: Context) -> None:
        kernel = (config.block_n, *config.options().values())
        case = self.case(batch, context)
        if case is None or kernel in self.broken or config in self.times[batch, context] or time.monotonic() > self.deadline:
            return
        try:
            run = case.ours(config, self.fused)
            error = case.error(run, self.fused)
            if not error < 2e-2:
                raise RuntimeError(f"wrong result at {batch} x {context}: error {error:.1e}")
            self.times[batch, context][config] = case.time(run, write=not self.fused)
        except Exception as problem:  # noqa: BLE001 - too large for the device, or wrong: not a candidate then
            self.broken.add(kernel)
            print(f"  dropped {config}: {type(problem).__name__}: {str(problem)[:200]}", flush=True)

    def score(self, config: DecodeConfig, batches: int | None = None) -> float:
        """Weighted mean of log(time / best time), over the tuned cases of a class of batch, or of all. Infinite without all of them."""
        total, weights = 0.0, 0.0
        for batch, context, weight in TUNED:
            times = self.times.get((batch, context))
            if not times or (batches is not None and batch_class(batch) != batches):
                continue
            if config not in times:
                return float("inf")
            total += weight * math.log(times[config] / min(times.values()))
            weights += weight
        return total / weights if weights else 0.0

    def tune(self) -> dict[str, Any]:
        configs = first_configs(self.shape[2])
        self.compiling(configs)
        for batch, context, _ in TUNED:
            for config in configs:
                self.measure(config, batch, context)
            best = sorted(self.times[batch, context].items(), key=lambda item: item[1])[:4]
            text = ", ".join(f"{label(c)} {t * 1e6:.1f}" for c, t in best)
            print(f"  {batch} x {context}: {text}", flush=True)
        # the fields that must not vary: whichever leave the best choices in all classes
        groups: dict[tuple[Any, ...], list[DecodeConfig]] = defaultdict(list)
        for config in configs:
            if self.times[TUNED[0][:2]] and self.score(config) < float("inf"):
                groups[tuple(getattr(config, name) for name in FIXED)].append(config)
        if not groups:
            raise RuntimeError("no configuration was measured everywhere")
        classes = range(len(BATCHES) + 1)
        chosen = min(groups.values(), key=lambda group: sum(min(self.score(c, k) for c in group) for k in classes))
        picks = [min(chosen, key=lambda c, k=k: self.score(c, k)) for k in classes]
        picks = self.refine_chunk(picks)
        picks = self.refine(picks, "prefetch", (0, 4))
        picks = self.refine(picks, "seam", (0, 12))
        picks = self.refine(picks, "min_tiles", (1, 2, 8))
        heads, kv_heads, dim = self.shape
        entry: dict[str, Any] = {"head_dim": dim, "group": heads // kv_heads, "dtype": "bfloat16"}
        entry |= {name: getattr(picks[0], name) for name in FIXED}
        entry["batches"] = [{name: value for name, value in asdict(p).items() if name not in FIXED} for p in picks]
        return entry

    def refine(self, picks: list[DecodeConfig], name: str, values: tuple[int, ...]) -> list[DecodeConfig]:
        """Try other values of a field that may differ between classes."""
        better = []
        self.compiling([replace(pick, **{name: value}) for pick in set(picks) for value in values])
        for k, pick in enumerate(picks):
            options = [pick, *(replace(pick, **{name: value}) for value in values)]
            for batch, context, _ in TUNED:
                if batch_class(batch) == k:
                    for option in options:
                        self.measure(option, batch, context)
            better.append(min(options, key=lambda c, k=k: self.score(c, k)))
        return better

    def refine_chunk(self, picks: list[DecodeConfig]) -> list[DecodeConfig]:
        """Other chunk sizes, for all classes alike. Small ones are for the few sequences of the first class, cut wherever they can be."""
        options = [picks, *([replace(p, min_chunk=chunk) for p in picks] for chunk in (64, 128, 512))]
        options += [[replace(option[0], min_tiles=1, seam=0), *option[1:]] for option in options[1:3]]
        self.compiling([config for option in options[1:] for config in set(option)])
        for option in options:
            for batch, context, _ in TUNED:
                self.measure(option[batch_class(batch)], batch, context)
        return min(options, key=lambda option: sum(self.score(c, k) for k, c in enumerate(option)))


def label(c: DecodeConfig) -> str:
    return f"n{c.block_n}w{c.num_warps}s{c.num_stages}x{c.programs_per_sm}p{c.prefetch}c{c.min_chunk}m{c.min_tiles}k{c.seam}"


def save(path: Path, entries: list[dict[str, Any]]) -> None:
    old = json.loads(path.read_text(encoding="utf-8"))["entries"] if path.is_file() else []
    merged = {(e["head_dim"], e["group"], e["dtype"]): e for e in [*old, *entries]}
    lines = ",\n".join(json.dumps(merged[key]) for key in sorted(merged))
    about = f'"device": {json.dumps(torch.cuda.get_device_name())}, "torch": {json.dumps(torch.__version__)}'
    path.write_text(f'{{{about}, "entries": [\n{lines}\n]}}\n', encoding="utf-8")
    table_module.load_table.cache_clear()


def print_table(name: str, tuner: Tuner, deadline: float, some: tuple[tuple[int, Context], ...] = ()) -> None:
    """Every batch and context with the chosen configuration: alone, behind the KV write and with it in it; FlashAttention 3 likewise.

    The smallest batches also cut wherever they can be, the last two columns again.
    """
    heads, kv_heads, dim = tuner.shape
    print(f"{name}, blocks of {tuner.block_size}: us a layer (of 4.3 TB/s) alone | behind the KV write | fused | FA3 alone | behind it"
          " | small chunks behind it | fused", flush=True)  # fmt: skip
    for batch, context in some or [(b, c) for b in BATCH_SIZES for c in CONTEXTS]:
        config = decode_config(dim, heads // kv_heads, torch.bfloat16, batch)
        case = tuner.case(batch, context)
        if case is None or time.monotonic() > deadline:
            continue
        columns = [cell(case, case.ours(config), False), cell(case, case.ours(config), True), cell(case, case.ours(config, True), False)]
        if available():
            columns += [cell(case, case.fa3(), write) for write in (False, True)]
        if batch_class(batch) == 0:
            cut = replace(config, min_chunk=64, min_tiles=1, seam=0)
            columns += [cell(case, case.ours(cut), True), cell(case, case.ours(cut, True), False)]
        print(f"{name:9} {batch:5} x {context!s:5} floor {case.bytes / BANDWIDTH * 1e6:7.1f} | {' | '.join(columns)}", flush=True)
        tuner.cases.pop((batch, context))


def cell(case: Case, run: Callable[[int], None], write: bool) -> str:
    taken = case.time(run, write)
    return f"{taken * 1e6:8.1f} {case.bytes / taken / BANDWIDTH:4.0%}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=150, help="time limit for everything")
    parser.add_argument("--out", type=Path, default=table_module.CONFIG_FILE)
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--workers", type=int, default=min(14, os.cpu_count() or 1))
    parser.add_argument("--table-only", action="store_true", help="only print what the present configurations reach")
    parser.add_argument("--fused", action="store_true", help="tune attention with the KV write in it")
    args = parser.parse_args()
    begun = time.monotonic()
    if not torch.cuda.is_available():
        print("tune_attention needs a CUDA GPU.")
        return 1
    global MULTIPROCESSORS
    MULTIPROCESSORS = torch.cuda.get_device_properties(0).multi_processor_count
    share = args.seconds / (len(args.shapes) + 0.4)
    entries: list[dict[str, Any]] = []
    with multiprocessing.get_context("spawn").Pool(args.workers) as workers:

        def compile_all(shape: tuple[int, int, int], deadline: float, configs: list[DecodeConfig]) -> None:
            waiting = [workers.apply_async(compile_config, (shape, config, BLOCK_SIZE, args.fused)) for config in configs]
            for ready in waiting:
                ready.wait(max(0.0, deadline - time.monotonic()))
                if ready.ready() and ready.get():
                    print(f"  {ready.get()}", flush=True)

        pool = Pool()
        for i, name in enumerate(args.shapes):
            heads, kv_heads, dim = shape = SHAPES[name]
            until = begun + share * (i + 0.75)
            tuner = Tuner(shape, pool, until, partial(compile_all, shape, until), fused=args.fused)
            if not args.table_only:
                tune_shape(name, tuner, entries, args.out)
                print(f"{time.monotonic() - begun:.0f} s", flush=True)
            chosen = {decode_config(dim, heads // kv_heads, torch.bfloat16, batch) for batch in BATCH_SIZES}
            compiled = [workers.apply_async(compile_config, (shape, config, BLOCK_SIZE, f)) for config in chosen for f in (False, True)]
            for config in chosen:
                for fused in (False, True):
                    workers.apply_async(compile_config, (shape, config, 64, fused))
            for one in compiled:
                one.wait(max(0.0, until - time.monotonic()))
            print_table(name, tuner, begun + share * (i + 1))
        for name in args.shapes[:2]:  # are larger blocks faster?
            tuner = Tuner(SHAPES[name], pool, 0.0, block_size=64)
            print_table(name, tuner, begun + args.seconds, tuple(case[:2] for case in TUNED[:8]))
        workers.terminate()
    print(f"{time.monotonic() - begun:.0f} s")
    return 0


def tune_shape(name: str, tuner: Tuner, entries: list[dict[str, Any]], out: Path) -> None:
    try:
        entries.append(tuner.tune())
        print(f"  {json.dumps(entries[-1])}", flush=True)
        save(out, entries)
    except RuntimeError as problem:
        print(f"  {name}: {problem}; the rule for it: {heuristic(SHAPES[name][2], 2, torch.bfloat16)}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
