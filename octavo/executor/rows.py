"""The device-side batch state: one row per running sequence.

State lives on the device so that a step can start before the host has read the one before it: the token that step N
sampled is written to its row, and step N+1 reads it there.
"""

from __future__ import annotations

import numpy as np
import torch

from octavo.types import BlockAppend, RowInit


class BatchRows:
    """Rows of running sequences.

    last_token:  int64 [max_rows]              the newest sampled token, whose K and V are not in blocks yet
    block_table: int32 [max_rows, max_blocks]  block ids in token order; entries past a row's blocks are undefined
    """

    def __init__(self, max_rows: int, max_blocks: int, device: torch.device) -> None:
        self.device = device
        self.last_token = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self.block_table = torch.zeros(max_rows, max_blocks, dtype=torch.int32, device=device)
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
        packed = torch.from_numpy(np.array([list(cells.keys()), list(cells.values())], dtype=np.int64)).pin_memory()
        packed = packed.to(self.device, non_blocking=True)
        self.block_table.view(-1).index_copy_(0, packed[0], packed[1].to(torch.int32))
