"""The host never waits for the GPU while it submits a step, of whatever mixture: PyTorch raises where an operation would."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.timeout(300),
]

SIZES: dict[str, Any] = dict(
    vocab_size=2048, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=64, max_position_embeddings=8192,
)  # fmt: skip
MIXTURES: dict[str, list[dict[str, Any]]] = {
    "greedy": [{"temperature": 0.0}],
    "drawn": [{"temperature": 0.8}],
    "truncated": [{"temperature": 0.8, "top_p": 0.9, "top_k": 50}, {"temperature": 1.0, "min_p": 0.1}],
    "logprobs": [{"temperature": 0.0, "logprobs": 3}, {"temperature": 0.8}],
    "penalties": [{"presence_penalty": 0.5, "repetition_penalty": 1.2}, {"temperature": 0.0}],
    "lists": [{"logit_bias": {5: 2.0}}, {"allowed_token_ids": list(range(100))}, {"min_tokens": 3}],
}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Any:
    transformers = pytest.importorskip("transformers")
    from octavo import LLM

    folder = Path(tmp_path_factory.mktemp("qwen3"))
    transformers.AutoModelForCausalLM.from_config(transformers.Qwen3Config(**SIZES)).save_pretrained(folder)
    settings: dict[str, Any] = dict(device="cuda", dtype="bfloat16", skip_tokenizer_init=True, max_model_len=8192, max_num_seqs=32)
    return LLM(model=str(folder), kv_cache_memory=256 * 2**20, enable_prefix_caching=False, **settings)


@pytest.mark.parametrize("mixture", MIXTURES)
def test_no_step_makes_the_host_wait(llm: Any, mixture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from octavo import SamplingParams

    rng = random.Random(3)
    lengths = [5, 40, 3000, 17, 200, 9, 1500, 64, 300, 30, 30, 30]  # prompts that graphs hold, and one that they don't
    prompts = [{"prompt_token_ids": [rng.randrange(10, 2000) for _ in range(n)]} for n in lengths]
    options = MIXTURES[mixture]
    params = [SamplingParams(max_tokens=4 + i, ignore_eos=True, detokenize=False, **options[i % len(options)]) for i in range(len(lengths))]
    for _ in range(3):  # compile, capture
        llm.generate(prompts, params, use_tqdm=False)
    torch.cuda.synchronize()
    submit, steps = llm.executor.submit, []

    def watched(plan: Any) -> None:
        torch.cuda.set_sync_debug_mode("error")
        try:
            submit(plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        steps.append(plan.num_tokens)

    monkeypatch.setattr(llm.executor, "submit", watched)
    llm.generate(prompts, params, use_tqdm=False)
    assert len(steps) > 5 and max(steps) > 2048
