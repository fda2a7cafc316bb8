"""Attention on this machine's GPU against its floors: ``python -m octavo.attention.bench [--tune]``.

Times are of CUDA graphs that cycle enough copies of the cache to keep the L2 cold. Every shape is first checked against the
torch reference on random data; the error is relative to the largest element.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from octavo.kernels.attention_plan import make_decode_plan, plan_decode, plan_extend
from octavo.kernels.decode_attention import attention_reference, decode_attention, make_decode_workspace, max_chunks
from octavo.kernels.decode_config import DecodeConfig, decode_config
from octavo.kernels.extend_attention import ExtendConfig, extend_attention, extend_config
from octavo.kernels.flash_attention_3 import available, flash_attention_3, make_schedule
from octavo.kernels.write_kv import write_kv

BANDWIDTH = 4.3e12  # bytes/s
FLOPS = 790e12
COLD_BYTES = 200e6  # well over the L2
DEVICE = torch.device("cuda")
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
        copies = max(1, min(64, int(COLD_BYTES / self.bytes) + 1)) if self.decodes else 2
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
    def bytes(self) -> float:
        return sum(self.lengths) * self.kv_heads * self.dim * 2 * self.dtype.itemsize

    @property
    def flops(self) -> float:
        seen = sum(c * (n - c) + c * (c + 1) / 2 for n, c in zip(self.lengths, self.counts, strict=True))
        return 4.0 * self.heads * self.dim * seen

    def error(self, run: Runner) -> float:
        """Largest difference from the reference over the largest value, on a few sequences' last queries."""
        step = self.steps[0]
        self.out.fill_(float("nan"))
        run(self, step)
        ours = self.out.unflatten(1, (self.heads, -1)).float()
        q = self.qkv[:, : self.heads * self.dim].unflatten(1, (self.heads, -1))
        worst, ends = 0.0, step.query_start.tolist()[1:]
        longest = max(range(len(self.lengths)), key=self.lengths.__getitem__)
        for s in {0, longest, len(self.lengths) - 1}:
            rows = slice(ends[s] - min(self.counts[s], 128), ends[s])
            theirs = attention_reference(q[rows], self.cache, step.block_tables[s], self.lengths[s], self.scale)
            worst = max(worst, float((ours[rows] - theirs).abs().max() / theirs.abs().max()))
        return worst if bool(self.out.isfinite().all()) else float("nan")


Runner = Callable[[Case, Step], None]  # one layer's attention; the first call on a step makes its task lists


