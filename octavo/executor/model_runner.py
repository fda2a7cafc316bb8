"""Runs one plan on one device: rows → inputs → layers → logits → sampling → rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from octavo.attention.base import AttentionBackend, AttentionMetadata, ForwardContext
from octavo.executor.rows import BatchRows
from octavo.sampling.batch import SamplingState
from octavo.sampling.logprobs import prompt_logprobs
from octavo.sampling.sampler import SampleOutput, Sampler
from octavo.types import Advance, RowInit, StepPlan, StepResult, TokenLogprobs, TokenParams

LOGITS_CHUNK = 256  # prompt positions whose logits exist at the same time, for prompt_logprobs


@dataclass(slots=True)
class PendingStep:
    """A submitted step whose sampled tokens the host has not read."""

    step: int
    rows: list[int]
    output: SampleOutput | None
    prompt_logprobs: dict[int, list[TokenLogprobs]]

    def to_result(self) -> StepResult:
        if self.output is None:
            return StepResult(self.step, [], [], None, self.prompt_logprobs)
        token_ids, logprobs = self.output.to_host()
        return StepResult(self.step, self.rows, token_ids, logprobs, self.prompt_logprobs)


class ModelRunner:
    """Executes plans in submission order; owns the rows, the KV caches and the sampler's state.

    Args:
        model: see docs/architecture.md, "how to add a model".
        kv_caches: one per attention layer, as the backend made them.
        max_rows: rows, at least the scheduler's max_num_seqs.
    """

    def __init__(
        self,
        model: Any,
        backend: AttentionBackend,
        kv_caches: list[Any],
        *,
        block_size: int,
        max_rows: int,
        max_model_len: int,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self.model = model
        self.backend = backend
        self.kv_caches = kv_caches
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.device = device
        self.vocab_size = vocab_size
        self.rows = BatchRows(max_rows, -(-max_model_len // block_size), device)
        self.sampler = Sampler(SamplingState(max_rows, vocab_size, device))

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> PendingStep:
        """Copies, rows, blocks, forward, sampling: in the order that StepPlan promises."""
        if plan.copies:
            self._copy_blocks(plan.copies)
        for init in plan.row_inits:
            self.sampler.state.init_row(init)
        self.rows.update(plan.row_inits, plan.block_appends)
        if not plan.advances:
            return PendingStep(plan.step, [], None, {})

        token_ids, metadata = self._build_inputs(plan.advances)
        self.backend.prepare(metadata)
        hidden = self.model(token_ids, ForwardContext(metadata, self.backend, self.kv_caches))

        entries = self._prompt_logprobs(hidden, plan.advances)
        rows, positions, sources = _sampled(plan.advances)
        output = None
        if rows:
            logits = self.model.compute_logits(hidden[self._to_device(np.array(sources, dtype=np.int64))])
            output = self.sampler.sample(logits, rows, positions)
            self.rows.last_token[self._to_device(np.array(rows, dtype=np.int64))] = output.token_ids
        return PendingStep(plan.step, rows, output, entries)

    def _build_inputs(self, advances: list[Advance]) -> tuple[torch.Tensor, AttentionMetadata]:
        """Flat token ids [T] and where each of them lives. Sampled tokens come from the rows, not from the host."""
        num_seqs = len(advances)
        rows = np.fromiter((a.row for a in advances), np.int64, num_seqs)
        starts = np.fromiter((a.start for a in advances), np.int64, num_seqs)
        counts = np.fromiter((a.count for a in advances), np.int64, num_seqs)
        query_start = np.zeros(num_seqs + 1, np.int32)
        np.cumsum(counts, out=query_start[1:])
        num_tokens = int(query_start[-1])
        num_decodes = int(np.argmax(counts > 1)) if counts.max() > 1 else num_seqs
        row_index = self._to_device(rows)
        if num_tokens == num_seqs:
            positions, seq_of_token = starts, None
        else:
            seq_of_token = np.repeat(np.arange(num_seqs), counts)
            positions = np.arange(num_tokens) - query_start[:-1][seq_of_token] + starts[seq_of_token]

        if all(a.token_ids is None for a in advances):
            token_ids = self.rows.last_token[row_index]
        else:
            known = np.empty(num_tokens, np.int64)
            from_row: list[int] = []
            for i, a in enumerate(advances):
                if a.token_ids is None:
                    from_row.append(i)
                else:
                    known[query_start[i] : query_start[i + 1]] = a.token_ids
            token_ids = self._to_device(known)
            if from_row:
                places = self._to_device(query_start[from_row].astype(np.int64))
                token_ids[places] = self.rows.last_token[self._to_device(rows[from_row])]

        device_positions = self._to_device(np.ascontiguousarray(positions))
        tables = self.rows.block_table[row_index]
        table_of_token = tables if seq_of_token is None else tables[self._to_device(seq_of_token)]
        blocks = table_of_token.gather(1, (device_positions // self.block_size).unsqueeze(1)).squeeze(1)
        seq_lens = starts + counts
        metadata = AttentionMetadata(
            num_tokens=num_tokens,
            num_seqs=num_seqs,
            num_decodes=num_decodes,
            max_query_len=int(counts.max()),
            max_seq_len=int(seq_lens.max()),
            block_size=self.block_size,
            positions=device_positions,
            slots=blocks.to(torch.int64) * self.block_size + device_positions % self.block_size,
            query_start=self._to_device(query_start),
            seq_lens=self._to_device(seq_lens.astype(np.int32)),
            block_tables=tables,
        )
        return token_ids, metadata

    def _prompt_logprobs(self, hidden: torch.Tensor, advances: list[Advance]) -> dict[int, list[TokenLogprobs]]:
        entries: dict[int, list[TokenLogprobs]] = {}
        offset = 0
        for a in advances:
            if a.prompt_logprobs is not None and a.next_token_ids:
                found: list[TokenLogprobs] = []
                for begin in range(0, len(a.next_token_ids), LOGITS_CHUNK):
                    targets = a.next_token_ids[begin : begin + LOGITS_CHUNK]
                    first = offset + begin
                    logits = self.model.compute_logits(hidden[first : first + len(targets)])
                    found.extend(prompt_logprobs(logits, targets, a.prompt_logprobs))
                entries[a.row] = found
            offset += a.count
        return entries

    def _copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        pairs = self._to_device(np.array(copies, dtype=np.int64))
        for cache in self.kv_caches:
            for tensor in cache if isinstance(cache, (tuple, list)) else (cache,):
                tensor[pairs[:, 1]] = tensor[pairs[:, 0]]

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor if self.device.type == "cpu" else tensor.pin_memory().to(self.device, non_blocking=True)

    def warm_up(self) -> None:
        """Run the smallest real step on row 0 and block 0 once, so that one-time costs don't fall on the first answer."""
        params = TokenParams(temperature=0.0)
        count = min(4, self.max_model_len)
        init = RowInit(0, params, 0, [0] * count, [], [0])
        self.execute(StepPlan(-1, [Advance(0, 0, count, [0] * count, (0,))], [init])).to_result()
        if count < self.max_model_len:
            self.execute(StepPlan(-1, [Advance(0, count, 1, None, (0,))])).to_result()
        self.sampler.state.clear_row(0)


def _sampled(advances: list[Advance]) -> tuple[list[int], list[int], list[int]]:
    """(row, position of the token to draw, index of its hidden state) of every row that samples, in plan order."""
    rows: list[int] = []
    positions: list[int] = []
    sources: list[int] = []
    end = 0
    for a in advances:
        end += a.count
        for row in a.sample_rows:
            rows.append(row)
            positions.append(a.start + a.count)
            sources.append(end - 1)
    return rows, positions, sources
