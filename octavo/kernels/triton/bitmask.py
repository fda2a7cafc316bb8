"""Forbidding the tokens that a bitmask leaves out (structured output): writes -inf, reads no logits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from octavo.kernels.sizes import cdiv
from octavo.kernels.triton.launch import launch, pdl_options, release, wait

_BLOCK_WORDS = 64  # 2,048 tokens a program


@triton.jit
def _bitmask_kernel(
    logits_ptr, logits_stride, bits_ptr, words, places_ptr, vocab, BLOCK_WORDS: tl.constexpr, USE_PDL: tl.constexpr
):  # fmt: skip
    """Grid (masked rows, blocks of words)."""
    mask_row = tl.program_id(0)
    token = tl.program_id(1) * BLOCK_WORDS * 32 + tl.arange(0, BLOCK_WORDS * 32)
    release(USE_PDL)
    wait(USE_PDL)
    place = tl.load(places_ptr + mask_row).to(tl.int64)
    word = tl.load(bits_ptr + mask_row.to(tl.int64) * words + token // 32, mask=token // 32 < words, other=0)
    forbidden = ((word >> (token % 32)) & 1) == 0
    minus_inf = tl.full([BLOCK_WORDS * 32], float("-inf"), tl.float32)
    tl.store(logits_ptr + place * logits_stride + token, minus_inf.to(logits_ptr.dtype.element_ty), mask=forbidden & (token < vocab))


def apply_token_bitmask(logits: torch.Tensor, bits: torch.Tensor, places: torch.Tensor) -> None:
    """See octavo/kernels/token_bitmask.py. One launch."""
    if not bits.is_contiguous() or bits.dtype != torch.int32 or logits.stride(1) != 1 or len(places) != len(bits):
        raise ValueError(
            f"apply_token_bitmask takes contiguous int32 bits [N, W], N places and logits whose rows are contiguous; got {bits.dtype} "
            f"{tuple(bits.shape)}, {len(places)} places and strides {logits.stride()}."
        )
    vocab = logits.shape[1]
    if len(bits):
        grid = (len(bits), cdiv(vocab, _BLOCK_WORDS * 32))
        args = (logits, logits.stride(0), bits, bits.shape[1], places, vocab)
        launch(_bitmask_kernel, grid, args, BLOCK_WORDS=_BLOCK_WORDS, num_warps=4, **pdl_options(logits))
