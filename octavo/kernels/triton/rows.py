"""The ends of a decode step: its inputs from the device's rows, its results back to them; and the uploads between steps.

Rows are the batch state of ``executor/rows.py``. A graph holds a fixed number of places B; places without a sequence carry
``dummy_row``, a row of the state that belongs to nobody.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from octavo.kernels.sizes import cdiv
from octavo.kernels.triton.launch import launch, pdl_options, release, wait

_BLOCK = 128


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """What one step of B places reads; the tensors' addresses are what a graph holds.

    token_ids, positions, slots: int64 [B]; seq_lens: int32 [B]; block_tables: int32 [B, max_blocks], None if not asked for.
    A place of ``dummy_row``: token 0, position 0, slot -1, length 0, its block table that row's.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor | None = None

    @classmethod
    def empty(cls, places: int, device: torch.device | str, max_blocks: int | None = None) -> DecodeInputs:
        token_ids, positions, slots = (torch.zeros(places, dtype=torch.int64, device=device) for _ in range(3))
        seq_lens = torch.zeros(places, dtype=torch.int32, device=device)
        tables = None if max_blocks is None else torch.zeros(places, max_blocks, dtype=torch.int32, device=device)
        return cls(token_ids, positions, slots, seq_lens, tables)


@triton.jit
def _decode_inputs_kernel(
    row_index_ptr, last_token_ptr, num_computed_ptr, table_ptr, table_stride, token_ptr, position_ptr, slot_ptr, length_ptr,
    places, dummy_row, dummy_len, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < places
    release(USE_PDL)
    wait(USE_PDL)
    row = tl.load(row_index_ptr + place, mask=inside, other=0).to(tl.int64)
    real = inside & (row != dummy_row)
    token = tl.load(last_token_ptr + row, mask=real, other=0)
    position = tl.load(num_computed_ptr + row, mask=real, other=0).to(tl.int64)
    block = tl.load(table_ptr + row * table_stride + position // BLOCK_SIZE, mask=real, other=0).to(tl.int64)
    slot = tl.where(real, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)
    length = tl.where(real, position + 1, dummy_len).to(tl.int32)
    tl.store(token_ptr + place, token, mask=inside)
    tl.store(position_ptr + place, position, mask=inside)
    tl.store(slot_ptr + place, slot, mask=inside)
    tl.store(length_ptr + place, length, mask=inside)


@triton.jit
def _tables_kernel(row_index_ptr, table_ptr, table_stride, length_ptr, out_ptr, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr,
                   BLOCK: tl.constexpr, USE_PDL: tl.constexpr):  # fmt: skip
    """Grid (places, column blocks): the used part of each place's block table."""
    place = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    release(USE_PDL)
    wait(USE_PDL)
    used = (tl.load(length_ptr + place) + BLOCK_SIZE - 1) // BLOCK_SIZE
    if tl.program_id(1) * BLOCK < used:
        row = tl.load(row_index_ptr + place).to(tl.int64)
        inside = (column < WIDTH) & (column < used)
        block = tl.load(table_ptr + row * table_stride + column, mask=inside, other=0)
        tl.store(out_ptr + place.to(tl.int64) * WIDTH + column, block, mask=inside)


def decode_inputs(
    row_index: torch.Tensor,
    last_token: torch.Tensor,
    num_computed: torch.Tensor,
    block_table: torch.Tensor,
    out: DecodeInputs,
    *,
    block_size: int,
    dummy_row: int = -1,
    dummy_len: int = 0,
) -> DecodeInputs:
    """Fill ``out`` for a step in which each place runs its row's last token. One launch (two with block tables).

    row_index: int64 [B], distinct but for ``dummy_row``. last_token: int64 [rows]; num_computed: int64 or int32 [rows], tokens
    whose K and V are in blocks, which is the position of the last token; block_table: int32 [rows, max_blocks].
    dummy_len: the length given to places without a sequence, 0 unless an attention kernel needs 1.
    Entries of out.block_tables past a sequence's blocks are left as they are.
    """
    places = row_index.shape[0]
    if places == 0:
        return out
    options = pdl_options(row_index)
    launch(
        _decode_inputs_kernel, (cdiv(places, _BLOCK),),
        (row_index, last_token, num_computed, block_table, block_table.stride(0),
        out.token_ids, out.positions, out.slots, out.seq_lens,
        places, dummy_row, dummy_len),
        BLOCK_SIZE=block_size, BLOCK=_BLOCK, num_warps=4, **options,
    )  # fmt: skip
    if out.block_tables is not None:
        width = block_table.shape[1]
        launch(
            _tables_kernel, (places, cdiv(width, 512)),
            (row_index, block_table, block_table.stride(0), out.seq_lens, out.block_tables),
            WIDTH=width, BLOCK_SIZE=block_size, BLOCK=512, num_warps=4, **options,
        )  # fmt: skip
    return out


def decode_inputs_reference(
    row_index: torch.Tensor,
    last_token: torch.Tensor,
    num_computed: torch.Tensor,
    block_table: torch.Tensor,
    out: DecodeInputs,
    *,
    block_size: int,
    dummy_row: int = -1,
    dummy_len: int = 0,
) -> DecodeInputs:
    """See ``decode_inputs``."""
    real = row_index != dummy_row
    row = torch.where(real, row_index, 0)
    position = torch.where(real, num_computed[row].long(), 0)
    block = block_table[row].gather(1, (position // block_size)[:, None])[:, 0].long()
    out.token_ids.copy_(torch.where(real, last_token[row], 0))
    out.positions.copy_(position)
    out.slots.copy_(torch.where(real, block * block_size + position % block_size, -1))
    out.seq_lens.copy_(torch.where(real, position + 1, dummy_len))
    if out.block_tables is not None:
        used = torch.arange(block_table.shape[1], device=row.device) * block_size < out.seq_lens[:, None]
        source = block_table[torch.where(real, row_index, dummy_row)]
        out.block_tables.copy_(torch.where(used, source, out.block_tables))
    return out


@triton.jit
def _store_tokens_kernel(
    row_index_ptr, token_ptr, last_token_ptr, num_computed_ptr, places, dummy_row, BLOCK: tl.constexpr, USE_PDL: tl.constexpr
):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < places
    release(USE_PDL)
    wait(USE_PDL)
    row = tl.load(row_index_ptr + place, mask=inside, other=0).to(tl.int64)
    real = inside & (row != dummy_row)
    tl.store(last_token_ptr + row, tl.load(token_ptr + place, mask=inside, other=0), mask=real)
    computed = tl.load(num_computed_ptr + row, mask=real, other=0)
    tl.store(num_computed_ptr + row, computed + 1, mask=real)


def store_tokens(
    row_index: torch.Tensor, tokens: torch.Tensor, last_token: torch.Tensor, num_computed: torch.Tensor, *, dummy_row: int = -1
) -> None:
    """After a decode step: last_token[row] = token and num_computed[row] += 1, for all places but ``dummy_row``'s.

    row_index, tokens: int64 [B], rows distinct.
    """
    places = row_index.shape[0]
    if places:
        launch(
            _store_tokens_kernel,
            (cdiv(places, _BLOCK),),
            (row_index, tokens, last_token, num_computed, places, dummy_row),
            BLOCK=_BLOCK,
            num_warps=4,
            **pdl_options(tokens),
        )


def store_tokens_reference(
    row_index: torch.Tensor, tokens: torch.Tensor, last_token: torch.Tensor, num_computed: torch.Tensor, *, dummy_row: int = -1
) -> None:
    """See ``store_tokens``."""
    real = row_index != dummy_row
    last_token[row_index[real]] = tokens[real]
    num_computed[row_index[real]] += 1


@triton.jit
def _scatter_kernel(pairs_ptr, flat_ptr, count, size, BLOCK: tl.constexpr, USE_PDL: tl.constexpr):
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = pair < count
    release(USE_PDL)
    wait(USE_PDL)
    index = tl.load(pairs_ptr + pair * 2, mask=inside, other=-1)
    value = tl.load(pairs_ptr + pair * 2 + 1, mask=inside, other=0)
    tl.store(flat_ptr + index, value.to(flat_ptr.dtype.element_ty), mask=(index >= 0) & (index < size))


def scatter_pairs(pairs: torch.Tensor, target: torch.Tensor) -> None:
    """target.view(-1)[pairs[i, 0]] = pairs[i, 1] for all i, in one launch.

    pairs: int64 [N, 2], uploaded in one copy; indices distinct but for negative ones, which write nothing (so that a buffer of
    fixed size can be part of a graph). target: contiguous, any integer type: the block table, last_token, num_computed.
    """
    if not target.is_contiguous() or pairs.dim() != 2 or pairs.shape[1] != 2 or not pairs.is_contiguous():
        raise ValueError(f"scatter_pairs takes contiguous pairs [N, 2] and a contiguous target; got {tuple(pairs.shape)}.")
    count = pairs.shape[0]
    if count:
        launch(
            _scatter_kernel,
            (cdiv(count, _BLOCK),),
            (pairs, target, count, target.numel()),
            BLOCK=_BLOCK,
            num_warps=4,
            **pdl_options(pairs),
        )


def scatter_pairs_reference(pairs: torch.Tensor, target: torch.Tensor) -> None:
    """See ``scatter_pairs``."""
    wanted = pairs[(pairs[:, 0] >= 0) & (pairs[:, 0] < target.numel())]
    target.view(-1)[wanted[:, 0]] = wanted[:, 1].to(target.dtype)
