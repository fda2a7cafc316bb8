"""Engine, scheduler and runner on small random models against a slow truth: one sequence, the whole prefix run anew for each token."""

from __future__ import annotations

import itertools
import random
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch

from octavo.attention.reference import ReferenceAttention
from octavo.engine.core import Engine
from octavo.engine.cost_model import CostModel
from octavo.engine.settings import SchedulerSettings
from octavo.executor.model_runner import ModelRunner, PendingStep, Undrawn
from octavo.executor.swap import WORD, HostMemory, SwapSpace
from octavo.sampling.batch import SamplingState
from octavo.sampling.sampler import Sampler
from octavo.types import GenerateRequest, RowInit, StepPlan, StepResult, TokenMasks, TokenParams
from tests.models.helpers import PagedRunner, load_like, tiny_transformers_model

VOCAB = 131
MAX_LEN = 64


@pytest.fixture(scope="module", params=["Llama", "Qwen3"])
def model(request: pytest.FixtureRequest) -> Any:
    return load_like(tiny_transformers_model(request.param, seed=1))


class RunnerExecutor:
    """The executor's part around a ModelRunner, on ReferenceAttention."""

    swap_block_s = 0.0
    whole_prompts = False

    def __init__(self, model: Any, *, num_blocks: int, block_size: int, max_rows: int, steps_ahead: int, num_cpu_blocks: int = 0) -> None:
        backend = ReferenceAttention()
        device = torch.device("cpu")
        caches = [
            backend.make_kv_cache(num_blocks, block_size, layer.num_kv_heads, layer.head_dim, torch.float32, device)
            for layer in model.attention_layers
        ]
        for cache in caches:
            cache.fill_(float("nan"))  # whoever reads what nobody wrote is found out
        self.runner = ModelRunner(
            model, backend, caches, block_size=block_size, max_rows=max_rows, max_model_len=MAX_LEN, vocab_size=VOCAB, device=device
        )
        self.num_blocks, self.num_cpu_blocks, self.steps_ahead = num_blocks, num_cpu_blocks, steps_ahead
        if num_cpu_blocks:
            words = sum(cache[0].nbytes for cache in caches) // WORD.itemsize
            memory = HostMemory(num_cpu_blocks * words * WORD.itemsize, device)
            self.runner.swap = SwapSpace(memory, torch.empty(3, words, dtype=WORD), caches)  # so few that most moves take turns
            memory.words.view(torch.float32).fill_(float("nan"))
        self.pending: deque[PendingStep] = deque()
        self.num_copies = 0
        self.most_tokens = 0

    def submit(self, plan: StepPlan) -> None:
        self.num_copies += len(plan.copies)
        self.most_tokens = max(self.most_tokens, plan.num_tokens)
        self.pending.append(self.runner.execute(plan))

    def collect(self) -> StepResult:
        return self.pending.popleft().to_result()

    def forget(self) -> None:
        self.pending.clear()

    def shutdown(self) -> None: ...


def slow_truth(model: Any, request: GenerateRequest, seed: int) -> tuple[list[int], list[Any]]:
    """Tokens and their log-probabilities, without a batch, a cache, or blocks that outlive a token."""
    params, tokens, drawn, logprobs = request.params, list(request.prompt_token_ids), [], []
    while len(drawn) < params.max_tokens:
        logits = PagedRunner(model, num_blocks=32).step([("s", tokens)])[0][-1:]
        sampler = Sampler(SamplingState(1, VOCAB))
        sampler.state.init_row(RowInit(0, params, seed, request.prompt_token_ids, drawn, [0]))
        [token], entries = sampler.sample(logits.clone(), [0], [len(tokens)]).to_host()
        tokens.append(token)
        drawn.append(token)
        logprobs.append(entries[0] if entries else None)
    return drawn, logprobs


def random_params(rng: random.Random) -> TokenParams:
    return TokenParams(
        n=rng.choice([1, 1, 2, 3]),
        max_tokens=rng.randint(1, 20),
        temperature=rng.choice([0.0, 0.8]),
        top_k=rng.choice([0, 5]),
        top_p=rng.choice([1.0, 0.9]),
        frequency_penalty=rng.choice([0.0, 0.7]),
        repetition_penalty=rng.choice([1.0, 1.2]),
        seed=rng.randint(0, 10**9),
        logprobs=rng.choice([None, 0, 2]),
        prompt_logprobs=rng.choice([None, None, 1]),
        bad_words_token_ids=rng.choice([(), ((5,), (7, 8))]),
        logit_bias=rng.choice([None, {3: 4.0}]),
    )


