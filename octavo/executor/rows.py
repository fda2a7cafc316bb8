"""The device-side batch state: one row per running sequence.

State lives on the device so that a step can start before the host has read the one before it: the token that step N
sampled is written to its row, and step N+1 reads it there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from octavo.kernels.upload import upload
from octavo.types import BlockAppend, RowInit


@dataclass(slots=True)
class DecodeInputs:
    """What a decode step of B rows runs on: token_ids, positions, slots int64 [B], seq_lens int32 [B]."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor | None = None  # a kernel may gather them, too


class BatchRows:
    """Rows of running sequences, and a spare one at the end that pads decode graphs.

    last_token:   int64 [max_rows + 1]              the newest sampled token, whose K and V are not in blocks yet
    num_computed: int64 [max_rows + 1]              tokens whose K and V are in blocks: the position of the next to run
    block_table:  int32 [max_rows + 1, max_blocks]  block ids in token order; entries past a row's blocks are undefined
    """

    def __init__(self, max_rows: int, max_blocks: int, device: torch.device) -> None:
        self.device = device
        self.last_token = torch.zeros(max_rows + 1, dtype=torch.int64, device=device)
        self.num_computed = torch.zeros(max_rows + 1, dtype=torch.int64, device=device)
        self.block_table = torch.zeros(max_rows + 1, max_blocks, dtype=torch.int32, device=device)
        # On the CPU the host writes the rows in place; elsewhere one packed copy a step does it.
        self._table_view = self.block_table.numpy() if device.type == "cpu" else None

    def update(self, inits: list[RowInit], appends: list[BlockAppend]) -> None:
        """Set block tables of new rows, then append blocks to rows, in this order."""
        writes = [(init.row, 0, init.block_ids) for init in inits if init.block_ids]
        writes += [(a.row, a.offset, a.block_ids) for a in appends if a.block_ids]
        if not writes:
            return
        if self._table_view is not None:
            for row, offset, ids in writes:
                self._table_view[row, offset : offset + len(ids)] = ids
            return
        width = self.block_table.shape[1]
        # A later write to the same place must win, which a scatter with duplicate targets doesn't promise.
        cells = {row * width + offset + i: block for row, offset, ids in writes for i, block in enumerate(ids)}
        pairs = upload(np.array(list(cells.items()), dtype=np.int64), torch.int64, self.device)
        from octavo.kernels.triton.rows import scatter_pairs

        scatter_pairs(pairs, self.block_table)

    def decode_inputs(self, row_index: torch.Tensor, spare_row: int, block_size: int) -> DecodeInputs:
        """Inputs of a step in which each of ``row_index`` (int64 [B]) runs its newest token. Spare rows write nothing."""
        if row_index.is_cuda:
            from octavo.kernels.triton.rows import decode_inputs

            out = DecodeInputs(*(torch.empty_like(row_index) for _ in range(3)), torch.empty_like(row_index, dtype=torch.int32))
            return decode_inputs(
                row_index, self.last_token, self.num_computed, self.block_table, out, block_size=block_size, dummy_row=spare_row
            )
        positions = self.num_computed[row_index]
        blocks = self.block_table[row_index, positions // block_size]
        slots = blocks.to(torch.int64) * block_size + positions % block_size
        spare = row_index == spare_row
        return DecodeInputs(
            token_ids=self.last_token[row_index],
            positions=positions,
            slots=slots.masked_fill(spare, -1),
            seq_lens=(positions + 1).masked_fill(spare, 0).to(torch.int32),
        )

    def advance(self, row_index: torch.Tensor, tokens: torch.Tensor | None) -> None:
        """After such a step: one more token is computed, and ``tokens`` (int64 [B]) are the newest. Spare rows stay at 0."""
        if tokens is not None and row_index.is_cuda:
            from octavo.kernels.triton.rows import store_tokens

            store_tokens(row_index, tokens, self.last_token, self.num_computed, dummy_row=self.num_computed.shape[0] - 1)
            return
        self.num_computed[row_index] = torch.where(row_index == self.num_computed.shape[0] - 1, 0, self.num_computed[row_index] + 1)
        if tokens is not None:
            self.last_token[row_index] = tokens
