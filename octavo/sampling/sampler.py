"""Draws a token for every row of a step. The order of operations stands in the package's docstring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from octavo.kernels.sample import argmax_rows, sample_rows
from octavo.kernels.upload import upload
from octavo.sampling.batch import SamplingState, Selection
from octavo.sampling.feature import StepInputs
from octavo.sampling.logprobs import LogprobsTensors, gather_logprobs, rows_at_once
from octavo.sampling.random import uniforms
from octavo.sampling.truncation import draw_from_weights, full_weights, kept_weights, repair
from octavo.types import TokenLogprobs

GREEDY, RANDOM, TRUNCATED = "greedy", "random", "truncated"


@dataclass(slots=True)
class LogprobsGroup:
    """``tensors`` row j belongs to the step's row indices[j], which asked for counts[j] alternatives."""

    indices: list[int]
    counts: list[int]
    tensors: LogprobsTensors


@dataclass(slots=True)
class SampleOutput:
    """What a step drew: token_ids int64 [R] on the device, in the order of the step's rows."""

    token_ids: torch.Tensor
    logprobs: list[LogprobsGroup] = field(default_factory=list)

    def start_copy(self) -> SampleOutput:
        """The same on the host, in pinned memory that holds it once all that is queued on the stream now has run."""
        groups = [LogprobsGroup(g.indices, g.counts, g.tensors.start_copy()) for g in self.logprobs]
        return SampleOutput(self.token_ids.to("cpu", non_blocking=True), groups)

    def to_host(self) -> tuple[list[int], list[TokenLogprobs | None] | None]:
        """(token ids, one TokenLogprobs or None per row; None instead of the list if no row asked). Waits for the device."""
        tokens = self.token_ids.tolist()
        if not self.logprobs:
            return tokens, None
        rows: list[TokenLogprobs | None] = [None] * len(tokens)
        for group in self.logprobs:
            for index, entry in zip(group.indices, group.tensors.to_host(group.counts)):
                rows[index] = entry
        return tokens, rows


