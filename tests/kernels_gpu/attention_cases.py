"""Random paged batches, on whichever device Triton can run on here."""

from __future__ import annotations

import os
from dataclasses import dataclass

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu")
RUNS = INTERPRETED or DEVICE.type == "cuda"
needs_triton = pytest.mark.skipif(not RUNS, reason="needs an NVIDIA GPU, or TRITON_INTERPRET=1 for Triton's interpreter")


def rounding(dtype: torch.dtype) -> dict[str, float]:
    """Tolerance for results of size about 1 that differ by the storage rounding of one or two operations."""
    relative, absolute = {torch.float32: (1e-4, 2e-5), torch.float16: (2e-3, 2e-3)}.get(dtype, (1.6e-2, 1.6e-2))
    return {"rtol": relative, "atol": absolute}


@dataclass
class Batch:
    """Sequences at random blocks, in a table of more rows than sequences."""

    cache: torch.Tensor
    tables: torch.Tensor
    row_index: torch.Tensor
    seq_lens: torch.Tensor
    counts: list[int]

    @property
    def query_start(self) -> torch.Tensor:
        return torch.tensor([0, *self.counts]).cumsum(0).int().to(self.seq_lens.device)

    def positions(self) -> list[int]:
        return [p for length, count in zip(self.seq_lens.tolist(), self.counts, strict=True) for p in range(length - count, length)]

    def slots(self) -> list[int]:
        size = self.cache.shape[3]
        found, at = [], iter(self.positions())
        for row, count in zip(self.row_index.tolist(), self.counts, strict=True):
            for _ in range(count):
                p = next(at)
                found.append(int(self.tables[row, p // size]) * size + p % size)
        return found


def make_batch(
    lengths: list[int],
    counts: list[int],
    kv_heads: int,
    dim: int,
    block_size: int,
    dtype: torch.dtype,
    seed: int = 0,
    cache_dtype: torch.dtype | None = None,
) -> Batch:
    rng = torch.Generator().manual_seed(seed)
    needed = [-(-length // block_size) for length in lengths]
    num_blocks = sum(needed) + 2
    free = torch.randperm(num_blocks, generator=rng).tolist()
    rows = len(lengths) + 2
    tables = torch.full((rows, max([1, *needed]) + 1), num_blocks - 1, dtype=torch.int32)
    row_index = torch.randperm(rows, generator=rng)[: len(lengths)]
    for row, count in zip(row_index.tolist(), needed, strict=True):
        tables[row, :count] = torch.tensor([free.pop() for _ in range(count)], dtype=torch.int32)
    cache = torch.randn(num_blocks, 2, kv_heads, block_size, dim, generator=rng).to(cache_dtype or dtype)
    return Batch(cache.to(DEVICE), tables.to(DEVICE), row_index.to(DEVICE), torch.tensor(lengths, dtype=torch.int32, device=DEVICE), counts)
