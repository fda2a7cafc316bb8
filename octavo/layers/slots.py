"""Where a checkpoint's tensors go.

Every module that owns parameters declares, before anything is read, which checkpoint tensors it takes and where each one
lands (``weight_slots``). Loading is then a comparison of two sets of names, so nothing can be missed or dropped in silence.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class WeightSlot:
    """The place of one checkpoint tensor.

    ``shape`` is the whole checkpoint tensor's. This rank takes ``start : start + count`` of dimension ``dim`` of it, for each
    (dim, start, count) in ``cuts``. ``destination`` is a view of ``parameter`` with the shape that is left after the cuts.
    """

    parameter: torch.Tensor
    destination: torch.Tensor
    shape: tuple[int, ...]
    cuts: tuple[tuple[int, int, int], ...] = ()

    def load(self, tensor: torch.Tensor) -> None:
        """Copy this rank's part of ``tensor``, converting dtype and device. The caller has checked ``shape``."""
        for dim, start, count in self.cuts:
            tensor = tensor.narrow(dim, start, count)
        self.destination.copy_(tensor)


def whole(parameter: torch.Tensor) -> WeightSlot:
    """A slot for a checkpoint tensor that is taken as it is."""
    return WeightSlot(parameter, parameter.data, tuple(parameter.shape))


def empty_parameter(*shape: int, dtype: torch.dtype) -> torch.nn.Parameter:
    """An uninitialised parameter on the current default device; no gradients are ever kept."""
    return torch.nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)