class Sampler:
    """Logits → tokens for rows of a ``SamplingState``. On a GPU nothing waits for the device."""

    def __init__(self, state: SamplingState) -> None:
        self.state = state
        self.on_cpu = state.device.type == "cpu"

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, rows: Sequence[int], positions: Sequence[int]) -> SampleOutput:
        """Draw rows[i]'s token at index positions[i] of its sequence from logits[i], and count it.

        logits: float32 [R, V] on the state's device; may be overwritten. ValueError for other shapes or types,
        KeyError for rows that are not initialized or named twice.
        """
        selection, step, logits = self._begin(logits, rows, positions)
        return self.run(logits, selection, step)

    @torch.inference_mode()
    def run(self, logits: torch.Tensor, selection: Selection, step: StepInputs) -> SampleOutput:
        """``sample`` after its host part: what a graph captures. logits: float32 [R, V], contiguous; may be overwritten."""
        raw = self._raw_logits(logits, selection)
        for feature, chosen in selection.features:
            feature.apply(logits, chosen, step)
        tokens = self._draw(logits, selection, step)
        for feature, chosen in selection.features:
            feature.update(tokens, chosen, step)
        return SampleOutput(tokens, [group for part in raw for group in self._logprobs(part, logits, tokens)])

    def graph_mode(self, rows: Sequence[int]) -> str | None:
        """How ``sample_rows`` may draw for these rows: greedy, random or truncated. None: a row needs more than drawing."""
        selection = self.state.select(rows)
        return None if selection.features or selection.logprobs else _mode(selection)

    def masked_mode(self, rows: Sequence[int]) -> str | None:
        """The same for rows of which some follow a grammar, once its masks are applied."""
        selection = self.state.select(rows)
        others = any(feature is not self.state.grammar for feature, _ in selection.features)
        return None if others or selection.logprobs else _mode(selection)

    def sample_rows(self, logits: torch.Tensor, row_index: torch.Tensor, positions: torch.Tensor, mode: str) -> torch.Tensor:
        """Draw without the host: for CUDA graphs, where only the tensors' values differ from step to step.

        logits [B, V], float32 or the model's type; row_index, positions int64 [B], on the device; ``mode`` from ``graph_mode``.
        Returns int64 [B]. A GPU's kernels draw by Gumbel noise, elsewhere by inverse CDF: seeds give other tokens there.
        """
        if logits.is_cuda:
            from octavo.kernels.triton import sample as kernels

            modes = {GREEDY: kernels.GREEDY, RANDOM: kernels.PLAIN, TRUNCATED: kernels.TRUNCATED}
            return kernels.sample_rows(logits, self.state.packed, row_index, positions, mode=modes[mode])
        logits = repair(logits.float())
        if mode == GREEDY:
            return logits.argmax(-1)
        params, keys = self.state.draw_params(row_index)
        greedy = params.temperature == 0.0
        params.temperature = params.temperature.masked_fill(greedy, 1.0)
        weights = kept_weights(logits, params) if mode == TRUNCATED else full_weights(logits, params.temperature)
        return torch.where(greedy, logits.argmax(-1), draw_from_weights(weights, uniforms(keys, positions)))

    @torch.inference_mode()
    def distribution(self, logits: torch.Tensor, rows: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
        """The exact distribution that ``sample`` would draw from: float64 [R, V], rows sum to 1. Changes nothing."""
        selection, step, logits = self._begin(logits.clone(), rows, positions)
        for feature, chosen in selection.features:
            feature.apply(logits, chosen, step)
        logits = repair(logits)
        certain = torch.zeros_like(logits, dtype=torch.float64).scatter_(1, logits.argmax(-1, keepdim=True), 1.0)
        greedy = selection.params.temperature == 0.0
        params = replace(selection.params, temperature=selection.params.temperature.masked_fill(greedy, 1.0))
        weights = kept_weights(logits, params).double()
        return torch.where(greedy[:, None], certain, weights / weights.sum(-1, keepdim=True))

    def _begin(self, logits: torch.Tensor, rows: Sequence[int], positions: Sequence[int]) -> tuple[Selection, StepInputs, torch.Tensor]:
        expected = (len(rows), self.state.vocab_size)
        if tuple(logits.shape) != expected or logits.dtype != torch.float32 or len(positions) != len(rows):
            raise ValueError(
                f"sample takes float32 logits {expected} and a position per row; got {logits.dtype} {tuple(logits.shape)} "
                f"and {len(positions)} positions."
            )
        selection = self.state.select(rows)
        return selection, self.state.inputs(selection, positions), logits.contiguous()

    def _draw(self, logits: torch.Tensor, selection: Selection, step: StepInputs) -> torch.Tensor:
        """Final logits → int64 [R]. What a row does never decides which operations run on the others."""
        if not selection.rows:
            return torch.empty(0, dtype=torch.int64, device=logits.device)
        if self.on_cpu:
            return self._draw_on_cpu(logits, selection, step)
        return self.sample_rows(logits, step.row_index, step.position_index, _mode(selection))

    def _draw_on_cpu(self, logits: torch.Tensor, selection: Selection, step: StepInputs) -> torch.Tensor:
        if selection.all_greedy:
            return argmax_rows(logits)
        p = selection.params
        return sample_rows(logits, p.temperature, p.top_k, p.top_p, p.min_p, uniforms(selection.keys, step.position_index))

    def _raw_logits(self, logits: torch.Tensor, selection: Selection) -> list[tuple[list[int], list[int], torch.Tensor | None]]:
        """(indices, counts, unmodified logits) of rows that want log-probabilities; rows that want the whole vocabulary
        apart, so that the others don't pay for them. None: nothing will modify the logits, take them later."""
        groups = []
        for everything in (False, True):
            wanted = [(i, k) for i, k in selection.logprobs if (k == self.state.vocab_size) == everything]
            if wanted:
                indices = [i for i, _ in wanted]
                raw = logits[upload(indices, torch.int64, logits.device)] if selection.features else None
                groups.append((indices, [k for _, k in wanted], raw))
        return groups

    def _logprobs(
        self, part: tuple[list[int], list[int], torch.Tensor | None], logits: torch.Tensor, tokens: torch.Tensor
    ) -> list[LogprobsGroup]:
        """Some rows at a time. Whole vocabularies leave for the host at once: many rows of them would fill the device."""
        indices, counts, raw = part
        index, most = upload(indices, torch.int64, logits.device), max(counts)
        size, groups = rows_at_once(most, self.state.vocab_size), []
        for start in range(0, len(indices), size):
            some = slice(start, start + size)
            values = logits[index[some]] if raw is None else raw[some]
            tensors = gather_logprobs(values, tokens[index[some]], most)
            whole = logits.is_cuda and most == self.state.vocab_size
            groups.append(LogprobsGroup(indices[some], counts[some], tensors.start_copy() if whole else tensors))
        return groups


def _mode(selection: Selection) -> str:
    return GREEDY if selection.all_greedy else TRUNCATED if selection.truncates else RANDOM
