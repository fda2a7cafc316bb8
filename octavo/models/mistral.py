"""Mistral 7B and its successors."""

from __future__ import annotations

from octavo.models.decoder import DecoderForCausalLM


class MistralForCausalLM(DecoderForCausalLM):
    """The shared decoder; the first releases slide a window over every layer."""