def random_requests(rng: random.Random, count: int) -> list[GenerateRequest]:
    shared = [rng.randrange(VOCAB) for _ in range(20)]
    requests = []
    for i in range(count):
        own = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 18))]
        prompt = shared[: rng.choice([0, 4, 8, 20])] + own
        requests.append(GenerateRequest(request_id=str(i), prompt_token_ids=prompt, params=random_params(rng)))
    return requests


@pytest.mark.parametrize(
    ("steps_ahead", "budget", "num_blocks", "prefix_caching", "num_cpu_blocks"),
    [
        (0, 64, 64, True, 0),
        (1, 64, 64, True, 0),
        (0, 7, 64, True, 0),
        (1, 9, 17, True, 0),
        (1, 6, 17, False, 0),
        (0, 30, 17, True, 0),
        (1, 9, 17, True, 60),
        (1, 6, 17, False, 60),
        (0, 30, 17, True, 14),
    ],
)
def test_batches_chunks_prefix_hits_and_preemption_change_no_token(
    model: Any, steps_ahead: int, budget: int, num_blocks: int, prefix_caching: bool, num_cpu_blocks: int
) -> None:
    rng = random.Random(f"{steps_ahead} {budget} {num_blocks}")
    executor = RunnerExecutor(
        model, num_blocks=num_blocks, block_size=4, max_rows=6, steps_ahead=steps_ahead, num_cpu_blocks=num_cpu_blocks
    )
    settings = SchedulerSettings(
        num_blocks=num_blocks,
        block_size=4,
        max_model_len=MAX_LEN,
        max_num_seqs=6,
        max_num_batched_tokens=budget,
        prefix_caching=prefix_caching,
        num_cpu_blocks=num_cpu_blocks,
    )
    engine = Engine.from_settings(settings, executor)
    if num_cpu_blocks:  # times measured here could say that computing again is quicker; while nothing is known, all is moved
        engine.scheduler.preemption.costs = CostModel()
    requests = random_requests(rng, 14)
    arriving = deque(requests)
    tokens: dict[tuple[str, int], list[int]] = {}
    logprobs: dict[tuple[str, int], list[Any]] = {}
    prompts: dict[str, Any] = {}
    seeds: dict[tuple[str, int], int] = {}
    while arriving or engine.has_work():
        for _ in range(min(len(arriving), rng.choice([0, 1, 5]))):
            request = arriving.popleft()
            engine.add_request(request)
            seeds.update({(request.request_id, s.index): s.seed for s in engine.scheduler.requests[request.request_id].sequences})
        for delta in engine.step():
            key = (delta.request_id, delta.index)
            tokens.setdefault(key, []).extend(delta.token_ids)
            logprobs.setdefault(key, []).extend(delta.logprobs or [None] * len(delta.token_ids))
            if delta.prompt_logprobs is not None:
                prompts[delta.request_id] = delta.prompt_logprobs
            assert delta.finish_reason in (None, "length")
    assert executor.num_copies > 0, "no copy-on-write was needed: the test lost its point"
    assert executor.most_tokens <= budget
    if num_blocks < 20:
        assert engine.stats().num_preemptions > 0
    assert (engine.stats().num_blocks_in > 0) == (num_cpu_blocks > 0)
    assert (engine.stats().prefix_cache_hits > 0) == prefix_caching
    assert engine.stats().kv_cache_usage == 0
    for request in requests:
        for index in range(request.params.n):
            key = (request.request_id, index)
            expected, entries = slow_truth(model, request, seeds[key])
            assert tokens[key] == expected, (request, index)
            _check_logprobs(logprobs[key], entries)
        if request.params.prompt_logprobs is not None:
            _check_prompt(model, request, prompts[request.request_id])


def _check_logprobs(ours: list[Any], expected: list[Any]) -> None:
    for a, b in zip(ours, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert (a.token_ids, a.rank) == (b.token_ids, b.rank)
            assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)


