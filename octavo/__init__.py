"""Octavo: a high-throughput inference and serving engine for large language models.

Importing the package costs next to nothing: what it exports is imported when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from octavo.config import EngineConfig
    from octavo.frontend.async_llm import AsyncLLM
    from octavo.frontend.beam_search import BeamSearchParams
    from octavo.frontend.llm import LLM
    from octavo.frontend.outputs import CompletionOutput, RequestOutput
    from octavo.frontend.params import SamplingParams
    from octavo.frontend.structured import StructuredOutputsParams

_EXPORTS = {
    "LLM": "octavo.frontend.llm",
    "AsyncLLM": "octavo.frontend.async_llm",
    "BeamSearchParams": "octavo.frontend.beam_search",
    "SamplingParams": "octavo.frontend.params",
    "StructuredOutputsParams": "octavo.frontend.structured",
    "RequestOutput": "octavo.frontend.outputs",
    "CompletionOutput": "octavo.frontend.outputs",
    "EngineConfig": "octavo.config",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchParams",
    "CompletionOutput",
    "EngineConfig",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
]


def __getattr__(name: str) -> Any:
    module = _EXPORTS.get(name)
    if module is None:
        raise AttributeError(f"module 'octavo' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(module), name)
    globals()[name] = value  # the next access doesn't come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
