"""Whether a model fits, how large the KV cache may be, and what to say when it doesn't fit: which flags would."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from octavo.config import FEW_ROWS, MANY_ROWS, EngineConfig
from octavo.errors import ConfigError, OutOfMemoryError
from octavo.executor.footprint import Footprint, footprint, kv_block_bytes
from octavo.models.config import ModelConfig

GIB = 2**30
MANY_ROWS_BYTES = 64 * GIB  # from this GPU memory on
MIB = 2**20
CPU_DEFAULT_KV_BYTES = 4 * GIB
CPU_DEFAULT_KV_SHARE = 0.4  # of the memory that is free at start
MOST_UTILIZATION = 0.95  # that is advised: the driver and the display want something, too
MARGIN = 1.1  # what is advised must fit for certain, though a step's memory is an estimate
OTHERS_MATTER = GIB  # a CUDA context and the driver use less than this
_LARGER = "use a smaller model, or a machine with more memory."
_QUANTIZATIONS = ("fp8", "int4")  # worth naming, once --quantization takes them


@dataclass(frozen=True)
class Room:
    """Memory of the device in bytes. ``free``: what can still be taken, whoever uses the rest."""

    total: int
    free: int
    on_cpu: bool = False

    def allowed(self, utilization: float) -> int:
        """Bytes that may still be taken: on a GPU until ``utilization`` of it is in use, by whomever."""
        return self.free if self.on_cpu else int(self.total * utilization) - (self.total - self.free)


@dataclass(frozen=True)
class KvBudget:
    """num_blocks KV blocks of block_bytes each (all layers together)."""

    num_blocks: int
    block_bytes: int


def with_rows(config: EngineConfig, model: ModelConfig, *, max_model_len: int, dtype_bytes: int, room: Room) -> EngineConfig:
    """``config`` with --max-num-seqs auto resolved: many rows where memory is plenty and they fit."""
    if config.max_num_seqs is not None:
        return config
    if not room.on_cpu and room.total >= MANY_ROWS_BYTES and (config.max_num_batched_tokens or MANY_ROWS) >= MANY_ROWS:
        many = replace(config, max_num_seqs=MANY_ROWS)
        check = _Check(many, model, max_model_len, dtype_bytes, room)
        if check.short(many, check.footprint(many)) <= 0:
            return many
    return replace(config, max_num_seqs=FEW_ROWS)


def check_fits(config: EngineConfig, model: ModelConfig, *, max_model_len: int, dtype_bytes: int, room: Room) -> None:
    """Before anything is loaded: OutOfMemoryError when ``config`` can't fit into ``room``, naming the flags that would.

    It never refuses what fits: only tensors that are certain to exist are counted. Each flag named would do alone, unless said
    otherwise, and with some room to spare.
    """
    _Check(config, model, max_model_len, dtype_bytes, room).run()


@dataclass(frozen=True)
class _Check:
    config: EngineConfig
    model: ModelConfig
    max_model_len: int
    dtype_bytes: int
    room: Room

    def run(self) -> None:
        config = self.config
        if config.kv_cache_memory is not None:  # enough for one sequence?
            kv_budget(
                config,
                self.model,
                max_model_len=self.max_model_len,
                dtype_bytes=self.dtype_bytes,
                free_bytes=sys.maxsize,  # what is free is looked at below
                on_cpu=self.room.on_cpu,
            )
        need = self.footprint(config)
        short = self.short(config, need)
        if short <= 0:
            return
        fixes = self.fixes()
        raise OutOfMemoryError(
            f"The model does not fit into {'memory' if self.room.on_cpu else 'GPU memory'}: short by {gib(short)}. "
            f"It needs {self._parts(need)}. {self._situation()} " + self._advice(fixes, need)
        )

    def footprint(self, config: EngineConfig, max_model_len: int | None = None) -> Footprint:
        length = max_model_len or self.max_model_len
        return footprint(config, self.model, max_model_len=length, dtype_bytes=self.dtype_bytes, on_cpu=self.room.on_cpu)

    def short(self, config: EngineConfig, need: Footprint) -> int:
        """Bytes that are missing. On a CPU, unless told, the KV cache takes a share of what is left, up to a limit."""
        left = self.room.allowed(config.gpu_memory_utilization) - need.fixed
        if self.room.on_cpu and left > 0 and config.kv_cache_memory is None and config.num_gpu_blocks_override is None:
            left = min(CPU_DEFAULT_KV_BYTES, int(left * CPU_DEFAULT_KV_SHARE))
        return need.kv - left

    def fits(self, config: EngineConfig, max_model_len: int | None = None) -> bool:
        """With room to spare."""
        need = self.footprint(config, max_model_len)
        spare = int((MARGIN - 1) * (need.step + need.graphs))
        return self.short(config, replace(need, slack=need.slack + spare)) <= 0

    # -- advice -----------------------------------------------------------------------------------------------------------

    def fixes(self) -> list[str]:
        """Flags of which each alone would fit, the least painful first."""
        config, found = self.config, []
        if not self.room.on_cpu and (share := self._utilization()) is not None:
            found.append(f"--gpu-memory-utilization {share:.2f}")
        if config.num_gpu_blocks_override is not None:
            if (blocks := self._largest("num_gpu_blocks_override", 1, config.num_gpu_blocks_override - 1)) is not None:
                found.append(f"--num-gpu-blocks-override {blocks}")
        elif (memory := self._kv_cache_memory()) is not None:
            found.append(f"--kv-cache-memory {memory}M")
        if config.num_gpu_blocks_override is None and config.kv_cache_memory is None and (length := self._length(config)) is not None:
            found.append(f"--max-model-len {length}")
        if (rows := self._largest("max_num_seqs", 1, config.rows - 1, 8)) is not None:
            found.append(f"--max-num-seqs {rows}")
        least = config.rows + (0 if config.enable_chunked_prefill else self.max_model_len)
        budget = config.token_budget(self.max_model_len, "cpu" if self.room.on_cpu else "cuda")
        if (tokens := self._largest("max_num_batched_tokens", least, budget - 1, 64)) is not None:
            found.append(f"--max-num-batched-tokens {tokens}")
        found += [f"--quantization {name}" for name in _QUANTIZATIONS if self._quantized(name)]
        return found

    def _utilization(self) -> float | None:
        """The least share, in hundredths, that fits; None where it would have to be too much."""
        for hundredths in range(math.floor(self.config.gpu_memory_utilization * 100) + 1, round(MOST_UTILIZATION * 100) + 1):
            if self.fits(replace(self.config, gpu_memory_utilization=hundredths / 100)):
                return hundredths / 100
        return None

    def _length(self, config: EngineConfig) -> int | None:
        size = config.block_size
        blocks = largest(lambda n: self.fits(config, n * size), (self.max_model_len - 1) // size)
        return blocks * size or None

    def _largest(self, name: str, least: int, most: int, step: int = 1) -> int | None:
        """The largest value of a flag in least .. most that fits, rounded down to a multiple of ``step`` if that is still one."""
        found = largest(lambda n: self.fits(replace(self.config, **{name: least - 1 + n})), most - least + 1)
        if not found:
            return None
        value = least - 1 + found
        return max(value // step * step, least) if value > step else value

    def _kv_cache_memory(self) -> int | None:
        """MiB. Where it was given: less of it. On a CPU also where it was not: all that is free instead of a share."""
        config = self.config
        if config.kv_cache_memory is None and not self.room.on_cpu:
            return None
        one = self.footprint(replace(config, kv_cache_memory=None)).kv
        if config.kv_cache_memory is None:
            mebibytes = -(-one // MIB)
            return mebibytes if self.fits(replace(config, kv_cache_memory=mebibytes * MIB)) else None
        mebibytes = largest(lambda n: self.fits(replace(config, kv_cache_memory=n * MIB)), config.kv_cache_memory // MIB)
        return mebibytes if mebibytes * MIB >= one else None

    def _quantized(self, name: str) -> bool:
        if self.config.quantization not in (None, "none"):
            return False
        try:
            return self.fits(replace(self.config, quantization=name))
        except ConfigError:  # not supported
            return False

    def _advice(self, fixes: list[str], need: Footprint) -> str:
        others = " It would fit if the other processes ended." if self._fits_alone() else ""
        if len(fixes) > 1:
            return f"Any one of these would fit: {'; '.join(fixes)}.{others}"
        together = self._together()
        if fixes:
            longer = f" Or, for longer sequences, together: {together}." if together and fixes[0].startswith("--max-model-len") else ""
            return f"{fixes[0]} would fit.{longer}{others}"
        if together:
            return f"Together these would fit: {together}.{others}"
        if others:
            return others.strip()
        most = self.room.free if self.room.on_cpu else self.room.allowed(MOST_UTILIZATION)
        if need.weights > most:
            return f"The weights alone are more than the {gib(most)} that could be used at most: {_LARGER}"
        return f"No flags would make it fit: {_LARGER}"

    def _fits_alone(self) -> bool:
        """Whether it would fit if others didn't hold so much of the GPU."""
        room = self.room
        if room.on_cpu or room.total - room.free <= OTHERS_MATTER:
            return False
        return replace(self, room=Room(room.total, room.total - OTHERS_MATTER // 2)).fits(self.config)

    def _together(self) -> str | None:
        config = self.config
        rows = min(config.rows, 16)
        changes: dict[str, Any] = {"max_num_seqs": rows}
        if config.enable_chunked_prefill:
            budget = config.token_budget(self.max_model_len, "cpu" if self.room.on_cpu else "cuda")
            changes["max_num_batched_tokens"] = max(min(budget, 1024), rows)
        if not self.room.on_cpu and config.gpu_memory_utilization < MOST_UTILIZATION:
            changes["gpu_memory_utilization"] = MOST_UTILIZATION
        changes |= {name: None for name in ("kv_cache_memory", "num_gpu_blocks_override") if getattr(config, name) is not None}
        smallest = replace(config, **changes)
        length = self.max_model_len if self.fits(smallest) else self._length(smallest)
        if not length:
            return None
        text = [f"--{name.replace('_', '-')} {value}" for name, value in changes.items() if value is not None]
        text += [f"--max-model-len {length}"] if length != self.max_model_len else []
        gone = [f"no --{name.replace('_', '-')}" for name, value in changes.items() if value is None]
        return ", ".join(text + gone)

    # -- words ------------------------------------------------------------------------------------------------------------

    def _parts(self, need: Footprint) -> str:
        config = self.config
        if config.num_gpu_blocks_override is not None:
            kv = f"the {config.num_gpu_blocks_override} KV blocks of --num-gpu-blocks-override"
        elif config.kv_cache_memory is not None and need.kv == config.kv_cache_memory:
            kv = "the KV cache of --kv-cache-memory"
        else:
            kv = f"the KV cache of one sequence of {self.max_model_len} tokens"
        step = (need.step + need.slack, "a step's activations and sampling")
        parts = [(need.weights, "weights"), step, (need.graphs, "CUDA graphs"), (need.kv, kv)]
        return f"{gib(need.total)}: " + ", ".join(f"{gib(size)} for {what}" for size, what in parts if size)

    def _situation(self) -> str:
        room, share = self.room, self.config.gpu_memory_utilization
        if room.on_cpu:
            return f"{gib(room.free)} of memory is available" + (
                f", and without --kv-cache-memory the KV cache takes {CPU_DEFAULT_KV_SHARE:.0%} of what the rest leaves."
                if self.config.kv_cache_memory is None and self.config.num_gpu_blocks_override is None
                else "."
            )
        allowed = room.allowed(share)
        text = f"--gpu-memory-utilization {share:g} of this GPU's {gib(room.total)} is {gib(int(room.total * share))}, "
        used = room.total - room.free
        if used > OTHERS_MATTER:
            text += f"but {gib(used)} is in use already, most of it by other processes (nvidia-smi lists them), "
        return text + "which leaves " + (f"{gib(allowed)}." if allowed > 0 else "nothing.")


def largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest n in 1 .. most for which ``fits``, which holds up to some n and for none above it; 0 if for none."""
    low, high = 0, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


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


def kv_budget(
    config: EngineConfig,
    model: ModelConfig,
    *,
    max_model_len: int,
    dtype_bytes: int,
    free_bytes: int,
    on_cpu: bool,
    total_bytes: int | None = None,
) -> KvBudget:
    """Blocks for the KV cache out of ``free_bytes`` (what is left after weights and activations).

    Raises OutOfMemoryError when not even one sequence of ``max_model_len`` fits, naming the flags that would help.
    ``total_bytes``: the GPU's memory, to say which --gpu-memory-utilization would.
    """
    block_bytes = kv_block_bytes(model, config.block_size, dtype_bytes)
    blocks_per_sequence = -(-max_model_len // config.block_size)
    if config.num_gpu_blocks_override is not None:
        if config.num_gpu_blocks_override * block_bytes > free_bytes:
            raise OutOfMemoryError(
                f"--num-gpu-blocks-override asks for {gib(config.num_gpu_blocks_override * block_bytes)}, but only {gib(free_bytes)} of "
                f"memory is free beside the weights. Ask for at most {max(free_bytes, 0) // block_bytes} blocks."
            )
        return KvBudget(config.num_gpu_blocks_override, block_bytes)
    if config.kv_cache_memory is not None:
        budget, source = config.kv_cache_memory, "--kv-cache-memory"
        if budget > free_bytes:
            raise OutOfMemoryError(
                f"--kv-cache-memory asks for {gib(budget)}, but only {gib(max(free_bytes, 0))} of memory is free beside the weights. "
                f"Ask for at most {max(free_bytes, 0) // MIB}M."
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
            f"The KV cache is too small for --max-model-len {max_model_len}: one such sequence needs {gib(need)}, "
            f"and {source} leaves {gib(max(budget, 0))}, short by {gib(need - max(budget, 0))}. "
            + (f"Use --max-model-len {fits} or less, or " if fits else "Free memory, use a smaller model, or ")
            + _more_kv(config, need - budget, max(free_bytes, 0), need, on_cpu, total_bytes)
        )
    return KvBudget(num_blocks, block_bytes)


def _more_kv(config: EngineConfig, short: int, free: int, need: int, on_cpu: bool, total: int | None) -> str:
    """The flag that gives the KV cache the ``need`` bytes of which it is ``short``."""
    if on_cpu or config.kv_cache_memory is not None:
        return f"give more with --kv-cache-memory, at least {-(-need // MIB)}M" + (f" ({gib(free)} is free)." if free < need else ".")
    if total:
        share = math.ceil((config.gpu_memory_utilization + short / total) * 100) / 100
        if share <= MOST_UTILIZATION:
            return f"raise --gpu-memory-utilization to {share:.2f}."
        return "lower --max-num-seqs or --max-num-batched-tokens: a step then needs less."
    return "raise --gpu-memory-utilization."


@contextmanager
def explained(what: str, describe: Callable[[], str] | None = None) -> Iterator[None]:
    """Turn running out of memory inside into an OutOfMemoryError with advice. ``what``: e.g. "while the weights were loaded".

    ``describe``: a sentence on the memory there is, asked when it has happened.
    """
    try:
        yield
    except OutOfMemoryError:
        raise
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        message = f"Memory ran out {what}. " + (f"{describe()} " if describe else "") + ADVICE
        short = first_line(error)
        raise OutOfMemoryError(f"{message} ({short})" if short else message) from None


ADVICE = (
    "Lower --max-num-seqs or --max-num-batched-tokens, or --gpu-memory-utilization (which leaves more beside the KV cache); "
    "or end other processes that use the memory, or use a smaller model."
)


def is_out_of_memory(error: BaseException) -> bool:
    """torch's own error, or one of CUDA's or the CPU allocator's that only its text tells."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return any(words in str(error).lower() for words in ("out of memory", "can't allocate memory"))


def first_line(error: BaseException) -> str:
    """What was asked for, without the allocator's statistics."""
    return str(error).strip().partition("\n")[0].partition(". GPU ")[0][:200]


def gib(count: int) -> str:
    """For people: 15.26 GiB, 96.0 MiB, 1.5 KiB."""
    if abs(count) >= GIB // 10:
        return f"{count / GIB:.2f} GiB"
    return f"{count / MIB:.1f} MiB" if abs(count) >= MIB else f"{count / 2**10:.1f} KiB"
