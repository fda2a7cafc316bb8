"""Weights in the model's own floating-point type."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

from octavo.layers import ops
from octavo.layers.slots import WeightSlot, empty_parameter
from octavo.quantization.base import LinearPart

PackedLinear = Callable[[torch.Tensor, "torch.Tensor | None"], torch.Tensor]


class UnquantizedScheme:
    """``weight`` [out, in] in the model's dtype; ``packed`` is the prepacked product, where there is one.

    ``prepack(weight)`` returns a function (x, bias) -> x @ weight.T + bias that owns its copy of the weight, or None where
    packing brings nothing (other devices). The module then lets go of its plain weight; a tied embedding still holds it.
    """

    name = "none"

    def __init__(self, prepack: Callable[[torch.Tensor], PackedLinear | None] | None = None) -> None:
        self.prepack = prepack

    def create_weights(self, module: nn.Module, in_features: int, out_features: int, dtype: torch.dtype) -> None:
        module.weight = empty_parameter(out_features, in_features, dtype=dtype)
        module.packed = None

    def share_weight(self, module: nn.Module, weight: nn.Parameter) -> None:
        module.weight = weight
        module.packed = None

    def load(self, module: nn.Module, part: LinearPart) -> Iterator[tuple[str, WeightSlot]]:
        weight = module.weight
        yield (
            "weight",
            WeightSlot(
                parameter=weight,
                destination=weight.data.narrow(0, part.offset, part.out_count),
                shape=(part.out_features, part.in_features),
                cuts=((0, part.out_start, part.out_count), (1, part.in_start, part.in_count)),
            ),
        )

    def finalize(self, module: nn.Module) -> None:
        if self.prepack is None:
            return
        module.packed = self.prepack(module.weight.data)
        if module.packed is not None:
            module.weight = None

    def apply(self, module: nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        packed = module.packed
        return ops.linear(x, module.weight, bias) if packed is None else packed(x, bias)

    def plain_weight(self, module: nn.Module) -> torch.Tensor | None:
        """The [out, in] weight for kernels that fuse something with the product; None where it was packed away."""
        return module.weight
