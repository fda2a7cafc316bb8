"""y = x W^T for few rows of x: kernels bound by reading W [rows, K] once.

Two families, for 16-bit types:

- ``gemv_kernel``: up to 4 rows of x, products on the CUDA cores. A program holds BLOCK_N rows of W; its first tile of W is on
  its way before the kernel before this one has ended.
- ``skinny_kernel``: up to 64 rows on the tensor cores. W is the left operand (its rows fill the instruction's 64, x's few rows
  are the narrow side), through an asynchronous pipeline; before the wait, W is asked into L2.

In both, W's rows of a gated layer are visited in turn, gate row n then up row n, so that a program has both halves of an
output. With SPLIT_K programs to a tile, each writes its partial sums, and the last to arrive adds them in the order of the
splits: the result does not depend on who was last.

A row's result depends on the block shapes, never on the other rows, and in ``gemv_kernel`` not on how many there are.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.kernels.triton.activation import silu
from octavo.kernels.triton.launch import prefetch_lines, release, wait


@triton.jit
def _weight_rows(tile, N, BLOCK_N: tl.constexpr, GATED: tl.constexpr):
    """Rows of W [BLOCK_N] that a tile reads. Out of range: the last row again, whose result is not stored."""
    place = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    if GATED:
        return tl.minimum(place // 2, N - 1) + (place % 2) * N
    else:
        return tl.minimum(place, N - 1)


@triton.jit
def _stream(x_ptr, residual_ptr, columns, inside, HAS_RESIDUAL: tl.constexpr):
    """x, or x + residual rounded to x's type."""
    x = tl.load(x_ptr + columns, mask=inside, other=0.0)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + columns, mask=inside, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
    return x


