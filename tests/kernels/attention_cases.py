"""Random steps for attention tests: shuffled blocks, stale garbage around the valid tokens, mixed decodes and chunks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from octavo.attention.base import AttentionLayerSpec, AttentionMetadata
from octavo.kernels.kv_cache import KVCache, make_kv_cache, write_reference

POISON = {torch.float32: float("nan"), torch.bfloat16: float("nan"), torch.float16: float("nan")}


@dataclass
class Case:
    """A step over sequences whose K and V are all known: ``keys[s]``, ``values[s]`` are [length, kv_heads, head_dim]."""

    layer: AttentionLayerSpec
    metadata: AttentionMetadata
    cache: KVCache
    qkv: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]


def make_layer(heads: int = 4, kv_heads: int = 2, head_dim: int = 64, **options: object) -> AttentionLayerSpec:
    return AttentionLayerSpec(0, heads, kv_heads, head_dim, head_dim**-0.5, **options)  # type: ignore[arg-type]


def rope_table(positions: int, rotary_dim: int) -> torch.Tensor:
    angles = torch.arange(positions)[:, None] * 10000.0 ** (-torch.arange(0, rotary_dim, 2) / rotary_dim)
    return torch.cat((angles.cos(), angles.sin()), dim=-1).float()


def make_metadata(lengths: list[int], counts: list[int], block_size: int, tables: list[list[int]]) -> AttentionMetadata:
    """Sequences of ``lengths`` tokens after the step, of which the last ``counts`` run in it."""
    positions, slots = [], []
    for length, count, table in zip(lengths, counts, tables, strict=True):
        for p in range(length - count, length):
            positions.append(p)
            slots.append(table[p // block_size] * block_size + p % block_size)
    width = max(map(len, tables))
    decodes = next((i for i, c in enumerate(counts) if c != 1), len(counts))
    return AttentionMetadata(
        num_tokens=sum(counts),
        num_seqs=len(counts),
        num_decodes=decodes,
        max_query_len=max(counts),
        max_seq_len=max(lengths),
        block_size=block_size,
        positions=torch.tensor(positions),
        slots=torch.tensor(slots),
        query_start=torch.tensor([0, *counts]).cumsum(0).int(),
        seq_lens=torch.tensor(lengths).int(),
        # past a table's end lies what must never be followed
        block_tables=torch.tensor([t + [2**30] * (width - len(t)) for t in tables]).int(),
    )


def make_tables(lengths: list[int], block_size: int, generator: torch.Generator) -> tuple[list[list[int]], int]:
    needed = [-(-n // block_size) for n in lengths]
    total = sum(needed) + 3
    ids = torch.randperm(total, generator=generator).tolist()
    return [[ids.pop() for _ in range(n)] for n in needed], total


def make_case(layer: AttentionLayerSpec, lengths: list[int], counts: list[int], block_size: int, dtype: torch.dtype, seed: int = 0) -> Case:
    """The cache holds every token of every sequence, the run ones too; everything else in it is NaN."""
    g = torch.Generator().manual_seed(seed)
    tables, total = make_tables(lengths, block_size, g)
    metadata = make_metadata(lengths, counts, block_size, tables)
    cache = make_kv_cache(total, block_size, layer.num_kv_heads, layer.head_dim, dtype, torch.device("cpu"))
    for part in cache:
        part.fill_(POISON[dtype])
    keys, values = ([torch.randn(n, layer.num_kv_heads, layer.head_dim, generator=g).to(dtype) for n in lengths] for _ in range(2))
    for s, length in enumerate(lengths):
        slots = torch.tensor([tables[s][p // block_size] * block_size + p % block_size for p in range(length)])
        write_reference(cache, slots, keys[s], values[s])
    qkv = torch.randn(metadata.num_tokens, (layer.num_heads + 2 * layer.num_kv_heads) * layer.head_dim, generator=g).to(dtype)
    return Case(layer, metadata, cache, qkv, keys, values)
