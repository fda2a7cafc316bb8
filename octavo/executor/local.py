"""One device in this process: loads the model, sizes the KV cache, runs plans."""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from octavo import env
from octavo.attention.selector import select_backend
from octavo.config import EngineConfig
from octavo.distributed.group import Group
from octavo.errors import ConfigError, OutOfMemoryError
from octavo.executor.footprint import graph_bytes, kv_block_bytes
from octavo.executor.kernel_keys import begin_library_key, settle_cache_keys
from octavo.executor.memory import Room, available_memory, check_fits, explained, gib, kv_budget, with_rows
from octavo.executor.model_runner import ModelRunner, PendingStep
from octavo.executor.profile import step_peak_bytes
from octavo.executor.swap import SwapSetup
from octavo.executor.warmup import KernelWarmup
from octavo.log import kv_cache_line
from octavo.models.config import ModelConfig
from octavo.models.loader import load_model
from octavo.types import StepPlan, StepResult, TokenMasks

logger = logging.getLogger("octavo.executor")

Progress = Callable[[str, "float | None", str], None]  # stage, fraction 0..1 or None, detail


class LocalExecutor:
    """The Executor for one device. On the CPU ``submit`` computes; on a GPU it enqueues and ``collect`` waits.

    Raises ConfigError for a device that isn't there, ModelError for weights that don't fit the model,
    OutOfMemoryError when the KV cache is too small for ``max_model_len``.
    """

    num_cpu_blocks = 0
    swap_block_s = 0.0
    whole_prompts = False

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        *,
        max_model_len: int,
        progress: Progress | None = None,
        kernels: KernelWarmup | None = None,
    ) -> None:
        """``kernels``: a warm-up that was started before this module was imported; None starts one."""
        report = progress or (lambda stage, fraction, detail: None)
        self.timings: dict[str, float] = {}
        self.device = resolve_device(config)
        self.dtype = resolve_dtype(config.dtype, model_config, self.device)
        if config.tensor_parallel_size > 1:
            raise ConfigError("--tensor-parallel-size above 1 is not supported yet; leave it out.")
        on_cpu = self.device.type == "cpu"
        _warn_of_idle_flags(config, on_cpu)
        self.kernels = kernels or KernelWarmup.start(config, model_config, max_model_len)
        if on_cpu:
            torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0))))
        else:
            torch.cuda.set_device(self.device)
            settle_cache_keys()
            library_key = begin_library_key()
        backend = select_backend(self.device, config.attention_backend)  # before anything is loaded: it may be refused

        with self._timed("device"):
            room = self._room()
            config = with_rows(config, model_config, max_model_len=max_model_len, dtype_bytes=self.dtype.itemsize, room=room)
            check_fits(config, model_config, max_model_len=max_model_len, dtype_bytes=self.dtype.itemsize, room=room)
            block_bytes = kv_block_bytes(model_config, config.block_size, self.dtype.itemsize)
            swap = SwapSetup(config, block_bytes, max_model_len, self.device)
            if not on_cpu:  # there, weights and KV cache come out of the same memory, and go first
                swap.take(available_memory())
        with self._timed("weights"), explained("while the weights were loaded", self._describe):
            report("weights", 0.0, "")
            model = load_model(
                model_config,
                dtype=self.dtype,
                device=self.device,
                group=Group.single(),
                load_format=config.load_format,
                max_model_len=max_model_len,
                seed=config.seed,
                progress=lambda fraction: report("weights", fraction, ""),
            )
        self.config = config  # resolved

        def make_caches(num_blocks: int) -> list[Any]:
            return [
                backend.make_kv_cache(num_blocks, config.block_size, spec.num_kv_heads, spec.head_dim, self.dtype, self.device)
                for spec in model.attention_layers
            ]

        with explained("while the batch state was made", self._describe):
            self.runner = ModelRunner(
                model,
                backend,
                make_caches(1),
                block_size=config.block_size,
                max_rows=config.rows,
                max_model_len=max_model_len,
                vocab_size=model_config.vocab_size,
                device=self.device,
                token_budget=config.token_budget(max_model_len, self.device.type),
                use_graphs=env.decode_graphs(not on_cpu and not config.enforce_eager),
            )
        with self._timed("profile"), explained("in a trial of the heaviest steps", self._describe):
            free_bytes = available_memory() if on_cpu else self._free_gpu_bytes(config, max_model_len)
        with self._timed("kv_cache"), explained("while the KV cache was made", self._describe):
            budget = kv_budget(
                config,
                model_config,
                max_model_len=max_model_len,
                dtype_bytes=self.dtype.itemsize,
                free_bytes=free_bytes,
                on_cpu=on_cpu,
                total_bytes=room.total,
            )
            self.num_blocks = budget.num_blocks
            self.runner.kv_caches = make_caches(self.num_blocks)
        with self._timed("swap_space"), explained("while the swap space was made", self._describe):
            if on_cpu:
                swap.take(free_bytes - self.num_blocks * block_bytes)
            self.runner.swap = swap.finish(self.runner.kv_caches)
            if self.runner.swap is not None:
                self.num_cpu_blocks, self.swap_block_s = self.runner.swap.num_blocks, self.runner.swap.block_s
        # Only --num-gpu-blocks-override can give less than one longest sequence; then no longer one is served.
        self.max_model_len = min(max_model_len, self.num_blocks * config.block_size)
        if config.max_model_len is not None and self.max_model_len < max_model_len:
            logger.warning("--num-gpu-blocks-override leaves room for %d of the %d tokens asked for.", self.max_model_len, max_model_len)
        report("KV cache", None, kv_cache_line(self.num_blocks, config.block_size, self.max_model_len))
        with self._timed("kernels"):
            if not on_cpu:
                self.kernels.wait_first()
                library_key.join()
        with self._timed("warm_up"), explained("while the first steps were captured", self._describe):
            report("warm-up", None, "")
            self.runner.warm_up()
        if not on_cpu:  # steps captured when they are asked for shall find room, too
            free, total = torch.cuda.mem_get_info(self.device)
            self._least_free = free - graph_bytes(total) * 3 // 4
        self.steps_ahead = env.steps_ahead(0 if on_cpu else 1)
        self._pending: deque[PendingStep] = deque()

    def submit(self, plan: StepPlan) -> None:
        try:
            self._pending.append(self.runner.execute(plan))
        except (RuntimeError, MemoryError):
            with explained(f"in a step of {plan.num_tokens} tokens", self._describe):
                raise

    def sample(self, masks: TokenMasks) -> None:
        try:
            self.runner.sample(self._pending[-1], masks)
        except (RuntimeError, MemoryError):
            with explained("while tokens were drawn", self._describe):
                raise

    def collect(self) -> StepResult:
        return self._pending.popleft().to_result()

    def prepare(self) -> bool:
        """With nothing else to do, do a little that makes later steps quicker; False when nothing is left to prepare (now)."""
        graphs = self.runner.graphs
        if graphs is None or not graphs.pool.on_gpu or not self.kernels.ended() or self._pending:
            return False
        if torch.cuda.mem_get_info(self.device)[0] < self._least_free:
            return False
        if not torch.cuda.current_stream(self.device).query():  # a request that comes now waits for one step at most, not for many
            return True
        try:
            with torch.inference_mode():
                return graphs.capture_next()
        except Exception as error:  # noqa: BLE001 (out of memory, say; the step will be tried again when it is asked for)
            logger.warning("Steps are not captured ahead any more: %s", error)
            self._least_free = 1 << 62
            return False

    def forget(self) -> None:
        """Drop the results of steps that were submitted and not collected."""
        self._pending.clear()

    def shutdown(self) -> None:
        self._pending.clear()
        self.runner.swap = None  # gives its memory back, for which it waits for the device
        self.kernels.stop()

    def _room(self) -> Room:
        if self.device.type == "cpu":
            free = available_memory()
            return Room(free, free, on_cpu=True)
        free, total = torch.cuda.mem_get_info(self.device)
        return Room(total, free)

    def _describe(self) -> str:
        """The memory there is, for messages."""
        try:
            room = self._room()
            if room.on_cpu:
                return f"{gib(room.free)} of memory is available."
            mine = torch.cuda.memory_reserved(self.device)
        except RuntimeError:  # a device that is past answering
            return ""
        return f"Of the GPU's {gib(room.total)}, {gib(room.free)} is free and Octavo's tensors take {gib(mine)}."

    def _free_gpu_bytes(self, config: EngineConfig, max_model_len: int) -> int:
        """What --gpu-memory-utilization leaves for the KV cache, whoever else uses the card."""
        budget = config.token_budget(max_model_len, "cuda")
        peak = step_peak_bytes(self.runner, token_budget=budget, max_rows=config.rows)
        free, total = torch.cuda.mem_get_info(self.device)
        logger.debug("a step needs up to %.2f GiB beside weights and KV cache", peak / 2**30)
        graphs = 0 if self.runner.graphs is None else graph_bytes(total)
        return int(total * config.gpu_memory_utilization) - (total - free) - peak - graphs

    def _timed(self, name: str) -> Timer:
        return Timer(self.timings, name)


