"""``LLM.embed`` and ``score``: decoders against transformers' hidden states however prompts are cut, roles, refusals, interruptions."""

from __future__ import annotations

import gc
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from octavo import LLM, SamplingParams
from octavo.config import EngineConfig
from octavo.errors import ConfigError, RequestError
from tests.frontend.thresholds import thresholds_seen
from tests.models.helpers import tiny_transformers_model
from tests.models.test_encoders import make_encoder
from tests.tiny_model import make_tiny_model

COMMON: dict[str, Any] = {"skip_tokenizer_init": True, "dtype": "float32", "device": "cpu", "kv_cache_memory": 2**21}


def prompts_of(seed: int, count: int = 14, longest: int = 120) -> list[list[int]]:
    rng = random.Random(seed)
    shared = [rng.randrange(131) for _ in range(longest)]
    return [shared[: rng.randint(0, 60)] + [rng.randrange(131) for _ in range(rng.randint(1, longest - 60))] for _ in range(count)]


def expected(hf: Any, prompts: list[list[int]], kind: str) -> np.ndarray:
    with torch.no_grad():
        states = [hf.base_model(torch.tensor([p])).last_hidden_state[0] for p in prompts]
    vectors = torch.stack([s.mean(0) if kind == "mean" else s[-1] for s in states])
    return F.normalize(vectors, dim=-1).numpy()


