"""Embeddings on the GPU equal transformers': encoders packed, decoders in chunks, both between other work. Float32, random weights."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.timeout(300),
]

COMMON: dict[str, Any] = {"skip_tokenizer_init": True, "device": "cuda", "kv_cache_memory": 2**28}


def prompts_of(vocab: int, count: int, longest: int) -> list[list[int]]:
    rng = random.Random(2)
    return [[rng.randrange(5, vocab) for _ in range(rng.choice([1, 2, 17, 18, 64, longest]))] for _ in range(count)]


def vectors_of(states: list[Any], kind: str) -> np.ndarray:
    picked = torch.stack([{"mean": s.mean(0), "cls": s[0], "last": s[-1]}[kind] for s in states])
    return torch.nn.functional.normalize(picked.float(), dim=-1).cpu().numpy()


def embedded(llm: Any, prompts: list[list[int]]) -> np.ndarray:
    return np.stack([o.outputs.data for o in llm.embed(prompts)])


@pytest.mark.parametrize(("dtype", "tolerance"), [("auto", 1e-5), ("bfloat16", 0.03)])
def test_encoders(dtype: str, tolerance: float, tmp_path: Path) -> None:
    from octavo import LLM
    from tests.models.test_encoders import make_encoder

    hf = make_encoder(tmp_path, hidden_size=64, max_position_embeddings=256).cuda()
    prompts = prompts_of(101, 300, 256)
    with torch.inference_mode():
        states = [hf(torch.tensor([p], device="cuda")).last_hidden_state[0] for p in prompts]
    for kind in ("mean", "cls"):
        pooler = json.dumps({"pooling_type": kind})
        for limits in ({}, {"max_num_seqs": 16, "max_num_batched_tokens": 512}):
            llm = LLM(tmp_path, dtype=dtype, pooler_config=pooler, **COMMON, **limits)
            assert llm.executor.steps_ahead == 1
            assert np.abs(embedded(llm, prompts) - vectors_of(states, kind)).max() < tolerance


@pytest.mark.parametrize("kind", ["last", "mean"])
def test_decoders_between_generations(kind: str, tmp_path: Path) -> None:
    """Captured decode steps and steps with pooling take turns; neither changes the other."""
    transformers = pytest.importorskip("transformers")
    from octavo import LLM
    from octavo.frontend.pooling import pooling_params, pooling_request
    from octavo.types import GenerateRequest, TokenParams

    sizes = dict(vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2)
    torch.manual_seed(0)
    config = transformers.Qwen3Config(**sizes, head_dim=64, max_position_embeddings=1024, tie_word_embeddings=False)
    hf = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    hf.save_pretrained(tmp_path)
    hf.cuda()
    prompts = prompts_of(512, 60, 900)
    with torch.inference_mode():
        states = [hf.model(torch.tensor([p], device="cuda")).last_hidden_state[0] for p in prompts]
    truth = vectors_of(states, kind)
    pooler = json.dumps({"pooling_type": kind})
    llm = LLM(tmp_path, dtype="float32", pooler_config=pooler, max_num_seqs=24, max_num_batched_tokens=256, **COMMON)
    assert np.abs(embedded(llm, prompts) - truth).max() < 1e-4
    params = pooling_params(llm.roles, llm.model_config)
    for i, prompt in enumerate(prompts):
        llm.engine.add_request(
            GenerateRequest(request_id=f"g{i}", prompt_token_ids=prompt, params=TokenParams(temperature=0.0, max_tokens=12))
        )
        llm.engine.add_request(pooling_request(f"p{i}", prompt, params, arrival_time=0.0))
    vectors, tokens = {}, 0
    while llm.engine.has_work():
        for delta in llm.engine.step():
            tokens += len(delta.token_ids)
            if delta.embedding is not None:
                vectors[delta.request_id] = np.frombuffer(delta.embedding, "<f4")
    assert tokens == 60 * 12
    assert np.abs(np.stack([vectors[f"p{i}"] for i in range(60)]) - truth).max() < 1e-4
