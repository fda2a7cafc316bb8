"""Attention as a layer: it holds what a backend must know and leaves the work to the backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from octavo.attention.base import AttentionLayerSpec, ForwardContext


class Attention(nn.Module):
    """QK-norm, RoPE, KV write and attention of one layer, done by the context's backend.

    ``spec.layer_index`` is also the index of the layer's KV cache. The spec refers to the parameters' own memory, so a model
    must be built on the device that it runs on.
    """

    def __init__(self, spec: AttentionLayerSpec) -> None:
        super().__init__()
        self.spec = spec

    def forward(self, qkv: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """qkv [T, (num_heads + 2 * num_kv_heads) * head_dim], may be overwritten -> [T, num_heads * head_dim]."""
        spec = self.spec
        return context.backend.forward(qkv, spec, context.kv_caches[spec.layer_index], context)
