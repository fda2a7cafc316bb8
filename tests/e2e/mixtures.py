"""Requests of every kind that makes a step do something of its own: for what must hold of every step, whatever it holds.

A case is a way to start the engine and what is asked of it there. ``run`` asks; ``check`` says whether the plans that came of it
held what the case is about. Nothing is downloaded, weights are random.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo.types import GenerateRequest, StepPlan, TokenParams
from tests.tiny_model import make_tiny_model

SIZES: dict[str, Any] = dict(
    architectures=["Qwen3ForCausalLM"], model_type="qwen3", vocab_size=2048, hidden_size=256, intermediate_size=512, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=64, max_position_embeddings=8192, attention_bias=False,
)  # fmt: skip
LENGTHS = (5, 40, 3000, 17, 200, 9, 1500, 64, 300, 30, 30, 30)  # prompts that captured steps hold, and some that they don't
SHORT = (50, 200, 17, 120, 90, 200, 64, 150, 30, 75, 180, 110)
COMMON: dict[str, Any] = dict(
    load_format="dummy", max_num_seqs=32, max_num_batched_tokens=4096, kv_cache_memory=256 * 2**20, enable_prefix_caching=False,
)  # fmt: skip
FEW_BLOCKS: dict[str, Any] = dict(num_gpu_blocks_override=60, block_size=16, max_model_len=512, max_num_seqs=16)
LETTERS = {"regex": "[a-z]{2,30}"}


@dataclass(frozen=True)
class Case:
    """``options``: sampling parameters of the prompts, taking turns. ``settings``: beside COMMON. ``holds``: what one plan each must
    answer to with something true. ``pooling``: each prompt is also asked for a vector of this kind."""

    options: tuple[dict[str, Any], ...]
    settings: dict[str, Any] = field(default_factory=dict)
    lengths: tuple[int, ...] = LENGTHS
    max_tokens: int = 4
    holds: tuple[Callable[[StepPlan], Any], ...] = ()
    pooling: str | None = None


def _copies(plan: StepPlan) -> Any:
    return plan.copies


def _masked(plan: StepPlan) -> Any:
    return plan.masked


def _masked_decodes(plan: StepPlan) -> Any:
    return plan.masked and all(a.token_ids is None for a in plan.advances)


def _swap_outs(plan: StepPlan) -> Any:
    return plan.swap_outs


def _swap_ins(plan: StepPlan) -> Any:
    return plan.swap_ins


def _scored(plan: StepPlan) -> Any:
    return any(a.prompt_logprobs is not None for a in plan.advances)


def _scored_alone(plan: StepPlan) -> Any:
    return _scored(plan) and not any(a.sample_rows for a in plan.advances)


def _pooled(plan: StepPlan) -> Any:
    return any(a.pooling_ends for a in plan.advances)


def _words_of(most: int) -> Callable[[StepPlan], Any]:
    """A step with bad words, of which the longest has so many tokens."""
    return lambda plan: max((len(word) for init in plan.row_inits for word in init.params.bad_words_token_ids), default=0) == most


CASES: dict[str, Case] = {
    "greedy": Case(({"temperature": 0.0},)),
    "drawn": Case(({"temperature": 0.8},)),
    "truncated": Case(({"temperature": 0.8, "top_p": 0.9, "top_k": 50}, {"temperature": 1.0, "min_p": 0.1})),
    "logprobs": Case(({"temperature": 0.0, "logprobs": 3}, {"temperature": 0.8})),
    "logprobs before penalties": Case(({"logprobs": 3, "presence_penalty": 0.5}, {"logprobs": 0, "min_tokens": 2}, {"temperature": 0.8})),
    "penalties": Case(({"presence_penalty": 0.5, "repetition_penalty": 1.2}, {"temperature": 0.0}, {"frequency_penalty": 0.5})),
    "lists": Case(({"logit_bias": {5: 2.0}}, {"allowed_token_ids": list(range(100))}, {"min_tokens": 3, "stop_token_ids": [7]})),
    "bad words": Case(({"bad_words": ["a"]}, {"temperature": 0.0}), holds=(_words_of(1),)),
    "bad words of several tokens": Case(
        ({"bad_words": ["ab", "a"]}, {"bad_words": ["longer"]}, {"bad_words": ["b"]}), holds=(_words_of(7),)
    ),
    "prompt logprobs": Case(({"prompt_logprobs": 2}, {"prompt_logprobs": 0, "logprobs": 1}, {"temperature": 0.0}), holds=(_scored,)),
    "grammars": Case(
        ({"temperature": 0.0, "structured_outputs": LETTERS}, {"temperature": 0.8}), max_tokens=9, holds=(_masked, _masked_decodes)
    ),
    "grammars and more": Case(
        ({"logprobs": 2, "presence_penalty": 0.5, "structured_outputs": LETTERS}, {"bad_words": ["ab"]}, {"temperature": 0.0}),
        max_tokens=9,
        holds=(_masked, _masked_decodes),
    ),
    "forks": Case(({"n": 3}, {"n": 2, "temperature": 0.8, "repetition_penalty": 1.2}, {"temperature": 0.0}), holds=(_copies,)),
    "prompt logprobs in chunks": Case(
        ({"prompt_logprobs": 1, "temperature": 0.0},), {"max_num_batched_tokens": 600}, (3000, 40, 1500, 9), holds=(_scored_alone,)
    ),
    "swapped": Case(
        ({"temperature": 0.0}, {"temperature": 0.8, "repetition_penalty": 1.2, "bad_words": ["ab"]}),
        FEW_BLOCKS | {"swap_space": 0.25},
        SHORT,
        max_tokens=40,
        holds=(_swap_outs, _swap_ins),
    ),
    "recomputed": Case(
        ({"temperature": 0.0}, {"temperature": 0.8, "presence_penalty": 0.2, "bad_words": ["ab"], "logprobs": 1}),
        FEW_BLOCKS | {"swap_space": 0},
        SHORT,
        max_tokens=40,
        holds=(lambda plan: any(init.output_token_ids for init in plan.row_inits),),
    ),
    "means": Case(({"temperature": 0.0},), {"max_num_batched_tokens": 600}, holds=(_pooled,), pooling="mean"),
    "last states": Case(({"temperature": 0.0},), {"max_num_batched_tokens": 600}, holds=(_pooled,), pooling="last"),
}


def make_model(folder: Path) -> Path:
    """A small Qwen3 of sizes that a GPU's kernels take; returns ``folder``. Its tokens are bytes, and " a": a word of one token."""
    make_tiny_model(folder)
    tokenizer = folder / "tokenizer.json"
    data = json.loads(tokenizer.read_text())
    data["model"]["vocab"]["Ġa"] = 258
    data["model"]["merges"].append(["Ġ", "a"])
    tokenizer.write_text(json.dumps(data))
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | SIZES))
    return folder


