"""Attention on CPUs: one C call a layer, on a paged cache laid out for vector units; plain torch where C can't run."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

from octavo.kernels import kv_cache as cache_layout
from octavo.kernels.cpu.arguments import AttentionPlan, check_error, layer_args, step_args, usable
from octavo.kernels.cpu.library import Library, keep_freed_memory, library
from octavo.kernels.kv_cache import KVCache
from octavo.kernels.paged_attention import paged_attention_reference
from octavo.kernels.rope_and_write_kv import rope_and_write_kv_reference

if TYPE_CHECKING:
    from octavo.attention.base import AttentionLayerSpec, AttentionMetadata, ForwardContext

EXTRA = "cpu"  # the backend's key in AttentionMetadata.extra


class _Step:
    """A step as the kernels see it: what every layer shares."""

    __slots__ = ("address", "args", "held", "plans", "threads")

    def __init__(self, metadata: AttentionMetadata) -> None:
        self.args, self.held = step_args(metadata)
        self.address = ctypes.addressof(self.args)
        self.threads = torch.get_num_threads()
        self.plans: dict[tuple[int, ...], AttentionPlan] = {}


class _Layer:
    """A layer bound to its cache."""

    __slots__ = ("address", "args", "cache", "dtype", "key", "layer", "width")

    def __init__(self, layer: AttentionLayerSpec, cache: KVCache, dtype: torch.dtype) -> None:
        self.layer, self.cache, self.dtype = layer, cache, dtype
        self.args = layer_args(layer, cache)
        self.address = ctypes.addressof(self.args)
        self.key = (layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.sliding_window or 0)
        self.width = layer.num_heads * layer.head_dim


class CpuAttention:
    """The CPU's AttentionBackend. What it promises about equal bits: see ``kernels.paged_attention``.

    Making one also sets the process's memory allocator up for a run of equal steps (``keep_freed_memory``).
    """

    name = "cpu"

    def __init__(self) -> None:
        keep_freed_memory()
        self._kernels: Library | None = library()
        self._layers: dict[int, _Layer] = {}

    def make_kv_cache(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> KVCache:
        """(K, V), zeroed, laid out as ``kernels.kv_cache`` says; dimension 0 of both counts blocks."""
        return cache_layout.make_kv_cache(num_blocks, block_size, num_kv_heads, head_dim, dtype, device)

    def prepare(self, metadata: AttentionMetadata) -> None:
        """Fills ``metadata.extra``; the metadata's tensors must not change after it. ValueError if they contradict each other."""
        if self._kernels is not None:
            metadata.extra[EXTRA] = _Step(metadata)

    def forward(self, qkv: torch.Tensor, layer: AttentionLayerSpec, kv_cache: KVCache, context: ForwardContext) -> torch.Tensor:
        """See AttentionBackend. Rows past the step's tokens (padding) become zero. IndexError for ids or slots out of range."""
        metadata = context.attention
        if not qkv.is_contiguous():
            qkv = qkv.contiguous()
        bound = self._bind(qkv, layer, kv_cache, metadata)
        if bound is None:
            return _forward_reference(qkv, layer, kv_cache, metadata)
        step: _Step | None = metadata.extra.get(EXTRA)
        if step is None:
            self.prepare(metadata)
            step = metadata.extra[EXTRA]
        if bound.args.threads != step.threads:
            bound.args.threads = step.threads
        plan = step.plans.get(bound.key)
        if plan is None:
            plan = step.plans[bound.key] = AttentionPlan(self._kernels, step.args, bound.args)  # type: ignore[arg-type]
        rows = qkv.shape[0]
        out = qkv.new_empty(rows, bound.width)
        error = self._kernels.attention_layer(  # type: ignore[union-attr, attr-defined]
            step.address, bound.address, *plan.arguments, qkv.data_ptr(), out.data_ptr()
        )
        if error:
            check_error(error)
        if rows > metadata.num_tokens:
            out[metadata.num_tokens :] = 0
        return out

    def _bind(self, qkv: torch.Tensor, layer: AttentionLayerSpec, kv_cache: KVCache, metadata: AttentionMetadata) -> _Layer | None:
        """The layer's arguments, kept between steps; None where the kernels don't cover it."""
        if self._kernels is None:
            return None
        bound = self._layers.get(id(layer))
        if bound is not None and bound.layer is layer and bound.cache is kv_cache and bound.dtype is qkv.dtype:
            return bound
        if not usable(qkv, layer, kv_cache, metadata.block_size):
            return None
        bound = self._layers[id(layer)] = _Layer(layer, kv_cache, qkv.dtype)
        return bound


def _forward_reference(qkv: torch.Tensor, layer: AttentionLayerSpec, kv_cache: KVCache, metadata: AttentionMetadata) -> torch.Tensor:
    rope_and_write_kv_reference(qkv, layer, kv_cache, metadata)
    out = qkv.new_empty(qkv.shape[0], layer.num_heads * layer.head_dim)
    return paged_attention_reference(qkv, layer, kv_cache, metadata, out)
