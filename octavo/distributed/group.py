"""A group of ranks that share every layer of a model, and its collectives.

A group is an object that is passed to whatever needs it, never a global. The base class is the group of one rank, whose
collectives return their argument; transports for several ranks override the three collectives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class Group:
    """Rank ``rank`` of ``size``. Every rank must make the same calls in the same order.

    Results may share memory with the argument, so a caller that still needs ``x`` must copy it first.
    """

    def __init__(self, rank: int, size: int) -> None:
        if not 0 <= rank < size:
            raise ValueError(f"rank must be in [0, {size}), got {rank}")
        self.rank = rank
        self.size = size

    @classmethod
    def single(cls) -> Group:
        """The group of one rank."""
        return Group(0, 1)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' ``x`` (equal shapes and dtypes), on every rank."""
        return self._only_for_one_rank(x, "all_reduce")

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """All ranks' ``x`` (equal shapes), concatenated along ``dim`` in rank order, on every rank."""
        return self._only_for_one_rank(x, "all_gather")

    def broadcast(self, x: torch.Tensor, source: int = 0) -> torch.Tensor:
        """Rank ``source``'s ``x`` on every rank."""
        return self._only_for_one_rank(x, "broadcast")

    def _only_for_one_rank(self, x: torch.Tensor, name: str) -> torch.Tensor:
        if self.size > 1:
            raise NotImplementedError(f"{type(self).__name__}.{name}: a group of {self.size} ranks needs a transport")
        return x

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank={self.rank}, size={self.size})"