def make_llm(folder: Path, case: Case, **options: Any) -> Any:
    from octavo import LLM
    from octavo.engine.cost_model import CostModel

    settings = COMMON | case.settings | options
    if case.pooling is not None:
        settings["pooler_config"] = json.dumps({"pooling_type": case.pooling})
    llm = LLM(folder, **settings)
    if settings.get("swap_space"):  # so small a model is recomputed sooner; while nothing is known of that, all is moved
        llm.engine.scheduler.preemption.costs = CostModel()
    return llm


def prompts_of(case: Case) -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(10, 2000) for _ in range(n)] for n in case.lengths]


def run(llm: Any, case: Case) -> None:
    """Ask for all of it, and for vectors of the same prompts beside it."""
    from octavo import SamplingParams

    prompts = prompts_of(case)
    params = [
        SamplingParams(max_tokens=case.max_tokens + i, ignore_eos=True, detokenize=False, **case.options[i % len(case.options)])
        for i in range(len(prompts))
    ]
    if case.pooling is None:
        results = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        assert all(o.finish_reason in ("length", "stop") for result in results for o in result.outputs)
        return
    for request in _with_vectors(llm, prompts):
        llm.engine.add_request(request)
    vectors = 0
    while llm.engine.has_work():
        for delta in llm.engine.step():
            assert delta.error is None
            vectors += delta.embedding is not None
    assert vectors == len(prompts)


def _with_vectors(llm: Any, prompts: list[list[int]]) -> Iterator[GenerateRequest]:
    from octavo.frontend.pooling import pooling_params, pooling_request

    pooling = pooling_params(llm.roles, llm.model_config)
    for i, prompt in enumerate(prompts):
        yield GenerateRequest(request_id=f"g{i}", prompt_token_ids=prompt, params=TokenParams(temperature=0.0, max_tokens=9))
        yield pooling_request(f"p{i}", prompt, pooling, arrival_time=0.0)


def check(case: Case, plans: list[StepPlan]) -> None:
    """Did the case's steps hold what it is there for?"""
    assert len(plans) > 5
    if case.lengths is LENGTHS and "max_num_batched_tokens" not in case.settings:
        assert max(plan.num_tokens for plan in plans) > 2048
    for number, condition in enumerate(case.holds):
        assert any(condition(plan) for plan in plans), f"no step held the case's part {number}: the test lost its point"


def make_encoder_llm(folder: Path, kind: str, **options: Any) -> Any:
    from octavo import LLM

    sizes = dict(vocab_size=101, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128, type_vocab_size=2)
    config = dict(architectures=["BertModel"], model_type="bert", hidden_act="gelu", max_position_embeddings=256, layer_norm_eps=1e-12)
    (folder / "config.json").write_text(json.dumps(sizes | config | {"torch_dtype": "float32", "pad_token_id": 0}))
    settings: dict[str, Any] = dict(load_format="dummy", skip_tokenizer_init=True, max_num_seqs=16, max_num_batched_tokens=512)
    return LLM(folder, pooler_config=json.dumps({"pooling_type": kind}), **settings | options)


def run_encoder(llm: Any) -> None:
    rng = random.Random(2)
    llm.embed([[rng.randrange(5, 101) for _ in range(rng.choice([1, 2, 17, 18, 64, 256]))] for _ in range(60)])