def embedded(llm: LLM, prompts: list[list[int]], **options: Any) -> np.ndarray:
    return np.stack([o.outputs.data for o in llm.embed(prompts, **options)])


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
@pytest.mark.parametrize("kind", ["last", "mean"])
@pytest.mark.parametrize("ahead", ["0", "1"])
def test_decoders_equal_transformers(family: str, kind: str, ahead: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one step, in chunks of a few tokens, with prefix hits, few blocks and one step ahead: the same vectors."""
    monkeypatch.setenv("OCTAVO_STEPS_AHEAD", ahead)
    hf = tiny_transformers_model(family)
    hf.save_pretrained(tmp_path)
    prompts = prompts_of(3)
    truth = expected(hf, prompts, kind)
    pooler = json.dumps({"pooling_type": kind.upper()})
    for options in (
        {},
        {"max_num_batched_tokens": 9, "max_num_seqs": 4},
        {"max_num_batched_tokens": 24, "max_num_seqs": 8, "num_gpu_blocks_override": 20, "block_size": 8},
    ):
        llm = LLM(tmp_path, runner="pooling", pooler_config=pooler, **{**COMMON, **options})
        for _ in range(2):  # the second time out of the prefix cache, where the pooling allows it
            assert np.abs(embedded(llm, prompts) - truth).max() < 2e-5
        assert llm.engine.stats().kv_cache_usage == 0
        assert (llm.engine.stats().prefix_cache_hits > 0) == (kind == "last")


@pytest.mark.parametrize("ahead", ["0", "1"])
@pytest.mark.parametrize("kind", ["mean", "cls", "last"])
def test_encoders_run_texts_whole(ahead: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More texts than rows, of all lengths, in steps of a bounded size that never hold a part of a text."""
    monkeypatch.setenv("OCTAVO_STEPS_AHEAD", ahead)
    hf = make_encoder(tmp_path)
    rng = random.Random(7)
    prompts = [[rng.randrange(5, 101) for _ in range(rng.choice([1, 2, 9, 30, 31, 69, 70]))] for _ in range(50)]
    with torch.no_grad():
        states = [hf(torch.tensor([p])).last_hidden_state[0] for p in prompts]
    vectors = torch.stack([{"mean": s.mean(0), "cls": s[0], "last": s[-1]}[kind] for s in states])
    options = {"skip_tokenizer_init": True, "device": "cpu", "pooler_config": json.dumps({"pooling_type": kind})}
    for limits in ({}, {"max_num_seqs": 6, "max_num_batched_tokens": 76}, {"max_num_seqs": 1}):
        llm = LLM(tmp_path, **options, **limits)
        plans = []
        submit = llm.executor.submit
        monkeypatch.setattr(llm.executor, "submit", lambda plan, submit=submit, plans=plans: (plans.append(plan), submit(plan)))
        assert np.abs(embedded(llm, prompts) - F.normalize(vectors, dim=-1).numpy()).max() < 1e-5
        assert all(a.start == 0 and a.pooling_ends for plan in plans for a in plan.advances)
        assert max(plan.num_tokens for plan in plans) <= llm.engine.settings.max_num_batched_tokens
        assert llm.executor.num_blocks == 0 and llm.engine.stats().kv_cache_usage == 0
        assert llm.engine.stats().prompt_tokens == sum(map(len, prompts))
        assert len(llm.engine.scheduler.free_rows) == llm.config.max_num_seqs
    with pytest.raises(ConfigError, match="at least 76 for an encoder"):
        LLM(tmp_path, max_num_seqs=6, max_num_batched_tokens=75, **options)
    with pytest.raises(RequestError, match="maximum context length is 70"):
        llm.embed([[5] * 71])


def test_a_text_model_does_both(tmp_path: Path) -> None:
    hf = tiny_transformers_model("Llama")
    hf.save_pretrained(tmp_path)
    llm = LLM(tmp_path, **COMMON)
    prompts = prompts_of(4, 5)
    before = llm.generate([{"prompt_token_ids": p} for p in prompts], SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
    assert np.abs(embedded(llm, prompts) - expected(hf, prompts, "last")).max() < 2e-5
    after = llm.generate([{"prompt_token_ids": p} for p in prompts], SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
    assert [o.outputs[0].token_ids for o in before] == [o.outputs[0].token_ids for o in after]


def test_embeddings_between_generations(tmp_path: Path) -> None:
    """In the same steps: neither changes the other."""
    hf = tiny_transformers_model("Qwen3")
    hf.save_pretrained(tmp_path)
    llm = LLM(tmp_path, pooler_config='{"pooling_type": "MEAN"}', max_num_batched_tokens=16, max_num_seqs=6, **COMMON)
    from octavo.frontend.pooling import pooling_params, pooling_request
    from octavo.types import GenerateRequest, TokenParams

    prompts = prompts_of(5, 12)
    truth = expected(hf, prompts, "mean")
    params = pooling_params(llm.roles, llm.model_config)
    alone = [o.outputs[0].token_ids for o in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=9), use_tqdm=False)]
    tokens: dict[str, list[int]] = {}
    vectors: dict[str, bytes] = {}
    for i, prompt in enumerate(prompts):
        greedy = TokenParams(temperature=0.0, max_tokens=9)
        llm.engine.add_request(GenerateRequest(request_id=f"g{i}", prompt_token_ids=prompt, params=greedy))
        llm.engine.add_request(pooling_request(f"p{i}", prompt, params, arrival_time=0.0))
    while llm.engine.has_work():
        for delta in llm.engine.step():
            tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
            if delta.embedding is not None:
                assert delta.finish_reason == "stop"
                vectors[delta.request_id] = delta.embedding
    assert [tokens[f"g{i}"] for i in range(12)] == alone
    found = np.stack([np.frombuffer(vectors[f"p{i}"], "<f4") for i in range(12)])
    assert np.abs(found - truth).max() < 2e-5


def test_checkpoints_without_a_head(tmp_path: Path) -> None:
    """Embedding models are saved by their base class: other names, no head. They make embeddings whatever --runner says not."""
    hf = tiny_transformers_model("Qwen3")
    hf.base_model.save_pretrained(tmp_path)
    llm = LLM(tmp_path, **COMMON)
    prompts = prompts_of(6, 4)
    assert np.abs(embedded(llm, prompts) - expected(hf, prompts, "last")).max() < 2e-5
    with pytest.raises(RequestError, match="does not generate"):
        llm.generate(prompts, use_tqdm=False)
    with pytest.raises(ConfigError, match="cannot generate text"):
        LLM(tmp_path, runner="generate", **COMMON)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")
    return LLM(folder, load_format="dummy", dtype="float32", device="cpu", kv_cache_memory=2**21, max_model_len=64)


def test_dimensions_and_normalization(tiny: LLM) -> None:
    (whole,) = embedded(tiny, ["some text"])
    (raw,) = embedded(tiny, ["some text"], normalize=False)
    np.testing.assert_allclose(raw / np.linalg.norm(raw), whole, atol=1e-6)
    (cut,) = embedded(tiny, ["some text"], dimensions=5)
    np.testing.assert_allclose(cut, raw[:5] / np.linalg.norm(raw[:5]), atol=1e-6)
    np.testing.assert_allclose(embedded(tiny, ["some text"], dimensions=64)[0], whole, atol=1e-6)


def test_truncation_keeps_the_beginning(tiny: LLM) -> None:
    long = "abcdefgh" * 20
    np.testing.assert_array_equal(embedded(tiny, [long], truncate_prompt_tokens=10), embedded(tiny, [long[:10]]))
    assert len(tiny.embed(long, truncate_prompt_tokens=-1)[0].prompt_token_ids) == 64


@pytest.mark.parametrize(
    ("prompts", "options", "match"),
    [
        (["ok", "x" * 65], {}, r"prompts\[1\] has 65 tokens, and this model's maximum context length is 64 tokens"),
        ([[]], {}, "is empty"),
        ([[1, 288]], {}, "vocabulary"),
        (["a"], {"dimensions": 0}, "between 1 and 64"),
        (["a"], {"dimensions": 65}, "between 1 and 64"),
        (["a"], {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        (["a"], {"truncate_prompt_tokens": 65}, "between 1 and 64"),
    ],
)
def test_refusals_leave_nothing_behind(tiny: LLM, prompts: Any, options: dict[str, Any], match: str) -> None:
    with pytest.raises(RequestError, match=match):
        tiny.embed(prompts, **options)
    assert not tiny.engine.has_work()


def test_scores(tiny: LLM) -> None:
    outputs = tiny.score("same", ["same", "other"])
    assert outputs[0].outputs.score == pytest.approx(1, abs=1e-6) and outputs[1].outputs.score < 1
    pairs = tiny.score(["a", "b"], ["c", "d"])
    assert pairs[1].outputs.score == pytest.approx(tiny.score("b", "d")[0].outputs.score, abs=1e-6)
    with pytest.raises(RequestError, match="can't be paired"):
        tiny.score(["a", "b"], ["c", "d", "e"])


def test_while_a_batch_runs_collections_are_rare_and_afterwards_as_before(tiny: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    before, seen = gc.get_threshold(), thresholds_seen(tiny.engine, monkeypatch)
    for call in (lambda: tiny.embed([[1, 2], [3]]), lambda: tiny.score([[1]], [[2], [3]])):
        call()
        assert set(seen) == {(20_000, 20, 50)} and len(seen) >= 3
        assert gc.get_threshold() == before
        seen.clear()
    with pytest.raises(RequestError):
        tiny.embed([[1], [10**9]])
    assert gc.get_threshold() == before


def test_an_interruption_leaves_a_usable_engine(tiny: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    truth = embedded(tiny, ["some text"])
    monkeypatch.setattr(tiny.executor.runner.pooler, "pool", lambda *a: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        tiny.embed(["some text"] * 3)
    monkeypatch.undo()
    assert not tiny.engine.has_work()
    np.testing.assert_array_equal(embedded(tiny, ["some text"]), truth)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"runner": "generate", "task": "embed"}, "contradict"),
        ({"runner": "generate", "convert": "embed"}, "contradict"),
        ({"task": "classify"}, "--task must be one of"),
        ({"pooler_config": "MEAN"}, "not valid JSON"),
        ({"pooler_config": "[]"}, "JSON object"),
        ({"pooler_config": '{"pooling_type": "ALL"}'}, "'ALL' is not supported"),
        ({"pooler_config": '{"softmax": true}'}, "'softmax' is not supported"),
        ({"pooler_config": '{"normalize": 1}'}, "true or false"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        EngineConfig(**options)


def test_roles_that_cannot_be(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path)
    with pytest.raises(ConfigError, match="CLS pooling"):
        LLM(folder, load_format="dummy", pooler_config='{"pooling_type": "CLS"}', **COMMON)
    with pytest.raises(ConfigError, match="says nothing"):
        LLM(folder, load_format="dummy", runner="generate", pooler_config='{"pooling_type": "MEAN"}', **COMMON)
    llm = LLM(folder, load_format="dummy", task="generate", **COMMON)
    with pytest.raises(RequestError, match="only generates text"):
        llm.embed([[1]])
