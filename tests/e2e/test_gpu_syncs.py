"""The host never waits for the GPU while it submits a step, of whatever mixture: PyTorch raises where an operation would.

tests/executor/test_no_waits.py runs the same requests where there is no GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.timeout(300),
]

from octavo.types import StepPlan  # noqa: E402
from tests.e2e import mixtures  # noqa: E402


@pytest.fixture(scope="module")
def make_llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[mixtures.Case], Any]]:
    """The case's LLM; cases that come one after another and want the same settings share it."""
    folder = mixtures.make_model(tmp_path_factory.mktemp("models") / "qwen3")
    held: dict[str, Any] = {}

    def make(case: mixtures.Case) -> Any:
        key = repr((case.settings, case.pooling))
        if key not in held:
            close()
            held[key] = mixtures.make_llm(folder, case, device="cuda", dtype="bfloat16")
        return held[key]

    def close() -> None:
        for llm in held.values():
            llm.shutdown()
        held.clear()

    yield make
    close()


def watched(executor: Any, monkeypatch: pytest.MonkeyPatch) -> list[StepPlan]:
    """The plans that the executor will get; from now on, both halves of a step raise where they would wait."""
    plans: list[StepPlan] = []

    def raising(function: Callable[[Any], None]) -> Callable[[Any], None]:
        def call(argument: Any) -> None:
            if isinstance(argument, StepPlan):
                plans.append(argument)
            torch.cuda.set_sync_debug_mode("error")
            try:
                function(argument)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        return call

    torch.cuda.synchronize()
    for half in ("submit", "sample"):
        if hasattr(executor, half):
            monkeypatch.setattr(executor, half, raising(getattr(executor, half)))
    return plans


@pytest.mark.parametrize("name", mixtures.CASES)
def test_no_step_makes_the_host_wait(make_llm: Callable[[mixtures.Case], Any], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = mixtures.CASES[name]
    llm = make_llm(case)
    for _ in range(3):  # compile, capture
        mixtures.run(llm, case)
    plans = watched(llm.executor, monkeypatch)
    mixtures.run(llm, case)
    mixtures.check(case, plans)


@pytest.mark.parametrize("kind", ["mean", "cls"])
def test_nor_does_an_encoder(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = mixtures.make_encoder_llm(tmp_path, kind, device="cuda")
    mixtures.run_encoder(llm)
    plans = watched(llm.executor, monkeypatch)
    mixtures.run_encoder(llm)
    assert len(plans) > 2


def test_what_waits_raises() -> None:
    numbers, index = torch.zeros(5, device="cuda"), torch.zeros(2, dtype=torch.int64, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchroniz"):
            numbers[index] = 1.0
    finally:
        torch.cuda.set_sync_debug_mode("default")
