"""The few numbers that the scheduler needs, apart from the command line's many."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.config import EngineConfig
from octavo.engine.pace import PaceRule, rule_for
from octavo.engine.policy import POLICIES
from octavo.errors import ConfigError

# Tokens in a step of an encoder: what fits into a CPU's caches with its activations, and what fills a GPU.
CPU_ENCODER_TOKENS = 1024
GPU_ENCODER_TOKENS = 16384


@dataclass(frozen=True, kw_only=True)
class SchedulerSettings:
    """Raises ConfigError for numbers that could stall the engine.

    ``max_num_batched_tokens``: the token budget. Without ``chunked_prefill`` it must hold the longest prompt beside a
    full batch of decodes. ``pace`` rations prompts beside decodes by time (pace.py); it needs ``chunked_prefill``, and
    without one the token budget is all there is. ``seed`` makes the seeds of requests that bring none. ``num_cpu_blocks``: the
    size of the swap tier (0: none), to or from which a block takes ``swap_block_s`` seconds.
    """

    num_blocks: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    chunked_prefill: bool = True
    prefix_caching: bool = True
    policy: str = "fcfs"
    pace: PaceRule | None = None
    seed: int = 0
    num_cpu_blocks: int = 0
    swap_block_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("num_blocks", "block_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}.")
        for name in ("num_cpu_blocks", "swap_block_s"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative, got {getattr(self, name)}.")
        if self.policy not in POLICIES:
            raise ConfigError(f"scheduling policy must be one of {', '.join(POLICIES)}; got {self.policy!r}.")
        if self.pace is not None and not self.chunked_prefill:
            raise ConfigError("pace needs chunked_prefill: a prompt that cannot be split cannot be rationed.")
        least = self.max_num_seqs if self.chunked_prefill else self.max_model_len + self.max_num_seqs
        if self.max_num_batched_tokens < least:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least {least} with max_num_seqs {self.max_num_seqs}"
                + ("." if self.chunked_prefill else f" and max_model_len {self.max_model_len}, because chunked prefill is off.")
            )

    @classmethod
    def for_encoder(cls, config: EngineConfig, *, max_model_len: int, device_type: str) -> SchedulerSettings:
        """Without a KV cache: every prompt is run whole. Blocks are only counted: one of the longest length for each sequence."""
        least = max_model_len + config.rows
        budget = config.max_num_batched_tokens or (CPU_ENCODER_TOKENS if device_type == "cpu" else GPU_ENCODER_TOKENS)
        if config.max_num_batched_tokens is not None and budget < least:
            raise ConfigError(
                f"--max-num-batched-tokens ({budget}) must be at least {least} for an encoder, which runs each text in one step: the "
                f"longest ({max_model_len} tokens) and --max-num-seqs ({config.rows}). Raise it, or leave it out."
            )
        return cls(
            num_blocks=config.rows + config.rows // 50 + 1,  # more than the scheduler's watermark holds back
            block_size=max_model_len,
            max_model_len=max_model_len,
            max_num_seqs=config.rows,
            max_num_batched_tokens=max(budget, least),
            chunked_prefill=False,
            prefix_caching=False,
            policy=config.scheduling_policy,
            seed=config.seed,
        )

    @classmethod
    def from_config(
        cls,
        config: EngineConfig,
        *,
        num_blocks: int,
        max_model_len: int,
        device_type: str,
        num_cpu_blocks: int = 0,
        swap_block_s: float = 0.0,
    ) -> SchedulerSettings:
        """``device_type``: cpu or cuda."""
        paced = config.enable_chunked_prefill and (config.max_num_batched_tokens is None or config.itl_slo_ms is not None)
        return cls(
            num_blocks=num_blocks,
            block_size=config.block_size,
            max_model_len=max_model_len,
            max_num_seqs=config.rows,
            max_num_batched_tokens=config.token_budget(max_model_len, device_type),
            chunked_prefill=config.enable_chunked_prefill,
            prefix_caching=config.enable_prefix_caching,
            policy=config.scheduling_policy,
            pace=rule_for(device_type, config.itl_slo_ms) if paced else None,
            seed=config.seed,
            num_cpu_blocks=num_cpu_blocks,
            swap_block_s=swap_block_s,
        )
