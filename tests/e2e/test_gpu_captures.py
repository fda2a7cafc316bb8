"""What captured steps leave behind on a GPU: no memory when an engine is gone, and an engine that answers when a capture was spoilt.

tests/executor/test_graph_pool.py holds the same where there is no GPU, as far as PyTorch's own part in it can be played.
"""

from __future__ import annotations

import gc
import random
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.timeout(300),
]

from tests.e2e import mixtures  # noqa: E402

MIB = 2**20
KV_MIB = 256
Make = Callable[[], Any]


@pytest.fixture(scope="module")
def make_llm(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """An engine whose prompts come in many steps of one size, beside decodes."""
    from octavo import LLM

    folder = str(mixtures.make_model(tmp_path_factory.mktemp("models") / "qwen3"))
    settings: dict[str, Any] = dict(
        model=folder, load_format="dummy", device="cuda", dtype="float32", skip_tokenizer_init=True, max_model_len=512, max_num_seqs=16,
        max_num_batched_tokens=64, enable_prefix_caching=False, kv_cache_memory=KV_MIB * MIB,
    )  # fmt: skip
    return lambda: LLM(**settings)


def ask(llm: Any, seed: int = 0) -> list[list[int]]:
    from octavo import SamplingParams

    rng = random.Random(seed)
    prompts = [{"prompt_token_ids": [rng.randrange(10, 2000) for _ in range(rng.randint(1, 150))]} for _ in range(32)]
    params = [SamplingParams(temperature=0.0, max_tokens=rng.randint(1, 40), ignore_eos=True, detokenize=False) for _ in prompts]
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


def graphs(llm: Any) -> Any:
    return llm.executor.runner.graphs.pool


def use(llm: Any, before: int) -> weakref.ref[Any]:
    """Returns the graphs' pool, which nothing here holds any more."""
    pool = graphs(llm)
    ask(llm)
    assert any(key[0] == "mixed" and key[1] > 0 for key in pool.steps)
    assert torch.cuda.memory_reserved() - before > KV_MIB * MIB
    return weakref.ref(pool)


def kept() -> int:
    """Bytes in pools of graphs, once those of engines that are gone have been given back."""
    gc.collect()
    torch.cuda.empty_cache()
    return sum(s["total_size"] for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) != (0, 0))


def test_an_engine_that_is_only_dropped_gives_its_memory_back(make_llm: Make) -> None:
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    left = use(make_llm(), before)
    gc.collect()
    torch.cuda.empty_cache()
    assert left() is None
    assert torch.cuda.memory_reserved() - before < KV_MIB * MIB / 2  # workspaces of libraries stay


def test_a_spoilt_capture_costs_graphs_and_not_the_engine(make_llm: Make, caplog: pytest.LogCaptureFixture) -> None:
    before = kept()
    spoil_a_capture(make_llm, caplog)
    assert kept() <= before


def spoil_a_capture(make_llm: Make, caplog: pytest.LogCaptureFixture) -> None:
    llm = make_llm()
    pool = graphs(llm)
    expected = ask(llm)
    pool.steps.clear()
    record = pool._record
    pool._record = lambda key, body: record(key, lambda: (torch.cuda.synchronize(), body())[1])
    for _ in range(3):
        assert ask(llm) == expected
    assert pool.refused and caplog.text.count("Steps are not captured any more") == 1
    assert torch.rand(2, device="cuda").shape == (2,)
    torch.cuda.empty_cache()
    llm.shutdown()
    other = make_llm()
    assert ask(other) == expected
    assert graphs(other).steps and not graphs(other).refused
    other.shutdown()


def test_threads_that_take_turns_capture_and_give_all_back(make_llm: Make) -> None:
    """Each has a cuBLAS handle and workspace of its own, and captures what another ran first."""
    before = kept()
    take_turns(make_llm())
    assert kept() <= before


def take_turns(llm: Any) -> None:
    pool = graphs(llm)
    expected = ask(llm)
    turns = threading.Barrier(4, timeout=60)

    def work(number: int) -> None:
        for turn in range(3):
            turns.wait()
            if turn == number:
                pool._ran.update(dict.fromkeys(pool.steps, 1))
                pool.steps.clear()
                answers.append(ask(llm))
        turns.wait()

    answers: list[Any] = []
    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(4):
        turns.wait()
    for thread in threads:
        thread.join()
    assert answers == [expected] * 3 and pool.steps and not pool.refused


def test_who_waits_for_the_device_from_another_thread_disturbs_no_answer(make_llm: Make) -> None:
    """It may cost a capture, and with it those to come."""
    llm = make_llm()
    expected = ask(llm)
    graphs(llm).steps.clear()
    done = threading.Event()

    def wait_again_and_again() -> None:
        while not done.wait(0.001):
            with suppress(RuntimeError):
                torch.cuda.synchronize()

    thread = threading.Thread(target=wait_again_and_again)
    thread.start()
    try:
        for _ in range(4):
            assert ask(llm) == expected
    finally:
        done.set()
        thread.join()
    assert ask(llm) == expected
    print("captured:", len(graphs(llm).steps), "refused:", graphs(llm).refused)
    llm.shutdown()
