"""Which architectures can be served, and where their classes are. Imports torch only when a class is asked for."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from octavo.errors import ModelError

if TYPE_CHECKING:
    from octavo.models.decoder import DecoderForCausalLM

# architecture as config.json names it -> module:class
SUPPORTED_ARCHITECTURES: dict[str, str] = {
    "LlamaForCausalLM": "octavo.models.llama:LlamaForCausalLM",
    "MistralForCausalLM": "octavo.models.mistral:MistralForCausalLM",
    "Qwen2ForCausalLM": "octavo.models.qwen2:Qwen2ForCausalLM",
    "Qwen3ForCausalLM": "octavo.models.qwen3:Qwen3ForCausalLM",
}
# the same for encoders, which make embeddings only; those with a head are run without it
SUPPORTED_ENCODERS: dict[str, str] = {
    "BertModel": "octavo.models.bert:BertModel",
    "BertForMaskedLM": "octavo.models.bert:BertModel",
    "RobertaModel": "octavo.models.bert:BertModel",
    "RobertaForMaskedLM": "octavo.models.bert:BertModel",
    "XLMRobertaModel": "octavo.models.bert:BertModel",
    "XLMRobertaForMaskedLM": "octavo.models.bert:BertModel",
}


def model_class(architecture: str) -> type[DecoderForCausalLM]:
    """The class that serves ``architecture``. ModelError with the supported ones, if there is none."""
    target = SUPPORTED_ARCHITECTURES.get(architecture) or SUPPORTED_ENCODERS.get(architecture)
    if target is None:
        supported = ", ".join(sorted(SUPPORTED_ARCHITECTURES) + sorted(SUPPORTED_ENCODERS))
        raise ModelError(f"The architecture {architecture!r} is not supported. Supported are: {supported}.")
    module, name = target.split(":")
    return getattr(import_module(module), name)
