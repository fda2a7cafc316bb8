"""Attention on this machine's GPU against its floors: ``python -m octavo.kernels.bench.attention [--tune]``.

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

from octavo.attention.base import AttentionLayerSpec, AttentionMetadata
from octavo.kernels.attention_plan import ALIGN
from octavo.kernels.decode_attention import DecodeConfig, attention_reference
from octavo.kernels.extend_attention import ExtendConfig

BANDWIDTH = 4.3e12  # bytes/s
FLOPS = 790e12
COLD_BYTES = 200e6  # well over the L2
DEVICE = torch.device("cuda")
MODELS = {"0.6B": (16, 8, 128), "8B": (32, 8, 128)}


@dataclass
class Case:
    """A step of sequences at random blocks, in ``copies`` disjoint sets of blocks."""

    model: str
    name: str
    lengths: list[int]
    counts: list[int]
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    cache: torch.Tensor = field(init=False)
    steps: list[AttentionMetadata] = field(init=False)
    qkv: torch.Tensor = field(init=False)
    layer: AttentionLayerSpec = field(init=False)

    def __post_init__(self) -> None:
        heads, kv_heads, dim = MODELS[self.model]
        self.layer = AttentionLayerSpec(0, heads, kv_heads, dim, dim**-0.5)
        copies = max(1, min(64, int(COLD_BYTES / self.bytes) + 1)) if self.decodes else 2
        needed = [-(-n // self.block_size) for n in self.lengths]
        blocks = sum(needed) * copies
        ids = torch.randperm(blocks).int()
        self.cache = torch.randn(blocks, 2, kv_heads, self.block_size, dim, device=DEVICE, dtype=self.dtype)
        self.qkv = torch.randn(sum(self.counts), (heads + 2 * kv_heads) * dim, device=DEVICE, dtype=self.dtype)
        self.steps, at = [], 0
        for _ in range(copies):
            tables = torch.zeros(len(needed), max(needed), dtype=torch.int32)
            for row, n in enumerate(needed):
                tables[row, :n] = ids[at : at + n]
                at += n
            self.steps.append(self._metadata(tables))

    def _metadata(self, tables: torch.Tensor) -> AttentionMetadata:
        starts = torch.tensor([0, *itertools.accumulate(self.counts)], dtype=torch.int32, device=DEVICE)
        positions = [p for n, c in zip(self.lengths, self.counts, strict=True) for p in range(n - c, n)]
        return AttentionMetadata(
            num_tokens=len(positions),
            num_seqs=len(self.lengths),
            num_decodes=len(self.lengths) if self.decodes else 0,
            max_query_len=max(self.counts),
            max_seq_len=max(self.lengths),
            block_size=self.block_size,
            positions=torch.tensor(positions, device=DEVICE),
            slots=self._slots(tables).to(DEVICE),
            query_start=starts,
            seq_lens=torch.tensor(self.lengths, dtype=torch.int32, device=DEVICE),
            block_tables=tables.to(DEVICE),
        )

    def _slots(self, tables: torch.Tensor) -> torch.Tensor:
        found = []
        for row, (n, c) in enumerate(zip(self.lengths, self.counts, strict=True)):
            p = torch.arange(n - c, n)
            found.append(tables[row, p // self.block_size].long() * self.block_size + p % self.block_size)
        return torch.cat(found)

    @property
    def decodes(self) -> bool:
        return max(self.counts) == 1

    @property
    def bytes(self) -> float:
        _, kv_heads, dim = MODELS[self.model]
        return sum(self.lengths) * kv_heads * dim * 2 * self.dtype.itemsize

    @property
    def flops(self) -> float:
        heads, _, dim = MODELS[self.model]
        seen = sum(c * (n - c) + c * (c + 1) / 2 for n, c in zip(self.lengths, self.counts, strict=True))
        return 4.0 * heads * dim * seen

    def run(self, backend: Any, m: AttentionMetadata) -> torch.Tensor:
        """Attention alone; the decode plan is made by ``prepare_all``."""
        out = torch.empty(self.qkv.shape[0], self.layer.num_heads * self.layer.head_dim, device=DEVICE, dtype=self.dtype)
        if self.decodes:
            backend.decode(self.qkv, self.layer, self.cache, m, backend.plan_decode(self.layer, self.cache, m), out)
        else:
            backend.extend(self.qkv, self.layer, self.cache, m, out)
        return out

    def prepare_all(self, backend: Any) -> None:
        """Every copy has the same lengths, so a shared plan buffer is right for all of them."""
        backend.make_workspace(max(256, len(self.lengths)), [self.layer], self.dtype, DEVICE)
        for m in self.steps:
            m.extra.clear()
            backend.prepare(m)
            self.run(backend, m)

    def error(self, backend: Any) -> float:
        """Largest difference from the reference over the largest value, on a few sequences' last queries."""
        m = self.steps[0]
        ours = self.run(backend, m).unflatten(1, (self.layer.num_heads, -1)).float()
        q = self.qkv[:, : self.layer.num_heads * self.layer.head_dim].unflatten(1, (self.layer.num_heads, -1))
        worst, ends = 0.0, m.query_start.tolist()[1:]
        longest = max(range(len(self.lengths)), key=self.lengths.__getitem__)
        for s in {0, longest, len(self.lengths) - 1}:
            take = min(self.counts[s], 128)
            rows = slice(ends[s] - take, ends[s])
            theirs = attention_reference(q[rows], self.cache, m.block_tables[s], self.lengths[s], self.layer.scale)
            worst = max(worst, float((ours[rows] - theirs).abs().max() / theirs.abs().max()))
        return worst


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


