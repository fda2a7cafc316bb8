"""How large the KV cache may be, and what to say when it doesn't fit."""

from __future__ import annotations

import os
from dataclasses import dataclass

from octavo.config import EngineConfig
from octavo.errors import OutOfMemoryError
from octavo.models.config import ModelConfig

GIB = 2**30
CPU_DEFAULT_KV_BYTES = 4 * GIB
CPU_DEFAULT_KV_SHARE = 0.4  # of the memory that is free at start


@dataclass(frozen=True)
class KvBudget:
    """num_blocks KV blocks of block_bytes each (all layers together)."""

    num_blocks: int
    block_bytes: int


def kv_block_bytes(model: ModelConfig, block_size: int, dtype_bytes: int, num_kv_heads: int | None = None) -> int:
    """Bytes of one block: K and V of ``block_size`` tokens in every layer, on one rank."""
    heads = model.num_kv_heads if num_kv_heads is None else num_kv_heads
    return 2 * model.num_layers * heads * model.head_dim * block_size * dtype_bytes


def available_memory() -> int:
    """Bytes of main memory that can still be taken, counting a container's limit."""
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    available = int(line.split()[1]) * 1024
        with open("/sys/fs/cgroup/memory.max") as limit, open("/sys/fs/cgroup/memory.current") as used:
            text = limit.read().strip()
            if text != "max":
                available = min(available, int(text) - int(used.read()) + _droppable_cache())
    except (OSError, ValueError):
        pass
    return max(available, 0)


def _droppable_cache() -> int:
    """File cache that counts as used in the container, but is given up when memory is asked for: the model file just read."""
    with open("/sys/fs/cgroup/memory.stat") as file:
        return sum(int(line.split()[1]) for line in file if line.startswith(("inactive_file ", "active_file ")))


def kv_budget(config: EngineConfig, model: ModelConfig, *, max_model_len: int, dtype_bytes: int, free_bytes: int, on_cpu: bool) -> KvBudget:
    """Blocks for the KV cache out of ``free_bytes`` (what is left after weights and activations).

    Raises OutOfMemoryError when not even one sequence of ``max_model_len`` fits, naming the flags that would help.
    """
    block_bytes = kv_block_bytes(model, config.block_size, dtype_bytes)
    blocks_per_sequence = -(-max_model_len // config.block_size)
    if config.num_gpu_blocks_override is not None:
        if config.num_gpu_blocks_override * block_bytes > free_bytes:
            raise OutOfMemoryError(
                f"--num-gpu-blocks-override asks for {_gib(config.num_gpu_blocks_override * block_bytes)}, but only {_gib(free_bytes)} of "
                f"memory is free beside the weights. Ask for at most {max(free_bytes, 0) // block_bytes} blocks."
            )
        return KvBudget(config.num_gpu_blocks_override, block_bytes)
    if config.kv_cache_memory is not None:
        budget, source = config.kv_cache_memory, "--kv-cache-memory"
        if budget > free_bytes:
            raise OutOfMemoryError(
                f"--kv-cache-memory asks for {_gib(budget)}, but only {_gib(free_bytes)} of memory is free beside the weights. "
                f"Ask for at most {free_bytes // 2**20}M."
            )
    elif on_cpu:
        budget, source = min(CPU_DEFAULT_KV_BYTES, int(free_bytes * CPU_DEFAULT_KV_SHARE)), "the free memory"
    else:
        budget, source = free_bytes, "--gpu-memory-utilization"
    num_blocks = max(budget, 0) // block_bytes
    # More than every running sequence at full length could use is of use to the prefix cache alone.
    if num_blocks < blocks_per_sequence:
        fits = num_blocks * config.block_size
        need = blocks_per_sequence * block_bytes
        raise OutOfMemoryError(
            f"The KV cache is too small for --max-model-len {max_model_len}: one such sequence needs {_gib(need)}, "
            f"and {source} leaves {_gib(max(budget, 0))}, short by {_gib(need - max(budget, 0))}. "
            + (f"Use --max-model-len {fits} or less, or " if fits else "Free memory, use a smaller model, or ")
            + ("give more with --kv-cache-memory." if on_cpu else "raise --gpu-memory-utilization, or give --kv-cache-memory.")
        )
    return KvBudget(num_blocks, block_bytes)


def _gib(count: int) -> str:
    if count >= GIB // 10:
        return f"{count / GIB:.2f} GiB"
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count / 2**10:.1f} KiB"
