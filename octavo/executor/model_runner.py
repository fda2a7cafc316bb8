"""Runs one plan on one device: rows → inputs → layers → logits → sampling → rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from octavo.attention.base import AttentionBackend, AttentionMetadata, ForwardContext
from octavo.executor.footprint import LOGITS_CHUNK
from octavo.executor.rows import BatchRows
from octavo.executor.step_graphs import LOGITS, StepGraphs, split_mixed
from octavo.executor.swap import SwapSpace
from octavo.kernels.upload import upload
from octavo.sampling.batch import SamplingState
from octavo.sampling.logprobs import PromptLogprobs
from octavo.sampling.pooling import PooledVectors, Pooler
from octavo.sampling.sampler import GREEDY, SampleOutput, Sampler
from octavo.types import Advance, RowInit, StepPlan, StepResult, TokenMasks, TokenParams


def padded_rows(count: int) -> int:
    """Rows that a CPU step is padded to. oneDNN builds a kernel of a megabyte, in milliseconds, for each new number of rows."""
    if count <= 8:
        return 1 << (count - 1).bit_length() if count else 0
    step = 8 if count <= 64 else 32 if count <= 256 else 64 if count <= 1024 else 128
    return -(-count // step) * step


@dataclass(slots=True)
class Undrawn:
    """What a step's second half needs of its first: float32 logits [R, V], their positions, and their rows on the device.
    ``captured``: they lie where StepGraphs.draw expects them."""

    logits: torch.Tensor
    positions: list[int]
    row_index: torch.Tensor
    captured: bool = False


class PendingStep:
    """A submitted step whose sampled tokens the host has not read.

    On a GPU the copy to the host is queued right behind the step, so that reading it does not wait for the step after.
    """

    __slots__ = ("done", "output", "pooled", "prompt_logprobs", "rows", "step", "undrawn")

    def __init__(
        self,
        step: int,
        rows: list[int],
        output: SampleOutput | None,
        prompt_logprobs: PromptLogprobs | None = None,
        pooled: PooledVectors | None = None,
    ) -> None:
        self.step = step
        self.rows = rows
        self.output: SampleOutput | None = None
        self.prompt_logprobs = prompt_logprobs
        self.pooled = pooled
        self.done: torch.cuda.Event | None = None
        self.undrawn: Undrawn | None = None  # a masked step's, between its halves
        if output is not None:
            self.finish(output)

    def finish(self, output: SampleOutput) -> None:
        self.output = output
        if output.token_ids.is_cuda:
            self.output = output.start_copy()
            self.done = torch.cuda.Event()
            self.done.record()

    def to_result(self) -> StepResult:
        pooled = self.pooled.to_host() if self.pooled is not None else {}
        scored = self.prompt_logprobs.to_host() if self.prompt_logprobs is not None else {}
        if self.output is None:
            return StepResult(self.step, [], [], None, scored, pooled=pooled)
        if self.done is not None:
            self.done.synchronize()
        token_ids, logprobs = self.output.to_host()
        return StepResult(self.step, self.rows, token_ids, logprobs, scored, pooled=pooled)


class ModelRunner:
    """Executes plans in submission order; owns the rows, the KV caches and the sampler's state.

    Args:
        model: see docs/architecture.md, "how to add a model".
        kv_caches: one per attention layer, as the backend made them.
        max_rows: rows, at least the scheduler's max_num_seqs.
        token_budget: no plan advances more tokens; None: not known.
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
        token_budget: int | None = None,
        use_graphs: bool = False,
    ) -> None:
        self.model = model
        self.backend = backend
        self.kv_caches = kv_caches
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.device = device
        self.vocab_size = vocab_size
        self.rows = BatchRows(max_rows, -(-max_model_len // block_size), device)
        self.sampler = Sampler(SamplingState(max_rows + 1, vocab_size, device))
        self.pooler = Pooler(max_rows)
        make_workspace = getattr(backend, "make_workspace", None)
        if make_workspace is not None:
            make_workspace(max_rows, model.attention_layers, kv_caches[0].dtype, device)
        self.graphs = StepGraphs(self, max_rows, token_budget) if use_graphs else None
        self.swap: SwapSpace | None = None  # set by who has made the caches, if there is a swap tier

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> PendingStep:
        """Moves, copies, rows, blocks, forward, sampling: in the order that StepPlan promises."""
        if plan.swap_outs or plan.swap_ins:
            assert self.swap is not None
            self.swap.move(plan.swap_outs, plan.swap_ins)
        if plan.copies:
            self._copy_blocks(plan.copies)
        for init in plan.row_inits:
            self.sampler.state.init_row(init)
        self.rows.update(plan.row_inits, plan.block_appends)
        if not plan.advances:
            return PendingStep(plan.step, [], None)

        if self.graphs is not None and (pending := self._replay(plan, self.graphs)) is not None:
            return pending
        token_ids, metadata = self._build_inputs(plan.advances)
        self.backend.prepare(metadata)
        hidden = self.model(token_ids, ForwardContext(metadata, self.backend, self.kv_caches))

        pooled = self.pooler.pool(hidden, plan.advances)
        scored = self._prompt_logprobs(hidden, plan.advances)
        rows, positions, sources = _sampled(plan.advances)
        pending = PendingStep(plan.step, rows, None, scored, pooled)
        if rows:
            logits = self._logits(hidden[self._to_device(np.array(sources, dtype=np.int64))])
            row_index = self._to_device(np.array(rows, dtype=np.int64))
            self.rows.num_computed[row_index] = self._to_device(np.array(positions, dtype=np.int64))
            self._draw(pending, Undrawn(logits, positions, row_index), plan.masked)
        return pending

    @torch.inference_mode()
    def sample(self, pending: PendingStep, masks: TokenMasks) -> None:
        """The second half of a masked step, the newest one: what the grammars' rows may draw is known now."""
        undrawn, pending.undrawn = pending.undrawn, None
        assert undrawn is not None
        if undrawn.captured and self.graphs is not None and (mode := self.sampler.masked_mode(pending.rows)) is not None:
            pending.finish(SampleOutput(self.graphs.draw(pending.rows, mode, masks)))
            return
        self._draw(pending, undrawn, False, masks)

    def _draw(self, pending: PendingStep, undrawn: Undrawn, later: bool, masks: TokenMasks | None = None) -> None:
        """Draw the step's tokens and put them on their rows, now or when ``sample`` is called."""
        if later:
            pending.undrawn = undrawn
            return
        self.sampler.state.grammar.set_masks(masks)  # here: after Ctrl-C in a masked step nobody would take its masks away
        output = self.sampler.sample(undrawn.logits, pending.rows, undrawn.positions)
        self.rows.last_token[undrawn.row_index] = output.token_ids
        pending.finish(output)

    def _replay(self, plan: StepPlan, graphs: StepGraphs) -> PendingStep | None:
        """The step as a CUDA graph; None for a plan that no graph holds."""
        split = split_mixed(plan)
        if split is None:
            return None
        decodes, prompts = split
        rows = decodes + [a.row for a in prompts if a.sample_rows]
        mode = self.sampler.graph_mode(rows) if rows else GREEDY
        if prompts and mode is not None:
            tokens = graphs.mixed(decodes, prompts, mode)
            return PendingStep(plan.step, rows, SampleOutput(tokens) if rows else None)
        if prompts:
            return None
        if mode is not None:
            return PendingStep(plan.step, rows, SampleOutput(graphs.decode(rows, mode)))
        logits = graphs.decode(rows, LOGITS)
        pending = PendingStep(plan.step, rows, None)
        self._draw(pending, Undrawn(logits, [a.start + 1 for a in plan.advances], graphs.row_index[: len(rows)], True), plan.masked)
        return pending

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
        slots = blocks.to(torch.int64) * self.block_size + device_positions % self.block_size
        if self.device.type == "cpu" and (padding := padded_rows(num_tokens) - num_tokens):
            token_ids, device_positions = F.pad(token_ids, (0, padding)), F.pad(device_positions, (0, padding))
            slots = F.pad(slots, (0, padding), value=-1)
        seq_lens = starts + counts
        self.rows.num_computed[row_index] = self._to_device(seq_lens)
        metadata = AttentionMetadata(
            num_tokens=num_tokens,
            num_seqs=num_seqs,
            num_decodes=num_decodes,
            max_query_len=int(counts.max()),
            max_seq_len=int(seq_lens.max()),
            block_size=self.block_size,
            positions=device_positions,
            slots=slots,
            query_start=self._to_device(query_start),
            seq_lens=self._to_device(seq_lens.astype(np.int32)),
            block_tables=tables,
        )
        return token_ids, metadata

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [R, H] -> float32 [R, V]."""
        count = len(hidden)
        if self.device.type != "cpu" or padded_rows(count) == count:
            return self.model.compute_logits(hidden)
        return self.model.compute_logits(F.pad(hidden, (0, 0, 0, padded_rows(count) - count)))[:count]

    def _prompt_logprobs(self, hidden: torch.Tensor, advances: list[Advance]) -> PromptLogprobs | None:
        """LOGITS_CHUNK positions' logits at a time."""
        scored: PromptLogprobs | None = None
        offset = 0
        for a in advances:
            if a.prompt_logprobs is not None and a.next_token_ids:
                scored = scored or PromptLogprobs()
                for begin in range(0, len(a.next_token_ids), LOGITS_CHUNK):
                    targets = a.next_token_ids[begin : begin + LOGITS_CHUNK]
                    first = offset + begin
                    scored.add(a.row, self._logits(hidden[first : first + len(targets)]), targets, a.prompt_logprobs)
            offset += a.count
        return scored

    def _copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        pairs = self._to_device(np.array(copies, dtype=np.int64))
        for cache in self.kv_caches:
            for tensor in cache if isinstance(cache, (tuple, list)) else (cache,):
                tensor[pairs[:, 1]] = tensor[pairs[:, 0]]

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return upload(tensor, tensor.dtype, self.device)

    def warm_up(self) -> None:
        """Run the smallest real steps on row 0 and block 0, so that one-time costs don't fall on the first answer: where steps are
        captured twice, since what comes again is captured."""
        params = TokenParams(temperature=0.0)
        count = min(4, self.max_model_len)
        init = RowInit(0, params, 0, [0] * count, [], [0])
        for _ in range(2 if self.graphs is not None and self.graphs.pool.on_gpu else 1):
            self.execute(StepPlan(-1, [Advance(0, 0, count, [0] * count, (0,))], [init])).to_result()
            if count < self.max_model_len:
                self.execute(StepPlan(-1, [Advance(0, count, 1, None, (0,))])).to_result()
        self.sampler.state.clear_row(0)
        if self.graphs is not None:
            if self.graphs.pool.refused is not None:  # steps can do without graphs, but whoever starts the engine can do something about it
                raise self.graphs.pool.refused
            self.graphs.asked.clear()  # nobody has asked yet


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
