"""Captured steps where there is no GPU: a graph that is played runs its step's body again, padded to the graph's sizes.

So all that decides which step is replayed, padded or captured is under test, with the real engine and model; what CUDA does is not
(tests/e2e/test_gpu_engine.py).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.attention.base import AttentionLayerSpec, ForwardContext
from octavo.attention.reference import ReferenceAttention
from octavo.executor.graph_pool import CapturedStep, GraphPool
from tests.tiny_model import VOCAB_SIZE, make_tiny_model

NUM_PROMPTS, MAX_ROWS = 20, 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("models") / "tiny"))


class Rows(ReferenceAttention):
    """As backends on a GPU take them: one block table of all rows, and padding sequences without a token."""

    def forward(self, qkv: torch.Tensor, layer: AttentionLayerSpec, kv_cache: Any, context: ForwardContext) -> torch.Tensor:
        m = context.attention
        index = m.extra.get("row_index")
        tables = m.block_tables if index is None else m.block_tables[index]
        lengths = m.seq_lens.clamp(min=1)  # one key of nobody's, for a query that nobody reads
        fields = {name: getattr(m, name) for name in m.__slots__} | {"block_tables": tables, "seq_lens": lengths}
        return super().forward(qkv, layer, kv_cache, ForwardContext(type(m)(**fields), context.backend, context.kv_caches))


class Played:
    """What pools did."""

    def __init__(self) -> None:
        self.replays: list[Any] = []
        self.captured: set[Any] = set()

    def record(self, key: Any, body: Callable[[], torch.Tensor]) -> CapturedStep:
        assert key not in self.captured
        step = CapturedStep(SimpleNamespace(replay=lambda: self.replay(key, step, body)), torch.zeros(0))  # type: ignore[arg-type]
        self.captured.add(key)
        return step

    def replay(self, key: Any, step: CapturedStep, body: Callable[[], torch.Tensor]) -> None:
        self.replays.append(key)
        step.output = body()


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Played:
    """A CPU whose executor takes it for a device that captures."""
    seen = Played()
    made = GraphPool.__init__

    def make(self: GraphPool, rows: Any) -> None:
        made(self, rows)
        self.on_gpu = True

    monkeypatch.setenv("OCTAVO_DECODE_GRAPHS", "1")
    monkeypatch.setattr(GraphPool, "__init__", make)
    monkeypatch.setattr(GraphPool, "_record", lambda self, key, body: seen.record(key, body))
    monkeypatch.setattr("octavo.attention.reference.ReferenceAttention", Rows)
    return seen


def make_llm(folder: str, **options: Any) -> LLM:
    settings: dict[str, Any] = dict(enable_prefix_caching=False, kv_cache_memory=2**22) | options
    return LLM(
        model=folder, load_format="dummy", dtype="float32", device="cpu", attention_backend="reference", max_model_len=256,
        max_num_seqs=MAX_ROWS, **settings,
    )  # fmt: skip


def make_requests() -> tuple[list[Any], list[SamplingParams]]:
    rng = random.Random(3)
    shared = [rng.randrange(10, VOCAB_SIZE - 10) for _ in range(40)]
    prompts, params = [], []
    for i in range(NUM_PROMPTS):
        prompts.append({"prompt_token_ids": shared * (i % 2) + [rng.randrange(10, VOCAB_SIZE - 10) for _ in range(rng.randint(1, 60))]})
        draws = [dict(temperature=0.0), dict(temperature=0.9, seed=i), dict(temperature=0.7, top_p=0.8, top_k=20, seed=i)][i % 3]
        params.append(SamplingParams(max_tokens=rng.randint(1, 30), ignore_eos=True, **draws))  # type: ignore[arg-type]
    return prompts, params


def answers(llm: LLM) -> list[list[int]]:
    prompts, params = make_requests()
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False)]


@pytest.fixture(scope="module")
def expected(folder: str) -> list[list[int]]:
    llm = make_llm(folder)
    got = answers(llm)
    llm.shutdown()
    return got


@pytest.mark.parametrize("steps_ahead", ["0", "1"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 24},
        {"max_num_batched_tokens": 24, "num_gpu_blocks_override": 20, "swap_space": 0},
        {"num_gpu_blocks_override": 20, "swap_space": 0.01, "enable_prefix_caching": True},
    ],
    ids=str,
)
def test_tokens_are_the_same_whatever_is_captured(
    folder: str,
    expected: list[list[int]],
    played: Played,
    options: dict[str, Any],
    steps_ahead: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OCTAVO_STEPS_AHEAD", steps_ahead)
    llm = make_llm(folder, **options)
    graphs = llm.executor.runner.graphs
    for i in range(3):
        assert answers(llm) == expected, f"run {i}"
        for _ in range(4):
            graphs.capture_next()
    beside = {key for key in played.captured if key[0] == "mixed" and key[1] > 0}
    assert {key[0] for key in played.replays} == {"decode", "mixed"} and beside & set(played.replays)
    assert not graphs.pool.refused
    if "num_gpu_blocks_override" in options:
        assert llm.engine.stats().num_preemptions > 0
    llm.shutdown()


def test_everything_can_be_captured_ahead(folder: str, expected: list[list[int]], played: Played) -> None:
    llm = make_llm(folder)
    graphs, before = llm.executor.runner.graphs, len(played.captured)
    while graphs.capture_next():
        pass
    ahead = len(played.captured)
    assert ahead > before + 20
    assert answers(llm) == expected
    assert len(played.captured) == ahead  # nothing was missing
    llm.shutdown()


def test_ctrl_c_while_the_list_of_rows_is_copied_mixes_up_no_rows(folder: str, played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm(folder)
    graphs = llm.executor.runner.graphs
    graphs._set_rows([0, 1, 2])
    copied = torch.Tensor.copy_

    def interrupted(self: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        copied(self, *args, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(torch.Tensor, "copy_", interrupted)
        graphs._set_rows([0, 2])
    graphs._set_rows([0, 1, 2])
    assert graphs.row_index[:4].tolist() == [0, 1, 2, MAX_ROWS]
    llm.shutdown()


@pytest.fixture
def idle(folder: str, played: Played, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The executor of an engine with nothing to do, whose device, which is not there, has room and has done (``busy``: not yet)."""
    llm = make_llm(folder)
    executor: Any = llm.executor
    executor._least_free, executor.busy = 1, False
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2, 2))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(query=lambda: not executor.busy))
    monkeypatch.setattr(executor.kernels, "ended", lambda: True)
    yield executor
    llm.shutdown()


def test_idle_the_device_is_never_more_than_one_step_behind(idle: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that comes then waits for what the device is at."""
    asked: list[bool] = []
    monkeypatch.setattr(idle.runner.graphs, "capture_next", lambda: asked.append(not idle.busy) or True)
    idle.busy = True
    assert idle.prepare() and idle.prepare() and asked == []
    idle.busy = False
    assert idle.prepare() and asked == [True]


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyError("a kernel")], ids=str)
def test_a_step_that_cannot_be_prepared_ends_nothing(
    idle: Any, error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails() -> bool:
        raise error

    monkeypatch.setattr(idle.runner.graphs, "capture_next", fails)
    assert not idle.prepare() and not idle.prepare()
    assert caplog.text.count("not captured ahead any more") == 1
