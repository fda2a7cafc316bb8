"""Linear layers cut over a group's ranks.

Column-parallel layers cut the output (each rank has all of x and makes a part of y); row-parallel ones cut the input and
add the ranks' results. A column layer followed by a row layer needs one all-reduce (Shoeybi et al., Megatron-LM, 2019).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from octavo.distributed.group import Group
from octavo.layers import ops
from octavo.layers.norm import RMSNorm
from octavo.layers.parallel import divide, local_heads
from octavo.layers.slots import WeightSlot, empty_parameter
from octavo.quantization.base import LinearPart, LinearScheme

Gate = Callable[[torch.Tensor], torch.Tensor]


class Linear(nn.Module):
    """The rows of one or more checkpoint linears that this rank holds, multiplied at once. Base of the layers below."""

    def __init__(self, parts: Sequence[LinearPart], *, bias: bool, group: Group, scheme: LinearScheme, dtype: torch.dtype) -> None:
        super().__init__()
        self.parts = tuple(parts)
        self.group = group
        self.scheme = scheme
        self.in_features = parts[0].in_count
        self.out_features = sum(part.out_count for part in parts)
        scheme.create_weights(self, self.in_features, self.out_features, dtype)
        self.bias = empty_parameter(self.out_features, dtype=dtype) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, in_features] -> [T, out_features]; both are this rank's."""
        return self.scheme.apply(self, x, self.bias)

    def after_norm(
        self, norm: RMSNorm, x: torch.Tensor, residual: torch.Tensor | None, *, gated: Gate | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x, residual [T, in_features] -> (this product of norm(x + residual), x + residual), fused as far as kernels reach.

        ``gated``: the activation that joins the product's two halves, [T, out_features / 2].
        """
        weight = self.scheme.plain_weight(self)
        if weight is None or not (gated is None or gated is ops.silu_and_mul):
            normed, residual = norm(x, residual)
            y = self(normed)
            return (y if gated is None else gated(y)), residual
        return ops.norm_linear(x, norm.weight, norm.eps, weight, self.bias, residual, gated=gated is not None)

    def weight_slots(self, prefix: str) -> Iterator[tuple[str, WeightSlot]]:
        parent = prefix.rpartition(".")[0]
        for part in self.parts:
            name = prefix if part.name is None else f"{parent}.{part.name}".lstrip(".")
            for suffix, slot in self.scheme.load(self, part):
                yield f"{name}.{suffix}", slot
            if self.bias is not None:
                destination = self.bias.data.narrow(0, part.offset, part.out_count)
                cuts = ((0, part.out_start, part.out_count),)
                yield f"{name}.bias", WeightSlot(self.bias, destination, (part.out_features,), cuts)

    def finalize(self) -> None:
        self.scheme.finalize(self)


class MergedColumnParallelLinear(Linear):
    """Several linears over the same input as one product, each cut by output: y = [rank's part of each, one after another].

    ``parts`` maps checkpoint name -> output features, in the order of the result.
    """

    def __init__(
        self, in_features: int, parts: dict[str | None, int], *, bias: bool, group: Group, scheme: LinearScheme, dtype: torch.dtype
    ) -> None:
        cut: list[LinearPart] = []
        offset = 0
        for name, total in parts.items():
            count = divide(total, group.size, f"output features of {name or 'a linear layer'}")
            cut.append(LinearPart(name, total, group.rank * count, count, offset, in_features, 0, in_features))
            offset += count
        super().__init__(cut, bias=bias, group=group, scheme=scheme, dtype=dtype)


class ColumnParallelLinear(MergedColumnParallelLinear):
    """y = x W^T cut by output: [T, in_features] -> [T, out_features / size]."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool, group: Group, scheme: LinearScheme, dtype: torch.dtype) -> None:
        super().__init__(in_features, {None: out_features}, bias=bias, group=group, scheme=scheme, dtype=dtype)


class QKVParallelLinear(Linear):
    """q, k and v as one product, cut by heads: [T, in_features] -> [T, (num_heads + 2 * num_kv_heads) * head_dim].

    The head counts in the result (attributes ``num_heads``, ``num_kv_heads``) are this rank's. With more ranks than KV heads,
    neighbouring ranks hold the same KV head. ConfigError if the heads can't be cut evenly.
    """

    def __init__(
        self,
        in_features: int,
        head_dim: int,
        num_heads: int,
        num_kv_heads: int,
        *,
        bias: bool,
        group: Group,
        scheme: LinearScheme,
        dtype: torch.dtype,
        names: tuple[str, str, str] = ("q_proj", "k_proj", "v_proj"),
    ) -> None:
        heads, kv_heads = local_heads(num_heads, num_kv_heads, group.size)
        ranks_per_kv_head = max(1, group.size // num_kv_heads)
        parts: list[LinearPart] = []
        offset = 0
        for name, total, count, share in zip(
            names,
            (num_heads, num_kv_heads, num_kv_heads),
            (heads, kv_heads, kv_heads),
            (1, ranks_per_kv_head, ranks_per_kv_head),
            strict=True,
        ):
            start = group.rank // share * count
            parts.append(LinearPart(name, total * head_dim, start * head_dim, count * head_dim, offset, in_features, 0, in_features))
            offset += count * head_dim
        super().__init__(parts, bias=bias, group=group, scheme=scheme, dtype=dtype)
        self.num_heads = heads
        self.num_kv_heads = kv_heads


class RowParallelLinear(Linear):
    """y = x W^T cut by input: [T, in_features / size] -> the whole [T, out_features], equal on every rank."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool, group: Group, scheme: LinearScheme, dtype: torch.dtype) -> None:
        count = divide(in_features, group.size, "input features of a row-parallel layer")
        part = LinearPart(None, out_features, 0, out_features, 0, in_features, group.rank * count, count)
        super().__init__([part], bias=bias, group=group, scheme=scheme, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # one rank adds the bias, or the sum would hold it size times
        bias = self.bias if self.group.rank == 0 else None
        y = self.scheme.apply(self, x, bias)
        return self.group.all_reduce(y) if self.group.size > 1 else y
