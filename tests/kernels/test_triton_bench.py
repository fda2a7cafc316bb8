"""The benchmarks of ``octavo bench kernels`` run, compare each kernel with its reference, and end with 1 where one is wrong; at sizes
that the interpreter bears."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.kernels.triton_cases import DEVICE, needs_triton

pytestmark = needs_triton
FP16 = torch.float16  # the interpreter's bfloat16 is not rounded


def attention(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    from octavo.attention import bench

    monkeypatch.setitem(bench.MODELS, "tiny", (4, 2, 32))
    monkeypatch.setattr(bench, "available", lambda: False)  # FlashAttention 3 has no such heads
    cases = [("tiny", "decode", [70, 9, 300], [1, 1, 1]), ("tiny", "extend", [70, 9, 40], [5, 9, 17])]
    return bench.bench_attention((*case, 16, torch.float32) for case in cases)


def write_kv(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    from octavo.attention import bench

    monkeypatch.setattr(bench, "MODELS", {"tiny": (4, 2, 32)})
    return bench.bench_write_kv([3], FP16)


def linear(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    from octavo.kernels.bench.linear import Shape, bench_linear

    return bench_linear([Shape("gate_up", 64, 256, gated=True), Shape("down", 40, 520)], (2, 16), FP16)


def layers(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    from octavo.kernels.bench.linear import bench_layers

    return bench_layers(2, 64, 96, 64, 128, rows=2, dtype=FP16)


def ops(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    from octavo.kernels.bench.ops import bench_embedding, bench_rms_norm, bench_silu_and_mul

    return [*bench_rms_norm(2, 64, FP16), *bench_silu_and_mul(2, 64, FP16), *bench_embedding(2, vocab=50, width=64)]


def ends(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    from octavo.kernels.bench.ops import bench_rows, bench_scatter

    return [*bench_rows(3, max_blocks=20), *bench_scatter(5, rows=4, max_blocks=20)]


def sampling(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    from octavo.kernels.bench import sampling

    some = {name: parameters for name, parameters in sampling.cases(3).items() if name in ("greedy", "temperature", "top_p 0.95")}
    monkeypatch.setattr(sampling, "cases", lambda rows: some)
    return sampling.bench_sampling(vocab=700, all_rows=(3,))


def bitmask(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    from octavo.kernels.bench.sampling import bench_bitmask

    return bench_bitmask(vocab=700, all_rows=(2,))


NAMES = {
    attention: ["tiny  decode triton", "tiny  extend triton"],
    write_kv: ["tiny  write_kv     3 tokens"],
    linear: ["gate_up m=2 gemv", "gate_up m=16 dot", "down m=2 gemv", "down m=16 dot"],
    layers: ["2 layers' linears and norms, m=2, pdl=True", "2 layers' linears and norms, m=2, pdl=False"],
    ops: ["rms_norm+residual 2x64 triton", "silu_and_mul 2x64 triton", "embedding 2x64 triton"],
    ends: ["decode inputs + store, 3 places, tables=False", "decode inputs + store, 3 places, tables=True", "scatter 5 pairs"],
    sampling: [f"sample R=3 {name} (std 4.0)" for name in ("greedy", "temperature", "top_p 0.95")],
    bitmask: ["token bitmask R=2 triton"],
}


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def names_of(timings: list[Any], right: bool) -> list[str]:
    return [re.sub(" +", " ", t.name) for t in timings if t.check is not None and t.check.right is right]


@pytest.mark.parametrize("part", NAMES, ids=lambda part: part.__name__)
def test_each_kernel_is_compared_with_its_reference(
    part: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from octavo.kernels.bench.timing import exit_status

    timings = part(monkeypatch)
    assert names_of(timings, True) == [re.sub(" +", " ", name) for name in NAMES[part]]
    assert all(t.seconds > 0 and t.floor > 0 for t in timings)
    assert exit_status(timings) == 0 and "WRONG" not in "".join(map(str, timings))
    assert capsys.readouterr().err == ""


def zeros(*arguments: Any, **options: Any) -> torch.Tensor:
    return torch.zeros(3, dtype=torch.int64, device=DEVICE)


def slightly(function: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel that gives 5% more than there is."""

    def wrong(*arguments: Any, **options: Any) -> Any:
        result = function(*arguments, **options)
        return tuple(1.05 * x for x in result) if isinstance(result, tuple) else 1.05 * result

    return wrong


def adds(index: int) -> Callable[..., None]:
    """A kernel that does nothing but add 1 to one of its arguments."""
    return lambda *arguments, **options: arguments[index].add_(1)


