"""Sampling in Triton, against torch: the same noise, so the same tokens."""

from __future__ import annotations

import math

import pytest
import torch

from tests.kernels.triton_cases import DEVICE, INTERPRETED, gpu, needs_triton, rand

pytestmark = needs_triton
triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
from octavo.kernels.triton.draw import gumbel, stream_state  # noqa: E402


@triton.jit
def noise_kernel(out_ptr, key_ptr, position_ptr, N: tl.constexpr):
    token = tl.arange(0, N)
    tl.store(out_ptr + token, gumbel(stream_state(tl.load(key_ptr), tl.load(position_ptr)), token))


INF, NAN = float("inf"), float("nan")


def parameters(rows: int, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed: int = 1) -> dict[str, torch.Tensor]:
    """A tensor per parameter; each argument is one value for all rows or a list."""

    def column(value, dtype: torch.dtype) -> torch.Tensor:
        values = value if isinstance(value, list) else [value] * rows
        return torch.tensor(values, dtype=dtype, device=DEVICE)

    generator = torch.Generator().manual_seed(seed)
    return {
        "temperature": column(temperature, torch.float32),
        "top_k": column(top_k, torch.int64),
        "top_p": column(top_p, torch.float64),
        "min_p": column(min_p, torch.float64),
        "keys": torch.randint(-(2**62), 2**62, (rows,), generator=generator).to(DEVICE),
        "positions": torch.randint(0, 10000, (rows,), generator=generator).to(DEVICE),
    }


def check(logits: torch.Tensor, **options) -> torch.Tensor:
    from octavo.kernels.triton.sample import sample_tokens, sample_tokens_reference

    chosen = parameters(len(logits), **options)
    tokens = sample_tokens(logits, **chosen)
    expected = sample_tokens_reference(logits, **chosen)
    assert tokens.dtype == torch.int64
    assert torch.equal(tokens, expected), (tokens.tolist(), expected.tolist())
    return tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", [1, 63, 5000, 9001])
def test_greedy(vocab: int, dtype: torch.dtype) -> None:
    from octavo.kernels.triton.sample import greedy_tokens

    logits = rand(5, vocab, dtype=dtype)
    assert torch.equal(greedy_tokens(logits), logits.float().argmax(-1))
    ties = (logits * 2).round().clamp(-1, 1)
    assert torch.equal(greedy_tokens(ties), (ties.float() + 0.0).argmax(-1))  # -0 and 0 tie


HOSTILE = [
    ([1.0, NAN, 3.0, 2.0], 2), ([1.0, INF, 3.0, 3.0], 2), ([-INF, -INF, -INF, -INF], 0), ([NAN, NAN, NAN, NAN], 0),
    ([NAN, INF, -INF, -5.0], 3), ([-INF, INF, -INF, INF], 0), ([-0.0, 0.0, -1.0, 0.0], 0), ([-INF, -2.0, -INF, -INF], 1),
]  # fmt: skip


@pytest.mark.parametrize(("row", "token"), HOSTILE)
def test_rows_that_cannot_be_drawn_from(row: list[float], token: int) -> None:
    from octavo.kernels.triton.sample import greedy_tokens

    logits = torch.full((3, 4500), -INF)
    logits[:, :4] = torch.tensor(row)
    assert greedy_tokens(logits.to(DEVICE)).tolist() == [token] * 3
    if row[0] != 0.0:
        assert check(logits.to(DEVICE), temperature=[0.0, 1.0, 1.0], top_k=[0, 0, 2]).tolist() == [token] * 3


@pytest.mark.parametrize("temperature", [1.0, 0.3, 1e-4, 30.0, 1e30])
def test_temperature(temperature: float) -> None:
    check(rand(6, 5000, scale=3), temperature=[temperature] * 5 + [0.0])


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": [1, 2, 5, 50, 200, 4999]},
        {"top_p": [0.0001, 0.1, 0.5, 0.9, 0.99, 0.999999]},
        {"min_p": [1.0, 0.5, 0.1, 0.01, 1e-4, 1e-9]},
        {"top_k": [5, 50, 500, 5, 50, 3000], "top_p": [0.9, 0.5, 0.95, 0.01, 0.999, 0.9]},
        {"top_k": 40, "top_p": 0.9, "min_p": [0.05, 0.3, 1e-3, 0.9, 1e-6, 0.0], "temperature": [0.7, 1.0, 2.0, 0.1, 5.0, 0.0]},
        {"top_p": 0.9, "min_p": [0.05, 0.3, 1e-3, 0.9, 1e-6, 0.0]},
        {"top_k": [0, 20, 0, 0, 9999, 5000], "top_p": [1.0, 1.0, 0.8, 1.0, 1.0, 1.0]},
    ],
)
@pytest.mark.parametrize("scale", [0.0, 0.5, 4.0])
def test_truncation(options: dict, scale: float) -> None:
    """Flat distributions (everything ties, the whole row is searched) and peaked ones."""
    check(rand(6, 5000, scale=scale), **options)


