"""A step as one CUDA graph: rows → inputs → layers → logits → sample → rows.

Launching a step's kernels one by one costs the host more than most steps take on the GPU. Two kinds of step are captured.

*Decode*: every sequence runs its newest token. Nothing but the list of rows differs from step to step; inputs are built from
the rows, the sampled token goes back to its row, and the next step reads it there.

*Mixed*: decodes, and prompts or chunks of prompts beside them, whose tokens and places are uploaded in one copy:

    tokens     [ one per decode, padded to D | prompts' tokens, one after another, padded to T ]
    sequences  [ decodes, padded to D        | prompts, padded to P                            ]

Padding decodes stand on a spare row whose slot is -1 and whose length is 0; padding tokens belong to no sequence, and what is
computed for them goes nowhere. Graphs exist by sizes, rounded up, and by mode (how the rows draw). A mixed step of many prompts or
tokens runs the same body without being captured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from octavo.attention.base import AttentionMetadata, ForwardContext
from octavo.executor.graph_pool import GraphPool, round_up
from octavo.executor.step_sizes import GRAPH_PROMPT_TOKENS, MAX_PROMPTS, askable_sizes, decode_sizes, mixed_decodes, prompt_sizes
from octavo.kernels.token_bitmask import apply_token_bitmask
from octavo.kernels.upload import upload
from octavo.sampling.sampler import GREEDY, RANDOM, TRUNCATED
from octavo.types import Advance, RowInit, StepPlan, TokenMasks, TokenParams

if TYPE_CHECKING:
    from octavo.executor.model_runner import ModelRunner

LOGITS = "logits"  # stop after the logits: the sampler goes on eagerly (penalties, masks, log-probabilities …)
AHEAD_TOKENS = 2048  # prompt tokens of steps that are captured before they are asked for


class StepGraphs:
    """The captured steps of one model runner, on its device and current stream."""

    def __init__(self, runner: ModelRunner, max_rows: int, token_budget: int | None = None) -> None:
        """``token_budget``: no step of more tokens will be asked for."""
        self.runner = runner
        self.token_budget = token_budget
        self.pool = GraphPool(runner.rows)
        self.spare_row = max_rows
        device = runner.device
        self.sizes = decode_sizes(max_rows)
        self.mixed_sizes = mixed_decodes(max_rows)
        self.row_index = torch.full((max_rows,), self.spare_row, dtype=torch.int64, device=device)
        self.places = torch.arange(max(max_rows, GRAPH_PROMPT_TOKENS) + 1, dtype=torch.int64, device=device)
        self.prompt_inputs = torch.zeros(3 * GRAPH_PROMPT_TOKENS + 6 * MAX_PROMPTS + 1, dtype=torch.int64, device=device)
        # Shared by the graphs that end with logits; each would keep some of its own, more than a GiB together.
        # The last row is for what nobody reads.
        self.logits = torch.empty(max_rows + 1, runner.vocab_size, device=device)
        self.mask_places = torch.full((max_rows,), max_rows, dtype=torch.int64, device=device)
        self.mask_bits: torch.Tensor | None = None
        self._rows: list[int] = []
        self.asked: set[str] = set()  # modes of steps
        # The spare row draws too, so it needs parameters that can be drawn with.
        runner.sampler.state.init_row(RowInit(self.spare_row, TokenParams(temperature=0.0), 0, [0], [], []))

    def run_largest(self, prompts: list[Advance]) -> None:
        """Run the bodies that need most memory as they are, without capturing them: to see how much.

        ``prompts``: at most MAX_PROMPTS, of GRAPH_PROMPT_TOKENS tokens at most together, on rows that have blocks; the decodes are
        padding.
        """
        size = round_up(sum(p.count for p in prompts), prompt_sizes(self.mixed_sizes[-1]))
        self._set_rows([])
        self._fill_prompt_inputs(self._upload_prompts(prompts, size, MAX_PROMPTS))
        self._mixed_body(self.mixed_sizes[-1], size, MAX_PROMPTS, TRUNCATED)
        self._decode_body(self.sizes[-1], TRUNCATED)
        self._decode_body(self.sizes[-1], LOGITS)

    # -- ahead of time ----------------------------------------------------------------------------------------------------

    def capture_next(self) -> bool:
        """Do a little, some 10 to 25 ms, towards capturing a step that is likely to be asked for; False when there is none left. No step
        may be in flight.

        A step that is captured when it is asked for makes its streams wait as long, twice.
        """
        if not self.pool.on_gpu or self.pool.refused:
            return False
        for key, body in self._steps_ahead():
            if key not in self.pool.steps:
                self._set_rows([])
                if key[0] == "mixed":
                    self._fill_prompt_inputs(self._upload_prompts([], key[2], MAX_PROMPTS))
                self.pool.prepare(key, body)
                return True
        return False

    def _steps_ahead(self) -> Iterator[tuple[tuple[Any, ...], Callable[[], torch.Tensor]]]:
        """(key, body) of common steps, the likeliest first: those of modes that were asked for."""
        all_modes = (RANDOM, GREEDY, TRUNCATED)
        known = tuple(mode for mode in all_modes if mode in self.asked) or all_modes[:2]
        for modes in (known, tuple(mode for mode in all_modes if mode not in known)):
            for low, high in ((-1, 64), (64, 256)):
                for mode in modes:
                    for bucket in (s for s in self.sizes if low < s <= high):
                        yield ("decode", bucket, mode), partial(self._decode_body, bucket, mode)
                    for decodes in (s for s in self.mixed_sizes if low < s <= high):
                        for tokens in (s for s in self._askable(decodes) if s <= AHEAD_TOKENS):
                            sizes = (decodes, tokens, MAX_PROMPTS)
                            yield ("mixed", *sizes, mode), partial(self._mixed_body, *sizes, mode)

    def _askable(self, decodes: int) -> list[int]:
        """Sizes of prompts beside ``decodes`` that a step can have, whose memory ``run_largest`` has seen needed."""
        max_rows = self.sizes[-1]
        longest = min(MAX_PROMPTS, max_rows) * self.runner.max_model_len
        return askable_sizes(decodes, max_rows, min(longest, GRAPH_PROMPT_TOKENS), self.token_budget)

    # -- decode steps -----------------------------------------------------------------------------------------------------

    def decode(self, rows: list[int], mode: str) -> torch.Tensor:
        """Advance ``rows`` by one token each: token ids int64 [len(rows)], or float32 logits in mode LOGITS.

        A view of what the next step overwrites.
        """
        bucket = round_up(len(rows), self.sizes) if self.pool.on_gpu else len(rows)
        self._set_rows(rows)
        self.asked.add(mode)
        return self.pool.run(("decode", bucket, mode), partial(self._decode_body, bucket, mode))[: len(rows)]

    def _set_rows(self, rows: list[int]) -> None:
        """Upload the list of rows if it differs from the last one; what lies past it is padding."""
        if rows != self._rows:
            padded = rows + [self.spare_row] * max(0, len(self._rows) - len(rows))
            self._rows = [-1] * len(padded)  # Ctrl-C may come before or after the copy
            self.row_index[: len(padded)].copy_(upload(padded, torch.int64, self.runner.device), non_blocking=True)
            self._rows = list(rows)

    def _decode_body(self, bucket: int, mode: str) -> torch.Tensor:
        runner = self.runner
        row_index = self.row_index[:bucket]
        inputs = runner.rows.decode_inputs(row_index, self.spare_row, runner.block_size)
        query_start = self.places[: bucket + 1].to(torch.int32)
        hidden = self._forward(
            inputs.token_ids, inputs.positions, inputs.slots, query_start, inputs.seq_lens, row_index, num_decodes=bucket, max_query_len=1
        )
        if mode == LOGITS:
            logits = runner.model.compute_logits(hidden)
            runner.rows.advance(row_index, None)
            return self.logits[:bucket].copy_(logits)
        logits = runner.model.compute_logits(hidden, raw=mode != TRUNCATED)  # truncation's search works in float32
        tokens = runner.sampler.sample_rows(logits, row_index, inputs.positions + 1, mode)
        runner.rows.advance(row_index, tokens)
        return tokens

    def draw(self, rows: list[int], mode: str, masks: TokenMasks) -> torch.Tensor:
        """The second half of a step whose first was ``decode(rows, LOGITS)``: token ids int64 [len(rows)], put on their rows."""
        bucket = round_up(len(rows), self.sizes) if self.pool.on_gpu else len(rows)
        count, words = masks.bits.shape
        bits = self.make_mask_bits(words)
        unused = self.logits.shape[0] - 1
        places = upload([*masks.places, *[unused] * (bucket - count)], torch.int64, self.runner.device)
        self.mask_places[:bucket].copy_(places, non_blocking=True)
        if count:
            bits[:count].copy_(upload(torch.from_numpy(masks.bits), torch.int32, self.runner.device), non_blocking=True)
        return self.pool.run(("draw", bucket, mode), partial(self._draw_body, bucket, mode))[: len(rows)]

    def make_mask_bits(self, words: int) -> torch.Tensor:
        """int32 [max_rows, words], made with the first mask: few servers ever see one."""
        if self.mask_bits is None:
            self.mask_bits = torch.zeros(len(self.mask_places), words, dtype=torch.int32, device=self.runner.device)
        return self.mask_bits

    def _draw_body(self, bucket: int, mode: str) -> torch.Tensor:
        """Can be run again: the logits that a mask has forbidden stay forbidden."""
        runner, row_index = self.runner, self.row_index[:bucket]
        assert self.mask_bits is not None
        apply_token_bitmask(self.logits, self.mask_bits[:bucket], self.mask_places[:bucket])
        tokens = runner.sampler.sample_rows(self.logits[:bucket], row_index, runner.rows.num_computed[row_index], mode)
        runner.rows.last_token[row_index] = tokens
        return tokens

    # -- mixed steps ------------------------------------------------------------------------------------------------------

    def mixed(self, decodes: list[int], prompts: list[Advance], mode: str) -> torch.Tensor:
        """Advance rows ``decodes`` by one token each and run ``prompts``: tokens drawn, decodes first, then the prompts that draw."""
        num_tokens, captured = sum(p.count for p in prompts), self.pool.on_gpu and fits_graph(prompts)
        num_decodes = round_up(len(decodes), self.mixed_sizes) if self.pool.on_gpu else len(decodes)
        if captured:
            sizes = (num_decodes, round_up(num_tokens, prompt_sizes(num_decodes)), MAX_PROMPTS)
        else:
            sizes = (num_decodes, num_tokens, len(prompts))
        self._set_rows(decodes)
        self.asked.add(mode)
        packed = self._upload_prompts(prompts, sizes[1], sizes[2])
        if captured:
            self._fill_prompt_inputs(packed)
            tokens = self.pool.run(("mixed", *sizes, mode), partial(self._mixed_body, *sizes, mode))
        else:  # so many tokens that launching them one by one takes the host less than they take the device
            tokens = self._mixed_body(*sizes, mode, packed, max(p.count for p in prompts))
        drawn = [sizes[0] + i for i, p in enumerate(prompts) if p.sample_rows]
        if len(decodes) == sizes[0] and drawn == list(range(sizes[0], sizes[0] + len(drawn))):
            return tokens[: sizes[0] + len(drawn)]
        return tokens[upload([*range(len(decodes)), *drawn], torch.int64, self.runner.device)]

    def _upload_prompts(self, prompts: list[Advance], size: int, slots: int) -> torch.Tensor:
        """``_pack``'s array on the device, in one copy."""
        return upload(torch.from_numpy(self._pack(prompts, size, slots)), torch.int64, self.runner.device)

    def _fill_prompt_inputs(self, packed: torch.Tensor) -> None:
        """Put it where captured steps read it."""
        self.prompt_inputs[: len(packed)].copy_(packed, non_blocking=True)

    def _pack(self, prompts: list[Advance], size: int, slots: int) -> np.ndarray:
        """int64: token ids, positions, rows [size each]; query starts [slots + 1]; rows, lengths, sampling rows, sampling
        positions, places of the states to sample from [slots each]."""
        packed = np.zeros(3 * size + 6 * slots + 1, np.int64)
        ids, positions, rows = packed[: 3 * size].reshape(3, size)
        starts = packed[3 * size : 3 * size + slots + 1]
        row, length, draw_row, draw_position, source = packed[3 * size + slots + 1 :].reshape(5, slots)
        rows[:] = row[:] = draw_row[:] = self.spare_row
        begin = 0
        for i, p in enumerate(prompts):
            end = begin + p.count
            ids[begin:end] = p.token_ids
            positions[begin:end] = np.arange(p.start, p.start + p.count)
            rows[begin:end] = row[i] = p.row
            length[i] = draw_position[i] = p.start + p.count
            source[i] = end - 1
            if p.sample_rows:
                draw_row[i] = p.row
            starts[i + 1 :] = end
            begin = end
        return packed

    def _mixed_body(
        self, decodes: int, size: int, slots: int, mode: str, packed: torch.Tensor | None = None, longest: int | None = None
    ) -> torch.Tensor:
        """``packed``: by ``_pack``, if not in the buffer of captured steps; ``longest``: tokens of the longest prompt, if known."""
        runner, rows, spare = self.runner, self.runner.rows, self.spare_row
        packed = self.prompt_inputs if packed is None else packed
        ids, positions, row_of_token = packed[: 3 * size].view(3, size)
        starts = packed[3 * size : 3 * size + slots + 1]
        row, length, draw_row, draw_position, source = packed[3 * size + slots + 1 : 3 * size + 6 * slots + 1].view(5, slots)
        blocks = rows.block_table[row_of_token, positions // runner.block_size].to(torch.int64)
        prompt_slots = (blocks * runner.block_size + positions % runner.block_size).masked_fill(row_of_token == spare, -1)
        row_index = self.row_index[:decodes]
        inputs = rows.decode_inputs(row_index, spare, runner.block_size)
        hidden = self._forward(
            torch.cat((inputs.token_ids, ids)),
            torch.cat((inputs.positions, positions)),
            torch.cat((inputs.slots, prompt_slots)),
            torch.cat((self.places[:decodes], starts + decodes)).to(torch.int32),
            torch.cat((inputs.seq_lens, length.to(torch.int32))),
            torch.cat((row_index, row)),
            num_decodes=decodes,
            max_query_len=longest or size,
        )
        logits = runner.model.compute_logits(hidden[torch.cat((self.places[:decodes], source + decodes))], raw=mode != TRUNCATED)
        draw_rows = torch.cat((row_index, draw_row))
        tokens = runner.sampler.sample_rows(logits, draw_rows, torch.cat((inputs.positions + 1, draw_position)), mode)
        rows.num_computed[row] = length  # padding sets the spare row's to 0, which it is
        rows.last_token[draw_row] = tokens[decodes:]
        rows.advance(row_index, tokens[:decodes])
        return tokens

    def _forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        query_start: torch.Tensor,
        seq_lens: torch.Tensor,
        row_index: torch.Tensor,
        *,
        num_decodes: int,
        max_query_len: int,
    ) -> torch.Tensor:
        runner = self.runner
        table, extra = runner.rows.block_table, {"row_index": row_index}
        if not self.pool.on_gpu:  # the CPU's backend takes one table a sequence
            table, extra = table[row_index], {}
        metadata = AttentionMetadata(
            num_tokens=len(token_ids),
            num_seqs=len(seq_lens),
            num_decodes=num_decodes,
            max_query_len=max_query_len,
            max_seq_len=runner.max_model_len,
            block_size=runner.block_size,
            positions=positions,
            slots=slots,
            query_start=query_start,
            seq_lens=seq_lens,
            block_tables=table,
            extra=extra,
        )
        runner.backend.prepare(metadata)
        return runner.model(token_ids, ForwardContext(metadata, runner.backend, runner.kv_caches))


def split_mixed(plan: StepPlan) -> tuple[list[int], list[Advance]] | None:
    """(rows that decode, prompts) of a plan that the bodies here can run; None for others.

    Decodes come first, and a prompt draws for its own row or not at all: its tokens come out in the plan's order.
    """
    advances = plan.advances
    count = next((i for i, a in enumerate(advances) if a.token_ids is not None), len(advances))
    prompts = advances[count:]
    if any(len(a.sample_rows) != 1 for a in advances[:count]):
        return None
    if any(a.token_ids is None or a.prompt_logprobs is not None or a.pooling is not None or len(a.sample_rows) > 1 for a in prompts):
        return None
    if any(a.sample_rows and a.sample_rows != (a.row,) for a in prompts):
        return None
    return [a.row for a in advances[:count]], prompts


def fits_graph(prompts: list[Advance]) -> bool:
    return len(prompts) <= MAX_PROMPTS and sum(p.count for p in prompts) <= GRAPH_PROMPT_TOKENS
