"""Qwen3 (dense)."""

from __future__ import annotations

from octavo.models.decoder import DecoderForCausalLM


class Qwen3ForCausalLM(DecoderForCausalLM):
    """The shared decoder with RMSNorm on each head of q and k before RoPE."""