class Timer:
    """``with``: puts the seconds of its body into ``timings`` under ``name``."""

    def __init__(self, timings: dict[str, float], name: str) -> None:
        self.timings, self.name = timings, name

    def __enter__(self) -> None:
        self.start = time.perf_counter()

    def __exit__(self, *exc: object) -> None:
        self.timings[self.name] = round(time.perf_counter() - self.start, 3)


def _warn_of_idle_flags(config: EngineConfig, on_cpu: bool) -> None:
    """Say which of the given flags have nothing to act on here; silence would look like consent."""
    defaults = {f.name: f.default for f in dataclasses.fields(config)}
    if on_cpu and config.gpu_memory_utilization != defaults["gpu_memory_utilization"]:
        logger.warning("--gpu-memory-utilization says nothing on a CPU; --kv-cache-memory sets the size of the KV cache.")


def resolve_device(config: EngineConfig) -> torch.device:
    """The device that ``--device`` names. Raises ConfigError when it isn't there."""
    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(
            "--device cuda: PyTorch sees no CUDA GPU. Check nvidia-smi and that torch is a CUDA build "
            f"(this one is {torch.__version__}), or use --device cpu."
        )
    return torch.device("cuda", torch.cuda.current_device())


def resolve_dtype(name: str, model: ModelConfig, device: torch.device) -> torch.dtype:
    """The type of weights, activations and KV cache.

    auto: the checkpoint's own on a GPU; on a CPU bfloat16, or float32 where the CPU has no bfloat16 arithmetic and would
    emulate it slowly.
    """
    if name == "auto":
        if device.type == "cpu":
            name = "bfloat16" if model.dtype != "float32" and torch.ops.mkldnn._is_mkldnn_bf16_supported() else "float32"
        else:
            name = "bfloat16" if model.dtype == "float32" else model.dtype
    name = {"half": "float16", "float": "float32"}.get(name, name)
    return {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}[name]


__all__ = ["LocalExecutor", "OutOfMemoryError", "Timer", "resolve_device", "resolve_dtype"]