def _check_prompt(model: Any, request: GenerateRequest, entries: list[Any]) -> None:
    prompt = request.prompt_token_ids
    logprobs = PagedRunner(model, num_blocks=32).step([("s", prompt)])[0].log_softmax(-1)
    assert len(entries) == len(prompt) - 1
    for position, entry in enumerate(entries):
        token, best = prompt[position + 1], int(logprobs[position].argmax())
        assert entry.token_ids == [token, best]
        assert entry.logprobs == pytest.approx([float(logprobs[position, token]), float(logprobs[position, best])], abs=1e-4)


def test_n_sequences_without_a_seed_differ(model: Any) -> None:
    executor = RunnerExecutor(model, num_blocks=64, block_size=4, max_rows=8, steps_ahead=1)
    settings = SchedulerSettings(num_blocks=64, block_size=4, max_model_len=MAX_LEN, max_num_seqs=8, max_num_batched_tokens=64)
    engine = Engine.from_settings(settings, executor)
    for name in "ab":
        engine.add_request(GenerateRequest(request_id=name, prompt_token_ids=[1, 2, 3], params=TokenParams(n=4, max_tokens=12)))
    tokens: dict[tuple[str, int], list[int]] = {}
    while engine.has_work():
        for delta in engine.step():
            tokens.setdefault((delta.request_id, delta.index), []).extend(delta.token_ids)
    assert len(tokens) == 8
    assert all(a != b for a, b in itertools.combinations(tokens.values(), 2))


@pytest.mark.parametrize("max_model_len", [1, 2, 4, 5, 64])
def test_warm_up_fits_any_context(model: Any, max_model_len: int) -> None:
    backend = ReferenceAttention()
    caches = [backend.make_kv_cache(8, 8, x.num_kv_heads, x.head_dim, torch.float32, torch.device("cpu")) for x in model.attention_layers]
    runner = ModelRunner(
        model, backend, caches, block_size=8, max_rows=2, max_model_len=max_model_len, vocab_size=VOCAB, device=torch.device("cpu")
    )
    seen: list[int] = []
    execute = runner.execute
    runner.execute = lambda plan: seen.append(max(a.start + a.count for a in plan.advances)) or execute(plan)  # type: ignore[method-assign, func-returns-value]
    runner.warm_up()
    assert max(seen) == min(5, max_model_len)


def test_a_capture_that_fails_in_the_warm_up_is_told(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later, steps go on without graphs; now somebody is there who can free memory."""
    backend = ReferenceAttention()
    caches = [backend.make_kv_cache(8, 8, x.num_kv_heads, x.head_dim, torch.float32, torch.device("cpu")) for x in model.attention_layers]
    sizes = {"block_size": 8, "max_rows": 2, "max_model_len": 64, "vocab_size": VOCAB}
    runner = ModelRunner(model, backend, caches, **sizes, device=torch.device("cpu"), use_graphs=True)  # type: ignore[arg-type]
    runner.warm_up()
    assert runner.graphs is not None
    monkeypatch.setattr(runner.graphs.pool, "refused", torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(torch.OutOfMemoryError):
        runner.warm_up()


def test_ctrl_c_in_a_masked_draw_leaves_no_mask_for_the_next(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = RunnerExecutor(model, num_blocks=4, block_size=16, max_rows=2, steps_ahead=0).runner
    runner.sampler.state.init_row(RowInit(0, TokenParams(temperature=0.0), 0, [0], [], [0]))
    logits = torch.arange(VOCAB, dtype=torch.float32)[None]
    undrawn = Undrawn(logits, [1], torch.zeros(1, dtype=torch.int64))
    pending = PendingStep(0, [0], None)
    pending.undrawn = undrawn

    def interrupted(*args: Any) -> None:
        assert runner.sampler.state.grammar._masks is not None
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(runner.sampler, "sample", interrupted)
        runner.sample(pending, TokenMasks([0], np.ones((1, -(-VOCAB // 32)), np.int32)))
    runner.sampler.state.init_row(RowInit(0, TokenParams(temperature=0.0, logprobs=0), 0, [0], [], [0]))
    later = PendingStep(1, [0], None)
    runner._draw(later, undrawn, False)
    assert runner.sampler.state.grammar._masks is None and later.to_result().token_ids == [VOCAB - 1]
