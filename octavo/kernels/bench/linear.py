"""``bench_linear``: small-M linear layers against cuBLAS and the floor, each as a chain over distinct weights."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from octavo.kernels.bench.timing import DEVICE, Check, Timing, close, copies_for, exit_status, shown, time_graph
from octavo.kernels.rms_norm import rms_norm_reference
from octavo.kernels.silu_and_mul import silu_and_mul_reference
from octavo.kernels.triton import linear as module

TOLERANCE = 6e-3  # of float32's results, rounded: some of a 16-bit type's roundings fall to the other side
LAYER_TOLERANCE = 2e-2  # of a layer's, whose results pass through eight roundings; they add up as the root of the number of layers


@dataclass(frozen=True)
class Shape:
    """A linear layer: weight [weight_rows, k]; gated: SiLU(gate) * up follows; normed: a norm stands before it."""

    name: str
    weight_rows: int
    k: int
    gated: bool = False
    normed: bool = False

    @property
    def num_bytes(self) -> int:
        return 2 * self.weight_rows * self.k


def decoder_shapes(name: str, hidden: int, inner: int, heads: int, kv_heads: int, head_dim: int, vocab: int) -> list[Shape]:
    return [
        Shape(f"{name} qkv", (heads + 2 * kv_heads) * head_dim, hidden, normed=True),
        Shape(f"{name} o", hidden, heads * head_dim),
        Shape(f"{name} gate_up", 2 * inner, hidden, gated=True, normed=True),
        Shape(f"{name} down", hidden, inner),
        Shape(f"{name} lm_head", vocab, hidden),
    ]


SHAPES = [
    *decoder_shapes("qwen3-0.6b", 1024, 3072, 16, 8, 128, 151936),
    *decoder_shapes("qwen3-8b", 4096, 12288, 32, 8, 128, 151936),
    *decoder_shapes("llama-3.2-1b", 2048, 8192, 32, 8, 64, 128256),
]


class Operands:
    """Distinct weights of a shape, enough to keep L2 cold, and one x. Random: zeros would be faster than real data."""

    def __init__(self, shape: Shape, rows: int, dtype: torch.dtype = torch.bfloat16) -> None:
        self.shape = shape
        count = copies_for(shape.num_bytes)
        self.weights = torch.empty(count, shape.weight_rows, shape.k, dtype=dtype, device=DEVICE).normal_(0, 0.02)
        self.x = torch.randn(rows, shape.k, dtype=dtype, device=DEVICE)
        self.residual = torch.randn_like(self.x)
        self.norm_weight = torch.ones(shape.k, dtype=dtype, device=DEVICE)

    def check(self, config: module.LinearConfig, rows: int) -> Check:
        """A configuration's result against torch's, whose sums are float32 and rounded where the kernel's are."""
        x, weight, gated = self.x[:rows], self.weights[0], self.shape.gated
        expected = F.linear(x.float(), weight.float()).to(x.dtype)
        expected = silu_and_mul_reference(expected) if gated else expected
        return close((module.run(config, x, weight, gated=gated)[0], expected), tolerance=TOLERANCE)

    def time(self, config: module.LinearConfig, rows: int, fused_norm: bool = False) -> float:
        """Seconds a call of a configuration (torch's own kernels for "torch"; the gated product counts in all)."""
        x, gated = self.x[:rows], self.shape.gated
        if config.kernel == "torch":
            return time_graph([lambda w=w: module.linear_reference(x, w, gated=gated) for w in self.weights])
        options = {"norm": (self.norm_weight, 1e-6), "residual": self.residual[:rows]} if fused_norm else {}
        return time_graph([lambda w=w: module.run(config, x, w, gated=gated, **options) for w in self.weights])

    def time_norm_apart(self, config: module.LinearConfig, rows: int) -> float:
        """Seconds of the norm and the linear layer as two kernels."""
        x, residual, gated = self.x[:rows], self.residual[:rows], self.shape.gated

        def call(weight: torch.Tensor) -> torch.Tensor:
            normed, _ = module.rms_norm(x, self.norm_weight, 1e-6, residual)
            return module.run(config, normed, weight, gated=gated)[0]

        return time_graph([lambda w=w: call(w) for w in self.weights])


