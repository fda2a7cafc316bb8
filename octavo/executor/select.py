"""Which executor runs a model. Imports torch only when one is made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from octavo.config import EngineConfig
from octavo.models.config import ModelConfig

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo.executor.warmup import KernelWarmup


def start_warmup(config: EngineConfig, model: ModelConfig, max_model_len: int) -> KernelWarmup | None:
    """Begin to compile the kernels of decoders; encoders have none."""
    if model.encoder:
        return None
    from octavo.executor.warmup import KernelWarmup

    return KernelWarmup.start(config, model, max_model_len)


def make_executor(
    config: EngineConfig,
    model: ModelConfig,
    *,
    max_model_len: int,
    progress: Callable[[str, float | None, str], None] | None = None,
    kernels: KernelWarmup | None = None,
) -> Any:
    """An ``EncoderExecutor`` for an encoder, else a ``LocalExecutor``; see there for errors."""
    if model.encoder:
        from octavo.executor.encoder import EncoderExecutor

        return EncoderExecutor(config, model, max_model_len=max_model_len, progress=progress)
    from octavo.executor.local import LocalExecutor

    return LocalExecutor(config, model, max_model_len=max_model_len, progress=progress, kernels=kernels)
