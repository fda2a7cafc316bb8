"""How a layer's width is cut over the ranks of a group."""

from __future__ import annotations

from octavo.errors import ConfigError


def divide(total: int, size: int, what: str) -> int:
    """``total / size``. ConfigError naming ``what`` (a plural) and the sizes that would work, if it is not whole."""
    if total % size:
        sizes = [s for s in range(1, min(total, 64) + 1) if total % s == 0]
        raise ConfigError(_refusal(f"{total} {what} are not divisible by the parallel size {size}", sizes))
    return total // size


def local_heads(num_heads: int, num_kv_heads: int, size: int) -> tuple[int, int]:
    """(query heads, KV heads) of one rank. With more ranks than KV heads, each KV head is held by several ranks.

    ConfigError naming the head counts and the sizes that would work, if the heads can't be cut evenly.
    """
    if not _heads_fit(num_heads, num_kv_heads, size):
        sizes = [s for s in range(1, num_heads + 1) if _heads_fit(num_heads, num_kv_heads, s)]
        what = f"The model's {num_heads} attention heads and {num_kv_heads} KV heads"
        raise ConfigError(_refusal(f"{what} are not divisible by the parallel size {size}", sizes))
    return num_heads // size, max(1, num_kv_heads // size)


def _heads_fit(num_heads: int, num_kv_heads: int, size: int) -> bool:
    return num_heads % size == 0 and (num_kv_heads % size == 0 or size % num_kv_heads == 0)


def _refusal(problem: str, sizes: list[int]) -> str:
    return f"{problem}. Sizes that would work: {', '.join(map(str, sizes))} (--tensor-parallel-size)."
