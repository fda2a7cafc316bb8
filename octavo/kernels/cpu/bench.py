"""``python -m octavo.kernels.cpu.bench``: each operation of SmolLM2-135M against its torch reference and its floor, and whole steps.

Every layer has weights and a cache of its own, as in a model, so that they come from memory and not from a cache of the CPU.
Times are the best of several rounds: on a busy machine the rest measures the neighbours. A floor is the bytes that an operation can't
do without over this machine's bandwidth, or its operations over the rate of a large matrix product, whichever takes longer; both
rates are measured at the start. What stays in the CPU's caches (activations of a few rows, short contexts) can be faster than that.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from octavo.kernels.cpu.arguments import AttentionPlan, check_error, layer_args, step_args
from octavo.kernels.cpu.library import keep_freed_memory, library
from octavo.kernels.kv_cache import make_kv_cache
from octavo.kernels.packed_linear import packed_linear_reference, prepack_linear
from octavo.kernels.paged_attention import paged_attention_reference
from octavo.kernels.rms_norm import rms_norm, rms_norm_reference
from octavo.kernels.rope_and_write_kv import rope_and_write_kv_reference
from octavo.kernels.sample import sample_rows, sample_rows_reference
from octavo.kernels.silu_and_mul import silu_and_mul, silu_and_mul_reference

HIDDEN, HEADS, KV_HEADS, DIM, INNER, VOCAB, BLOCK = 576, 9, 3, 64, 1536, 49152, 16
WIDTHS = {
    "qkv": ((HEADS + 2 * KV_HEADS) * DIM, HIDDEN),
    "o": (HIDDEN, HEADS * DIM),
    "gate_up": (2 * INNER, HIDDEN),
    "down": (HIDDEN, INNER),
}
TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}  # ||ours - reference|| / ||reference||

# name, (tokens of each sequence after the step, of which run), how many sequences
CASES = [(f"decode {n} x {context}", context, 1, n) for context in (256, 2048) for n in (1, 8, 32)]
CASES += [("prefill 512", 512, 512, 1), ("512 more of 2048", 2048, 512, 1)]


def best(function: Callable[[], object], budget_s: float, rounds: int = 100) -> float:
    """Seconds of the fastest call."""
    function()
    fastest, end = float("inf"), time.perf_counter() + budget_s
    for _ in range(rounds):
        start = time.perf_counter()
        function()
        fastest = min(fastest, time.perf_counter() - start)
        if time.perf_counter() > end:
            break
    return fastest


@dataclass(frozen=True)
class Machine:
    """bandwidth: bytes/s out of memory; flops: operations/s of a matrix product of the type that is benchmarked."""

    bandwidth: float
    flops: float

    def floor(self, num_bytes: float, flops: float = 0.0) -> float:
        """Seconds."""
        return max(num_bytes / self.bandwidth, flops / self.flops)


def measure_machine(dtype: torch.dtype, budget_s: float = 0.25, megabytes: int = 128, size: int = 1536) -> Machine:
    data = torch.ones(megabytes * 2**18)
    copy = torch.empty_like(data)
    moved = max(data.nbytes / best(data.sum, budget_s), 2 * data.nbytes / best(lambda: copy.copy_(data), budget_s))
    x, linear = torch.randn(size, size).to(dtype), Linear(size, size, dtype)
    return Machine(moved, 2 * size**3 / min(best(lambda: linear(x), budget_s), best(lambda: linear.reference(x), budget_s)))


@dataclass(frozen=True)
class Operation:
    """One kernel in all layers. ``reference``: the same in torch, called ``reference_calls`` times for as much work.

    ``results``: what both give for the same inputs, to compare. ``num_bytes``, ``flops``: what can't be done without.
    """

    run: Callable[[], object]
    reference: Callable[[], object]
    results: Callable[[], tuple[torch.Tensor, torch.Tensor]]
    num_bytes: float
    flops: float = 0.0
    reference_calls: int = 1

    def error(self) -> float:
        ours, theirs = (t.double() for t in self.results())
        return float((ours - theirs).norm() / theirs.norm())


@dataclass(frozen=True)
class Measured:
    """Seconds, and the relative error."""

    ours: float
    reference: float
    floor: float
    error: float

    def line(self, name: str) -> str:
        times = f"{1e3 * self.ours:10.3f} {1e3 * self.reference:12.3f} {self.reference / self.ours:8.1f}x"
        return f"  {name:12}{times} {1e3 * self.floor:10.3f} {self.floor / self.ours:9.0%} {self.error:10.1e}"


class Linear:
    """A random weight as the model holds it, and as the reference takes it."""

    def __init__(self, out_features: int, in_features: int, dtype: torch.dtype) -> None:
        self.weight = torch.randn(out_features, in_features).mul_(in_features**-0.5).to(dtype)
        self.packed = prepack_linear(self.weight)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.reference(x) if self.packed is None else self.packed(x)

    def reference(self, x: torch.Tensor) -> torch.Tensor:
        return packed_linear_reference(x, self.weight)


class Model:
    """Random weights of all layers, packed and as they were."""

    def __init__(self, num_layers: int, dtype: torch.dtype) -> None:
        self.layers = [{name: Linear(*shape, dtype) for name, shape in WIDTHS.items()} for _ in range(num_layers)]
        self.head = Linear(VOCAB, HIDDEN, dtype)
        self.norm = torch.ones(HIDDEN, dtype=dtype)


class Attention:
    """One step's attention in every layer, through the same call that the backend makes."""

    def __init__(self, num_layers: int, context: int, run: int, sequences: int, dtype: torch.dtype) -> None:
        blocks = -(-context // BLOCK)
        tables = torch.randperm(sequences * blocks).view(sequences, blocks).int()
        positions = torch.arange(context - run, context).repeat(sequences)
        slots = tables.repeat_interleave(run, dim=0).gather(1, (positions // BLOCK)[:, None])[:, 0].long() * BLOCK + positions % BLOCK
        self.metadata: Any = SimpleNamespace(
            num_tokens=sequences * run, num_seqs=sequences, block_size=BLOCK, positions=positions, slots=slots,
            query_start=torch.arange(sequences + 1).int() * run, seq_lens=torch.full((sequences,), context).int(), block_tables=tables,
        )  # fmt: skip
        angles = torch.arange(context)[:, None] * 10000.0 ** (-torch.arange(0, DIM, 2) / DIM)
        self.layer: Any = SimpleNamespace(
            num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, scale=DIM**-0.5, rope_cos_sin=torch.cat((angles.cos(), angles.sin()), -1),
            rope_interleaved=False, q_norm=None, k_norm=None, norm_eps=1e-5, sliding_window=None, logit_soft_cap=None,
        )  # fmt: skip
        self.kernels: Any = library()
        device = torch.device("cpu")
        self.caches = [make_kv_cache(sequences * blocks, BLOCK, KV_HEADS, DIM, dtype, device) for _ in range(num_layers)]
        for cache in self.caches:
            cache[0].normal_(), cache[1].normal_()
        self.step, self.tensors = step_args(self.metadata)
        self.layers = [layer_args(self.layer, cache) for cache in self.caches]
        self.plan = AttentionPlan(self.kernels, self.step, self.layers[0])

    def __call__(self, qkv: torch.Tensor, index: int) -> torch.Tensor:
        out = qkv.new_empty(len(qkv), HEADS * DIM)
        step, layer = ctypes.addressof(self.step), ctypes.addressof(self.layers[index])
        check_error(self.kernels.attention_layer(step, layer, *self.plan.arguments, qkv.data_ptr(), out.data_ptr()))
        return out

    def reference(self, qkv: torch.Tensor, index: int) -> torch.Tensor:
        rope_and_write_kv_reference(qkv, self.layer, self.caches[index], self.metadata)
        out = qkv.new_empty(len(qkv), HEADS * DIM)
        return paged_attention_reference(qkv, self.layer, self.caches[index], self.metadata, out)


def forward(model: Model, attention: Attention, hidden: torch.Tensor) -> torch.Tensor:
    residual: torch.Tensor | None = None
    for index, layer in enumerate(model.layers):
        x, residual = rms_norm(hidden, model.norm, 1e-5, residual)
        x = layer["o"](attention(layer["qkv"](x), index))
        x, residual = rms_norm(x, model.norm, 1e-5, residual)
        hidden = layer["down"](silu_and_mul(layer["gate_up"](x)))
    return rms_norm(hidden, model.norm, 1e-5, residual)[0]


def linear_operation(linears: list[Linear], x: torch.Tensor) -> Operation:
    out_features, in_features = linears[0].weight.shape
    moved = x.element_size() * (out_features * in_features + len(x) * (in_features + out_features))
    return Operation(
        lambda: [linear(x) for linear in linears],
        lambda: [linear.reference(x) for linear in linears],
        lambda: (linears[0](x), linears[0].reference(x)),
        len(linears) * moved,
        len(linears) * 2 * len(x) * out_features * in_features,
    )


def operations(model: Model, attention: Attention, context: int, run: int, sequences: int, dtype: torch.dtype) -> dict[str, Operation]:
    """In all layers, but for the head and the drawing of tokens, which have one row a sequence."""
    rows, layers, size = sequences * run, model.layers, dtype.itemsize
    x, wide, qkv = (torch.randn(rows, width).to(dtype) for width in (HIDDEN, 2 * INNER, WIDTHS["qkv"][0]))
    seen = sequences * sum(range(context - run + 1, context + 1))  # keys, over all queries
    found = {
        "attention": Operation(
            lambda: [attention(qkv, i) for i in range(len(layers))],
            lambda: attention.reference(qkv, 0),  # one layer: the reference is slow
            lambda: (attention(qkv.clone(), 0), attention.reference(qkv.clone(), 0)),
            len(layers) * sequences * context * KV_HEADS * DIM * 2 * size,
            len(layers) * 4 * HEADS * DIM * seen,
            len(layers),
        ),
        "norms": Operation(
            lambda: [rms_norm(x, model.norm, 1e-5, x) for _ in range(2 * len(layers))],
            lambda: [rms_norm_reference(x, model.norm, 1e-5, x) for _ in range(2 * len(layers))],
            lambda: (rms_norm(x, model.norm, 1e-5, x)[0], rms_norm_reference(x, model.norm, 1e-5, x)[0]),
            2 * len(layers) * 4 * x.nbytes,
        ),
        "silu": Operation(
            lambda: [silu_and_mul(wide) for _ in layers],
            lambda: [silu_and_mul_reference(wide) for _ in layers],
            lambda: (silu_and_mul(wide), silu_and_mul_reference(wide)),
            len(layers) * wide.nbytes * 1.5,
        ),
    }
    for name, shape in WIDTHS.items():
        found[name] = linear_operation([layer[name] for layer in layers], torch.randn(rows, shape[1]).to(dtype))
    found["head"] = linear_operation([model.head], x[-sequences:].contiguous())
    logits = torch.randn(sequences, VOCAB) * 4
    per_row = [torch.full((sequences,), value).to(kind) for value, kind in ((0.8, torch.float32), (50, torch.int64), (0.95, torch.float64))]
    chances = (*per_row, torch.zeros(sequences).double(), torch.rand(sequences).double())
    found["sample"] = Operation(
        lambda: sample_rows(logits, *chances),
        lambda: sample_rows_reference(logits, *chances),
        lambda: (sample_rows(logits, *chances), sample_rows_reference(logits, *chances)),
        logits.nbytes,
    )
    return found


def measure(model: Model, case: tuple[str, int, int, int], dtype: torch.dtype, machine: Machine, budget_s: float) -> dict[str, Measured]:
    """By operation; ``layers`` is a whole pass through them, its reference and floor the sums of theirs, its error the largest."""
    _, context, run, sequences = case
    attention = Attention(len(model.layers), context, run, sequences, dtype)
    results = {}
    for name, operation in operations(model, attention, context, run, sequences, dtype).items():
        error = operation.error()  # first: the attention kernels turn their q and k in place, again and again while they are timed
        reference = operation.reference_calls * best(operation.reference, budget_s / 2)
        floor = machine.floor(operation.num_bytes, operation.flops)
        results[name] = Measured(best(operation.run, budget_s), reference, floor, error)
    parts = [part for name, part in results.items() if name not in ("head", "sample")]
    x = torch.randn(sequences * run, HIDDEN).to(dtype)
    results["layers"] = Measured(
        best(lambda: forward(model, attention, x), budget_s),
        sum(part.reference for part in parts),
        sum(part.floor for part in parts),
        max(part.error for part in parts),
    )
    return results


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="The CPU kernels at SmolLM2-135M's shapes, against torch and what this machine can do.")
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32", "float16"))
    names = ", ".join(case[0] for case in CASES)
    parser.add_argument("--cases", nargs="*", default=[], metavar="WORDS", help=f"only those that begin so: {names}")
    parser.add_argument("--seconds", type=float, default=0.6, help="longest time for each kernel in each case (0.6)")
    options = parser.parse_args(argv)
    if library() is None:
        print("There are no CPU kernels to time.", file=sys.stderr)
        return 1
    keep_freed_memory()
    torch.manual_seed(0)
    dtype = getattr(torch, options.dtype)
    machine = measure_machine(dtype, min(options.seconds, 0.25))
    rates = f"{machine.bandwidth / 1e9:.1f} GB/s, {machine.flops / 1e9:,.0f} GFLOP/s"
    print(f"{torch.get_num_threads()} threads, {options.layers} layers, {options.dtype}; milliseconds of all layers; this machine: {rates}")
    print(f"  {'':12}{'ours':>10} {'reference':>12} {'':>9} {'floor':>10} {'of it':>9} {'error':>10}")
    model, wrong = Model(options.layers, dtype), []
    for case in CASES:
        if options.cases and not case[0].startswith(tuple(options.cases)):
            continue
        results = measure(model, case, dtype, machine, options.seconds)
        seconds = sum(results[name].ours for name in ("layers", "head", "sample"))
        print(f"{case[0]}: {case[2] * case[3] / seconds:,.0f} tok/s")
        for name, measured in results.items():
            bad = not measured.error <= (0 if name == "sample" else TOLERANCE[dtype])
            wrong += [f"{name} of {case[0]}"] * bad
            print(measured.line(name) + ("  WRONG" if bad else ""), flush=True)
    for what in wrong:
        print(f"The result differs from the reference's: {what}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main())
