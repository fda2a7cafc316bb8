"""Attention in Triton: the GPU backend that always works.

A layer is two launches: ``write_kv`` (QK-norm, RoPE, cache write) and ``decode_attention`` for sequences that run one token,
``extend_attention`` for those that run more, or both. Steps of few decodes and nothing else (``fused_write``) need no ``write_kv``:
``decode_attention`` begins with its work. Task lists are made on the device once a step and shared by all layers.

In a CUDA graph: call ``make_workspace`` first, outside of it; then ``prepare`` and the layers are launches of fixed shape that
read lengths, slots and block tables on the device, and nothing waits for the host. Capture decode steps only (every sequence
runs one token: ``num_decodes == num_seqs == num_tokens``), with padding rows of seq_len 0 and slot -1, whose output is zero.
``max_seq_len`` isn't used. ``extra["row_index"]`` (int [S]) makes block_tables the table of all rows, where sequence s has
row ``row_index[s]``, so that nothing needs gathering. One stream runs all steps: plans and workspace are shared.
"""

from __future__ import annotations

from typing import Any

import torch

from octavo import env
from octavo.attention.base import AttentionLayerSpec, AttentionMetadata, ForwardContext
from octavo.errors import ConfigError
from octavo.kernels.attention_plan import DecodePlan, make_decode_plan, plan_decode, plan_extend
from octavo.kernels.decode_attention import DecodeWorkspace, decode_attention, make_decode_workspace, max_chunks
from octavo.kernels.decode_config import BATCHES, DecodeConfig, decode_config
from octavo.kernels.extend_attention import ExtendConfig, extend_attention, extend_config
from octavo.kernels.new_tokens import NewTokens
from octavo.kernels.sizes import next_power_of_2
from octavo.kernels.write_kv import write_kv

EXTRA = "triton"  # the backend's key in AttentionMetadata.extra: which task lists this step has made


