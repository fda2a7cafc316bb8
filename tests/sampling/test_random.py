"""The random stream: a function of (seed, position), uniform and independent along both."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from octavo.sampling.random import mix64, mix64_int, row_key, uniforms


def stream(seed: int, count: int, draw: int = 0) -> np.ndarray:
    keys = torch.full((count,), row_key(seed), dtype=torch.int64)
    return uniforms(keys, torch.arange(count), draw).numpy()


def ks_statistic(values: np.ndarray) -> float:
    """Kolmogorov–Smirnov distance to the uniform distribution, times sqrt(n); above 1.95 once in a thousand."""
    ordered, n = np.sort(values), len(values)
    steps = np.arange(n)
    return float(max((ordered - steps / n).max(), ((steps + 1) / n - ordered).max()) * np.sqrt(n))


def test_known_answers_of_splitmix64():
    # The first outputs of the published generator from state 1234567.
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    golden = 0x9E3779B97F4A7C15
    assert [mix64_int(1234567 + (i + 1) * golden) for i in range(5)] == expected


def test_tensor_and_integer_arithmetic_agree():
    values = [0, 1, -1, 2**63 - 1, -(2**63), 0x123456789ABCDEF, -987654321]
    mixed = mix64(torch.tensor(values, dtype=torch.int64)).tolist()
    assert [v % 2**64 for v in mixed] == [mix64_int(v) for v in values]


def test_range_and_determinism():
    u = stream(7, 100_000)
    assert u.min() >= 0.0 and u.max() < 1.0
    assert np.array_equal(u, stream(7, 100_000))
    assert len(np.unique(u)) == len(u)


@pytest.mark.parametrize("seed", [0, 1, 2, 3, 42, -1, 2**63 - 1, -(2**63), 2**64 - 1])
def test_uniform_along_positions(seed):
    assert ks_statistic(stream(seed, 100_000)) < 2.2


@pytest.mark.parametrize("position", [0, 1, 5, 1000])
@pytest.mark.parametrize("first", [0, 10**12])
def test_uniform_along_consecutive_seeds(position, first):
    keys = torch.tensor([row_key(first + s) for s in range(50_000)], dtype=torch.int64)
    assert ks_statistic(uniforms(keys, torch.full_like(keys, position)).numpy()) < 2.2


def grid_chi_square(x: np.ndarray, y: np.ndarray, cells: int = 16) -> float:
    """Standard deviations by which pairs (x, y) miss an even spread over cells x cells."""
    counts = np.histogram2d(x, y, bins=cells, range=[[0, 1], [0, 1]])[0]
    expected = len(x) / cells**2
    freedom = cells**2 - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom))


@pytest.mark.parametrize("lag", [1, 2, 3, 16, 17, 64])
def test_positions_are_independent(lag):
    u = stream(123, 200_000)
    assert abs(grid_chi_square(u[:-lag], u[lag:])) < 4.5
    assert abs(np.corrcoef(u[:-lag], u[lag:])[0, 1]) < 4.5 / np.sqrt(len(u))


@pytest.mark.parametrize(("a", "b"), [(0, 1), (1, 2), (41, 42), (5, -5), (0, 2**32), (3, 3 + 16), (1, 1 + 0x9E3779B97F4A7C15)])
def test_seeds_are_independent_even_shifted(a, b):
    u, v = stream(a, 100_000), stream(b, 100_000)
    for lag in (0, 1, 16):
        assert abs(grid_chi_square(u[: len(u) - lag], v[lag:])) < 4.5
    assert not np.intersect1d(u, v).size


def test_draws_of_one_position_are_independent():
    assert abs(grid_chi_square(stream(9, 100_000, 0), stream(9, 100_000, 1))) < 4.5
    assert not np.intersect1d(stream(9, 100_000, 15), stream(9, 100_000, 0)).size


def test_bits_are_balanced():
    bits = (stream(77, 100_000) * 2**53).astype(np.int64)
    for bit in range(53):
        assert abs(((bits >> bit) & 1).mean() - 0.5) < 4.5 * 0.5 / np.sqrt(len(bits))
