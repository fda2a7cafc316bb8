"""Llama 2 and 3, and the many models that share their architecture (SmolLM2, TinyLlama, Yi …)."""

from __future__ import annotations

from octavo.models.decoder import DecoderForCausalLM


class LlamaForCausalLM(DecoderForCausalLM):
    """The shared decoder as it is."""
