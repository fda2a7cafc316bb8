"""The benchmarks of ``octavo bench kernels`` run, and what they compare agrees; at sizes that the interpreter bears."""

from __future__ import annotations

import re

import pytest

from tests.kernels.triton_cases import needs_triton

pytestmark = needs_triton


def test_sampling(capsys: pytest.CaptureFixture[str]) -> None:
    from octavo.kernels.bench.sampling import bench_bitmask, bench_sampling, cases

    bench_sampling(vocab=700, all_rows=(3,))
    lines = capsys.readouterr().out.splitlines()
    drawn = [line for line in lines if line.startswith("sample R=3")]
    assert len(drawn) == len(cases(3))
    for line in drawn:
        assert lines[lines.index(line) + 1].startswith("  the same in torch (3 of 3 equal)")
    assert len(bench_bitmask(vocab=700, all_rows=(2,))) == 2


def test_the_ends_of_a_step() -> None:
    from octavo.kernels.bench.ops import bench_rows, bench_scatter

    timings = [*bench_rows(3, max_blocks=20), *bench_scatter(5, rows=4, max_blocks=20)]
    assert [t.name.startswith("  the same in torch") for t in timings] == [False, True] * 3
    for timing in timings[1::2]:
        equal, of = re.search(r"\((\d+) of (\d+) equal\)", timing.name).groups()
        assert equal == of and int(of) >= 18
    assert all(t.seconds > 0 and t.floor > 0 for t in timings)


def test_norms_activations_and_the_embedding() -> None:
    from octavo.kernels.bench.ops import bench_embedding, bench_rms_norm, bench_silu_and_mul

    timings = [*bench_rms_norm(2, 64), *bench_silu_and_mul(2, 64), *bench_embedding(2, vocab=50, width=64)]
    assert [t.name.rpartition(" ")[2] for t in timings] == ["triton", "torch"] * 3
