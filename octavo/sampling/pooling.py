"""Hidden states → one vector a prompt: the mean of its tokens', the last token's, or the first one's.

A prompt may be run in chunks. The last token's state comes with the last chunk; a mean is summed up over the chunks in its
row, on the device and in float32, so no step waits for another. What a row's sum holds of an earlier prompt is overwritten
when a prompt starts at position 0; means never start anywhere else, for they take nothing out of the prefix cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from octavo.kernels.upload import upload
from octavo.types import Advance


class PooledVectors:
    """The vectors of the prompts that end in a step. On a GPU their copy to the host is queued behind the step."""

    __slots__ = ("_done", "dimensions", "rows", "vectors")

    def __init__(self, vectors: torch.Tensor, rows: list[int], dimensions: list[int | None]) -> None:
        """vectors float32 [N, H]; the row and the wanted number of components (None: all) of each."""
        self.rows = rows
        self.dimensions = dimensions
        self._done: torch.cuda.Event | None = None
        self.vectors = vectors
        if vectors.is_cuda:
            self.vectors = torch.empty(vectors.shape, dtype=vectors.dtype, pin_memory=True)
            self.vectors.copy_(vectors, non_blocking=True)
            self._done = torch.cuda.Event()
            self._done.record()

    def to_host(self) -> dict[int, bytes]:
        """Row -> float32 little-endian. Waits for the step."""
        if self._done is not None:
            self._done.synchronize()
        array = self.vectors.numpy().astype("<f4", copy=False)
        pairs = zip(self.rows, self.dimensions, strict=True)
        return {row: array[i, :count].tobytes() for i, (row, count) in enumerate(pairs)}


class Pooler:
    """Holds the sums of prompts that are not complete: float32 [max_rows, H], made when the first is needed."""

    def __init__(self, max_rows: int) -> None:
        self.max_rows = max_rows
        self.sums: torch.Tensor | None = None

    def pool(self, hidden: torch.Tensor, advances: Sequence[Advance]) -> PooledVectors | None:
        """hidden [T, H], the advances' positions one after another -> what ended; None if nothing did."""
        spans: list[tuple[Advance, int]] = []  # with the index of its first position in ``hidden``
        begin = 0
        for advance in advances:
            if advance.pooling is not None:
                spans.append((advance, begin))
            begin += advance.count
        if not spans:
            return None
        means = self._means(hidden, [s for s in spans if s[0].pooling.kind == "mean"])
        picks = [s for s in spans if s[0].pooling.kind != "mean" and s[0].pooling_ends]
        parts, ended = [], []
        if means is not None:
            parts.append(means)
            ended += [a for a, _ in spans if a.pooling.kind == "mean" and a.pooling_ends]
        if picks:
            index = [first + (a.count - 1 if a.pooling.kind == "last" else 0) for a, first in picks]
            parts.append(hidden[_to_device(index, hidden.device)].float())
            ended += [a for a, _ in picks]
        if not parts:
            return None
        vectors = parts[0] if len(parts) == 1 else torch.cat(parts)
        return PooledVectors(_finish(vectors, ended), [a.row for a in ended], [a.pooling.dimensions for a in ended])

    def _means(self, hidden: torch.Tensor, spans: list[tuple[Advance, int]]) -> torch.Tensor | None:
        """Add to the rows' sums; float32 [N, H] of the prompts that end, None if none does."""
        if not spans:
            return None
        sums = _segment_sums(hidden, [(first, a.count) for a, first in spans])
        going_on = [i for i, (a, _) in enumerate(spans) if not a.pooling_ends]
        continued = [i for i, (a, _) in enumerate(spans) if a.start > 0]
        if going_on or continued:
            sums = self._with_earlier(sums, [a for a, _ in spans], going_on, continued)
        ending = [i for i, (a, _) in enumerate(spans) if a.pooling_ends]
        if not ending:
            return None
        if going_on:
            sums = sums[_to_device(ending, hidden.device)]
        lengths = _to_device([spans[i][0].start + spans[i][0].count for i in ending], hidden.device)
        return sums / lengths[:, None]

    def _with_earlier(self, sums: torch.Tensor, advances: list[Advance], going_on: list[int], continued: list[int]) -> torch.Tensor:
        """The sums with those of earlier chunks; those of prompts that go on are kept in their rows."""
        if self.sums is None:
            self.sums = torch.zeros(self.max_rows, sums.shape[1], dtype=torch.float32, device=sums.device)
        if continued:
            rows = _to_device([advances[i].row for i in continued], sums.device)
            sums[_to_device(continued, sums.device)] += self.sums[rows]
        if going_on:
            rows = _to_device([advances[i].row for i in going_on], sums.device)
            self.sums[rows] = sums[_to_device(going_on, sums.device)]
        return sums


def _segment_sums(hidden: torch.Tensor, segments: list[tuple[int, int]]) -> torch.Tensor:
    """Sums over [first, first + count) of hidden [T, H], float32 [N, H]. Each is summed in its own order, whatever the others are."""
    lengths: list[int] = []
    kept: list[int] = []  # which of the lengths are segments, and not gaps between them
    end = 0
    for first, count in segments:
        if first > end:
            lengths.append(first - end)
        kept.append(len(lengths))
        lengths.append(count)
        end = first + count
    sums = torch.segment_reduce(hidden[:end].float(), "sum", lengths=_to_device(lengths, hidden.device), axis=0, unsafe=True)
    return sums if len(kept) == len(lengths) else sums[_to_device(kept, hidden.device)]


def _finish(vectors: torch.Tensor, advances: list[Advance]) -> torch.Tensor:
    """Cut to the wanted components (the others become 0) and normalize, as each prompt asks."""
    size = vectors.shape[1]
    wanted = [a.pooling.dimensions or size for a in advances]
    if any(count < size for count in wanted):
        beyond = torch.arange(size, device=vectors.device) >= _to_device(wanted, vectors.device)[:, None]
        vectors = vectors.masked_fill(beyond, 0)
    if all(a.pooling.normalize for a in advances):
        return F.normalize(vectors, dim=-1)
    flags = _to_device([int(a.pooling.normalize) for a in advances], vectors.device).bool()
    return torch.where(flags[:, None], F.normalize(vectors, dim=-1), vectors)


def _to_device(values: list[int], device: torch.device) -> torch.Tensor:
    return upload(values, torch.int64, device)
