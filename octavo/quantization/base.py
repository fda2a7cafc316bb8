"""What a weight scheme does for a linear layer: it owns how weights are held, filled and multiplied."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from octavo.layers.slots import WeightSlot


@dataclass(frozen=True)
class LinearPart:
    """One checkpoint linear [out_features, in_features] as it stands in a module (which may hold several, one below the other).

        checkpoint rows    [out_start, out_start + out_count)  ->  module rows [offset, offset + out_count)
        checkpoint columns [in_start,  in_start + in_count)    ->  all columns of the module

    ``name`` takes the place of the module's own name in checkpoint names (q_proj instead of qkv_proj); None keeps it.
    """

    name: str | None
    out_features: int
    out_start: int
    out_count: int
    offset: int
    in_features: int
    in_start: int
    in_count: int


class LinearScheme(Protocol):
    """One object serves all linears of a model; everything per layer lives on the module."""

    name: str

    def create_weights(self, module: torch.nn.Module, in_features: int, out_features: int, dtype: torch.dtype) -> None:
        """Register empty parameters for this rank's [out_features, in_features] on the current default device."""
        ...

    def share_weight(self, module: torch.nn.Module, weight: torch.nn.Parameter) -> None:
        """Instead of ``create_weights``: use another module's plain weight [out_features, in_features] (a tied head)."""
        ...

    def load(self, module: torch.nn.Module, part: LinearPart) -> Iterator[tuple[str, WeightSlot]]:
        """Where a part's checkpoint tensors go: (suffix such as ``weight``, slot)."""
        ...

    def finalize(self, module: torch.nn.Module) -> None:
        """Once, after all weights are filled: repack for speed. May free the parameters that it replaces."""
        ...

    def apply(self, module: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [T, in_features] -> [T, out_features] in x's dtype."""
        ...

    def plain_weight(self, module: torch.nn.Module) -> torch.Tensor | None:
        """The [out_features, in_features] weight for kernels that fuse something with the product; None if there is none."""
        ...
