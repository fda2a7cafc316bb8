"""``bench_linear``: small-M linear layers against cuBLAS and the floor, each as a chain over distinct weights."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from octavo.kernels.bench.timing import Timing, copies_for, time_graph
from octavo.kernels.triton import linear as module


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

    def __init__(self, shape: Shape, rows: int) -> None:
        self.shape = shape
        count = copies_for(shape.num_bytes)
        self.weights = torch.empty(count, shape.weight_rows, shape.k, dtype=torch.bfloat16, device="cuda").normal_(0, 0.02)
        self.x = torch.randn(rows, shape.k, dtype=torch.bfloat16, device="cuda")
        self.residual = torch.randn_like(self.x)
        self.norm_weight = torch.ones(shape.k, dtype=torch.bfloat16, device="cuda")

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


def bench_linear(names: Iterable[str] = (), rows: Iterable[int] = (1, 2, 4, 8, 16, 32, 64)) -> list[Timing]:
    """Prints the chosen kernel and cuBLAS for the shapes whose name holds one of ``names`` (none: all)."""
    results = []
    names = list(names)
    for shape in SHAPES:
        if names and not any(name in shape.name for name in names):
            continue
        operands = Operands(shape, max(rows))
        for m in rows:
            config = module.choose(m, shape.weight_rows, shape.k, shape.gated)
            flops = 2 * m * shape.weight_rows * shape.k
            for label, candidate in dict([("cublas", module.TORCH), (config.kernel, config)]).items():
                results.append(Timing(f"{shape.name} m={m} {label}", operands.time(candidate, m), shape.num_bytes, flops))
                print(results[-1], flush=True)
    return results


def bench_layers(
    layers: int = 28, hidden: int = 1024, inner: int = 3072, attention: int = 2048, qkv: int = 4096, rows: int = 1
) -> list[Timing]:
    """All linear layers and norms of a model's decode step in one graph (defaults: Qwen3-0.6B), with dependent launch and
    without: what small-M kernels and PDL bring to a step."""
    from octavo.kernels.triton.launch import enable_pdl

    def weight(n: int, k: int) -> torch.Tensor:
        return torch.empty(n, k, dtype=torch.bfloat16, device="cuda").normal_(0, k**-0.5)

    stack = [(weight(qkv, hidden), weight(hidden, attention), weight(2 * inner, hidden), weight(hidden, inner)) for _ in range(layers)]
    norm = torch.ones(hidden, dtype=torch.bfloat16, device="cuda")
    x0 = torch.randn(rows, hidden, dtype=torch.bfloat16, device="cuda")

    def step() -> torch.Tensor:
        x, residual = x0, torch.zeros_like(x0)
        for w_qkv, w_o, w_gate_up, w_down in stack:
            y, residual = module.norm_linear(x, norm, 1e-6, w_qkv, None, residual)
            x = module.linear(y[:, :attention], w_o)
            y, residual = module.norm_linear(x, norm, 1e-6, w_gate_up, None, residual, gated=True)
            x = module.linear(y, w_down)
        return x

    num_bytes = sum(w.numel() * 2 for layer in stack for w in layer)
    results = []
    for enabled in (True, False):
        enable_pdl(enabled)
        results.append(Timing(f"{layers} layers' linears and norms, m={rows}, pdl={enabled}", time_graph([step]), num_bytes))
        print(results[-1], flush=True)
    enable_pdl(True)
    return results


if __name__ == "__main__":
    bench_layers()
    bench_layers(12, 4096, 12288, 4096, 6144)
    bench_linear()
