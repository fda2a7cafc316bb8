"""A group whose ranks are threads of this process: real collectives, no transport."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from octavo.distributed.group import Group

T = TypeVar("T")


class ThreadGroup(Group):
    def __init__(self, rank: int, size: int, barrier: threading.Barrier, board: list) -> None:
        super().__init__(rank, size)
        self.barrier = barrier
        self.board = board

    def _exchange(self, x: torch.Tensor) -> list[torch.Tensor]:
        self.board[self.rank] = x.clone()
        self.barrier.wait()
        everyone = list(self.board)
        self.barrier.wait()
        return everyone

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._exchange(x)).sum(0)

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return torch.cat(self._exchange(x), dim=dim)

    def broadcast(self, x: torch.Tensor, source: int = 0) -> torch.Tensor:
        return self._exchange(x)[source]


def run_ranks(size: int, work: Callable[[Group], T]) -> list[T]:
    """``work(group)`` on every rank at once -> its results in rank order. A failing rank fails the call."""
    barrier, board = threading.Barrier(size, timeout=60), [None] * size

    def run(rank: int) -> T:
        try:
            return work(ThreadGroup(rank, size, barrier, board))
        except BaseException:
            barrier.abort()  # or the others would wait for this rank
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
        errors = [f.exception() for f in futures]
        for error in errors:
            if error is not None and not isinstance(error, threading.BrokenBarrierError):
                raise error
        return [f.result() for f in futures]