BROKEN = [
    (attention, "octavo.attention.bench.decode_attention", adds(5), [0]),
    (attention, "octavo.attention.bench.extend_attention", adds(6), [1]),
    (write_kv, "octavo.attention.bench.write_kv", adds(0), [0]),
    (linear, "octavo.kernels.triton.linear.run", slightly, [0, 1, 2, 3]),
    (layers, "octavo.kernels.triton.linear.linear", slightly, [0, 1]),
    (ops, "octavo.kernels.bench.ops.rms_norm", slightly, [0]),
    (ops, "octavo.kernels.bench.ops.silu_and_mul", slightly, [1]),
    (ops, "octavo.kernels.bench.ops.embedding", slightly, [2]),
    (ends, "octavo.kernels.triton.rows.store_tokens", adds(2), [0, 1]),
    (ends, "octavo.kernels.triton.rows.scatter_pairs", adds(1), [2]),
    (sampling, "octavo.kernels.triton.sample.sample_rows", zeros, [0, 1, 2]),
    (bitmask, "octavo.kernels.triton.bitmask.apply_token_bitmask", adds(0), [0]),
]


@pytest.mark.parametrize(("part", "kernel", "broken", "wrong"), BROKEN, ids=[case[1].rpartition(".")[2] for case in BROKEN])
def test_a_wrong_kernel_is_named(
    part: Callable[..., list[Any]], kernel: str, broken: Any, wrong: list[int], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    from importlib import import_module

    from octavo.kernels.bench.timing import exit_status

    module, _, name = kernel.rpartition(".")
    owner = import_module(module)
    monkeypatch.setattr(owner, name, slightly(getattr(owner, name)) if broken is slightly else broken)
    timings = part(monkeypatch)
    assert names_of(timings, False) == [re.sub(" +", " ", NAMES[part][i]) for i in wrong]
    assert exit_status(timings) == 1
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == len(wrong) and all("differs from the reference's" in line for line in errors)


def test_all_ways_to_draw() -> None:
    from octavo.kernels.bench.sampling import bench_sampling, cases

    drawn = [t for t in bench_sampling(vocab=700, all_rows=(3,)) if t.name.startswith("sample R=3")]
    assert len(drawn) == len(cases(3)) and all("  3 of 3 equal" in str(t) for t in drawn)


def test_draws_may_differ_only_where_float32_cannot_tell() -> None:
    from octavo.kernels.bench.sampling import cases, compare
    from octavo.kernels.triton.sample import gumbel_reference

    parameters, positions = cases(3)["temperature"], torch.arange(3, device=DEVICE)
    noise = gumbel_reference(parameters["keys"], positions, 8)
    logits = (-noise * 0.8).float()  # all scores are 0, but for rounding
    theirs = torch.tensor([1, 2, 3], device=DEVICE)
    for ours, number, right in (([1, 2, 3], 3, True), ([1, 5, 3], 2, True), ([1, 2, 8], 2, False), ([-1, 2, 3], 2, False)):
        check = compare(torch.tensor(ours, device=DEVICE), theirs, logits, parameters, positions)
        assert (check.words, check.right) == (f"{number} of 3 equal", right)
    far = logits.index_fill(1, torch.tensor([5], device=DEVICE), -1.0)
    assert not compare(torch.tensor([1, 5, 3], device=DEVICE), theirs, far, parameters, positions).right
    assert not compare(torch.tensor([1, 5, 3], device=DEVICE), theirs, logits, None, positions).right  # greedy


def test_nan_is_wrong() -> None:
    from octavo.kernels.bench.timing import close, within

    x = torch.ones(3)
    assert close((x, x), (1.001 * x, x), tolerance=2e-3).right and not close((x, x), (1.003 * x, x), tolerance=2e-3).right
    for errors in ([float("nan"), 0.0], [0.0, float("nan")]):
        assert not within(errors, 1.0).right and "nan" in within(errors, 1.0).words
    assert not close((x, x), (x * float("nan"), x), tolerance=1.0).right


def test_attention_by_its_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """``--only`` chooses; what is wrong makes the status 1; very unequal lengths are among the cases."""
    from octavo.attention import bench

    assert ("8B", "decode 65536 among 31 x 4096") in [case[:2] for case in bench.decode_cases()]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(bench.MODELS, "tiny", (4, 2, 32))
    found = [("tiny", f"decode {name}", [20, 300], [1, 1], 16, torch.float32) for name in ("of few", "of many")]
    monkeypatch.setattr(bench, "decode_cases", lambda block_size: found)
    monkeypatch.setattr(bench, "extend_cases", lambda block_size: [])
    monkeypatch.setattr(bench, "available", lambda: False)
    assert bench.main(["--only", "of few"]) == 0
    line = capsys.readouterr().out
    assert re.search(r"^tiny +decode of few +triton +[\d.]+ us +[\d.]+ TB/s +[\d.]+% of the floor +err \d", line) and "many" not in line
    monkeypatch.setattr(bench, "decode_attention", adds(5))
    assert bench.main(["--only", "decode"]) == 1
    assert capsys.readouterr().err.count("differs from the reference's") == 2
    with pytest.raises(SystemExit):
        bench.main(["--only", "no such case"])