def bench_linear(
    shapes: Iterable[Shape] = SHAPES, rows: Iterable[int] = (1, 2, 4, 8, 16, 32, 64), dtype: torch.dtype = torch.bfloat16
) -> list[Timing]:
    """Prints cuBLAS, and the chosen kernel where that is another."""
    results = []
    for shape in shapes:
        operands = Operands(shape, max(rows), dtype)
        for m in rows:
            config = module.choose(m, shape.weight_rows, shape.k, shape.gated)
            flops = 2 * m * shape.weight_rows * shape.k
            candidates = [("cublas", module.TORCH, None)]
            if config.kernel != "torch":
                candidates.append((config.kernel, config, operands.check(config, m)))
            for label, candidate, check in candidates:
                seconds = operands.time(candidate, m)
                results.append(shown(Timing(f"{shape.name} m={m} {label}", seconds, shape.num_bytes, flops, check)))
    return results


class Layers:
    """The linear layers and norms of a model's decode step; random weights."""

    def __init__(self, layers: int, hidden: int, inner: int, attention: int, qkv: int, rows: int, dtype: torch.dtype) -> None:
        def weight(n: int, k: int) -> torch.Tensor:
            return torch.empty(n, k, dtype=dtype, device=DEVICE).normal_(0, k**-0.5)

        self.attention = attention  # width of its output: so many of qkv's columns stand for it
        self.stack = [
            (weight(qkv, hidden), weight(hidden, attention), weight(2 * inner, hidden), weight(hidden, inner)) for _ in range(layers)
        ]
        self.norm = torch.ones(hidden, dtype=dtype, device=DEVICE)
        self.x = torch.randn(rows, hidden, dtype=dtype, device=DEVICE)

    @property
    def num_bytes(self) -> int:
        return sum(weight.nbytes for layer in self.stack for weight in layer)

    def step(self) -> torch.Tensor:
        x, residual = self.x, torch.zeros_like(self.x)
        for w_qkv, w_o, w_gate_up, w_down in self.stack:
            y, residual = module.norm_linear(x, self.norm, 1e-6, w_qkv, None, residual)
            x = module.linear(y[:, : self.attention], w_o)
            y, residual = module.norm_linear(x, self.norm, 1e-6, w_gate_up, None, residual, gated=True)
            x = module.linear(y, w_down)
        return x

    def reference(self) -> torch.Tensor:
        """``step`` in torch and float32."""
        x, norm = self.x.float(), self.norm.float()
        residual = torch.zeros_like(x)
        for layer in self.stack:
            w_qkv, w_o, w_gate_up, w_down = (weight.float() for weight in layer)
            y, residual = rms_norm_reference(x, norm, 1e-6, residual)
            y = F.linear(y, w_qkv)
            x = F.linear(y[:, : self.attention], w_o)
            y, residual = rms_norm_reference(x, norm, 1e-6, residual)
            x = F.linear(silu_and_mul_reference(F.linear(y, w_gate_up)), w_down)
        return x


def bench_layers(
    layers: int = 28, hidden: int = 1024, inner: int = 3072, attention: int = 2048, qkv: int = 4096, rows: int = 1,
    dtype: torch.dtype = torch.bfloat16,
) -> list[Timing]:  # fmt: skip
    """All linear layers and norms of a model's decode step in one graph (defaults: Qwen3-0.6B), with dependent launch and
    without: what small-M kernels and PDL bring to a step."""
    from octavo.kernels.triton.launch import enable_pdl

    model = Layers(layers, hidden, inner, attention, qkv, rows, dtype)
    expected, tolerance = model.reference(), LAYER_TOLERANCE * layers**0.5
    results = []
    for enabled in (True, False):
        enable_pdl(enabled)
        check = close((model.step(), expected), tolerance=tolerance)
        name = f"{layers} layers' linears and norms, m={rows}, pdl={enabled}"
        results.append(shown(Timing(name, time_graph([model.step]), model.num_bytes, check=check)))
    enable_pdl(True)
    return results


if __name__ == "__main__":
    torch.manual_seed(0)
    sys.exit(exit_status([*bench_layers(), *bench_layers(12, 4096, 12288, 4096, 6144), *bench_linear()]))
