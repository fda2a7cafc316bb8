"""The sampling half of the device-side batch state: what every row asks for, kept where the sampler uses it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from octavo.kernels.upload import upload
from octavo.sampling.feature import LogitFeature, StepInputs
from octavo.sampling.grammar import GrammarMask
from octavo.sampling.logprobs import resolve_count
from octavo.sampling.masks import AllowedTokens, BadWords, LogitBias, MinTokens
from octavo.sampling.penalties import Penalties
from octavo.sampling.random import row_key
from octavo.sampling.truncation import DrawParams
from octavo.types import RowInit

GREEDY_BELOW = 1e-5  # a temperature below it is greedy: in float32 it could not be told from 0 anyway
_MAX_TEMPERATURE = 1e30
_TEMPERATURE, _TOP_P, _MIN_P, _TOP_K, _KEY = range(5)
_NUM_COLUMNS = 5


@dataclass
class Selection:
    """What follows from which rows draw, kept while the same rows go on drawing.

    ``truncates``: some row that is not greedy cuts the vocabulary first. What a captured step does not ask for, since it reads the
    rows' parameters itself, is made when it is asked for: a dozen launches.
    """

    state: SamplingState
    rows: tuple[int, ...]
    version: int
    features: list[tuple[LogitFeature, Any]]
    all_greedy: bool
    truncates: bool
    logprobs: list[tuple[int, int]]  # (index into rows, how many alternatives)

    @cached_property
    def row_index(self) -> torch.Tensor:
        """int64 [R]."""
        return upload(self.rows, torch.int64, self.state.device)

    @property
    def params(self) -> DrawParams:
        """For all rows in order; greedy ones have temperature 0."""
        return self._drawn[0]

    @property
    def keys(self) -> torch.Tensor:
        """int64 [R], see random.row_key."""
        return self._drawn[1]

    @cached_property
    def _drawn(self) -> tuple[DrawParams, torch.Tensor]:
        return self.state.draw_params(self.row_index)


class SamplingState:
    """Per-row sampling parameters, penalties' counts and histories for ``max_rows`` rows.

    Plain parameters of all rows stand in one int64 matrix [max_rows, 5] (floating ones by their bits), so a step uploads
    changed rows in one copy. Options that few requests use keep their data in ``features``, applied in list order; rows
    that don't use them cost nothing.
    """

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device | str = "cpu") -> None:
        self.max_rows = max_rows
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self.penalties = Penalties(vocab_size, self.device)
        masks = (AllowedTokens, BadWords, LogitBias, MinTokens)
        self.grammar = GrammarMask(vocab_size, self.device)
        self.features: list[LogitFeature] = [self.grammar, *(mask(vocab_size, self.device) for mask in masks), self.penalties]
        self._mirror = np.zeros((max_rows, _NUM_COLUMNS), dtype=np.int64)
        self._mirror_floats = self._mirror.view(np.float64)
        self.packed = torch.zeros((max_rows, _NUM_COLUMNS), dtype=torch.int64, device=self.device)
        self._dirty: set[int] = set()
        self._logprobs: dict[int, int] = {}
        self._used: set[int] = set()
        self._version = 0
        self._selection: Selection | None = None

    @torch.inference_mode()
    def init_row(self, init: RowInit) -> None:
        """Put a sequence on a row, whatever was there before. Counts start from its prompt and known outputs."""
        row, params = init.row, init.params
        if not 0 <= row < self.max_rows:
            raise IndexError(f"row {row} is not in the batch state (0 to {self.max_rows - 1})")
        self.clear_row(row)
        self._used.add(row)  # first: after Ctrl-C in the middle there is something to clear
        greedy = params.temperature < GREEDY_BELOW or params.top_k == 1
        keep_all = params.top_k <= 0 or params.top_k >= self.vocab_size
        floats, ints = self._mirror_floats[row], self._mirror[row]
        floats[_TEMPERATURE] = 0.0 if greedy else min(params.temperature, _MAX_TEMPERATURE)
        floats[_TOP_P] = params.top_p
        floats[_MIN_P] = params.min_p
        ints[_TOP_K] = self.vocab_size if keep_all else params.top_k
        ints[_KEY] = row_key(init.seed)
        if params.logprobs is not None:
            self._logprobs[row] = resolve_count(params.logprobs, self.vocab_size)
        for feature in self.features:
            feature.init_row(init)
        self._changed(row)

    @torch.inference_mode()
    def clear_row(self, row: int) -> None:
        """Forget a row; nothing of it is left for the next. No error when it is clear."""
        if row not in self._used:
            return
        self._mirror[row] = 0
        self._logprobs.pop(row, None)
        for feature in self.features:
            feature.clear_row(row)
        self._used.discard(row)
        self._changed(row)

    def _changed(self, row: int) -> None:
        self._dirty.add(row)
        self._version += 1

    def select(self, rows: Sequence[int]) -> Selection:
        """Prepare a step of these rows (distinct, initialized; KeyError otherwise)."""
        key = tuple(rows)
        last = self._selection
        if last is None or last.version != self._version or last.rows != key:
            self._selection = self._select(key)
        return self._selection

    def inputs(self, selection: Selection, positions: Sequence[int]) -> StepInputs:
        """The step's positions on the device, beside what ``select`` prepared."""
        return StepInputs(selection.rows, positions, selection.row_index, upload(positions, torch.int64, self.device))

    def _select(self, rows: tuple[int, ...]) -> Selection:
        missing = [row for row in rows if row not in self._used]
        if missing or len(set(rows)) != len(rows):
            raise KeyError(f"rows to sample must be initialized and distinct; not initialized: {missing}, asked: {list(rows)}")
        self._upload()
        floats = self._mirror_floats[list(rows)].reshape(-1, _NUM_COLUMNS)
        top_k = self._mirror[list(rows), _TOP_K]
        greedy = floats[:, _TEMPERATURE] == 0.0
        cut = ~greedy & ((floats[:, _TOP_P] < 1.0) | (floats[:, _MIN_P] > 0.0) | (top_k < self.vocab_size))
        return Selection(
            state=self,
            rows=rows,
            version=self._version,
            features=[(f, s) for f in self.features if (s := f.select(rows)) is not None],
            all_greedy=bool(greedy.all()),
            truncates=bool(cut.any()),
            logprobs=[(i, self._logprobs[row]) for i, row in enumerate(rows) if row in self._logprobs],
        )

    def draw_params(self, row_index: torch.Tensor) -> tuple[DrawParams, torch.Tensor]:
        """(parameters, keys int64 [B]) of rows that only the device knows: row_index int64 [B]. No wait for the device."""
        packed = self.packed.index_select(0, row_index)
        floats = packed.view(torch.float64)
        params = DrawParams(
            floats[:, _TEMPERATURE].to(torch.float32),
            packed[:, _TOP_K].contiguous(),
            floats[:, _TOP_P].contiguous(),
            floats[:, _MIN_P].contiguous(),
        )
        return params, packed[:, _KEY].contiguous()

    def _upload(self) -> None:
        if not self._dirty:
            return
        dirty = sorted(self._dirty)
        self._dirty.clear()
        both = np.column_stack((dirty, self._mirror[dirty]))  # rows and their parameters, in one copy
        changed = upload(torch.from_numpy(both), torch.int64, self.device)
        self.packed.index_copy_(0, changed[:, 0], changed[:, 1:])
