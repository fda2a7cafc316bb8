"""``python -m octavo.kernels.cpu.bench``: what each operation of SmolLM2-135M costs here, and a whole step of its layers.

Every layer has weights and a cache of its own, as in a model, so that they come from memory and not from a cache of the CPU.
Times are the best of several rounds: on a busy machine the rest measures the neighbours.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from octavo.kernels.cpu.arguments import AttentionPlan, check_error, layer_args, step_args
from octavo.kernels.cpu.library import keep_freed_memory, library
from octavo.kernels.kv_cache import make_kv_cache
from octavo.kernels.packed_linear import prepack_linear
from octavo.kernels.rms_norm import rms_norm
from octavo.kernels.silu_and_mul import silu_and_mul

HIDDEN, HEADS, KV_HEADS, DIM, INNER, VOCAB, BLOCK = 576, 9, 3, 64, 1536, 49152, 16
WIDTHS = {
    "qkv": ((HEADS + 2 * KV_HEADS) * DIM, HIDDEN),
    "o": (HIDDEN, HEADS * DIM),
    "gate_up": (2 * INNER, HIDDEN),
    "down": (HIDDEN, INNER),
}

# name, (tokens of each sequence after the step, of which run), how many sequences
CASES = [(f"decode {n} x {context}", context, 1, n) for context in (256, 2048) for n in (1, 8, 32)]
CASES += [("prefill 512", 512, 512, 1), ("512 more of 2048", 2048, 512, 1)]


def best(function: Callable[[], object], rounds: int = 100, budget_s: float = 1.5) -> float:
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


class Model:
    """Random weights of all layers, packed."""

    def __init__(self, num_layers: int, dtype: torch.dtype) -> None:
        self.layers = [{name: _linear(*shape, dtype) for name, shape in WIDTHS.items()} for _ in range(num_layers)]
        self.head = _linear(VOCAB, HIDDEN, dtype)
        self.norm = torch.ones(HIDDEN, dtype=dtype)


def _linear(out_features: int, in_features: int, dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    weight = torch.randn(out_features, in_features).mul_(in_features**-0.5).to(dtype)
    packed = prepack_linear(weight)
    return packed if packed is not None else lambda x: F.linear(x, weight)


class Attention:
    """One step's attention in every layer, through the same call that the backend makes."""

    def __init__(self, num_layers: int, context: int, run: int, sequences: int, dtype: torch.dtype) -> None:
        blocks = -(-context // BLOCK)
        tables = torch.randperm(sequences * blocks).view(sequences, blocks).int()
        positions = torch.arange(context - run, context).repeat(sequences)
        slots = tables.repeat_interleave(run, dim=0).gather(1, (positions // BLOCK)[:, None])[:, 0].long() * BLOCK + positions % BLOCK
        metadata: Any = SimpleNamespace(
            num_tokens=sequences * run, num_seqs=sequences, block_size=BLOCK, positions=positions, slots=slots,
            query_start=torch.arange(sequences + 1).int() * run, seq_lens=torch.full((sequences,), context).int(), block_tables=tables,
        )  # fmt: skip
        angles = torch.arange(context)[:, None] * 10000.0 ** (-torch.arange(0, DIM, 2) / DIM)
        layer: Any = SimpleNamespace(
            num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, scale=DIM**-0.5, rope_cos_sin=torch.cat((angles.cos(), angles.sin()), -1),
            rope_interleaved=False, q_norm=None, k_norm=None, norm_eps=1e-5, sliding_window=None, logit_soft_cap=None,
        )  # fmt: skip
        self.kernels: Any = library()
        self.held = (
            metadata,
            layer,
            [make_kv_cache(sequences * blocks, BLOCK, KV_HEADS, DIM, dtype, torch.device("cpu")) for _ in range(num_layers)],
        )
        for cache in self.held[2]:
            cache[0].normal_(), cache[1].normal_()
        self.step, self.tensors = step_args(metadata)
        self.layers = [layer_args(layer, cache) for cache in self.held[2]]
        self.plan = AttentionPlan(self.kernels, self.step, self.layers[0])

    def __call__(self, qkv: torch.Tensor, index: int) -> torch.Tensor:
        import ctypes

        out = qkv.new_empty(len(qkv), HEADS * DIM)
        step, layer = ctypes.addressof(self.step), ctypes.addressof(self.layers[index])
        check_error(self.kernels.attention_layer(step, layer, *self.plan.arguments, qkv.data_ptr(), out.data_ptr()))
        return out


def forward(model: Model, attention: Attention, hidden: torch.Tensor) -> torch.Tensor:
    residual: torch.Tensor | None = None
    for index, layer in enumerate(model.layers):
        x, residual = rms_norm(hidden, model.norm, 1e-5, residual)
        x = layer["o"](attention(layer["qkv"](x), index))
        x, residual = rms_norm(x, model.norm, 1e-5, residual)
        hidden = layer["down"](silu_and_mul(layer["gate_up"](x)))
    return rms_norm(hidden, model.norm, 1e-5, residual)[0]


def measure(model: Model, context: int, run: int, sequences: int, dtype: torch.dtype) -> dict[str, float]:
    """Milliseconds for all layers, an operation a key; ``layers`` is a whole pass, ``head`` one row a sequence."""
    rows, layers = sequences * run, model.layers
    attention = Attention(len(layers), context, run, sequences, dtype)
    x, wide = torch.randn(rows, HIDDEN).to(dtype), torch.randn(rows, 2 * INNER).to(dtype)
    inputs = {name: torch.randn(rows, shape[1]).to(dtype) for name, shape in WIDTHS.items()}
    qkv, last = torch.randn(rows, WIDTHS["qkv"][0]).to(dtype), x[-sequences:].contiguous()
    calls: dict[str, Callable[[], object]] = {
        "attention": lambda: [attention(qkv, i) for i in range(len(layers))],
        "norms": lambda: [rms_norm(x, model.norm, 1e-5, x) for _ in range(2 * len(layers))],
        "silu": lambda: [silu_and_mul(wide) for _ in layers],
    }
    for name, value in inputs.items():
        calls[name] = lambda name=name, value=value: [layer[name](value) for layer in layers]
    calls["layers"] = lambda: forward(model, attention, x)
    calls["head"] = lambda: model.head(last)
    return {name: 1e3 * best(call) for name, call in calls.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description="Times of the CPU kernels at SmolLM2-135M's shapes, in milliseconds for all layers.")
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32", "float16"))
    options = parser.parse_args()
    if library() is None:
        print("There are no CPU kernels to time.", file=sys.stderr)
        return 1
    keep_freed_memory()
    torch.manual_seed(0)
    dtype = getattr(torch, options.dtype)
    print(f"{torch.get_num_threads()} threads, {options.layers} layers, {options.dtype}; milliseconds")
    model = Model(options.layers, dtype)
    for number, (name, context, run, sequences) in enumerate(CASES):
        times = measure(model, context, run, sequences, dtype)
        if not number:
            print(f"{'':18}" + "".join(f"{key:>10}" for key in times) + f"{'tok/s':>10}")
        rate = sequences * run / (times["layers"] + times["head"]) * 1e3
        print(f"{name:18}" + "".join(f"{value:10.2f}" for value in times.values()) + f"{rate:10.0f}", flush=True)
    return 0


if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main())
