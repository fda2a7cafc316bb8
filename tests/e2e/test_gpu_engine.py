"""Law 2 on the GPU: greedy tokens equal transformers', whatever else runs and however it is scheduled, captured or not.

Tiny random models in float32, where only the order of sums differs from transformers; nothing is downloaded.
"""

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

NUM_PROMPTS = 24
OUTPUT_TOKENS = 40
SIZES: dict[str, Any] = dict(
    vocab_size=2048, hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    head_dim=64, max_position_embeddings=2048,
)  # fmt: skip


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    transformers = pytest.importorskip("transformers")
    configs = {"llama": transformers.LlamaConfig, "qwen3": transformers.Qwen3Config}
    torch.manual_seed(0)
    hf = transformers.AutoModelForCausalLM.from_config(configs[request.param](**SIZES, tie_word_embeddings=False))
    for parameter in hf.parameters():  # far apart logits: no ties that rounding could turn
        parameter.data.mul_(3)
    folder = Path(tmp_path_factory.mktemp(request.param))
    hf.save_pretrained(folder)
    return str(folder), hf.eval().cuda()


def make_prompts() -> list[list[int]]:
    rng = random.Random(1)
    shared = [rng.randrange(10, 2000) for _ in range(48)]
    return [shared * (i % 2) + [rng.randrange(10, 2000) for _ in range(rng.randint(1, 200))] for i in range(NUM_PROMPTS)]


@pytest.fixture(scope="module")
def expected(model: tuple[str, Any]) -> list[list[int]]:
    answers = []
    with torch.inference_mode():
        for prompt in make_prompts():
            ids = torch.tensor([prompt], device="cuda")
            out = model[1].generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=OUTPUT_TOKENS, do_sample=False, eos_token_id=None
            )
            answers.append(out[0, len(prompt) :].tolist())
    return answers


@pytest.mark.parametrize(
    "options",
    [
        {"enforce_eager": True},
        {},
        {"max_num_batched_tokens": 64, "max_num_seqs": 16},
        {"num_gpu_blocks_override": 60, "max_num_seqs": 16, "swap_space": 0},
        {"num_gpu_blocks_override": 60, "max_num_seqs": 16, "swap_space": 0.25},
        {"num_gpu_blocks_override": 60, "max_num_seqs": 16, "swap_space": 0.25, "enforce_eager": True, "enable_prefix_caching": True},
        {"enable_prefix_caching": True, "max_num_seqs": 5},
        {"attention_backend": "triton", "block_size": 32},
        {"fused_write": "256", "enforce_eager": True},
        {"fused_write": "256"},
        {"fused_write": "5", "max_num_batched_tokens": 64, "max_num_seqs": 16},
        {"fused_write": "256", "num_gpu_blocks_override": 60, "max_num_seqs": 16},
        {"fused_write": "256", "enable_prefix_caching": True, "attention_backend": "triton"},
    ],
    ids=str,
)
def test_greedy_equals_transformers(
    model: tuple[str, Any], expected: list[list[int]], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from octavo import LLM, SamplingParams
    from octavo.engine.cost_model import CostModel

    options = dict(options)
    monkeypatch.setenv("OCTAVO_FUSED_WRITE", options.pop("fused_write", "0"))
    settings: dict[str, Any] = dict(enable_prefix_caching=False, max_num_seqs=32, kv_cache_memory=64 * 2**20) | options
    llm = LLM(model=model[0], dtype="float32", device="cuda", skip_tokenizer_init=True, max_model_len=512, **settings)
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True, detokenize=False)
    if options.get("swap_space"):  # so small a model is recomputed sooner; while nothing is known of that, all is moved
        llm.engine.scheduler.preemption.costs = CostModel()
    prompts = [{"prompt_token_ids": p} for p in make_prompts()]
    for _ in range(2):  # the second time with what the first left in the prefix cache
        got = [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]
        wrong = [i for i, (a, b) in enumerate(zip(got, expected, strict=True)) if a != b]
        assert not wrong, f"{len(wrong)} of {NUM_PROMPTS} differ, first {wrong[0]}: {got[wrong[0]]} instead of {expected[wrong[0]]}"
    if "num_gpu_blocks_override" in options:
        assert llm.engine.stats().num_preemptions > 0
        assert (llm.engine.stats().num_blocks_in > 0) == bool(options.get("swap_space"))
    if options.get("enable_prefix_caching"):
        assert llm.engine.stats().prefix_cache_hits > 0
    if not options.get("enforce_eager"):
        pool = llm.executor.runner.graphs.pool
        assert not pool.refused
        if options.get("max_num_batched_tokens"):  # prompts come in many steps of one size, beside decodes
            beside = [key for key in pool.steps if key[0] == "mixed" and key[1] > 0]
            assert beside, f"no step beside decodes was captured: {list(pool.steps)}"
    llm.shutdown()