def triton_decode(config: DecodeConfig | None = None) -> Runner:
    shared: dict[str, Any] = {}

    def run(case: Case, step: Step) -> None:
        seqs = len(case.lengths)
        chosen = config or decode_config(case.dim, case.heads // case.kv_heads, case.dtype, seqs)
        if not shared:
            multiprocessors = torch.cuda.get_device_properties(DEVICE).multi_processor_count
            shared["plan"] = plan = make_decode_plan(
                seqs, multiprocessors * chosen.programs_per_sm, DEVICE, block_n=chosen.block_n, min_chunk=chosen.min_chunk,
                max_chunks=max_chunks(case.heads, case.kv_heads, case.dim, multiprocessors),
            )  # fmt: skip
            shared["workspace"] = make_decode_workspace(plan, case.heads, case.kv_heads, case.dim)
        if "plan" not in step.tasks:  # every copy has the same lengths, so they share the buffer
            plan_decode(shared["plan"], step.seq_lens, seqs, case.kv_heads, min_tiles=chosen.min_tiles, seam=chosen.seam)
            step.tasks["plan"] = shared["plan"]
        decode_attention(
            case.qkv, case.cache, step.block_tables, shared["plan"], shared["workspace"], case.out,
            num_heads=case.heads, scale=case.scale, config=chosen, pdl=True,
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


def graph_time(calls: list[Callable[[], Any]], seconds: float = 0.05) -> float:
    """Seconds a call, of a CUDA graph of all ``calls``: the best of several replays."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
    torch.cuda.current_stream().wait_stream(stream)
    best, spent = float("inf"), 0.0
    while spent < seconds:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        taken = start.elapsed_time(end) / 1e3
        best, spent = min(best, taken), spent + taken
    return best / len(calls)


def measure(case: Case, run: Runner) -> tuple[float, float]:
    """(seconds of one layer's attention, relative error)."""
    for step in case.steps:
        step.tasks.clear()
        run(case, step)
    error = case.error(run)
    repeats = case.steps * max(1, 8 // len(case.steps))
    return graph_time([lambda s=s: run(case, s) for s in repeats]), error


def report(case: Case, label: str, taken: float, error: float) -> None:
    if case.decodes:
        rate, share = f"{case.bytes / taken / 1e12:6.2f} TB/s", case.bytes / BANDWIDTH / taken
    else:
        rate, share = f"{case.flops / taken / 1e12:6.0f} TFLOP/s", case.flops / FLOPS / taken
    wrong = "" if error < 2e-2 else "  WRONG"
    head = f"{case.model:5s} {case.name:30s} {label:16s} {taken * 1e6:9.1f} us"
    print(f"{head} {rate:>14s} {share:6.0%} of floor  err {error:.1e}{wrong}", flush=True)


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


def bench_attention(cases: list[tuple[Any, ...]]) -> None:
    for arguments in cases:
        case = Case(*arguments)
        for label, run in runners(case.decodes):
            report(case, label, *measure(case, run))


def bench_plan() -> None:
    """The decode task list, once a step."""
    for batch in (1, 32, 256):
        lengths = torch.full((batch,), 1024, dtype=torch.int32, device=DEVICE)
        plan = make_decode_plan(batch, 264, DEVICE)
        taken = graph_time([lambda p=plan, n=lengths, b=batch: plan_decode(p, n, b, 8)] * 10)
        print(f"plan of {batch} decodes: {taken * 1e6:.1f} us a step", flush=True)


def bench_write_kv() -> None:
    table = torch.randn(16384, 128, device=DEVICE)
    for model, tokens in itertools.product(MODELS, (1, 32, 256, 8192)):
        heads, kv_heads, dim = MODELS[model]
        norm = torch.ones(dim, device=DEVICE, dtype=torch.bfloat16)
        cache = torch.zeros(tokens // 16 + 1, 2, kv_heads, 16, dim, device=DEVICE, dtype=torch.bfloat16)
        positions = torch.arange(tokens, device=DEVICE)
        copies = [torch.randn(tokens, (heads + 2 * kv_heads) * dim, device=DEVICE, dtype=torch.bfloat16) for _ in range(8)]
        calls = [
            lambda x=x, c=cache, p=positions, n=norm, h=heads, k=kv_heads: write_kv(x, c, p, p, h, k, table, q_norm=n, k_norm=n, pdl=True)
            for x in copies
        ]
        taken = graph_time(calls)
        moved = tokens * 2 * 2 * (heads + 2 * kv_heads) * dim
        share = moved / BANDWIDTH / taken
        rate = f"{moved / taken / 1e12:6.2f} TB/s {share:6.0%} of floor"
        print(f"{model:5s} write_kv {tokens:5d} tokens {taken * 1e6:8.1f} us {rate}", flush=True)


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
        report(case, label, *measure(case, run))
    except Exception as error:  # a configuration may need more shared memory than there is
        print(f"{case.model:5s} {case.name:30s} {label:16s} {type(error).__name__}: {error}"[:160], flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tune", action="store_true", help="try launch configurations (minutes)")
    parser.add_argument("--block-size", type=int, default=16, help="tokens a block")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("This benchmark needs an NVIDIA GPU.")
    torch.manual_seed(0)
    if arguments.tune:
        tune()
        return
    bench_plan()
    bench_write_kv()
    bench_attention(decode_cases(arguments.block_size))
    bench_attention(extend_cases(arguments.block_size))


if __name__ == "__main__":
    main()
