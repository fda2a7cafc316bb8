"""Token embedding and output head, cut by vocabulary: rank r holds the ids [r * rows, (r + 1) * rows).

``rows`` is rounded up, so any vocabulary fits any group; rows past the vocabulary's end are zero and never looked up.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from octavo.distributed.group import Group
from octavo.layers import ops
from octavo.layers.slots import WeightSlot, empty_parameter
from octavo.quantization.base import LinearPart, LinearScheme


def vocab_range(vocab_size: int, group: Group) -> tuple[int, int, int]:
    """(rows held by each rank, first id of this rank, how many of its rows are real)."""
    rows = -(-vocab_size // group.size)
    start = min(group.rank * rows, vocab_size)
    return rows, start, min(rows, vocab_size - start)


class VocabParallelEmbedding(nn.Module):
    """token_ids int64 [T] -> [T, hidden_size]. Ids must lie in [0, vocab_size); nothing checks them here."""

    def __init__(self, vocab_size: int, hidden_size: int, *, group: Group, dtype: torch.dtype) -> None:
        super().__init__()
        self.group = group
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.rows, self.start, self.count = vocab_range(vocab_size, group)
        self.weight = empty_parameter(self.rows, hidden_size, dtype=dtype)
        self.weight.data[self.count :].zero_()

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self.group.size == 1:
            return ops.embedding(token_ids, self.weight)
        local = token_ids - self.start
        mine = (local >= 0) & (local < self.count)
        found = F.embedding(local.where(mine, 0), self.weight)
        return self.group.all_reduce(found.masked_fill(~mine[:, None], 0))

    def weight_slots(self, prefix: str) -> Iterator[tuple[str, WeightSlot]]:
        yield (
            f"{prefix}.weight",
            WeightSlot(
                parameter=self.weight,
                destination=self.weight.data.narrow(0, 0, self.count),
                shape=(self.vocab_size, self.hidden_size),
                cuts=((0, self.start, self.count),),
            ),
        )


class ParallelLMHead(nn.Module):
    """hidden [R, hidden_size] -> logits float32 [R, vocab_size], whole on every rank (``raw``: not converted to float32).

    ``tied`` is the embedding whose weight the head uses; None gives the head its own weight.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        group: Group,
        scheme: LinearScheme,
        dtype: torch.dtype,
        tied: VocabParallelEmbedding | None = None,
    ) -> None:
        super().__init__()
        self.group = group
        self.scheme = scheme
        self.vocab_size = vocab_size
        rows, start, count = vocab_range(vocab_size, group)
        self.part = LinearPart(None, vocab_size, start, count, 0, hidden_size, 0, hidden_size)
        self.tied = tied is not None
        if tied is None:
            scheme.create_weights(self, hidden_size, rows, dtype)
        else:
            scheme.share_weight(self, tied.weight)

    def forward(self, hidden: torch.Tensor, *, raw: bool = False) -> torch.Tensor:
        logits = self.scheme.apply(self, hidden, None)
        if self.group.size > 1:
            logits = self.group.all_gather(logits, dim=-1)[:, : self.vocab_size]
        return logits if raw else logits.float()

    def weight_slots(self, prefix: str) -> Iterator[tuple[str, WeightSlot]]:
        if self.tied:
            return
        for suffix, slot in self.scheme.load(self, self.part):
            yield f"{prefix}.{suffix}", slot

    def finalize(self) -> None:
        self.scheme.finalize(self)
