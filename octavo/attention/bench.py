"""Attention on this machine's GPU against its floors: ``python -m octavo.attention.bench [--only WORDS] [--tune]``.

Times are of CUDA graphs that cycle enough copies of the cache to keep the L2 cold. Every shape is first checked against the
torch reference on random data; attention's error is relative to the largest element. Status 1 if a result is wrong.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from octavo.kernels.attention_plan import make_decode_plan, plan_decode, plan_extend
from octavo.kernels.bench.timing import DEVICE as KIND
from octavo.kernels.bench.timing import Check, Timing, close, copies_for, exit_status, shown, time_graph, within
from octavo.kernels.decode_attention import attention_reference, decode_attention, make_decode_workspace, max_chunks
from octavo.kernels.decode_config import DecodeConfig, decode_config
from octavo.kernels.extend_attention import ExtendConfig, extend_attention, extend_config
from octavo.kernels.flash_attention_3 import available, flash_attention_3, make_schedule
from octavo.kernels.write_kv import write_kv, write_kv_reference

TOLERANCE = 2e-2  # of attention: the largest difference over the largest value
WRITE_TOLERANCE = 6e-3  # of what is normed, turned and rounded
DEVICE = torch.device(KIND)
PDL = DEVICE.type == "cuda"
MODELS = {"0.6B": (16, 8, 128), "8B": (32, 8, 128)}


@dataclass
class Step:
    """Where the tokens of one copy of a case live, and the task lists made for it."""

    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    query_start: torch.Tensor
    tasks: dict[str, Any] = field(default_factory=dict)


@dataclass
class Case:
    """A step of sequences at random blocks, in as many disjoint sets of blocks as make the L2 useless."""

    model: str
    name: str
    lengths: list[int]
    counts: list[int]
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    cache: torch.Tensor = field(init=False)
    steps: list[Step] = field(init=False)
    qkv: torch.Tensor = field(init=False)
    out: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.heads, self.kv_heads, self.dim = MODELS[self.model]
        copies = copies_for(self.bytes) if self.decodes else 2
        needed = [-(-n // self.block_size) for n in self.lengths]
        ids = torch.randperm(sum(needed) * copies).int()
        self.cache = torch.randn(len(ids), 2, self.kv_heads, self.block_size, self.dim, device=DEVICE, dtype=self.dtype)
        self.qkv = torch.randn(sum(self.counts), (self.heads + 2 * self.kv_heads) * self.dim, device=DEVICE, dtype=self.dtype)
        self.out = torch.empty(len(self.qkv), self.heads * self.dim, device=DEVICE, dtype=self.dtype)
        starts = torch.tensor([0, *itertools.accumulate(self.counts)], dtype=torch.int32, device=DEVICE)
        lengths = torch.tensor(self.lengths, dtype=torch.int32, device=DEVICE)
        self.steps, at = [], 0
        for _ in range(copies):
            tables = torch.zeros(len(needed), max(needed), dtype=torch.int32)
            for row, n in enumerate(needed):
                tables[row, :n] = ids[at : at + n]
                at += n
            self.steps.append(Step(tables.to(DEVICE), lengths, starts))

    @property
    def decodes(self) -> bool:
        return max(self.counts) == 1

    @property
    def scale(self) -> float:
        return self.dim**-0.5

    @property
    def bytes(self) -> int:
        return sum(self.lengths) * self.kv_heads * self.dim * 2 * self.dtype.itemsize

    @property
    def flops(self) -> float:
        seen = sum(c * (n - c) + c * (c + 1) / 2 for n, c in zip(self.lengths, self.counts, strict=True))
        return 4.0 * self.heads * self.dim * seen

    def check(self, run: Runner) -> Check:
        """Against the reference, on a few sequences' last queries."""
        step = self.steps[0]
        self.out.fill_(float("nan"))
        run(self, step)
        ours = self.out.unflatten(1, (self.heads, -1)).float()
        q = self.qkv[:, : self.heads * self.dim].unflatten(1, (self.heads, -1))
        errors, ends = [], step.query_start.tolist()[1:]
        longest = max(range(len(self.lengths)), key=self.lengths.__getitem__)
        for s in {0, longest, len(self.lengths) - 1}:
            rows = slice(ends[s] - min(self.counts[s], 128), ends[s])
            theirs = attention_reference(q[rows], self.cache, step.block_tables[s], self.lengths[s], self.scale)
            errors.append(float((ours[rows] - theirs).abs().max() / theirs.abs().max()))
        return within(errors if bool(self.out.isfinite().all()) else [float("nan")], TOLERANCE)


