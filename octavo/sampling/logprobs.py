"""Log-probabilities: of sampled tokens with the best alternatives, and of prompts. Of the distribution as the model gave
it: before penalties, masks, temperature and truncation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from octavo.kernels.upload import upload
from octavo.sampling.truncation import top_candidates
from octavo.types import TokenLogprobs

LEAST_LOGPROB = -9999.0  # stands for -inf and NaN, which JSON can't carry
_RANK_CANDIDATES = 64  # nearly all sampled tokens are among so many best
_CHUNK_ELEMENTS = 2**22  # logits that PromptLogprobs works on at a time (16 MiB of float32, a few times over)
FEW_ELEMENTS = 2**24  # the same for sampled tokens' few alternatives, which need no sort
HOST_BYTES = 2**28  # of a step's PromptLogprobs that may be on their way to the host at the same time


@dataclass(slots=True)
class LogprobsTensors:
    """On the device. ids int64 [L, 1 + K] and values float32 [L, 1 + K]: the token itself, then the K best in order;
    ranks int64 [L], 1-based, in the order (logit descending, id ascending)."""

    ids: torch.Tensor
    values: torch.Tensor
    ranks: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.ids.nbytes + self.values.nbytes + self.ranks.nbytes

    def start_copy(self) -> LogprobsTensors:
        """The same on the host, once the stream has come there."""
        return LogprobsTensors(*(t.to("cpu", non_blocking=True) for t in (self.ids, self.values, self.ranks)))

    def to_host(self, counts: Sequence[int]) -> list[TokenLogprobs]:
        """One entry per row, with counts[i] alternatives. Waits for the device."""
        ids, values, ranks = self.ids.tolist(), self.values.tolist(), self.ranks.tolist()
        return [TokenLogprobs(ids[i][: 1 + k], values[i][: 1 + k], ranks[i]) for i, k in enumerate(counts)]


def gather_logprobs(logits: torch.Tensor, tokens: torch.Tensor, count: int) -> LogprobsTensors:
    """logits: float32 [L, V], unmodified; tokens: int64 [L]; count: how many of the best, 0 to V. No wait on the device.

    Values are finite whatever the logits hold: what is not, or is less, becomes ``LEAST_LOGPROB``.
    """
    logprobs = logits.log_softmax(-1)
    on_cpu = logits.device.type == "cpu"
    if not on_cpu or bool(logprobs[:, 0].isnan().any()):  # one NaN or +inf in a row makes all of its log_softmax NaN
        logits = torch.where(logits.isnan(), float("-inf"), logits)
    token = tokens[:, None]
    best = top_candidates(logits, min(max(count, _RANK_CANDIDATES if on_cpu else 0), logits.shape[1]))[1] if count or on_cpu else None
    ranks = _ranks_from_best(logits, tokens, best) if on_cpu else _ranks(logits, tokens)
    ids = token if count == 0 else torch.cat([token, best[:, :count]], dim=1)
    values = logprobs.gather(1, ids).nan_to_num_(LEAST_LOGPROB, LEAST_LOGPROB, LEAST_LOGPROB).clamp_(min=LEAST_LOGPROB)
    return LogprobsTensors(ids, values, ranks)


def _ranks(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """1-based rank of tokens[i] in logits[i], in the order (logit descending, id ascending): int64 [L]."""
    own = logits.gather(1, tokens[:, None])
    before = torch.arange(logits.shape[1], device=logits.device) < tokens[:, None]
    return ((logits > own) | ((logits == own) & before)).sum(-1) + 1


def _ranks_from_best(logits: torch.Tensor, tokens: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
    """``_ranks``, read off the best tokens [L, C] where they hold the token; only the other rows are counted through."""
    hit = best == tokens[:, None]
    ranks = hit.int().argmax(-1) + 1
    missing = (~hit.any(-1)).nonzero().view(-1)
    if len(missing):
        ranks[missing] = _ranks(logits[missing], tokens[missing])
    return ranks


def rows_at_once(count: int, vocab_size: int) -> int:
    """How many rows with ``count`` alternatives ``gather_logprobs`` should get at a time, so that its memory stays bounded."""
    return max(1, (_CHUNK_ELEMENTS if count == vocab_size else FEW_ELEMENTS) // vocab_size)


def resolve_count(logprobs: int, vocab_size: int) -> int:
    """``SamplingParams.logprobs`` → how many alternatives: -1 is the whole vocabulary."""
    return vocab_size if logprobs < 0 else min(logprobs, vocab_size)


class PromptLogprobs:
    """What a step finds out about prompts' tokens, on its way to the host.

    Every few positions leave at once, for pinned memory: neither many positions nor whole vocabularies fill the device, and nothing
    waits. Pinned memory is bounded too: whoever asks for more than HOST_BYTES in a step (whole vocabularies of long prompts) has the
    earlier ones made into lists first, which waits for the device.
    """

    __slots__ = ("_bytes", "_copied", "_entries", "_parts")

    def __init__(self) -> None:
        self._entries: dict[int, list[TokenLogprobs]] = {}
        self._parts: list[tuple[int, int, LogprobsTensors]] = []  # row, how many alternatives, on the host once copied
        self._bytes = 0
        self._copied: torch.cuda.Event | None = None

    @torch.inference_mode()
    def add(self, row: int, logits: torch.Tensor, next_token_ids: Sequence[int], k: int) -> None:
        """For the next positions of ``row``: how probable next_token_ids[i] was after position i, and the k best (-1: all).

        logits: float32 [P, V]; P = len(next_token_ids), else ValueError. The memory it adds on the device does not grow with P.
        """
        if len(next_token_ids) != logits.shape[0]:
            raise ValueError(f"prompt_logprobs: {logits.shape[0]} rows of logits for {len(next_token_ids)} tokens; they must pair up.")
        vocab = logits.shape[1]
        count, size = resolve_count(k, vocab), rows_at_once(vocab, vocab)
        for start in range(0, len(next_token_ids), size):
            part = logits[start : start + size].float().contiguous()
            tokens = upload(next_token_ids[start : start + size], torch.int64, logits.device)
            self._send(row, count, gather_logprobs(part, tokens, count))

    def to_host(self) -> dict[int, list[TokenLogprobs]]:
        """Row → one entry per position, in order. Waits for the device."""
        self._unpack()
        return self._entries

    def _send(self, row: int, count: int, found: LogprobsTensors) -> None:
        if self._bytes + found.nbytes > HOST_BYTES:
            self._unpack()
        self._bytes += found.nbytes
        self._parts.append((row, count, found.start_copy()))
        if found.ids.is_cuda:
            self._copied = self._copied or torch.cuda.Event()
            self._copied.record()

    def _unpack(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()
        for row, count, found in self._parts:
            self._entries.setdefault(row, []).extend(found.to_host([count] * len(found.ranks)))
        self._parts.clear()
        self._bytes = 0
