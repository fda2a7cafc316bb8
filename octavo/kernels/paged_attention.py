"""Attention over the paged KV cache, decodes and chunks alike."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

from octavo.kernels.cpu.arguments import AttentionPlan, check_error, layer_args, step_args, usable
from octavo.kernels.cpu.library import library
from octavo.kernels.kv_cache import KVCache, read_reference

if TYPE_CHECKING:
    from octavo.attention.base import AttentionLayerSpec, AttentionMetadata


def paged_attention_reference(
    qkv: torch.Tensor, layer: AttentionLayerSpec, kv_cache: KVCache, metadata: AttentionMetadata, out: torch.Tensor
) -> torch.Tensor:
    """See ``paged_attention``. Loops over sequences and gathers each one's whole context."""
    heads, dim, group = layer.num_heads, layer.head_dim, layer.num_heads // layer.num_kv_heads
    starts, lengths = metadata.query_start.tolist(), metadata.seq_lens.tolist()
    out.zero_()
    rows = out.view(-1, heads, dim)
    for s in range(metadata.num_seqs):
        begin, end, length = starts[s], starts[s + 1], lengths[s]
        if begin == end:
            continue
        k, v = (x.float().repeat_interleave(group, dim=1) for x in read_reference(kv_cache, metadata.block_tables[s], length))
        q = qkv[begin:end, : heads * dim].view(-1, heads, dim).float()
        scores = torch.einsum("qhd,khd->hqk", q, k) * layer.scale
        if layer.logit_soft_cap:
            scores = layer.logit_soft_cap * torch.tanh(scores / layer.logit_soft_cap)
        key, query = torch.arange(length), torch.arange(length - (end - begin), length)[:, None]
        visible = key <= query
        if layer.sliding_window:
            visible &= key > query - layer.sliding_window
        weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
        rows[begin:end] = torch.einsum("hqk,khd->qhd", weights, v).to(out.dtype)
    return out


def paged_attention(
    qkv: torch.Tensor,
    layer: AttentionLayerSpec,
    kv_cache: KVCache,
    metadata: AttentionMetadata,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Every run token attends to its sequence's cached keys, its own included, up to its own position.

    qkv: [T, (num_heads + 2 * num_kv_heads) * head_dim] as ``rope_and_write_kv`` leaves it; only q is read.
    out: [T, num_heads * head_dim] in qkv's dtype; rows of no sequence become zero. Returned; made if it is None.

    A token's result has the same bits whatever else is in the batch, however its prompt was cut into chunks, and for any
    number of threads (float32, bfloat16 and float16 alike, given equal q and cache content): each row passes over the keys
    in an order that depends on their positions only. Softmax and sums are in float32; with AVX512_BF16 the softmax weights
    of bfloat16 caches are rounded to bfloat16 before they meet V.
    Raises IndexError for a block id outside the cache, ValueError for lengths that contradict each other.
    """
    if out is None:
        out = qkv.new_empty(qkv.shape[0], layer.num_heads * layer.head_dim)
    kernels = library()
    if kernels is None or not usable(qkv, layer, kv_cache, metadata.block_size):
        return paged_attention_reference(qkv, layer, kv_cache, metadata, out)
    step, held = step_args(metadata)
    arguments = layer_args(layer, kv_cache)
    plan = AttentionPlan(kernels, step, arguments)
    error = kernels.paged_attention(ctypes.addressof(step), ctypes.addressof(arguments), *plan.arguments, qkv.data_ptr(), out.data_ptr())  # type: ignore[attr-defined]
    del held
    check_error(error)
    out[metadata.num_tokens :] = 0
    return out
