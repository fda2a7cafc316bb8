"""Qwen2 and Qwen2.5 (dense)."""

from __future__ import annotations

from octavo.models.decoder import DecoderForCausalLM


class Qwen2ForCausalLM(DecoderForCausalLM):
    """The shared decoder with biases on q, k and v; some checkpoints slide a window over the upper layers."""
