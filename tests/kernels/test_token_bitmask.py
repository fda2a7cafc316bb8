"""Bitmasks on logits: the CPU's way and Triton's against the torch reference."""

from __future__ import annotations

import pytest
import torch

from octavo.kernels.token_bitmask import apply_token_bitmask, apply_token_bitmask_reference
from tests.kernels.triton_cases import DEVICE, gpu, needs_triton

SIZES = [(1, 1, 32), (5, 3, 33), (4, 4, 4096), (3, 2, 49152), (6, 1, 2050)]


def case(rows: int, masked: int, vocab: int, words: int | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    words = words or -(-vocab // 32)
    logits = torch.randn(rows, vocab)
    logits[torch.rand(rows, vocab) < 0.1] = float("nan")  # nothing is read, so nothing spreads
    bits = torch.randint(-(2**31), 2**31, (masked, words), dtype=torch.int64).to(torch.int32)
    bits[0, : words // 2] = 0
    bits[-1, words // 2 :] = -1
    return logits.to(DEVICE), bits.to(DEVICE), torch.randperm(rows)[:masked].to(DEVICE)


def slow(logits: torch.Tensor, bits: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    out = logits.clone()
    for i, place in enumerate(places.tolist()):
        for token in range(out.shape[1]):
            word = int(bits[i, token // 32]) & 0xFFFFFFFF if token // 32 < bits.shape[1] else 0
            if not word >> token % 32 & 1:
                out[place, token] = float("-inf")
    return out


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.nan_to_num(nan=7.5), b.nan_to_num(nan=7.5))


@pytest.mark.parametrize(("rows", "masked", "vocab", "words"), [(3, 2, 70, None), (2, 2, 70, 2), (2, 1, 64, 3), (4, 4, 1, None)])
def test_against_a_loop(rows: int, masked: int, vocab: int, words: int | None) -> None:
    logits, bits, places = (t.cpu() for t in case(rows, masked, vocab, words))
    expected = slow(logits, bits, places)
    for function in (apply_token_bitmask, apply_token_bitmask_reference):
        got = logits.clone()
        function(got, bits, places)
        assert equal(got, expected)


@pytest.mark.parametrize(("rows", "masked", "vocab"), SIZES)
def test_cpu_against_the_reference(rows: int, masked: int, vocab: int) -> None:
    logits, bits, places = (t.cpu() for t in case(rows, masked, vocab))
    expected = logits.clone()
    apply_token_bitmask_reference(expected, bits, places)
    apply_token_bitmask(logits, bits, places)
    assert equal(logits, expected)


@needs_triton
@pytest.mark.parametrize(("rows", "masked", "vocab"), SIZES)
def test_triton_against_the_reference(rows: int, masked: int, vocab: int) -> None:
    from octavo.kernels.triton.bitmask import apply_token_bitmask as kernel

    logits, bits, places = case(rows, masked, vocab)
    expected = logits.clone()
    apply_token_bitmask_reference(expected, bits, places)
    kernel(logits, bits, places)
    assert equal(logits, expected)
    kernel(logits, bits[:0], places[:0])
    with pytest.raises(ValueError, match="contiguous"):
        kernel(logits, bits.long(), places)


@gpu
@pytest.mark.parametrize(("rows", "masked", "vocab"), [(64, 64, 151936), (256, 100, 128256), (1, 1, 262208)])
def test_triton_at_real_sizes(rows: int, masked: int, vocab: int) -> None:
    test_triton_against_the_reference(rows, masked, vocab)