class TritonAttention:
    """AttentionBackend for CUDA devices (and, under TRITON_INTERPRET=1, for the CPU).

    A layer's cache is one tensor [num_blocks, 2, num_kv_heads, block_size, head_dim]: K at index 0, V at index 1; the tokens of
    a head of a block are contiguous.

    Args:
        programs: decode programs; None: as many as fit the device beside each other.
        pdl: launch the decode chain's kernels as programmatic dependents; None: where the device can (sm_90).
        decode_config, extend_config: launch parameters instead of the tuned ones.
        fused_write: steps of up to so many decodes alone write their K and V in the attention kernel; None: as OCTAVO_FUSED_WRITE says.
    """

    name = "triton"

    def __init__(
        self,
        programs: int | None = None,
        pdl: bool | None = None,
        decode_config: DecodeConfig | None = None,
        extend_config: ExtendConfig | None = None,
        fused_write: int | None = None,
    ) -> None:
        self._programs = programs
        self._pdl = pdl
        self._decode_config = decode_config
        self._extend_config = extend_config
        self._fused_write = env.fused_write() if fused_write is None else fused_write
        self._max_seqs = 0
        self._plans: dict[tuple[Any, ...], DecodePlan] = {}
        self._workspaces: dict[tuple[Any, ...], DecodeWorkspace] = {}
        self._retired: list[Any] = []

    def make_kv_cache(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """One layer's cache, zeroed; ConfigError for a block size that is not a power of two."""
        if block_size & (block_size - 1):
            raise ConfigError(f"Attention backend {self.name} needs a block size that is a power of two; got {block_size}.")
        return torch.zeros(num_blocks, 2, num_kv_heads, block_size, head_dim, dtype=dtype, device=device)

    def make_workspace(self, max_seqs: int, layers: list[AttentionLayerSpec], dtype: torch.dtype, device: torch.device) -> None:
        """Allocate what decodes of up to ``max_seqs`` sequences need. Call it before capturing graphs, and capture no larger ones.

        Without the call, eager steps allocate as they go. ``dtype`` is the cache's.
        """
        self._reserve(max_seqs)
        for layer in layers:
            for batch in [b for b in BATCHES if b < max_seqs] + [max_seqs]:
                self._decode_buffers(layer, dtype, device, batch)

    def prepare(self, metadata: AttentionMetadata) -> None:
        """Forget the task lists of the step before; each is made when the first layer asks for it."""
        metadata.extra[EXTRA] = {}
        if metadata.num_decodes > self._max_seqs:
            self._reserve(max(1024, next_power_of_2(metadata.num_decodes)))

    def forward(self, qkv: torch.Tensor, layer: AttentionLayerSpec, kv_cache: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """See AttentionBackend. Rows past the step's tokens become zero."""
        metadata = context.attention
        if EXTRA not in metadata.extra:
            self.prepare(metadata)
        # before write_kv: a programmatic dependent may only rely on what its predecessor waited for
        planned = len(metadata.extra[EXTRA])
        plan = self.plan_decode(layer, kv_cache, metadata) if metadata.num_decodes else None
        fresh = len(metadata.extra[EXTRA]) > planned
        decodes_only = metadata.num_decodes == metadata.num_seqs  # beside prompts write_kv is launched anyway
        fused = isinstance(plan, DecodePlan) and decodes_only and metadata.num_decodes <= self._fused_write
        if not fused:
            self._write(qkv, layer, kv_cache, metadata)
        out = qkv.new_empty(qkv.shape[0], layer.num_heads * layer.head_dim)
        if plan is not None:
            new = self._new_tokens(layer, metadata) if fused else None
            self.decode(qkv, layer, kv_cache, metadata, plan, out, new, fresh)
        if not decodes_only:
            self.extend(qkv, layer, kv_cache, metadata, out)
        used = metadata.num_decodes if decodes_only else metadata.num_tokens
        if out.shape[0] > used:
            out[used:].zero_()
        return out

    def plan_decode(self, layer: AttentionLayerSpec, cache: torch.Tensor, m: AttentionMetadata) -> Any:
        """The step's task list for layers of this shape and window, made if this is the first of them."""
        plan, _ = self._decode_buffers(layer, cache.dtype, m.seq_lens.device, m.num_decodes)
        tasks = m.extra[EXTRA]
        if id(plan) not in tasks:
            config = self._config(layer, cache.dtype, m.num_decodes)
            plan_decode(
                plan, m.seq_lens, m.num_decodes, layer.num_kv_heads, window=layer.sliding_window, row_index=m.extra.get("row_index"),
                min_tiles=config.min_tiles, seam=config.seam, pdl=self._use_pdl(plan.seqs.device),
            )  # fmt: skip
            tasks[id(plan)] = True
        return plan

    def decode(
        self, qkv: torch.Tensor, layer: AttentionLayerSpec, cache: torch.Tensor, m: AttentionMetadata, plan: Any, out: torch.Tensor,
        new: NewTokens | None = None, fresh: bool = False,
    ) -> None:  # fmt: skip
        """Rows 0 .. num_decodes - 1 of ``out``. K and V are in the cache and q is rotated, unless ``new`` says what is to be done.

        ``plan`` is ``plan_decode``'s; ``fresh``: made by this layer.
        """
        _, workspace = self._decode_buffers(layer, cache.dtype, qkv.device, m.num_decodes)
        decode_attention(
            qkv, cache, m.block_tables, plan, workspace, out,
            num_heads=layer.num_heads, scale=layer.scale, window=layer.sliding_window, soft_cap=layer.logit_soft_cap,
            config=self._config(layer, cache.dtype, m.num_decodes), pdl=self._use_pdl(qkv.device), new=new, fresh_plan=fresh,
        )  # fmt: skip

    def extend(self, qkv: torch.Tensor, layer: AttentionLayerSpec, cache: torch.Tensor, m: AttentionMetadata, out: torch.Tensor) -> None:
        """Rows num_decodes .. num_tokens - 1 of ``out``, the tokens of sequences num_decodes .. num_seqs - 1."""
        group = layer.num_heads // layer.num_kv_heads
        config = self._extend_config or extend_config(layer.head_dim, group, qkv.dtype)
        tasks, block_q = m.extra[EXTRA], config.block_q(group)
        if (key := ("extend", block_q)) not in tasks:
            tasks[key] = plan_extend(m.query_start, m.seq_lens, m.num_decodes, m.num_seqs, m.num_tokens - m.num_decodes, block_q)
        extend_attention(
            qkv, cache, m.block_tables, m.query_start, m.seq_lens, tasks[key], out,
            num_heads=layer.num_heads, scale=layer.scale, row_index=m.extra.get("row_index"),
            window=layer.sliding_window, soft_cap=layer.logit_soft_cap, config=config,
        )  # fmt: skip

    def _write(self, qkv: torch.Tensor, layer: AttentionLayerSpec, cache: torch.Tensor, m: AttentionMetadata) -> None:
        positions, slots = m.positions, m.slots
        if len(positions) > m.num_tokens:  # slicing takes the host as long as a launch
            positions, slots = positions[: m.num_tokens], slots[: m.num_tokens]
        write_kv(
            qkv, cache, positions, slots,
            layer.num_heads, layer.num_kv_heads, layer.rope_cos_sin, layer.rope_interleaved,
            layer.q_norm, layer.k_norm, layer.norm_eps, pdl=self._use_pdl(qkv.device),
        )  # fmt: skip

    def _new_tokens(self, layer: AttentionLayerSpec, m: AttentionMetadata) -> NewTokens:
        return NewTokens(
            m.positions[: m.num_decodes], m.slots[: m.num_decodes], layer.rope_cos_sin, layer.rope_interleaved,
            layer.q_norm, layer.k_norm, layer.norm_eps,
        )  # fmt: skip

    def _config(self, layer: AttentionLayerSpec, dtype: torch.dtype, batch: int) -> DecodeConfig:
        return self._decode_config or decode_config(layer.head_dim, layer.num_heads // layer.num_kv_heads, dtype, batch)

    def _reserve(self, max_seqs: int) -> None:
        if max_seqs <= self._max_seqs:
            return
        _refuse_capture(f"make_workspace(max_seqs={max_seqs}, ...)")
        self._max_seqs = max_seqs
        self._retired.append((self._plans, self._workspaces))  # graphs that were captured may still use them
        self._plans, self._workspaces = {}, {}

    def _decode_buffers(
        self, layer: AttentionLayerSpec, dtype: torch.dtype, device: torch.device, batch: int
    ) -> tuple[DecodePlan, DecodeWorkspace]:
        config = self._config(layer, dtype, batch)
        multiprocessors = _multiprocessors(device)
        programs = self._programs or multiprocessors * config.programs_per_sm
        heads = (layer.num_heads, layer.num_kv_heads, layer.head_dim)
        shape = (*heads, device, programs)
        key = (*shape, layer.sliding_window, config.block_n, config.min_chunk)
        if key not in self._plans:
            _refuse_capture("make_workspace with this layer")
            chunks = max_chunks(*heads, multiprocessors)
            self._plans[key] = plan = make_decode_plan(
                self._max_seqs, programs, device, block_n=config.block_n, min_chunk=config.min_chunk, max_chunks=chunks
            )
            if shape not in self._workspaces:
                self._workspaces[shape] = make_decode_workspace(plan, *heads)
        return self._plans[key], self._workspaces[shape]

    def _use_pdl(self, device: torch.device) -> bool:
        if self._pdl is None:
            self._pdl = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
        return self._pdl


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def _refuse_capture(call: str) -> None:
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"Attention's buffers can't be made while a CUDA graph is captured; call {call} before.")