def measure(case: Case, backend: Any) -> tuple[float, float]:
    """(seconds of one layer's attention, relative error)."""
    case.prepare_all(backend)
    error = case.error(backend)
    repeats = case.steps * max(1, 8 // len(case.steps))
    return graph_time([lambda m=m: case.run(backend, m) for m in repeats]), error


def report(case: Case, label: str, taken: float, error: float) -> None:
    if case.decodes:
        rate, share = f"{case.bytes / taken / 1e12:6.2f} TB/s", case.bytes / BANDWIDTH / taken
    else:
        rate, share = f"{case.flops / taken / 1e12:6.0f} TFLOP/s", case.flops / FLOPS / taken
    wrong = "" if error < 2e-2 else "  WRONG"
    head = f"{case.model:5s} {case.name:30s} {label:16s} {taken * 1e6:9.1f} us"
    print(f"{head} {rate:>14s} {share:6.0%} of floor  err {error:.1e}{wrong}", flush=True)


def backends(decodes: bool) -> list[tuple[str, Any]]:
    from octavo.attention.flash_attention import FlashAttention, available
    from octavo.attention.triton import TritonAttention

    found: list[tuple[str, Any]] = [("triton", TritonAttention())]
    if available():
        found.append(("fa3", FlashAttention(decode="fa3")))
    return found


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
        for label, backend in backends(case.decodes):
            report(case, label, *measure(case, backend))


def bench_plan() -> None:
    """The decode task list, once a step."""
    from octavo.attention.triton import TritonAttention

    for batch in (1, 32, 256):
        case, backend = Case("8B", "plan", [1024] * batch, [1] * batch), TritonAttention()
        case.prepare_all(backend)
        m = case.steps[0]

        def plan(case: Case = case, backend: Any = backend, m: AttentionMetadata = m) -> None:
            m.extra.clear()
            backend.prepare(m)
            backend.plan_decode(case.layer, case.cache, m)

        print(f"plan of {batch} decodes: {graph_time([plan] * 10) * 1e6:.1f} us a step", flush=True)


def bench_write_kv() -> None:
    from octavo.kernels.write_kv import write_kv

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
    """Every sensible launch configuration on a few shapes: what the tables in decode_ and extend_attention are set from."""
    from octavo.attention.triton import TritonAttention

    chosen = ["decode 1 x 1024", "decode 8 x 1024", "decode 64 x 2048", "decode 256 x 1024", "decode 65536 among 31 x 4096"]
    for arguments in [c for c in decode_cases() if c[1] in chosen]:
        case = Case(*arguments)
        for block_n, warps, stages, fit, split in itertools.product((32, 64, 128), (4,), (2, 3, 4), (2, 3, 4), (256, 512)):
            if 4 * block_n * (stages - 1) * case.layer.head_dim * fit > 225_000 or ALIGN % block_n:
                continue
            decode = (block_n, warps, stages, fit, split)
            _try(case, TritonAttention(decode_config=DecodeConfig(*decode)), str(decode))
    for arguments in extend_cases()[:3]:
        case = Case(*arguments)
        for block_m, block_n, warps, stages in itertools.product((64, 128), (32, 64, 128), (4, 8), (2, 3, 4)):
            if block_m == 64 and warps == 8:
                continue
            extend = (block_m, block_n, warps, stages)
            _try(case, TritonAttention(extend_config=ExtendConfig(*extend)), str(extend))


def _try(case: Case, backend: Any, label: str) -> None:
    try:
        report(case, label, *measure(case, backend))
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
