"""How decode attention is launched: what ``scripts/gpu/tune_attention.py`` measured, or a rule for shapes nobody measured."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from octavo.kernels.sizes import next_power_of_2

CONFIG_FILE = Path(__file__).with_name("decode_attention_configs.json")
BATCHES = (4, 8, 32, 128)  # sequences: up to each of them, and more than the last, may be launched differently
FIXED = ("block_n", "num_warps", "min_chunk")  # fields that may not


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """How a decode runs. The last bits of a result depend on the first three, which therefore don't change with the batch.

    block_n: tokens a tile, a divisor of ALIGN. min_chunk: tokens, at least, that are summed before they are folded.
    programs_per_sm: how many shall fit one multiprocessor beside each other; registers are rationed for it.
    prefetch: tiles that are asked into L2 before the kernel before has ended; a power of two, or 0.
    min_tiles, seam: see ``plan_decode``.
    """

    block_n: int = 64
    num_warps: int = 4
    min_chunk: int = 256
    num_stages: int = 3
    programs_per_sm: int = 2
    prefetch: int = 2
    min_tiles: int = 4
    seam: int = 4

    def options(self) -> dict[str, int]:
        """For the compiler. 65,536 registers a multiprocessor, of which a thread can have 255."""
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        registers = 65536 // (32 * self.num_warps * self.programs_per_sm) // 8 * 8
        return options | {"maxnreg": registers} if registers < 255 else options


def decode_config(head_dim: int, group: int, dtype: torch.dtype, batch: int = 256) -> DecodeConfig:
    """The launch parameters for a head size, query heads per KV head, cache type and number of sequences."""
    name = str(dtype).removeprefix("torch.")
    found = load_table().get((head_dim, group, name))
    return found[batch_class(batch)] if found else heuristic(head_dim, group, dtype)


def batch_class(batch: int) -> int:
    """The index into BATCHES of the first that is not smaller; len(BATCHES) past them all."""
    return sum(batch > b for b in BATCHES)


def heuristic(head_dim: int, group: int, dtype: torch.dtype) -> DecodeConfig:
    """For shapes that are not in the table: three programs a multiprocessor with two tiles on their way each, if there is room."""
    wide = max(16, next_power_of_2(head_dim)) * dtype.itemsize  # bytes of a token's K
    if dtype.itemsize == 1:  # converted in registers, which takes many
        return DecodeConfig(num_stages=4 if wide <= 128 else 3)
    if wide <= 64:
        return DecodeConfig(block_n=128)
    if wide <= 256:
        fit = 2 if group > 16 else 3
        return DecodeConfig(num_stages=3 if wide > 128 else 4, programs_per_sm=fit)
    return DecodeConfig(block_n=32, num_stages=3 if wide <= 512 else 2)


@cache
def load_table(path: Path = CONFIG_FILE) -> dict[tuple[int, int, str], list[DecodeConfig]]:
    """(head_dim, group, cache type) -> one configuration per class of batch."""
    if not path.is_file():
        return {}
    table, fields = {}, DecodeConfig.__dataclass_fields__
    for entry in json.loads(path.read_text(encoding="utf-8"))["entries"]:
        fixed = {name: entry[name] for name in FIXED}
        configs = [DecodeConfig(**fixed, **{name: value for name, value in one.items() if name in fields}) for one in entry["batches"]]
        if len(configs) == len(BATCHES) + 1:
            table[entry["head_dim"], entry["group"], entry["dtype"]] = configs
    return table
