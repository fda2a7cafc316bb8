"""bfloat16 against transformers, on the CPU and, where there is one, on the GPU: as near to float32 as transformers' own bfloat16.

Two right implementations in bfloat16 round in other places, so tokens and log-probabilities may differ. The yardstick is transformers
in float32 on the very texts that Octavo wrote; the tolerance is what transformers in bfloat16 errs there: Octavo's log-probabilities
may err twice as much on average, and a token that it takes for the best may be behind by twice the largest error.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")])]
NUM_PROMPTS = 12
OUTPUT_TOKENS = 24
SIZES: dict[str, Any] = dict(
    vocab_size=1024, hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    head_dim=64, max_position_embeddings=1024, tie_word_embeddings=False,
)  # fmt: skip


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any, Any]:
    """(folder, transformers in float32 on the CPU, the same in bfloat16), of weights that bfloat16 holds exactly."""
    transformers = pytest.importorskip("transformers")
    configs = {"llama": transformers.LlamaConfig, "qwen3": transformers.Qwen3Config}
    torch.manual_seed(0)
    config = configs[request.param](**SIZES)
    narrow = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    for parameter in narrow.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(2)
    folder = Path(tmp_path_factory.mktemp(request.param))
    narrow.save_pretrained(folder)
    wide = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return str(folder), wide, narrow


def make_prompts() -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(10, 1000) for _ in range(rng.randint(1, 90))] for _ in range(NUM_PROMPTS)]


def logits_of(model: Any, prompt: list[int], output: list[int]) -> Any:
    """float32 [len(output), V]: what each output token was drawn from."""
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + output[:-1]])).logits[0, len(prompt) - 1 :]
    return logits.float()


def chosen(logits: Any, output: list[int]) -> Any:
    """Log-probabilities of ``output`` [len(output)]."""
    return logits.log_softmax(-1)[torch.arange(len(output)), torch.tensor(output)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "options",
    [{}, {"enforce_eager": True}, {"max_num_batched_tokens": 48, "max_num_seqs": 8}, {"attention_backend": "triton"}],
    ids=str,
)
def test_as_near_to_float32_as_transformers_is(model: tuple[str, Any, Any], device: str, options: dict[str, Any]) -> None:
    from octavo import LLM, SamplingParams

    if device == "cpu" and options.keys() & {"attention_backend", "enforce_eager"}:
        pytest.skip("for a GPU")
    settings: dict[str, Any] = dict(enable_prefix_caching=False, max_num_seqs=16, kv_cache_memory=64 * 2**20) | options
    folder, wide, narrow = model
    llm = LLM(model=folder, dtype="bfloat16", device=device, skip_tokenizer_init=True, max_model_len=256, **settings)
    prompts = make_prompts()
    for logprobs in (None, 0):  # captured steps draw the first, the others are drawn outside of them
        params = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True, detokenize=False, logprobs=logprobs)
        answers = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        ours, theirs, behind, largest = [], [], 0.0, 0.0
        for prompt, answer in zip(prompts, answers, strict=True):
            output = list(answer.outputs[0].token_ids)
            truth, rounded = logits_of(wide, prompt, output), logits_of(narrow, prompt, output)
            largest = max(largest, float((rounded - truth).abs().max()))
            behind = max(behind, float((truth.max(-1).values - truth[torch.arange(len(output)), torch.tensor(output)]).max()))
            theirs.append((chosen(rounded, output) - chosen(truth, output)).abs())
            if logprobs is not None:
                given = [entry[token].logprob for entry, token in zip(answer.outputs[0].logprobs, output, strict=True)]
                ours.append((torch.tensor(given) - chosen(truth, output)).abs())
        assert behind <= 2 * largest, f"a token was taken that is {behind:.3f} behind; bfloat16 errs by {largest:.3f}"
        if ours:
            error, yardstick = float(torch.cat(ours).mean()), float(torch.cat(theirs).mean())
            assert error <= 2 * yardstick + 1e-4, f"log-probabilities err by {error:.4f}, transformers' by {yardstick:.4f}"
            print(f"{device} {options}: err by {error:.4f} ({yardstick:.4f}), behind by {behind:.4f} ({largest:.4f})")
    llm.shutdown()
