"""Law 2 on a real model: greedy tokens equal transformers' in float32, whatever else runs and however it is scheduled."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from octavo import LLM, SamplingParams
from tests.e2e.demo import demo_model_path, demo_transformers_model, text_prompts

NUM_PROMPTS = 50
FEWER = 28  # in the ways that take a CPU long
PROMPT_TOKENS = 64
OUTPUT_TOKENS = 64


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    from octavo.frontend.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(demo_model_path(), None)
    ids = [tokenizer.encode(text)[:PROMPT_TOKENS] for text in text_prompts(NUM_PROMPTS)]
    assert all(len(i) == PROMPT_TOKENS for i in ids)
    return ids


@pytest.fixture(scope="module")
def expected(prompts: list[list[int]]) -> list[list[int]]:
    torch = pytest.importorskip("torch")
    model = demo_transformers_model()
    with torch.inference_mode():
        batch = torch.tensor(prompts)
        out = model.generate(
            batch,
            attention_mask=torch.ones_like(batch),
            max_new_tokens=OUTPUT_TOKENS,
            min_new_tokens=OUTPUT_TOKENS,
            do_sample=False,
            eos_token_id=None,
        )
    return out[:, PROMPT_TOKENS:].tolist()


def make_llm(**options: object) -> LLM:
    return LLM(model=demo_model_path(), dtype="float32", max_model_len=512, kv_cache_memory=256 * 2**20, device="cpu", **options)


def run(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    return [o.outputs[0].token_ids for o in outputs]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    llm = make_llm(enable_prefix_caching=False, max_num_seqs=64)
    yield llm
    llm.shutdown()


def test_batched(llm: LLM, prompts: list[list[int]], expected: list[list[int]]) -> None:
    assert run(llm, prompts) == expected


@pytest.mark.parametrize("part", range(4))
def test_alone(llm: LLM, prompts: list[list[int]], expected: list[list[int]], part: int) -> None:
    assert [run(llm, [p])[0] for p in prompts[part::4]] == expected[part::4]


def test_chunked_prefill(prompts: list[list[int]], expected: list[list[int]]) -> None:
    llm = make_llm(enable_prefix_caching=False, max_num_seqs=16, max_num_batched_tokens=23)
    assert run(llm, prompts) == expected


def test_prefix_hits(prompts: list[list[int]], expected: list[list[int]]) -> None:
    llm = make_llm(enable_prefix_caching=True, max_num_seqs=64)
    run(llm, prompts)
    before = llm.engine.stats().prefix_cache_hits
    assert run(llm, prompts) == expected
    assert llm.engine.stats().prefix_cache_hits - before >= NUM_PROMPTS * (PROMPT_TOKENS - 16)


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_forced_preemption(prompts: list[list[int]], expected: list[list[int]], steps_ahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_STEPS_AHEAD", str(steps_ahead))
    llm = make_llm(enable_prefix_caching=True, max_num_seqs=32, num_gpu_blocks_override=64)
    assert run(llm, prompts[:FEWER]) == expected[:FEWER]
    assert llm.engine.stats().num_preemptions > 0


@pytest.mark.parametrize("device_rows", [0, 1])
def test_one_step_ahead(prompts: list[list[int]], expected: list[list[int]], device_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_STEPS_AHEAD", "1")
    monkeypatch.setenv("OCTAVO_DECODE_GRAPHS", str(device_rows))
    llm = make_llm(enable_prefix_caching=True, max_num_seqs=24, max_num_batched_tokens=80)
    assert run(llm, prompts[:FEWER]) == expected[:FEWER]
