"""Draws a token for every row of a step. The order of operations stands in the package's docstring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from octavo.sampling.batch import DrawGroup, SamplingState, Selection
from octavo.sampling.feature import StepInputs, upload
from octavo.sampling.logprobs import LogprobsTensors, gather_logprobs
from octavo.sampling.random import uniforms
from octavo.sampling.truncation import draw_from_candidates, draw_from_weights, full_weights, kept_weights, repair
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
    """Logits → tokens for rows of a ``SamplingState``.

    ``reads_values``: may the host look at values on the way? It does on the CPU, where that is free and saves sorting;
    elsewhere nothing waits for the device.
    """

    def __init__(self, state: SamplingState) -> None:
        self.state = state
        self.reads_values = state.device.type == "cpu"

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
        return SampleOutput(tokens, [self._logprobs(part, logits, tokens) for part in raw])

    def graph_mode(self, rows: Sequence[int]) -> str | None:
        """How ``sample_rows`` may draw for these rows: greedy, random or truncated. None: a row needs more than drawing."""
        selection = self.state.select(rows)
        if selection.features or selection.logprobs:
            return None
        if selection.all_greedy:
            return GREEDY
        return RANDOM if selection.truncated is None else TRUNCATED

    def sample_rows(self, logits: torch.Tensor, row_index: torch.Tensor, positions: torch.Tensor, mode: str) -> torch.Tensor:
        """Draw without the host: for CUDA graphs, where only the tensors' values differ from step to step.

        logits float32 [B, V]; row_index, positions int64 [B], on the device; ``mode`` from ``graph_mode``. Returns int64 [B].
        """
        if mode == GREEDY:
            return _greedy(logits)
        group = self.state.device_group(row_index)
        logits = repair(logits)
        weights = kept_weights(logits, group.params) if mode == TRUNCATED else full_weights(logits, group.params.temperature)
        drawn = draw_from_weights(weights, uniforms(group.keys, positions))
        return torch.where(self.state.device_is_greedy(row_index), logits.argmax(-1), drawn)

    @torch.inference_mode()
    def distribution(self, logits: torch.Tensor, rows: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
        """The exact distribution that ``sample`` would draw from: float64 [R, V], rows sum to 1. Changes nothing."""
        selection, step, logits = self._begin(logits.clone(), rows, positions)
        for feature, chosen in selection.features:
            feature.apply(logits, chosen, step)
        logits = repair(logits)
        certain = torch.zeros_like(logits, dtype=torch.float64).scatter_(1, logits.argmax(-1, keepdim=True), 1.0)
        if selection.everything is None:
            return certain
        weights = kept_weights(logits, selection.everything.params).double()
        return torch.where(selection.is_greedy[:, None], certain, weights / weights.sum(-1, keepdim=True))

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
        """Final logits → int64 [R]. The one place that a fused kernel replaces: it needs logits, ``selection`` (groups
        with their parameters and keys) and ``uniforms(keys, positions)``, and must keep the order of tokens (ties)."""
        if not selection.rows:
            return torch.empty(0, dtype=torch.int64, device=logits.device)
        if selection.all_greedy:
            return _greedy(logits)
        if not self.reads_values:
            return self._draw_blind(logits, selection, step)
        tokens = torch.empty_like(step.position_index)
        if selection.greedy is not None:
            tokens[selection.greedy] = _greedy(logits[selection.greedy])
        for group, truncates in ((selection.full, False), (selection.truncated, True)):
            if group is None:
                continue
            part, uniform = _members(logits, group, step)
            part = repair(part)
            if truncates:
                drawn = draw_from_candidates(part, group.params, uniform)
            else:
                drawn = draw_from_weights(full_weights(part, group.params.temperature), uniform)
            if group.index is None:
                return drawn
            tokens[group.index] = drawn
        return tokens

    def _draw_blind(self, logits: torch.Tensor, selection: Selection, step: StepInputs) -> torch.Tensor:
        """The same tokens without reading a value back: what a row does never decides which operations run."""
        group = selection.everything
        logits = repair(logits)
        weigh = kept_weights(logits, group.params) if selection.truncated else full_weights(logits, group.params.temperature)
        drawn = draw_from_weights(weigh, uniforms(group.keys, step.position_index))
        return drawn if selection.greedy is None else torch.where(selection.is_greedy, logits.argmax(-1), drawn)

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
    ) -> LogprobsGroup:
        indices, counts, raw = part
        index = upload(indices, torch.int64, logits.device)
        raw = logits[index] if raw is None else raw
        return LogprobsGroup(indices, counts, gather_logprobs(raw, tokens[index], max(counts)))


def _members(logits: torch.Tensor, group: DrawGroup, step: StepInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """A group's logits [G, V] and its uniform numbers [G]."""
    if group.index is None:
        return logits, uniforms(group.keys, step.position_index)
    return logits.index_select(0, group.index), uniforms(group.keys, step.position_index[group.index])


def _greedy(logits: torch.Tensor) -> torch.Tensor:
    """The first of the largest; the best finite one in a row that holds NaN or +inf."""
    best = logits.max(-1)
    if logits.device.type == "cpu" and bool(best.values.isfinite().all()):
        return best.indices
    return repair(logits).argmax(-1)
