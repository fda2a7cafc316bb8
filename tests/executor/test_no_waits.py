"""On a GPU no step makes the host wait while it is submitted: held on a CPU, by running the same plans on a GPU that isn't there.

tests/e2e/test_gpu_syncs.py holds it on a real one, with the same requests.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or torch.version.cuda is not None, reason="needs PyTorch without CUDA; elsewhere test_gpu_syncs.py is it"
)

from octavo.attention import flash_attention  # noqa: E402
from octavo.attention.triton import TritonAttention  # noqa: E402
from octavo.kernels import flash_attention_3  # noqa: E402
from octavo.kernels.token_bitmask import apply_token_bitmask_reference  # noqa: E402
from octavo.kernels.upload import upload  # noqa: E402
from octavo.types import StepPlan  # noqa: E402
from tests.e2e import mixtures  # noqa: E402
from tests.executor.no_waits import GPU, EncoderShadow, HostWaits, NoWaits, Shadow, pretended_gpu  # noqa: E402


@pytest.fixture(scope="module")
def fake() -> Iterator[Any]:
    with pretended_gpu() as mode:
        yield mode


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mixtures.make_model(tmp_path_factory.mktemp("models") / "qwen3")


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_STEPS_AHEAD", "1")
    monkeypatch.setenv("OCTAVO_DECODE_GRAPHS", "1")


def followed(executor: Any, shadow: Any, monkeypatch: pytest.MonkeyPatch) -> list[StepPlan]:
    """The plans that the executor will get; the shadow runs each of them first."""
    plans: list[StepPlan] = []
    submit = executor.submit

    def submitted(plan: StepPlan) -> None:
        plans.append(plan)
        shadow.submit(plan)
        submit(plan)

    monkeypatch.setattr(executor, "submit", submitted)
    if hasattr(executor, "sample"):
        sample = executor.sample
        monkeypatch.setattr(executor, "sample", lambda masks: (shadow.sample(masks), sample(masks)))
    return plans


@pytest.mark.parametrize("name", mixtures.CASES)
def test_no_step_makes_the_host_wait(fake: Any, folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = mixtures.CASES[name]
    llm = mixtures.make_llm(folder, case, device="cpu", dtype="float32")
    try:
        plans = followed(llm.executor, Shadow(llm, fake, TritonAttention(pdl=False)), monkeypatch)
        mixtures.run(llm, case)
        mixtures.check(case, plans)
    finally:
        llm.shutdown()


@pytest.mark.parametrize("decode", ["triton", "fa3"])
def test_nor_does_the_host_part_of_flash_attention(fake: Any, folder: Path, decode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library itself is not there."""
    schedules, calls = [], []
    operators = SimpleNamespace(
        get_scheduler_metadata=lambda **given: schedules.append(given) or torch.empty(8, dtype=torch.int32, device=GPU),
        fwd=lambda *tensors, **given: calls.append(given),
    )
    monkeypatch.setattr(flash_attention, "library", lambda: operators)
    monkeypatch.setattr(flash_attention_3, "library", lambda: operators)
    case = mixtures.CASES["prompt logprobs"]
    llm = mixtures.make_llm(folder, case, device="cpu", dtype="float32")
    try:
        plans = followed(llm.executor, Shadow(llm, fake, flash_attention.FlashAttention(decode, pdl=False)), monkeypatch)
        mixtures.run(llm, case)
    finally:
        llm.shutdown()
    assert len(calls) == 2 * len(schedules), "a schedule for the layers of a step"
    decodes = sum(any(a.count == 1 for a in plan.advances) for plan in plans) if decode == "fa3" else 0
    assert len(schedules) == decodes + sum(any(a.count > 1 for a in plan.advances) for plan in plans) > 0


