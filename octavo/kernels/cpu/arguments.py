"""Turns a step's metadata and a layer's specification into the structures that the C attention kernels read."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import torch

from octavo.kernels.cpu.library import ERRORS, MAX_GROUP, MAX_HEAD_DIM, TYPE_CODES, LayerArgs, Library, StepArgs, Task, address
from octavo.kernels.kv_cache import KVCache

if TYPE_CHECKING:
    from octavo.attention.base import AttentionLayerSpec, AttentionMetadata


def usable(qkv: torch.Tensor, layer: AttentionLayerSpec, kv_cache: KVCache, block_size: int) -> bool:
    """Whether the C kernels cover this case. They want whole vectors, whole groups of heads and plain memory."""
    dim, heads, kv_heads = layer.head_dim, layer.num_heads, layer.num_kv_heads
    return (
        qkv.is_cpu
        and qkv.dtype in TYPE_CODES
        and qkv.is_contiguous()
        and all(c.dtype == qkv.dtype and c.is_contiguous() for c in kv_cache)
        and covers(qkv.dtype, dim, heads, kv_heads, block_size)
        and all(w is None or (w.dtype == qkv.dtype and w.is_contiguous()) for w in (layer.q_norm, layer.k_norm))
        and (layer.rope_cos_sin is None or (layer.rope_cos_sin.dtype == torch.float32 and layer.rope_cos_sin.is_contiguous()))
    )


def covers(dtype: torch.dtype, head_dim: int, num_heads: int, num_kv_heads: int, block_size: int) -> bool:
    return (
        dtype in TYPE_CODES
        and head_dim % 16 == 0
        and 0 < head_dim <= MAX_HEAD_DIM
        and num_heads % num_kv_heads == 0
        and num_heads // num_kv_heads <= MAX_GROUP
        and block_size % 8 == 0
        and (block_size % 64 == 0 or 64 % block_size == 0)
    )


def step_args(metadata: AttentionMetadata) -> tuple[StepArgs, tuple[torch.Tensor, ...]]:
    """The structure, and the tensors that it points into: keep them as long as it is used."""
    int64, int32 = torch.int64, torch.int32
    held = tuple(
        tensor.to(dtype).contiguous()
        for tensor, dtype in (
            (metadata.positions, int64), (metadata.slots, int64),
            (metadata.query_start, int32), (metadata.seq_lens, int32), (metadata.block_tables, int32),
        )
    )  # fmt: skip
    positions, slots, query_start, seq_lens, tables = held
    n, s = metadata.num_tokens, metadata.num_seqs
    if len(positions) < n or len(slots) < n or len(query_start) < s + 1 or len(seq_lens) < s or len(tables) < s:
        raise ValueError(f"Attention metadata is shorter than its {n} tokens and {s} sequences.")
    stride = tables.shape[1] if tables.dim() == 2 else 0
    return StepArgs(n, s, metadata.block_size, stride, *(t.data_ptr() for t in held)), held


def layer_args(layer: AttentionLayerSpec, kv_cache: KVCache) -> LayerArgs:
    """Points into the layer's and the cache's tensors, which must outlive it."""
    k, v = kv_cache
    table = layer.rope_cos_sin
    if k.shape[1:3].numel() * k.shape[4] != layer.num_kv_heads * layer.head_dim:
        raise ValueError(f"The KV cache {tuple(k.shape)} was not made for {layer.num_kv_heads} KV heads of {layer.head_dim}.")
    return LayerArgs(
        type=TYPE_CODES[k.dtype],
        num_heads=layer.num_heads,
        num_kv_heads=layer.num_kv_heads,
        head_dim=layer.head_dim,
        num_blocks=k.shape[0],
        k_cache=k.data_ptr(),
        v_cache=v.data_ptr(),
        rope=address(table),
        rope_rows=0 if table is None else table.shape[0],
        rotary_dim=0 if table is None else table.shape[1],
        interleaved=int(layer.rope_interleaved),
        q_norm=address(layer.q_norm),
        k_norm=address(layer.k_norm),
        window=layer.sliding_window or 0,
        threads=torch.get_num_threads(),
        eps=layer.norm_eps,
        scale=layer.scale,
        soft_cap=layer.logit_soft_cap or 0.0,
    )


class AttentionPlan:
    """The task list of a step, good for every layer with the same heads, window and threads. Raises ValueError."""

    def __init__(self, kernels: Library, step: StepArgs, layer: LayerArgs) -> None:
        needs = (ctypes.c_int64 * 2)()
        capacity = layer.num_kv_heads * (4 * layer.threads + step.num_seqs + step.num_tokens // 8)  # a guess that is seldom short
        while True:
            self.tasks = torch.empty(max(1, capacity * ctypes.sizeof(Task)), dtype=torch.uint8)
            count = kernels.attention_plan(ctypes.byref(step), ctypes.byref(layer), self.tasks.data_ptr(), capacity, needs)  # type: ignore[attr-defined]
            if count < 0:
                raise ValueError(f"Attention metadata is inconsistent: {ERRORS[4]}.")
            if count <= capacity:
                break
            capacity = count
        self.slots = torch.empty(needs[0], dtype=torch.float32)
        self.arrived = torch.empty(needs[1], dtype=torch.int32)
        # tasks, their number, partial results, arrivals, split groups: as the kernels take them
        self.arguments: tuple[Any, ...] = (self.tasks.data_ptr(), count, self.slots.data_ptr(), self.arrived.data_ptr(), needs[1])


def check_error(code: int) -> None:
    """IndexError for what a kernel found to be out of range."""
    if code:
        raise IndexError(f"Attention: {ERRORS.get(code, f'error {code}')}.")