@pytest.mark.parametrize("candidates", [128, 4096])
def test_ties_are_kept_in_order_of_ids(candidates: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from octavo.kernels.triton import sample

    monkeypatch.setattr(sample, "CANDIDATES", candidates)
    logits = (rand(2, 4300) * 2).round().clamp(-3, 3)
    logits[:1, 4200:] = 9.0
    for top_k, top_p in ((7, 1.0), (150, 0.7), (0, 0.5)):
        check(logits, top_k=top_k, top_p=top_p)


def kept_by_kernel(logits: torch.Tensor, draws: int, **options) -> set[int]:
    from octavo.kernels.triton.sample import sample_tokens

    chosen = {name: value.repeat(draws) for name, value in parameters(1, **options).items()}
    chosen["positions"] = torch.arange(draws, device=DEVICE)
    return set(sample_tokens(logits.repeat(draws, 1), **chosen).tolist())


def test_nothing_else_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    from octavo.kernels.triton import sample

    if INTERPRETED:  # which takes as long over few tokens as a block is wide
        monkeypatch.setattr(sample, "BLOCK", 64)
        monkeypatch.setattr(sample, "PASS", 16)
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0, 0.0, -1.0, -INF]], device=DEVICE)
    assert kept_by_kernel(logits, 15, top_k=3) == {0, 1, 2}
    assert kept_by_kernel(logits, 10, top_p=0.35) == {0, 1}
    assert kept_by_kernel(logits, 10, min_p=0.5) <= {0, 1, 2, 3, 4}
    assert kept_by_kernel(logits, 10, top_k=4, top_p=0.5) == {0, 1}
    assert kept_by_kernel(logits, 50, temperature=100.0) == {0, 1, 2, 3, 4, 5}


def chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Standard deviations above what chance gives."""
    expected = probabilities * counts.sum()
    statistic = ((counts - expected) ** 2 / expected).sum().item()
    freedom = len(counts) - 1
    return (statistic - freedom) / math.sqrt(2 * freedom)


def test_the_noise() -> None:
    """Of a block of tokens: what the reference has, also where it is largest, which is what decides."""
    from octavo.kernels.triton.sample import gumbel_reference

    for key, position in ((0, 0), (-5, 7), (2**62 + 11, 123456)):
        keys, positions = (torch.tensor([value], device=DEVICE) for value in (key, position))
        noise = torch.empty(32768, device=DEVICE)
        noise_kernel[(1,)](noise, keys, positions, N=32768)
        expected = gumbel_reference(keys, positions, 32768)[0].float()
        matters = expected > -1.5  # less is noise that does not win unless hardly a token competes; float32 has it to 1e-3
        torch.testing.assert_close(noise[matters], expected[matters], rtol=2e-5, atol=2e-5)
        torch.testing.assert_close(noise[~matters], expected[~matters], rtol=1e-3, atol=1e-3)


def test_the_distribution_of_the_reference() -> None:
    """Draws by the noise are distributed as softmax(logits / temperature)."""
    from octavo.kernels.triton.sample import gumbel_reference

    draws, vocab = 50000, 40
    probabilities = (rand(vocab, scale=1.5, seed=3).cpu().double() / 0.8).softmax(-1)
    for keys, positions in ((torch.full((draws,), 12345), torch.arange(draws)), (torch.arange(draws) * 7919, torch.full((draws,), 3))):
        tokens = (probabilities.log() + gumbel_reference(keys, positions, vocab)).argmax(-1)
        assert abs(chi_square(torch.bincount(tokens, minlength=vocab).double(), probabilities)) < 4
        follows = tokens[1:] * vocab + tokens[:-1]  # a draw says nothing about the next
        joint = (probabilities[:, None] * probabilities).reshape(-1)
        common = joint > 1e-4
        assert abs(chi_square(torch.bincount(follows, minlength=vocab * vocab).double()[common], joint[common] / joint[common].sum())) < 4


def test_a_row_is_drawn_alike_wherever_it_stands() -> None:
    from octavo.kernels.triton.sample import PLAIN, pack_parameters, sample_rows

    logits = rand(4, 4500, scale=2)
    chosen = parameters(9, temperature=0.9, top_k=[0, 0, 0, 0, 40, 40, 40, 0, 0], top_p=[1.0] * 4 + [0.9] * 5)
    positions = chosen.pop("positions")
    packed = pack_parameters(**chosen)
    index = torch.tensor([5, 0, 8, 2], device=DEVICE)
    whole = sample_rows(logits, packed, index, positions[index])
    for i, row in enumerate(index.tolist()):
        one = sample_rows(logits[i : i + 1], packed[row : row + 1], None, positions[row : row + 1])
        assert one.item() == whole[i].item()
    plain = torch.tensor([0, 1, 2, 3], device=DEVICE)
    out = torch.empty(4, dtype=torch.int64, device=DEVICE)
    assert sample_rows(logits, packed, plain, positions[:4], mode=PLAIN, out=out) is out
    assert torch.equal(out, sample_rows(logits, packed, plain, positions[:4]))


def test_what_is_refused() -> None:
    from octavo.kernels.triton.sample import sample_rows, sample_tokens

    with pytest.raises(ValueError, match="float32"):
        sample_tokens(rand(2, 9, dtype=torch.bfloat16), **parameters(2))
    with pytest.raises(ValueError, match="contiguous rows"):
        sample_rows(rand(9, 2).t(), None, None, None, mode=0)
    with pytest.raises(ValueError, match="needs packed"):
        sample_rows(rand(2, 9), None, None, None)
    assert sample_tokens(torch.empty(0, 9, device=DEVICE), **parameters(0)).shape == (0,)


@gpu
@pytest.mark.parametrize("vocab", [128256, 151936])
@pytest.mark.parametrize("scale", [0.1, 1.0, 5.0])
def test_sampling_at_real_sizes(vocab: int, scale: float) -> None:
    """Few rows may differ where two candidates are closer than float32 tells, so almost all must agree."""
    from octavo.kernels.triton.sample import greedy_tokens, sample_tokens, sample_tokens_reference

    rows = 64
    logits = rand(rows, vocab, scale=scale)
    assert torch.equal(greedy_tokens(logits), logits.argmax(-1))
    cuts = ({"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.05}, {"top_k": 1000, "top_p": 0.95}, {"top_k": 100000}, {"top_p": 0.9999})
    for options in ({}, *cuts):
        chosen = parameters(rows, temperature=[0.0, 0.7, 1.0, 1.5] * (rows // 4), **options)
        same = sample_tokens(logits, **chosen) == sample_tokens_reference(logits, **chosen)
        assert same.float().mean() >= 0.98, (options, same.float().mean().item())


@gpu
@pytest.mark.parametrize("top_k", [0, 12])
def test_the_distribution(top_k: int) -> None:
    from octavo.kernels.triton.sample import kept_reference, sample_tokens

    draws, vocab = 60000, 40
    logits = rand(1, vocab, scale=1.5, seed=3)
    chosen = parameters(draws, temperature=0.8, top_k=top_k)
    chosen["keys"] = torch.full((draws,), 12345, device=DEVICE)
    chosen["positions"] = torch.arange(draws, device=DEVICE)
    tokens = sample_tokens(logits.expand(draws, -1), **chosen, truncates=top_k > 0)
    one = {name: chosen[name][:1] for name in ("temperature", "top_k", "top_p", "min_p")}
    kept = kept_reference(logits, **one)[0].cpu()
    probabilities = (logits[0].cpu().double() / 0.8).masked_fill(~kept, -INF).softmax(-1)
    counts = torch.bincount(tokens.cpu(), minlength=vocab).double()
    assert counts[~kept].sum() == 0
    assert abs(chi_square(counts[kept], probabilities[kept])) < 4


@gpu
def test_sampling_in_a_graph() -> None:
    from octavo.kernels.triton.sample import sample_tokens

    logits = rand(8, 151936, scale=3)
    chosen = parameters(8, temperature=[0.0, 1.0] * 4, top_k=[0, 50, 0, 0] * 2, top_p=[1.0, 0.9, 1.0, 0.95] * 2)
    expected = sample_tokens(logits, **chosen)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = sample_tokens(logits, **chosen)
    for _ in range(10):
        out.fill_(-1)
        graph.replay()
        assert torch.equal(out, expected)
    chosen["positions"] += 1
    graph.replay()
    assert torch.equal(out, sample_tokens(logits, **chosen))
