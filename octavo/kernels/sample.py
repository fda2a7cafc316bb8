"""Tokens from rows of logits, for hosts: greedy, and drawn after min_p, top_k and top_p, without sorting the vocabulary."""

from __future__ import annotations

from typing import Any

import torch

from octavo.kernels.cpu.library import library


def argmax_rows_reference(logits: torch.Tensor) -> torch.Tensor:
    """See ``argmax_rows``."""
    return _repair(logits).argmax(-1)


def argmax_rows(logits: torch.Tensor) -> torch.Tensor:
    """logits float32 [R, V] -> int64 [R]: the first of the largest; in a row that holds NaN or infinity where that would
    decide, the best finite one (0 if there is none)."""
    kernels: Any = library() if _plain(logits) else None
    if kernels is None:
        return argmax_rows_reference(logits)
    rows, vocab = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64)
    kernels.argmax_rows(logits.data_ptr(), rows, vocab, logits.stride(0), tokens.data_ptr(), torch.get_num_threads())
    return tokens


def sample_rows_reference(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    uniform: torch.Tensor,
) -> torch.Tensor:
    """See ``sample_rows``. Sorts everything, in double."""
    logits = _repair(logits)
    ordered, order = (logits.double() + 0.0).sort(dim=-1, descending=True, stable=True)
    weights = ((ordered - ordered[:, :1]) / temperature.double().clamp(min=1e-30)[:, None]).exp()
    place = torch.arange(logits.shape[1], device=logits.device)
    limited = weights * ((weights >= min_p[:, None]) & (place < top_k[:, None]))
    before = limited.cumsum(-1) - limited
    nucleus = (before < top_p[:, None] * limited.sum(-1, keepdim=True)) | (top_p >= 1.0)[:, None] | (place == 0)
    kept = limited * nucleus
    cumulative = torch.zeros_like(kept).scatter_(1, order, kept).cumsum(-1)
    total = cumulative[:, -1]
    target = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    drawn = (cumulative <= target[:, None]).sum(-1)
    return torch.where(temperature > 0, drawn, logits.argmax(-1))


def sample_rows(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    uniform: torch.Tensor,
) -> torch.Tensor:
    """One token a row by inverse CDF in order of ids: the first token whose cumulative weight exceeds uniform * total.

    logits float32 [R, V]; per row: temperature float32 (0: greedy), top_k int64 (V keeps all), top_p float64 (1 keeps all),
    min_p float64 (0 keeps all; against the best token's weight after temperature), uniform float64 in [0, 1). -> int64 [R].
    Tokens are ordered by (logit descending, id ascending); min_p and top_k cut first, top_p takes the shortest prefix of
    what is left that holds at least that share of its mass. A row with NaN or +inf, or nothing finite, gives its best finite
    token. A row's token depends on nothing but its own inputs.
    """
    options = (temperature, top_k, top_p, min_p, uniform)
    wanted = (torch.float32, torch.int64, torch.float64, torch.float64, torch.float64)
    if any(o.dtype != d or o.shape != logits.shape[:1] for o, d in zip(options, wanted, strict=True)):
        raise ValueError("sample_rows takes temperature float32, top_k int64, top_p, min_p and uniform float64, each with one entry a row.")
    kernels: Any = library() if _plain(logits) else None
    if kernels is None:
        return sample_rows_reference(logits, *options)
    rows, vocab = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64)
    held = [o.contiguous() for o in options]
    failed = kernels.sample_rows(
        logits.data_ptr(), rows, vocab, logits.stride(0), *(o.data_ptr() for o in held), tokens.data_ptr(), torch.get_num_threads()
    )
    if failed:
        raise MemoryError(f"sample_rows found no {vocab * 16} bytes to work in.")
    return tokens


def _plain(logits: torch.Tensor) -> bool:
    if logits.dim() != 2 or logits.shape[1] == 0:
        raise ValueError(f"logits must be [rows, vocabulary], got {tuple(logits.shape)}.")
    return logits.is_cpu and logits.dtype == torch.float32 and logits.stride(1) == 1 and logits.shape[1] < 2**31


def _repair(logits: torch.Tensor) -> torch.Tensor:
    """Rows that can't be drawn from become certain of their best finite token, or of token 0."""
    bad = ~logits.amax(-1, keepdim=True).isfinite()
    finite = torch.where(logits.isfinite(), logits, float("-inf"))
    certain = torch.full_like(logits, float("-inf")).scatter_(1, finite.argmax(-1, keepdim=True), 0.0)
    return torch.where(bad, certain, logits)
