"""Embedding rows, in the chain of dependent launches."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from octavo.kernels.sizes import cdiv, next_power_of_2
from octavo.kernels.triton.launch import launch, pdl_options, release, wait


def embedding_reference(token_ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """See ``embedding``."""
    return F.embedding(token_ids, weight)


@triton.jit
def _embedding_kernel(token_ptr, weight_ptr, out_ptr, vocab, WIDTH: tl.constexpr, BLOCK: tl.constexpr, USE_PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    release(USE_PDL)
    wait(USE_PDL)
    token = tl.load(token_ptr + row).to(tl.int64)
    known = tl.where((token >= 0) & (token < vocab), WIDTH, 0)
    value = tl.load(weight_ptr + token * WIDTH + column, mask=column < known, other=0.0)
    tl.store(out_ptr + row * WIDTH + column, value, mask=column < WIDTH)


def embedding(token_ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """token_ids int64 [T], weight [vocab, H] contiguous -> [T, H]. Ids outside the vocabulary give zeros, which is what a
    vocabulary cut over ranks needs before its sum."""
    tokens, (vocab, width) = token_ids.shape[0], weight.shape
    out = torch.empty(tokens, width, dtype=weight.dtype, device=weight.device)
    if tokens:
        block = min(2048, next_power_of_2(width))
        launch(
            _embedding_kernel,
            (tokens, cdiv(width, block)),
            (token_ids, weight, out, vocab),
            WIDTH=width,
            BLOCK=block,
            num_warps=max(1, min(8, block // 256)),
            **pdl_options(weight),
        )
    return out
