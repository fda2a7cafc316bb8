"""Gated activations: ``act(gate) * up`` over a [T, 2I] input whose first half is the gate."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from octavo.errors import ModelError
from octavo.layers import ops

_GATED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": ops.silu_and_mul,
    "swish": ops.silu_and_mul,
    "gelu": ops.gelu_and_mul,
    "gelu_pytorch_tanh": partial(ops.gelu_and_mul, approximate="tanh"),
    "gelu_new": partial(ops.gelu_and_mul, approximate="tanh"),
}


def gated_activation(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """The function [T, 2I] -> [T, I] for a checkpoint's ``hidden_act``. ModelError for one that is not supported."""
    if name not in _GATED:
        raise ModelError(f"The activation (hidden_act) {name!r} is not supported; supported are {', '.join(sorted(_GATED))}.")
    return _GATED[name]