@pytest.mark.parametrize("kind", ["mean", "cls"])
def test_nor_does_an_encoder(fake: Any, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = mixtures.make_encoder_llm(tmp_path, kind, device="cpu", dtype="float32")
    plans = followed(llm.executor, EncoderShadow(llm, fake), monkeypatch)
    mixtures.run_encoder(llm)
    assert len(plans) > 2


def test_nor_does_the_reference_of_a_kernel_that_steps_skip_here(fake: Any) -> None:
    """It is what devices without the kernel run, and what the kernel's tests compare with."""
    with fake, NoWaits():
        logits, bits = torch.zeros(5, 100, device=GPU), torch.zeros(2, 2, dtype=torch.int32, device=GPU)
        apply_token_bitmask_reference(logits, bits, torch.zeros(2, dtype=torch.int64, device=GPU))


TABLE = np.arange(8)
MISTAKES: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "a number through an index": lambda x, i: x.__setitem__(i, 1.0),
    "a number at a place": lambda x, i: x[0].__setitem__(3, 1.0),
    "a tensor through a mask": lambda x, i: x.__setitem__(x > 0, x[0, 0]),
    "a number through a mask": lambda x, i: x.__setitem__(x > 0, 0.0),
    "a list as an index": lambda x, i: x[[0, 1]],
    "a mask as an index": lambda x, i: x[x > 0],
    "a tensor as one place": lambda x, i: x[i[0]],
    "a number of a tensor": lambda x, i: x[0, 0].item(),
    "a list of a tensor": lambda x, i: i.tolist(),
    "an array of a tensor": lambda x, i: i.cpu().numpy(),
    "a condition": lambda x, i: bool((x > 0).any()),
    "places that aren't zero": lambda x, i: x.nonzero(),
    "repetitions without a total": lambda x, i: torch.repeat_interleave(i, i),
    "a tensor of a list": lambda x, i: torch.tensor([1, 2], device=GPU),
    "an array to the device": lambda x, i: torch.from_numpy(TABLE).to(GPU),
    "an array that isn't pinned": lambda x, i: torch.from_numpy(TABLE).to(GPU, non_blocking=True),
    "conversion on the way there": lambda x, i: torch.from_numpy(TABLE).pin_memory().to(GPU, torch.int32, non_blocking=True),
    "a copy to memory that isn't pinned": lambda x, i: torch.empty(x.shape).copy_(x, non_blocking=True),
    "a copy that waits": lambda x, i: torch.empty(x.shape, pin_memory=True).copy_(x),
    "something equal": lambda x, i: torch.equal(x, x),
    "lengths that are checked": lambda x, i: torch.segment_reduce(x, "sum", lengths=i, axis=0),
    "synchronization": lambda x, i: torch.cuda.synchronize(),
}
HARMLESS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "index_fill_": lambda x, i: x.index_fill_(0, i, 1.0),
    "a number to a part": lambda x, i: x[0].__setitem__(slice(2, 4), 1.0),
    "a tensor through an index": lambda x, i: x.__setitem__(i, x[i] + 1),
    "where": lambda x, i: torch.where(x > 0, 1.0, x),
    "masked_fill": lambda x, i: x.masked_fill_(x > 0, 1.0),
    "repetitions with a total": lambda x, i: torch.repeat_interleave(i, i, output_size=3),
    "upload": lambda x, i: upload([1, 2], torch.int32, GPU),
    "upload of nothing": lambda x, i: upload([], torch.int64, GPU),
    "upload that converts": lambda x, i: upload(TABLE, torch.int32, GPU),
    "to pinned memory": lambda x, i: torch.empty(x.shape, pin_memory=True).copy_(x, non_blocking=True),
    "to the host": lambda x, i: x.to("cpu", non_blocking=True),
    "a part of pinned memory": lambda x, i: torch.empty(9, 5, pin_memory=True)[2:6].copy_(x, non_blocking=True),
    "lengths on trust": lambda x, i: torch.segment_reduce(x, "sum", lengths=i, axis=0, unsafe=True),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("what", [*MISTAKES, *HARMLESS])
def test_mistakes_are_seen(fake: Any, what: str, inference: bool) -> None:
    """What a GPU would make the host wait for raises, and nothing else does."""
    with fake, NoWaits(), torch.inference_mode(inference):
        x, i = torch.zeros(4, 5, device=GPU), torch.zeros(2, dtype=torch.int64, device=GPU)
        if what in HARMLESS:
            HARMLESS[what](x, i)
            return
        with pytest.raises((HostWaits, RuntimeError)) as caught:
            MISTAKES[what](x, i)
    assert isinstance(caught.value, HostWaits) or type(caught.value).__name__ in (
        "DataDependentOutputException",
        "DynamicOutputShapeException",
    )
