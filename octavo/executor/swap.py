"""CPU memory for swapped-out blocks: how much of it, and the copies there and back.

A block's K and V lie apart on the device, a piece in each layer's tensors, and together in CPU memory:

    device   tensor 0 [blocks, words 0], tensor 1 [blocks, words 1], …       staging [some blocks, all words]
    CPU      [CPU blocks, all words]

So a few blocks are gathered into the staging buffer, a kernel a tensor, and go over in one copy for each run of neighbouring CPU
blocks; and the other way round. All of it is put on the stream that runs the steps, which keeps the order; nothing waits for it.
On the CPU the same is plain copies.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from octavo.config import EngineConfig
from octavo.errors import ConfigError, OutOfMemoryError
from octavo.executor.footprint import staging_bytes
from octavo.executor.memory import GIB, gib
from octavo.kernels.upload import upload

logger = logging.getLogger("octavo.executor")

# A CPU's memory is the KV cache's own: --kv-cache-memory makes better use of it. For a GPU each GiB takes a quarter of a second at
# every start, for preemptions that most servers never see.
AUTO_GIB = {"cuda": 0.0, "cpu": 0.0}
AUTO_SHARE = 0.25  # of the available memory, at most, without being asked
MOST_SHARE = 0.9  # when asked: the rest is for the processes around
WORD = torch.int64  # a block's piece of a tensor is a multiple of 8 bytes: it has at least 8 tokens

Moves = list[tuple[int, int]]


def num_swap_blocks(config: EngineConfig, block_bytes: int, max_model_len: int, device_type: str, available: int) -> int:
    """How many CPU blocks --swap-space means. ``available``: bytes of main memory that can be taken.

    OutOfMemoryError if it asks for more, ConfigError if it holds not a single block. More than the longest sequence of every row
    is not taken: so many hardly ever wait.
    """
    useful = config.rows * -(-max_model_len // config.block_size)
    if config.swap_space is None:
        return min(int(min(AUTO_GIB[device_type] * GIB, max(available, 0) * AUTO_SHARE)) // block_bytes, useful)
    blocks = min(int(config.swap_space * GIB) // block_bytes, useful)
    if config.swap_space and not blocks:
        raise ConfigError(
            f"--swap-space {config.swap_space:g} (GiB) is less than one block: {config.block_size} tokens take {gib(block_bytes)}. "
            "Give more, or 0 to recompute preempted sequences."
        )
    most = int(max(available, 0) * MOST_SHARE)
    if blocks * block_bytes > most:
        fits = most // block_bytes * block_bytes * 100 // GIB / 100
        raise OutOfMemoryError(
            f"--swap-space {config.swap_space:g} asks for {gib(blocks * block_bytes)} of main memory, but only {gib(max(available, 0))} "
            f"is available. Ask for at most {fits:g}, or for 0 to recompute preempted sequences."
        )
    return blocks


class HostMemory:
    """Main memory, as WORDs; for a GPU page-locked, because copies to or from other memory would make the host wait for the stream.

    OutOfMemoryError if the system refuses. Not ``pin_memory=True``: that rounds up to a power of two, and keeps the memory when
    the tensor is gone.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.words = torch.empty(num_bytes // WORD.itemsize, dtype=WORD)
        if device.type != "cuda":
            return
        torch.cuda.set_device(device.index or 0)  # each thread has one of its own
        cudart: Any = torch.cuda.cudart()
        error = int(cudart.cudaHostRegister(self.words.data_ptr(), num_bytes, 0))
        if error:
            raise OutOfMemoryError(
                f"{gib(num_bytes)} of main memory could not be page-locked for --swap-space (CUDA error {error}). Give less, "
                "or 0 to recompute preempted sequences."
            )
        weakref.finalize(self, _unlock, self.words).atexit = False  # it holds the tensor, so unlocking comes before freeing


def _unlock(words: torch.Tensor) -> None:
    torch.cuda.synchronize()
    cudart: Any = torch.cuda.cudart()
    cudart.cudaHostUnregister(words.data_ptr())


class SwapSpace:
    """Moves blocks between the KV caches and CPU memory. ``block_s``: seconds that one block takes, either way, measured here."""

    def __init__(self, memory: HostMemory, staging: torch.Tensor, kv_caches: list[Any]) -> None:
        """``staging``: where blocks lie together on the device on their way, WORD [some blocks, words of one]. ``kv_caches``: one per
        layer, as the backend made them, each a contiguous tensor or several, whose dimension 0 counts blocks."""
        tensors = [t for cache in kv_caches for t in (cache if isinstance(cache, (tuple, list)) else (cache,))]
        self.tensors = [t.view(len(t), -1).view(WORD) for t in tensors]
        self.device = staging.device
        self.staging = staging
        self.memory = memory
        self.host = memory.words.view(-1, staging.shape[1])
        words = sum(t.shape[1] for t in self.tensors)
        if words != staging.shape[1]:
            raise RuntimeError(f"a block has {words * WORD.itemsize} bytes, and {staging.shape[1] * WORD.itemsize} were planned for")
        self.block_s = self._measure()

    @property
    def num_blocks(self) -> int:
        return len(self.host)

    def move(self, outs: Moves, ins: Moves) -> None:
        """First all ``outs`` (device block, CPU block), then all ``ins`` (CPU block, device block). No target is named twice."""
        for part, ids in self._parts([(place, block) for block, place in outs]):
            self._gather(ids)
            for start, place, count in _runs(part):
                self.host[place : place + count].copy_(self.staging[start : start + count], non_blocking=True)
        for part, ids in self._parts(ins):
            for start, place, count in _runs(part):
                self.staging[start : start + count].copy_(self.host[place : place + count], non_blocking=True)
            self._scatter(ids)

    def _parts(self, moves: Moves) -> Iterator[tuple[list[int], torch.Tensor]]:
        """As many of the moves (CPU block, device block) as the staging buffer holds at a time: CPU blocks, ascending; device blocks."""
        moves = sorted(moves)
        size = len(self.staging)
        for begin in range(0, len(moves), size):
            part = moves[begin : begin + size]
            yield [place for place, _ in part], upload(np.array([b for _, b in part], dtype=np.int64), torch.int64, self.device)

    def _gather(self, ids: torch.Tensor) -> None:
        begin = 0
        for tensor in self.tensors:
            end = begin + tensor.shape[1]
            self.staging[: len(ids), begin:end] = tensor.index_select(0, ids)
            begin = end

    def _scatter(self, ids: torch.Tensor) -> None:
        begin = 0
        for tensor in self.tensors:
            end = begin + tensor.shape[1]
            tensor.index_copy_(0, ids, self.staging[: len(ids), begin:end])
            begin = end

    @torch.inference_mode()
    def _measure(self) -> float:
        """Move some blocks out and back, before anybody's are there; the second time, for the first has to wake things up."""
        count = min(len(self.staging), self.num_blocks, len(self.tensors[0]))
        pairs = [(i, i) for i in range(count)]
        seconds = 0.0
        for _ in range(2):
            self._wait()
            start = time.perf_counter()
            self.move(pairs, pairs)
            self._wait()
            seconds = time.perf_counter() - start
        return seconds / 2 / count

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class SwapSetup:
    """Makes a ``SwapSpace`` in two steps around the slow parts of an executor's start."""

    def __init__(self, config: EngineConfig, block_bytes: int, max_model_len: int, device: torch.device) -> None:
        self.config, self.block_bytes, self.max_model_len, self.device = config, block_bytes, max_model_len, device
        self.memory: Future[HostMemory] | None = None
        self.staging: torch.Tensor | None = None

    def take(self, available: int) -> None:
        """Decide how much (see ``num_swap_blocks`` for errors), and begin to take it: to lock 4 GiB takes about a second, so a thread
        does it. The staging buffer is made here, so that whoever measures the device's free memory later finds it taken."""
        blocks = num_swap_blocks(self.config, self.block_bytes, self.max_model_len, self.device.type, available)
        if not blocks:
            return
        size = min(staging_bytes(self.block_bytes, self.device.type) // self.block_bytes, blocks)
        self.staging = torch.empty(size, self.block_bytes // WORD.itemsize, dtype=WORD, device=self.device)
        thread = ThreadPoolExecutor(1, thread_name_prefix="swap-space")
        self.memory = thread.submit(HostMemory, blocks * self.block_bytes, self.device)
        thread.shutdown(wait=False)

    def finish(self, kv_caches: list[Any]) -> SwapSpace | None:
        """None without a swap tier. OutOfMemoryError if one was asked for and the system refused."""
        if self.memory is None or self.staging is None:
            return None
        try:
            memory = self.memory.result()
        except OutOfMemoryError as error:
            if self.config.swap_space is not None:
                raise
            logger.warning("Preempted sequences will be recomputed, not swapped out: %s", error)
            return None
        space = SwapSpace(memory, self.staging, kv_caches)
        logger.debug("swap space: %d blocks; moving one takes %.3f ms", space.num_blocks, space.block_s * 1e3)
        return space


def _runs(places: list[int]) -> Iterator[tuple[int, int, int]]:
    """(index, place, count) of each run of neighbours among ascending places."""
    start = 0
    for end in range(1, len(places) + 1):
        if end == len(places) or places[end] != places[end - 1] + 1:
            yield start, places[start], end - start
            start = end
