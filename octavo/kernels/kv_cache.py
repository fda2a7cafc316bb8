"""The CPU's paged KV cache: its layout, and slow access to it for the references."""

from __future__ import annotations

import math

import numpy as np
import torch

TOUCHED_BYTES = 8 * 2**20  # of each layer's K, and of its V: half a gigabyte for 30 layers

KVCache = tuple[torch.Tensor, torch.Tensor]


def make_kv_cache(num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> KVCache:
    """One layer's (K, V), zeroed.

    With P = 4 bytes / element size (2 for 16-bit types, 1 for float32), contiguous:
        K [num_blocks, num_kv_heads, head_dim / P, block_size, P]
        V [num_blocks, num_kv_heads, block_size / P, head_dim, P]
    so that a vector load brings neighbouring tokens of K and neighbouring dimensions of V, in the pairs that the CPU's bf16
    dot product takes. ValueError for an odd head_dim or block_size in a 16-bit type.
    """
    pair = 4 // dtype.itemsize
    if head_dim % pair or block_size % pair:
        raise ValueError(f"head_dim {head_dim} and block_size {block_size} must be even for {dtype}.")
    return (
        _zeros((num_blocks, num_kv_heads, head_dim // pair, block_size, pair), dtype, device),
        _zeros((num_blocks, num_kv_heads, block_size // pair, head_dim, pair), dtype, device),
    )


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros that take memory where they are touched: numpy asks the system for zeroed pages, torch.zeros writes all of them, which
    takes seconds for the default cache. The first blocks, which are used first, are touched here: a fault costs more than its use.
    """
    if torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    buffer = torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8))
    buffer[:TOUCHED_BYTES].zero_()
    return buffer.view(dtype).view(shape)


def block_size_of(cache: KVCache) -> int:
    return cache[0].shape[3]


def write_reference(cache: KVCache, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Put k, v [T, kv_heads, head_dim] where slots [T] (block * block_size + offset; -1 nowhere) say."""
    kept = slots >= 0
    slots, k, v = slots[kept], k[kept].to(cache[0].dtype), v[kept].to(cache[1].dtype)
    size, pair = block_size_of(cache), cache[0].shape[4]
    blocks, offsets = slots // size, slots % size
    cache[0].permute(0, 3, 1, 2, 4)[blocks, offsets] = k.unflatten(-1, (-1, pair))
    cache[1].permute(0, 2, 4, 1, 3)[blocks, offsets // pair, offsets % pair] = v


def read_reference(cache: KVCache, blocks: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first ``length`` tokens of a block table [n] as K, V [length, kv_heads, head_dim], copied."""
    blocks = blocks[: -(-length // block_size_of(cache))].long()
    k = cache[0][blocks].permute(0, 3, 1, 2, 4).flatten(3).flatten(0, 1)
    v = cache[1][blocks].permute(0, 2, 4, 1, 3).flatten(0, 2)
    return k[:length], v[:length]
