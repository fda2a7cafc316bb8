"""Per-head RMSNorm of q and k, rotary embedding (Su et al. 2021, arXiv:2104.09864), and K and V into the paged cache."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

from octavo.kernels.cpu.arguments import check_error, layer_args, step_args, usable
from octavo.kernels.cpu.library import library
from octavo.kernels.kv_cache import KVCache, write_reference

if TYPE_CHECKING:
    from octavo.attention.base import AttentionLayerSpec, AttentionMetadata


def rope_and_write_kv_reference(qkv: torch.Tensor, layer: AttentionLayerSpec, kv_cache: KVCache, metadata: AttentionMetadata) -> None:
    """See ``rope_and_write_kv``."""
    n, heads, kv_heads = metadata.num_tokens, layer.num_heads, layer.num_kv_heads
    q, k, v = qkv[:n].view(n, -1, layer.head_dim).split([heads, kv_heads, kv_heads], dim=1)
    for x, weight in ((q, layer.q_norm), (k, layer.k_norm)):
        if weight is not None:
            wide = x.float()
            normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + layer.norm_eps)
            x.copy_(normed.to(x.dtype) * weight)
        if layer.rope_cos_sin is not None:
            x.copy_(_rotate(x.float(), layer.rope_cos_sin[metadata.positions[:n]], layer.rope_interleaved))
    write_reference(kv_cache, metadata.slots[:n], k, v)


def _rotate(x: torch.Tensor, table: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """x [T, heads, dim], table [T, rotary] -> x with its first ``rotary`` channels rotated."""
    rotary = table.shape[-1]
    cos, sin = table.unsqueeze(1).chunk(2, dim=-1)
    a, b = (x[..., 0:rotary:2], x[..., 1:rotary:2]) if interleaved else x[..., :rotary].chunk(2, dim=-1)
    turned = (a * cos - b * sin, b * cos + a * sin)
    turned = torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)
    return torch.cat((turned, x[..., rotary:]), dim=-1)


def rope_and_write_kv(qkv: torch.Tensor, layer: AttentionLayerSpec, kv_cache: KVCache, metadata: AttentionMetadata) -> None:
    """Normalize and rotate q and k in place, then write K and V of every token to its slot.

    qkv: [T, (num_heads + 2 * num_kv_heads) * head_dim], contiguous, T >= metadata.num_tokens; rows past that are left alone.
    Slot -1 writes nothing. IndexError for a slot or position out of range (the other tokens may have been written).
    """
    kernels = library()
    if kernels is None or not usable(qkv, layer, kv_cache, metadata.block_size):
        rope_and_write_kv_reference(qkv, layer, kv_cache, metadata)
        return
    step, held = step_args(metadata)
    error = kernels.rope_and_write_kv(ctypes.byref(step), ctypes.byref(layer_args(layer, kv_cache)), qkv.data_ptr())  # type: ignore[attr-defined]
    del held
    check_error(error)