@triton.jit
def _norm_scale(
    x_ptr, residual_ptr, total_ptr, eps, limit, writes,
    K: tl.constexpr, BLOCK_K: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """1 / rms of one row of x (+ residual). limit: K, or 0 where there is no such row. One program (``writes`` 1, the others'
    0) also writes the sum, to a buffer of its own: the others still read x."""
    squares = tl.zeros([BLOCK_K], tl.float32)
    for start in tl.static_range(0, K, BLOCK_K):
        columns = start + tl.arange(0, BLOCK_K)
        inside = columns < limit
        value = _stream(x_ptr, residual_ptr, columns, inside, HAS_RESIDUAL)
        if HAS_RESIDUAL:
            tl.store(total_ptr + columns, value, mask=columns < limit * writes)
        wide = value.to(tl.float32)
        squares += wide * wide
    return tl.rsqrt(tl.sum(squares, axis=0) / K + eps)


@triton.jit
def _row_tile(
    x_ptr, residual_ptr, norm_ptr, scale, columns, inside,
    HAS_NORM: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """One row's entries at ``columns`` in float32, normalised if asked, with the roundings of a norm that stands alone."""
    value = _stream(x_ptr, residual_ptr, columns, inside, HAS_RESIDUAL)
    if HAS_NORM:
        weight = tl.load(norm_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        normed = (value.to(tl.float32) * scale).to(value.dtype).to(tl.float32)
        value = (normed * weight).to(value.dtype)
    return value.to(tl.float32)


@triton.jit
def _store_row(
    sums, rows, bias_ptr, y_ptr, tile, limit, kind: tl.constexpr,
    BLOCK_N: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """sums [BLOCK_N] of one row of x -> y. limit: N, or 0 where there is no such row.

    Rounded to ``kind`` as the separate operations would."""
    if HAS_BIAS:
        sums += tl.load(bias_ptr + rows).to(tl.float32)
    if GATED:
        gate, up = tl.split(tl.reshape(sums, [BLOCK_N // 2, 2]))
        active = silu(gate.to(kind).to(tl.float32)).to(kind).to(tl.float32)
        result = active * up.to(kind).to(tl.float32)
        place = tile * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    else:
        result = sums
        place = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    tl.store(y_ptr + place, result.to(kind).to(y_ptr.dtype.element_ty), mask=place < limit)


@triton.jit
def _add_splits(partial_ptr, step, SPLIT_K: tl.constexpr, BLOCK_N: tl.constexpr):
    """Partial sums [BLOCK_N] of all splits, added in order. From L2: other programs wrote them."""
    place = tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_N], tl.float32)
    for split in tl.static_range(SPLIT_K):
        total += tl.load(partial_ptr + split * step + place, cache_modifier=".cg")
    return total


@triton.jit(do_not_specialize=["M"])
def gemv_kernel(
    x_ptr, w_ptr, bias_ptr, y_ptr, residual_ptr, total_ptr, norm_ptr, eps, partial_ptr, counter_ptr,
    M, N, x_stride, residual_stride,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr,
    GATED: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_NORM: tl.constexpr, HAS_RESIDUAL: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of W's rows, SPLIT_K). x [M, K], M <= ROWS (1, 2 or 4); W [N, K], or [2N, K] if GATED; y [M, N].

    partial: float32 [SPLIT_K, tiles, 4, BLOCK_N]; counter: int32 [tiles], zero before and after.
    """
    STEPS: tl.constexpr = ((K + BLOCK_K - 1) // BLOCK_K + SPLIT_K - 1) // SPLIT_K
    EVEN: tl.constexpr = K % (BLOCK_K * SPLIT_K) == 0
    tile = tl.program_id(0)
    split = tl.program_id(1)
    kind: tl.constexpr = x_ptr.dtype.element_ty
    rows = _weight_rows(tile, N, BLOCK_N, GATED)
    w_rows = w_ptr + rows.to(tl.int64)[:, None] * K
    first = split * STEPS * BLOCK_K
    columns = first + tl.arange(0, BLOCK_K)

    if EVEN:
        w = tl.load(w_rows + columns[None, :])
    else:
        w = tl.load(w_rows + columns[None, :], mask=(columns < K)[None, :], other=0.0)
    release(USE_PDL)
    wait(USE_PDL)

    writes = tl.where(tile + split == 0, 1, 0)
    # the last columns of rows 1 to 3 of x and y, or 0 where there is no such row
    k1 = tl.where(1 < M, K, 0)
    k2 = tl.where(2 < M, K, 0)
    k3 = tl.where(3 < M, K, 0)
    n1 = tl.where(1 < M, N, 0)
    n2 = tl.where(2 < M, N, 0)
    n3 = tl.where(3 < M, N, 0)
    scale0 = 0.0
    scale1 = 0.0
    scale2 = 0.0
    scale3 = 0.0
    if HAS_NORM:
        scale0 = _norm_scale(x_ptr, residual_ptr, total_ptr, eps, K, writes, K, BLOCK_K, HAS_RESIDUAL)
        if ROWS >= 2:
            scale1 = _norm_scale(x_ptr + x_stride, residual_ptr + residual_stride, total_ptr + K, eps, k1, writes, K, BLOCK_K, HAS_RESIDUAL)
        if ROWS >= 4:
            scale2 = _norm_scale(
                x_ptr + 2 * x_stride, residual_ptr + 2 * residual_stride, total_ptr + 2 * K, eps, k2, writes, K, BLOCK_K, HAS_RESIDUAL
            )
            scale3 = _norm_scale(
                x_ptr + 3 * x_stride, residual_ptr + 3 * residual_stride, total_ptr + 3 * K, eps, k3, writes, K, BLOCK_K, HAS_RESIDUAL
            )

    acc0 = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    if ROWS >= 2:
        acc1 = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    if ROWS >= 4:
        acc2 = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
        acc3 = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for step in tl.static_range(STEPS):
        here = first + step * BLOCK_K + tl.arange(0, BLOCK_K)
        wide = w.to(tl.float32)
        if step + 1 < STEPS:  # the next tile is on its way while this one is used
            following = here + BLOCK_K
            if EVEN:
                w = tl.load(w_rows + following[None, :])
            else:
                w = tl.load(w_rows + following[None, :], mask=(following < K)[None, :], other=0.0)
        x0 = _row_tile(x_ptr, residual_ptr, norm_ptr, scale0, here, here < K, HAS_NORM, HAS_RESIDUAL)
        acc0 += wide * x0[None, :]
        if ROWS >= 2:
            x1 = _row_tile(x_ptr + x_stride, residual_ptr + residual_stride, norm_ptr, scale1, here, here < k1, HAS_NORM, HAS_RESIDUAL)
            acc1 += wide * x1[None, :]
        if ROWS >= 4:
            x2 = _row_tile(
                x_ptr + 2 * x_stride, residual_ptr + 2 * residual_stride, norm_ptr, scale2, here, here < k2, HAS_NORM, HAS_RESIDUAL
            )
            acc2 += wide * x2[None, :]
            x3 = _row_tile(
                x_ptr + 3 * x_stride, residual_ptr + 3 * residual_stride, norm_ptr, scale3, here, here < k3, HAS_NORM, HAS_RESIDUAL
            )
            acc3 += wide * x3[None, :]

    sums0 = tl.sum(acc0, axis=1)
    if ROWS >= 2:
        sums1 = tl.sum(acc1, axis=1)
    if ROWS >= 4:
        sums2 = tl.sum(acc2, axis=1)
        sums3 = tl.sum(acc3, axis=1)

    if SPLIT_K == 1:
        _store_row(sums0, rows, bias_ptr, y_ptr, tile, N, kind, BLOCK_N, GATED, HAS_BIAS)
        if ROWS >= 2:
            _store_row(sums1, rows, bias_ptr, y_ptr + N, tile, n1, kind, BLOCK_N, GATED, HAS_BIAS)
        if ROWS >= 4:
            _store_row(sums2, rows, bias_ptr, y_ptr + 2 * N, tile, n2, kind, BLOCK_N, GATED, HAS_BIAS)
            _store_row(sums3, rows, bias_ptr, y_ptr + 3 * N, tile, n3, kind, BLOCK_N, GATED, HAS_BIAS)
    else:
        tile_ptr = partial_ptr + tile * (4 * BLOCK_N)
        step_size = tl.num_programs(0) * (4 * BLOCK_N)
        place = tile_ptr + split * step_size + tl.arange(0, BLOCK_N)
        tl.store(place, sums0)
        if ROWS >= 2:
            tl.store(place + BLOCK_N, sums1)
        if ROWS >= 4:
            tl.store(place + 2 * BLOCK_N, sums2)
            tl.store(place + 3 * BLOCK_N, sums3)
        tl.debug_barrier()  # all threads' partial sums, before the one thread that says they are there
        arrived = tl.atomic_add(counter_ptr + tile, 1, sem="acq_rel")
        if arrived == SPLIT_K - 1:
            _store_row(_add_splits(tile_ptr, step_size, SPLIT_K, BLOCK_N), rows, bias_ptr, y_ptr, tile, N, kind, BLOCK_N, GATED, HAS_BIAS)
            if ROWS >= 2:
                total1 = _add_splits(tile_ptr + BLOCK_N, step_size, SPLIT_K, BLOCK_N)
                _store_row(total1, rows, bias_ptr, y_ptr + N, tile, n1, kind, BLOCK_N, GATED, HAS_BIAS)
            if ROWS >= 4:
                total2 = _add_splits(tile_ptr + 2 * BLOCK_N, step_size, SPLIT_K, BLOCK_N)
                _store_row(total2, rows, bias_ptr, y_ptr + 2 * N, tile, n2, kind, BLOCK_N, GATED, HAS_BIAS)
                total3 = _add_splits(tile_ptr + 3 * BLOCK_N, step_size, SPLIT_K, BLOCK_N)
                _store_row(total3, rows, bias_ptr, y_ptr + 3 * N, tile, n3, kind, BLOCK_N, GATED, HAS_BIAS)
            tl.store(counter_ptr + tile, 0)


@triton.jit
def _store_tile(
    acc, rows, bias_ptr, y_ptr, tile, M, N, kind: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """acc [BLOCK_N, BLOCK_M] -> y [M, N]."""
    if HAS_BIAS:
        acc += tl.load(bias_ptr + rows).to(tl.float32)[:, None]
    token = tl.arange(0, BLOCK_M)
    if GATED:
        pairs = tl.permute(tl.reshape(acc, [BLOCK_N // 2, 2, BLOCK_M]), (0, 2, 1))
        gate, up = tl.split(pairs)
        active = silu(gate.to(kind).to(tl.float32)).to(kind).to(tl.float32)
        result = active * up.to(kind).to(tl.float32)
        place = tile * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    else:
        result = acc
        place = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    where = y_ptr + token[None, :].to(tl.int64) * N + place[:, None]
    tl.store(where, result.to(kind).to(y_ptr.dtype.element_ty), mask=(token < M)[None, :] & (place < N)[:, None])


@triton.jit(do_not_specialize=["M"])
def skinny_kernel(
    x_ptr, w_ptr, bias_ptr, y_ptr, partial_ptr, counter_ptr, M, N, x_stride,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr,
    STAGES: tl.constexpr, PREFETCH: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of W's rows, SPLIT_K). x [M, K], M <= BLOCK_M; W [N, K], or [2N, K] if GATED; y [M, N].

    PREFETCH: how many columns of its part of W a program asks into L2 before the wait (a power of two, at least 64; 0 none).
    partial: float32 [SPLIT_K, tiles, BLOCK_N, BLOCK_M]; counter: int32 [tiles], zero before and after.
    """
    STEPS: tl.constexpr = ((K + BLOCK_K - 1) // BLOCK_K + SPLIT_K - 1) // SPLIT_K
    EVEN: tl.constexpr = K % (BLOCK_K * SPLIT_K) == 0
    tile = tl.program_id(0)
    split = tl.program_id(1)
    kind: tl.constexpr = x_ptr.dtype.element_ty
    rows = _weight_rows(tile, N, BLOCK_N, GATED)
    w_rows = w_ptr + rows.to(tl.int64)[:, None] * K
    first = split * STEPS * BLOCK_K
    token = tl.arange(0, BLOCK_M)

    release(USE_PDL)
    if PREFETCH > 0 and USE_PDL:
        lines = tl.minimum(first + tl.arange(0, PREFETCH // 64) * 64, K - 1)  # 64 entries of 2 bytes: a line
        prefetch_lines((w_rows + lines[None, :]).to(tl.int64), USE_PDL)
    wait(USE_PDL)

    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    x_rows = x_ptr + token[None, :].to(tl.int64) * x_stride
    for step in tl.range(0, STEPS, num_stages=STAGES):
        columns = first + step * BLOCK_K + tl.arange(0, BLOCK_K)
        if EVEN:
            w = tl.load(w_rows + columns[None, :])
            x = tl.load(x_rows + columns[:, None], mask=(token < M)[None, :], other=0.0)
        else:
            w = tl.load(w_rows + columns[None, :], mask=(columns < K)[None, :], other=0.0)
            x = tl.load(x_rows + columns[:, None], mask=(token < M)[None, :] & (columns < K)[:, None], other=0.0)
        acc = tl.dot(w, x, acc)

    if SPLIT_K == 1:
        _store_tile(acc, rows, bias_ptr, y_ptr, tile, M, N, kind, BLOCK_M, BLOCK_N, GATED, HAS_BIAS)
    else:
        place = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + token[None, :]
        tile_ptr = partial_ptr + tile * (BLOCK_N * BLOCK_M)
        step_size = tl.num_programs(0) * (BLOCK_N * BLOCK_M)
        tl.store(tile_ptr + split * step_size + place, acc)
        tl.debug_barrier()
        arrived = tl.atomic_add(counter_ptr + tile, 1, sem="acq_rel")
        if arrived == SPLIT_K - 1:
            total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            for part in tl.static_range(SPLIT_K):
                total += tl.load(tile_ptr + part * step_size + place, cache_modifier=".cg")
            _store_tile(total, rows, bias_ptr, y_ptr, tile, M, N, kind, BLOCK_M, BLOCK_N, GATED, HAS_BIAS)
            tl.store(counter_ptr + tile, 0)
