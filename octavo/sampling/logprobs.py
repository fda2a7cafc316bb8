"""Log-probabilities: of sampled tokens with the best alternatives, and of prompts. Of the distribution as the model gave
it: before penalties, masks, temperature and truncation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from octavo.sampling.truncation import top_candidates
from octavo.types import TokenLogprobs

LEAST_LOGPROB = -9999.0  # stands for -inf and NaN, which JSON can't carry
_CHUNK_ELEMENTS = 2**22  # logits that prompt_logprobs works on at a time (16 MiB of float32, a few times over)


@dataclass(slots=True)
class LogprobsTensors:
    """On the device. ids int64 [L, 1 + K] and values float32 [L, 1 + K]: the token itself, then the K best in order;
    ranks int64 [L], 1-based, in the order (logit descending, id ascending)."""

    ids: torch.Tensor
    values: torch.Tensor
    ranks: torch.Tensor

    def to_host(self, counts: Sequence[int]) -> list[TokenLogprobs]:
        """One entry per row, with counts[i] alternatives. Waits for the device."""
        ids, values, ranks = self.ids.tolist(), self.values.tolist(), self.ranks.tolist()
        return [TokenLogprobs(ids[i][: 1 + k], values[i][: 1 + k], ranks[i]) for i, k in enumerate(counts)]


def gather_logprobs(logits: torch.Tensor, tokens: torch.Tensor, count: int) -> LogprobsTensors:
    """logits: float32 [L, V], unmodified; tokens: int64 [L]; count: how many of the best, 0 to V. No wait on the device.

    Values are finite whatever the logits hold: what is not, or is less, becomes ``LEAST_LOGPROB``.
    """
    logits = torch.where(logits.isnan(), float("-inf"), logits) if logits.device.type != "cpu" or bool(logits.isnan().any()) else logits
    logprobs = logits.log_softmax(-1)
    token = tokens[:, None]
    own = logits.gather(1, token)
    before = torch.arange(logits.shape[1], device=logits.device) < token
    ranks = ((logits > own) | ((logits == own) & before)).sum(-1) + 1
    ids = token if count == 0 else torch.cat([token, top_candidates(logits, count)[1]], dim=1)
    values = logprobs.gather(1, ids).nan_to_num_(LEAST_LOGPROB, LEAST_LOGPROB, LEAST_LOGPROB).clamp_(min=LEAST_LOGPROB)
    return LogprobsTensors(ids, values, ranks)


def resolve_count(logprobs: int, vocab_size: int) -> int:
    """``SamplingParams.logprobs`` → how many alternatives: -1 is the whole vocabulary."""
    return vocab_size if logprobs < 0 else min(logprobs, vocab_size)


@torch.inference_mode()
def prompt_logprobs(logits: torch.Tensor, next_token_ids: Sequence[int], k: int) -> list[TokenLogprobs]:
    """One entry per prompt position: how probable next_token_ids[i] was after it, and the k best (-1: all).

    logits: float32 [P, V], row i from the position before next_token_ids[i]; P = len(next_token_ids), else ValueError.
    Works on a few rows at a time, so the memory it adds does not grow with P. Waits for the device.
    """
    if len(next_token_ids) != logits.shape[0]:
        raise ValueError(f"prompt_logprobs: {logits.shape[0]} rows of logits for {len(next_token_ids)} tokens; they must pair up.")
    vocab = logits.shape[1]
    count = resolve_count(k, vocab)
    chunk = max(1, _CHUNK_ELEMENTS // vocab)
    result: list[TokenLogprobs] = []
    for start in range(0, len(next_token_ids), chunk):
        part = logits[start : start + chunk].float().contiguous()
        tokens = torch.tensor(next_token_ids[start : start + chunk], dtype=torch.int64, device=logits.device)
        result += gather_logprobs(part, tokens, count).to_host([count] * len(tokens))
    return result
