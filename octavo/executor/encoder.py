"""The Executor for encoders: every step runs whole texts, without a KV cache, and gives their vectors."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections import deque

import numpy as np
import torch
import torch.nn.functional as F

from octavo import env
from octavo.config import FEW_ROWS, MANY_ROWS, EngineConfig
from octavo.distributed.group import Group
from octavo.errors import ConfigError
from octavo.executor.local import Progress, Timer, resolve_device, resolve_dtype
from octavo.executor.memory import explained
from octavo.executor.model_runner import padded_rows
from octavo.kernels.upload import upload
from octavo.models.bert import PackedBatch
from octavo.models.config import ModelConfig
from octavo.models.loader import load_model
from octavo.sampling.pooling import PooledVectors, Pooler
from octavo.types import Advance, PoolingParams, StepPlan, StepResult

logger = logging.getLogger("octavo.executor")


class EncoderExecutor:
    """One device. On the CPU ``submit`` computes; on a GPU it enqueues and ``collect`` waits.

    Raises ConfigError for a device that isn't there, ModelError for weights that don't fit the model, OutOfMemoryError.
    """

    num_blocks = num_cpu_blocks = 0
    swap_block_s = 0.0
    whole_prompts = True

    def __init__(self, config: EngineConfig, model_config: ModelConfig, *, max_model_len: int, progress: Progress | None = None) -> None:
        report = progress or (lambda stage, fraction, detail: None)
        self.timings: dict[str, float] = {}
        self.max_model_len = max_model_len
        self.device = resolve_device(config)
        rows = config.max_num_seqs or (FEW_ROWS if self.device.type == "cpu" else MANY_ROWS)
        self.config = config = dataclasses.replace(config, max_num_seqs=rows)
        self.dtype = encoder_dtype(config.dtype, model_config, self.device)
        if config.tensor_parallel_size > 1:
            raise ConfigError("--tensor-parallel-size above 1 is not supported yet; leave it out.")
        on_cpu = self.device.type == "cpu"
        if on_cpu:
            torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0))))
        else:
            torch.cuda.set_device(self.device)
        with Timer(self.timings, "weights"), explained("while the weights were loaded"):
            report("weights", 0.0, "")
            self.model = load_model(
                model_config,
                dtype=self.dtype,
                device=self.device,
                group=Group.single(),
                load_format=config.load_format,
                max_model_len=max_model_len,
                seed=config.seed,
                progress=lambda fraction: report("weights", fraction, ""),
            )
        self.pooler = Pooler(config.rows)
        self.steps_ahead = env.steps_ahead(0 if on_cpu else 1)
        self._pending: deque[tuple[int, PooledVectors | None]] = deque()
        with Timer(self.timings, "warm_up"):
            report("warm-up", None, "")
            self.submit(StepPlan(-1, [Advance(0, 0, 2, [0, 0], pooling=PoolingParams(kind="mean"), pooling_ends=True)]))
            self.collect()

    def submit(self, plan: StepPlan) -> None:
        with explained(f"in a step of {plan.num_tokens} tokens", self._describe):
            self._pending.append((plan.step, self._run(plan.advances)))

    def collect(self) -> StepResult:
        step, pooled = self._pending.popleft()
        return StepResult(step, [], [], pooled={} if pooled is None else pooled.to_host())

    def prepare(self) -> bool:
        """Nothing is captured or compiled ahead."""
        return False

    def forget(self) -> None:
        """Drop the results of steps that were submitted and not collected."""
        self._pending.clear()

    def shutdown(self) -> None:
        self._pending.clear()

    @torch.inference_mode()
    def _run(self, advances: list[Advance]) -> PooledVectors | None:
        """Shortest first, so that attention takes texts of similar length together."""
        ordered = sorted(advances, key=lambda a: a.count)
        batch = PackedBatch([a.count for a in ordered], self.device)
        token_ids = torch.from_numpy(np.concatenate([np.array(a.token_ids, dtype=np.int64) for a in ordered]))
        positions = torch.from_numpy(batch.positions)
        if self.device.type != "cpu":
            token_ids, positions = (upload(t, t.dtype, self.device) for t in (token_ids, positions))
        elif padding := padded_rows(batch.num_tokens) - batch.num_tokens:
            token_ids, positions = F.pad(token_ids, (0, padding)), F.pad(positions, (0, padding))
        hidden = self.model(token_ids, positions, batch)
        return self.pooler.pool(hidden, ordered)

    def _describe(self) -> str:
        return "Lower --max-num-batched-tokens or --max-model-len." if self.device.type != "cpu" else ""


def encoder_dtype(name: str, model: ModelConfig, device: torch.device) -> torch.dtype:
    """auto keeps a float32 checkpoint in float32, on a GPU too: encoders are small, and vectors are compared with stored ones."""
    if name == "auto" and model.dtype == "float32":
        return torch.float32
    return resolve_dtype(name, model, device)
