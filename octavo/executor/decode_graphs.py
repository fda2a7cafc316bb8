"""A decode step as one CUDA graph: rows → inputs → layers → logits → sample → rows.

Launching a step's kernels one by one costs the host more than a small step takes on the GPU. In a decode step every
sequence runs its newest token, so nothing but the list of rows differs from step to step, and the whole step can be replayed:
inputs are built from the rows, the sampled token goes back to its row, and the next step reads it there.

Graphs exist by bucket (number of sequences, rounded up; the rest are padding on a spare row whose slot is -1) and by mode
(how its rows draw). They are captured when first needed, about 20 ms each, and share one memory pool.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from octavo.attention.base import AttentionMetadata, ForwardContext
from octavo.sampling.feature import upload
from octavo.sampling.sampler import TRUNCATED
from octavo.types import RowInit, TokenParams

if TYPE_CHECKING:
    from octavo.executor.model_runner import ModelRunner

logger = logging.getLogger("octavo.executor")

LOGITS = "logits"  # stop after the logits: the sampler goes on eagerly (penalties, masks, log-probabilities …)


@dataclass(slots=True)
class CapturedStep:
    """``output``: token ids int64 [bucket], or float32 logits [bucket, V] in mode LOGITS. Overwritten by the next replay."""

    graph: torch.cuda.CUDAGraph
    output: torch.Tensor


def bucket_sizes(max_rows: int) -> list[int]:
    """1, 2, 4, 8, then multiples of 8 to 64, of 16 to 256, of 32 to 512, of 64 above; the last is max_rows."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 512, 32), *range(512, max_rows + 1, 64)]
    return [s for s in sizes if s < max_rows] + [max_rows]


class DecodeGraphs:
    """Captures and replays decode steps for one model runner, on its device and current stream."""

    def __init__(self, runner: ModelRunner, max_rows: int) -> None:
        self.runner = runner
        self.sizes = bucket_sizes(max_rows)
        self.spare_row = max_rows
        device = runner.device
        self.row_index = torch.full((max_rows,), self.spare_row, dtype=torch.int64, device=device)
        self.query_start = torch.arange(max_rows + 1, dtype=torch.int32, device=device)
        self.pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.graphs: dict[tuple[int, str], CapturedStep] = {}
        # The spare row draws too, so it needs parameters that can be drawn with.
        runner.sampler.state.init_row(RowInit(self.spare_row, TokenParams(temperature=0.0), 0, [0], [], []))
        self._rows: list[int] | None = None
        self._filled = 0

    def run(self, rows: list[int], mode: str) -> torch.Tensor:
        """Advance ``rows`` by one token each. Returns a view of the step's output for these rows; copy it before the next."""
        count = len(rows)
        if self.runner.device.type != "cuda":  # nothing to capture: the same body, run as it is (tests on the CPU)
            self._set_rows(rows)
            return self._body(count, mode)
        bucket = next(s for s in self.sizes if s >= count)
        self._set_rows(rows)
        step = self.graphs.get((bucket, mode)) or self._capture(bucket, mode)
        step.graph.replay()
        return step.output[:count]

    def _set_rows(self, rows: list[int]) -> None:
        """Upload the list of rows if it differs from the last one; what lies past it is padding."""
        if rows == self._rows:
            return
        padded = rows + [self.spare_row] * max(0, self._filled - len(rows))
        self.row_index[: len(padded)].copy_(upload(padded, torch.int64, self.runner.device), non_blocking=True)
        self._rows, self._filled = list(rows), len(rows)

    def _capture(self, bucket: int, mode: str) -> CapturedStep:
        """Run the step once as it is (compiles kernels, sizes workspaces), undo what that changed, then record it."""
        begun = time.perf_counter()
        runner = self.runner
        saved = (runner.rows.last_token.clone(), runner.rows.num_computed.clone())
        torch.cuda.synchronize()
        self._body(bucket, mode)
        runner.rows.last_token.copy_(saved[0])
        runner.rows.num_computed.copy_(saved[1])
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Not ``torch.cuda.graph``: it collects garbage and empties the allocator's cache each time, ten times the cost of this.
        current = torch.cuda.current_stream()
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                output = self._body(bucket, mode)
            finally:
                graph.capture_end()
        current.wait_stream(self.stream)
        step = self.graphs[bucket, mode] = CapturedStep(graph, output)
        logger.debug("captured a decode graph: %d sequences, %s, %.0f ms", bucket, mode, (time.perf_counter() - begun) * 1e3)
        return step

    def _body(self, bucket: int, mode: str) -> torch.Tensor:
        runner = self.runner
        row_index = self.row_index[:bucket]
        inputs = runner.rows.decode_inputs(row_index, self.spare_row, runner.block_size)
        table, extra = runner.rows.block_table, {"row_index": row_index}
        if runner.device.type != "cuda":  # the CPU's backend takes one table a sequence
            table, extra = table[row_index], {}
        metadata = AttentionMetadata(
            num_tokens=bucket,
            num_seqs=bucket,
            num_decodes=bucket,
            max_query_len=1,
            max_seq_len=runner.max_model_len,
            block_size=runner.block_size,
            positions=inputs.positions,
            slots=inputs.slots,
            query_start=self.query_start[: bucket + 1],
            seq_lens=inputs.seq_lens,
            block_tables=table,
            extra=extra,
        )
        runner.backend.prepare(metadata)
        hidden = runner.model(inputs.token_ids, ForwardContext(metadata, runner.backend, runner.kv_caches))
        if mode == LOGITS:
            logits = runner.model.compute_logits(hidden)
            runner.rows.advance(row_index, None)
            return logits
        logits = runner.model.compute_logits(hidden, raw=mode != TRUNCATED)  # truncation's search works in float32
        tokens: Any = runner.sampler.sample_rows(logits, row_index, inputs.positions + 1, mode)
        runner.rows.advance(row_index, tokens)
        return tokens