Runner = Callable[[Case, Step], None]  # one layer's attention; the first call on a step makes its task lists


def triton_decode(config: DecodeConfig | None = None) -> Runner:
    shared: dict[str, Any] = {}

    def run(case: Case, step: Step) -> None:
        seqs = len(case.lengths)
        chosen = config or decode_config(case.dim, case.heads // case.kv_heads, case.dtype, seqs)
        if not shared:
            number = torch.cuda.get_device_properties(DEVICE).multi_processor_count if PDL else 2
            shared["plan"] = plan = make_decode_plan(
                seqs, number * chosen.programs_per_sm, DEVICE, block_n=chosen.block_n, min_chunk=chosen.min_chunk,
                max_chunks=max_chunks(case.heads, case.kv_heads, case.dim, number),
            )  # fmt: skip
            shared["workspace"] = make_decode_workspace(plan, case.heads, case.kv_heads, case.dim)
        if "plan" not in step.tasks:  # every copy has the same lengths, so they share the buffer
            plan_decode(shared["plan"], step.seq_lens, seqs, case.kv_heads, min_tiles=chosen.min_tiles, seam=chosen.seam)
            step.tasks["plan"] = shared["plan"]
        decode_attention(
            case.qkv, case.cache, step.block_tables, shared["plan"], shared["workspace"], case.out,
            num_heads=case.heads, scale=case.scale, config=chosen, pdl=PDL,
        )  # fmt: skip

    return run


def triton_extend(config: ExtendConfig | None = None) -> Runner:
    def run(case: Case, step: Step) -> None:
        group = case.heads // case.kv_heads
        chosen = config or extend_config(case.dim, group, case.dtype)
        if "tiles" not in step.tasks:
            seqs = len(case.lengths)
            step.tasks["tiles"] = plan_extend(step.query_start, step.seq_lens, 0, seqs, len(case.qkv), chosen.block_q(group))
        extend_attention(
            case.qkv, case.cache, step.block_tables, step.query_start, step.seq_lens, step.tasks["tiles"], case.out,
            num_heads=case.heads, scale=case.scale, config=chosen,
        )  # fmt: skip

    return run


def fa3(case: Case, step: Step) -> None:
    options: dict[str, Any] = {"query_start": step.query_start, "max_query_len": max(case.counts)}
    if case.decodes:
        if "schedule" not in step.tasks:
            step.tasks["schedule"] = make_schedule(step.seq_lens, case.cache, step.block_tables, case.heads)
        options = {"schedule": step.tasks["schedule"]}
    seqs = {"block_tables": step.block_tables, "seq_lens": step.seq_lens}
    flash_attention_3(case.qkv, case.cache, case.out, 0, len(case.qkv), num_heads=case.heads, scale=case.scale, **seqs, **options)


def measure(case: Case, label: str, run: Runner) -> Timing:
    """One layer's attention."""
    for step in case.steps:
        step.tasks.clear()
        run(case, step)
    check = case.check(run)
    repeats = case.steps * max(1, 8 // len(case.steps))
    seconds = time_graph([lambda s=s: run(case, s) for s in repeats])
    moved, flops = (case.bytes, 0.0) if case.decodes else (0, case.flops)
    return Timing(f"{case.model:5s} {case.name:30s} {label}", seconds, moved, flops, check)


def runners(decodes: bool) -> list[tuple[str, Runner]]:
    found: list[tuple[str, Runner]] = [("triton", triton_decode() if decodes else triton_extend())]
    return [*found, ("fa3", fa3)] if available() else found


def decode_cases(block_size: int = 16) -> list[tuple[Any, ...]]:
    uneven = [int(n) for n in torch.randint(16, 4096, (64,), generator=torch.Generator().manual_seed(0))]
    shapes: list[tuple[str, str, list[int]]] = [
        (model, f"decode {batch} x {context}", [context] * batch)
        for model in MODELS
        for batch, context in ((1, 1024), (8, 1024), (32, 1024), (64, 2048), (128, 1024), (256, 1024))
    ]
    shapes += [("8B", "decode 1 x 65536", [65536]), ("8B", "decode 65536 among 31 x 4096", [4096] * 16 + [65536] + [4096] * 15)]
    shapes += [("8B", "decode 64 x 16..4096", uneven)]
    return [(model, name, lengths, [1] * len(lengths), block_size) for model, name, lengths in shapes]


def extend_cases(block_size: int = 16) -> list[tuple[Any, ...]]:
    shapes = [
        ("8B", "extend 8 x 512 over 2048", [2560] * 8, [512] * 8),
        ("8B", "prefill 8192", [8192], [8192]),
        ("8B", "prefill 4 x 2048", [2048] * 4, [2048] * 4),
        ("0.6B", "prefill 4 x 2048", [2048] * 4, [2048] * 4),
        ("8B", "extend 64 x 5 over 1024", [1029] * 64, [5] * 64),
    ]
    return [(*shape, block_size) for shape in shapes]


def bench_attention(cases: Iterable[tuple[Any, ...]]) -> list[Timing]:
    results = []
    for arguments in cases:
        case = Case(*arguments)
        results += [shown(measure(case, label, run)) for label, run in runners(case.decodes)]
    return results


def bench_plan() -> None:
    """The decode task list, once a step. What it lists is what is right in the attention of the other cases."""
    for batch in (1, 32, 256):
        lengths = torch.full((batch,), 1024, dtype=torch.int32, device=DEVICE)
        plan = make_decode_plan(batch, 264, DEVICE)
        taken = time_graph([lambda p=plan, n=lengths, b=batch: plan_decode(p, n, b, 8)] * 10)
        print(f"plan of {batch} decodes: {taken * 1e6:.1f} us a step", flush=True)


def bench_write_kv(numbers: Iterable[int] = (1, 32, 256, 8192), dtype: torch.dtype = torch.bfloat16) -> list[Timing]:
    results = []
    for model, tokens in itertools.product(MODELS, numbers):
        heads, kv_heads, dim = MODELS[model]
        norm, table = torch.ones(dim, device=DEVICE, dtype=dtype), torch.randn(16384, dim, device=DEVICE)
        caches = [torch.zeros(tokens // 16 + 1, 2, kv_heads, 16, dim, device=DEVICE, dtype=dtype) for _ in range(2)]
        at = torch.arange(tokens, device=DEVICE)  # positions, and slots
        copies = [torch.randn(tokens, (heads + 2 * kv_heads) * dim, device=DEVICE, dtype=dtype) for _ in range(8)]
        both = [copies[0].clone() for _ in range(2)]
        options = {"q_norm": norm, "k_norm": norm}
        write_kv(both[0], caches[0], at, at, heads, kv_heads, table, **options)
        write_kv_reference(both[1], caches[1], at, at, heads, kv_heads, table, **options)
        queries = (x[:, : heads * dim] for x in both)  # the reference changes K in place, too
        check = close(tuple(queries), tuple(caches), tolerance=WRITE_TOLERANCE)
        calls = [partial(write_kv, x, caches[0], at, at, heads, kv_heads, table, pdl=PDL, **options) for x in copies]
        moved = tokens * 2 * 2 * (heads + 2 * kv_heads) * dim
        results.append(shown(Timing(f"{model:5s} write_kv {tokens:5d} tokens", time_graph(calls), moved, check=check)))
    return results


def tune() -> None:
    """Every sensible launch configuration of extends on a few shapes; decodes have scripts/gpu/tune_attention.py."""
    for arguments in extend_cases()[:3]:
        case = Case(*arguments)
        for block_m, block_n, warps, stages in itertools.product((64, 128), (32, 64, 128), (4, 8), (2, 3, 4)):
            if block_m == 64 and warps == 8:
                continue
            extend = (block_m, block_n, warps, stages)
            _try(case, triton_extend(ExtendConfig(*extend)), str(extend))


def _try(case: Case, run: Runner, label: str) -> None:
    try:
        shown(measure(case, label, run))
    except Exception as error:  # a configuration may need more shared memory than there is
        print(f"{case.model:5s} {case.name:30s} {label:16s} {type(error).__name__}: {error}"[:160], flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m octavo.attention.bench", description="Attention against torch and its floors.")
    parser.add_argument("--tune", action="store_true", help="try launch configurations of extends (minutes)")
    parser.add_argument("--block-size", type=int, default=16, help="tokens a block")
    parser.add_argument("--only", metavar="WORDS", help="only the cases whose name holds these words, like 'decode 65536'")
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("this benchmark needs an NVIDIA GPU")
    torch.manual_seed(0)
    if arguments.tune:
        tune()
        return 0
    cases = [*decode_cases(arguments.block_size), *extend_cases(arguments.block_size)]
    if arguments.only is not None:
        cases = [case for case in cases if arguments.only in f"{case[0]} {case[1]}"]
        if not cases:
            parser.error(f"no case's name holds {arguments.only!r}")
        return exit_status(bench_attention(cases))
    bench_plan()
    return exit_status([*bench_write_kv(), *bench_attention(cases)])


if __name__ == "__main__":
    sys.exit(main())
