"""The whole engine on the CPU with the Triton backend in Triton's interpreter: the KV write in the attention kernel, or before it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kernels_gpu.attention_cases import INTERPRETED

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1; tests/e2e/test_gpu_engine.py is the GPU's")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, max_position_embeddings=512, tie_word_embeddings=False,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():  # far apart logits: no ties that rounding could turn
        parameter.data.mul_(3)
    path = Path(tmp_path_factory.mktemp("qwen3"))
    model.save_pretrained(path)
    return str(path)


def generate(folder: str, backend: Any, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Tokens of a few prompts, in steps that hold decodes, prompts' chunks and padding; ``backend``: instead of the CPU's own."""
    from octavo import LLM, SamplingParams
    from octavo.executor import local

    if backend is not None:
        monkeypatch.setattr(local, "select_backend", lambda *args: backend)
    monkeypatch.setenv("OCTAVO_DECODE_GRAPHS", "1")
    monkeypatch.setenv("OCTAVO_STEPS_AHEAD", "1")
    rng = random.Random(3)
    prompts = [{"prompt_token_ids": [rng.randrange(10, 250) for _ in range(n)]} for n in (1, 15, 40, 20)]
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, detokenize=False)
    llm = LLM(
        model=folder, dtype="float32", device="cpu", skip_tokenizer_init=True, max_model_len=128, max_num_seqs=3, block_size=16,
        max_num_batched_tokens=32, kv_cache_memory=2**20, enable_prefix_caching=False,
    )  # fmt: skip
    try:
        return [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]
    finally:
        llm.shutdown()


@pytest.mark.parametrize("limit", [2, 64])
def test_same_tokens(folder: str, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from octavo.attention.triton import TritonAttention
    from octavo.kernels import decode_attention

    fused = []
    arguments = decode_attention.new_arguments
    monkeypatch.setattr(decode_attention, "new_arguments", lambda new, *rest: (fused.append(new is not None), arguments(new, *rest))[1])
    expected = generate(folder, None, monkeypatch)
    assert not fused
    assert generate(folder, TritonAttention(fused_write=limit), monkeypatch) == expected
    assert set(fused) == {True, False}, "steps that only decode, and steps beside prompts or of more sequences"
