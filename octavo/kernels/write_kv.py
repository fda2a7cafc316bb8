"""QK-norm, RoPE and the write of K and V into a paged cache, fused: every token is read once and written once.

RMSNorm per head as in Qwen3; rotary embedding of Su et al. 2021 (arXiv:2104.09864).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from octavo.kernels.sizes import cdiv, next_power_of_2
from octavo.kernels.triton.launch import launch

FP8_MAX = 448.0  # largest finite e4m3


def write_kv_reference(
    qkv: torch.Tensor,
    kv_cache: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    cos_sin: torch.Tensor | None = None,
    interleaved: bool = False,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """See ``write_kv``."""
    tokens, dim = positions.shape[0], kv_cache.shape[-1]
    heads = qkv[:tokens].unflatten(1, (-1, dim))
    q, k, v = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    for x, weight in ((q, q_norm), (k, k_norm)):
        if weight is not None:
            wide = x.float()
            normed = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
            x.copy_(normed * weight.to(x.dtype))
        if cos_sin is not None:
            x.copy_(_rotate(x.float(), cos_sin[positions], interleaved))
    kept = slots >= 0
    size = kv_cache.shape[3]
    blocks, offsets = slots[kept] // size, slots[kept] % size
    for side, x, scale in ((0, k, k_scale), (1, v, v_scale)):
        stored = x[kept]
        if kv_cache.dtype.itemsize == 1:
            stored = (stored.float() / scale).clamp(-FP8_MAX, FP8_MAX)
        kv_cache[blocks, side, :, offsets] = stored.to(kv_cache.dtype)


def _rotate(x: torch.Tensor, table: torch.Tensor, interleaved: bool) -> torch.Tensor:
    rotary = table.shape[-1]
    cos, sin = table.unsqueeze(1).chunk(2, dim=-1)
    a, b = (x[..., 0:rotary:2], x[..., 1:rotary:2]) if interleaved else x[..., :rotary].chunk(2, dim=-1)
    turned = (a * cos - b * sin, b * cos + a * sin)
    joined = torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)
    return torch.cat((joined, x[..., rotary:]), dim=-1)


@triton.jit
def _scaled(x, w, rstd, normed, dtype: tl.constexpr):
    """RMSNorm with the roundings of the reference: to dtype before the weight and after it. Rows not ``normed`` pass."""
    y = (x * rstd[:, None]).to(dtype).to(tl.float32) * w.to(tl.float32)
    return tl.where(normed[:, None], y.to(dtype).to(tl.float32), x)


@triton.jit
def norm_weights(q_norm, k_norm, is_k, at, inside, Q_NORM: tl.constexpr, K_NORM: tl.constexpr):
    """Of the norm that each head (a row) has, those of the channels ``at``. Loaded as they are used, a row each: what several rows
    share would have to go through shared memory."""
    if Q_NORM and K_NORM:
        norm = tl.where(is_k, k_norm, q_norm)
    elif Q_NORM:
        norm = q_norm + tl.where(is_k, 0, 0)
    else:
        norm = k_norm + tl.where(is_k, 0, 0)
    at = norm[:, None] + at[None, :]
    return tl.load(at, mask=tl.broadcast_to(inside[None, :], at.shape), other=0.0)


@triton.jit
def normed_and_turned(
    a, b, c, is_q, is_k, w_a, w_b, w_c, cos, sin, eps,
    DIM: tl.constexpr, HAS_REST: tl.constexpr, ROPE: tl.constexpr, Q_NORM: tl.constexpr, K_NORM: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """float32 (a, b, c) of some heads (a row each), normalized and rotated where they are q or k. c counts where HAS_REST."""
    if Q_NORM or K_NORM:
        squares = tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)
        if HAS_REST:
            squares += tl.sum(c * c, axis=1)
        rstd = tl.rsqrt(squares / DIM + eps)
        normed = (is_q & Q_NORM) | (is_k & K_NORM)
        a = _scaled(a, w_a, rstd, normed, dtype)
        b = _scaled(b, w_b, rstd, normed, dtype)
        if HAS_REST:
            c = _scaled(c, w_c, rstd, normed, dtype)
    if ROPE:
        turns = (is_q | is_k)[:, None]
        # fused by hand: what a compiler fuses may differ from kernel to kernel
        across, along = b * sin, a * sin
        a = tl.where(turns, tl.fma(a, tl.broadcast_to(cos, a.shape), -across), a)
        b = tl.where(turns, tl.fma(b, tl.broadcast_to(cos, b.shape), along), b)
    return a, b, c


@triton.jit
def channels(HALF: tl.constexpr, HALF_PAD: tl.constexpr, REST_PAD: tl.constexpr, DIM: tl.constexpr, INTERLEAVED: tl.constexpr):
    """(at_a, at_b, j, in_half, in_rest): a head is pairs (a, b) that turn together, then channels j that don't."""
    i = tl.arange(0, HALF_PAD)
    if INTERLEAVED:
        at_a = 2 * i
        at_b = 2 * i + 1
    else:
        at_a = i
        at_b = i + HALF
    j = 2 * HALF + tl.arange(0, REST_PAD)
    return at_a, at_b, j, i < HALF, j < DIM


@triton.jit
def put(dest, x, mask, inverse, FP8: tl.constexpr, limit: tl.constexpr):
    if FP8:
        x = tl.minimum(tl.maximum(x * inverse, -limit), limit)
    tl.store(dest, x.to(dest.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["positions", "slots"])
def _write_kv_kernel(
    qkv, kv, positions, slots, cos_sin, q_norm, k_norm,
    qkv_stride, kv_stride_block, kv_stride_side, kv_stride_head, kv_stride_token, table_stride,
    eps, k_inverse, v_inverse,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
    HALF: tl.constexpr, HALF_PAD: tl.constexpr, REST: tl.constexpr, REST_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_H: tl.constexpr,
    ROPE: tl.constexpr, INTERLEAVED: tl.constexpr, Q_NORM: tl.constexpr, K_NORM: tl.constexpr,
    FP8: tl.constexpr, FP8_LIMIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One token, BLOCK_H of its heads."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    is_q = head < HEADS
    is_k = (head >= HEADS) & (head < HEADS + KV_HEADS)
    is_kv = (head >= HEADS) & (head < HEADS + 2 * KV_HEADS)
    dtype = qkv.dtype.element_ty

    i = tl.arange(0, HALF_PAD)
    at_a, at_b, j, in_half, in_rest = channels(HALF, HALF_PAD, REST_PAD, DIM, INTERLEAVED)
    pairs = (is_q | is_kv)[:, None] & in_half[None, :]
    rests = (is_q | is_kv)[:, None] & in_rest[None, :]

    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if ROPE:
        position = tl.load(positions + token)
    slot = tl.load(slots + token)
    row = qkv + token * qkv_stride + head[:, None] * DIM
    a = tl.load(row + at_a[None, :], mask=pairs, other=0.0).to(tl.float32)
    b = tl.load(row + at_b[None, :], mask=pairs, other=0.0).to(tl.float32)
    c, w_a, w_b, w_c, cos, sin = 0.0, 1.0, 1.0, 1.0, 1.0, 0.0
    if REST > 0:
        c = tl.load(row + j[None, :], mask=rests, other=0.0).to(tl.float32)
    if Q_NORM or K_NORM:
        w_a = norm_weights(q_norm, k_norm, is_k, at_a, in_half, Q_NORM, K_NORM)
        w_b = norm_weights(q_norm, k_norm, is_k, at_b, in_half, Q_NORM, K_NORM)
        if REST > 0:
            w_c = norm_weights(q_norm, k_norm, is_k, j, in_rest, Q_NORM, K_NORM)
    if ROPE:
        angles = cos_sin + position * table_stride + tl.where(is_k, 0, 0)[:, None] + i[None, :]  # a row each, too
        cos = tl.load(angles, mask=pairs, other=1.0)
        sin = tl.load(angles + HALF, mask=pairs, other=0.0)
    a, b, c = normed_and_turned(a, b, c, is_q, is_k, w_a, w_b, w_c, cos, sin, eps, DIM, REST > 0, ROPE, Q_NORM, K_NORM, dtype)

    if ROPE or Q_NORM:
        tl.store(row + at_a[None, :], a.to(dtype), mask=pairs & is_q[:, None])
        tl.store(row + at_b[None, :], b.to(dtype), mask=pairs & is_q[:, None])
        if REST > 0 and Q_NORM:
            tl.store(row + j[None, :], c.to(dtype), mask=rests & is_q[:, None])
    if slot >= 0:
        # what a 16-bit model stores is rounded to its own type first, as the reference does
        side = tl.where(is_k, 0, 1)
        kv_head = head - HEADS - side * KV_HEADS
        inverse = tl.where(is_k, k_inverse, v_inverse)[:, None]
        dest = kv + (slot // BLOCK_SIZE) * kv_stride_block + (slot % BLOCK_SIZE) * kv_stride_token
        dest = dest + (side * kv_stride_side + kv_head * kv_stride_head)[:, None]
        put(dest + at_a[None, :], a.to(dtype).to(tl.float32), pairs & is_kv[:, None], inverse, FP8, FP8_LIMIT)
        put(dest + at_b[None, :], b.to(dtype).to(tl.float32), pairs & is_kv[:, None], inverse, FP8, FP8_LIMIT)
        if REST > 0:
            put(dest + j[None, :], c.to(dtype).to(tl.float32), rests & is_kv[:, None], inverse, FP8, FP8_LIMIT)


def heads_at_a_time(dim: int, warps: int) -> int:
    """Heads for ``warps`` warps. Alike for each, so that a head's squares are added up in the same order by whoever makes it."""
    return next_power_of_2(max(1, 256 * warps // dim))


def head_shape(dim: int, cos_sin: torch.Tensor | None) -> dict[str, int]:
    """How a head divides into channels that turn and that don't, as constants of the kernels."""
    rotary = dim if cos_sin is None else cos_sin.shape[1]
    half = rotary // 2
    rest = dim - 2 * half
    return {"HALF": half, "HALF_PAD": next_power_of_2(half), "REST": rest, "REST_PAD": next_power_of_2(max(rest, 1))}


def write_kv(
    qkv: torch.Tensor,
    kv_cache: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    cos_sin: torch.Tensor | None = None,
    interleaved: bool = False,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    pdl: bool = False,
) -> None:
    """Normalize and rotate q in place, and write normalized, rotated K and V of every token to its slot. One launch.

    qkv:       [>= T, (num_heads + 2 * num_kv_heads) * head_dim]; q is overwritten, k and v are left as they came
    kv_cache:  [num_blocks, 2, num_kv_heads, block_size, head_dim], any strides with a contiguous last dimension; a
               float8_e4m3fn cache holds value / scale, clamped to the finite range
    positions: int64 [T]
    slots:     int64 [T]: block * block_size + offset; -1 writes nothing
    cos_sin:   float32 [max_position, rotary_dim]: cos, then sin; None for no rotation
    ``pdl`` launches it as a programmatic dependent of the kernel before it (sm_90).
    """
    tokens, dim = positions.shape[0], kv_cache.shape[-1]
    if tokens == 0:
        return
    # A decode wants many small programs, a prompt fewer, larger ones.
    warps = 2 if tokens <= 64 else 4
    block_h = heads_at_a_time(dim, warps)
    total = num_heads + 2 * num_kv_heads
    launch(
        _write_kv_kernel, (tokens, cdiv(total, block_h)),
        (qkv, kv_cache, positions, slots, cos_sin, q_norm, k_norm,
        qkv.stride(0), kv_cache.stride(0), kv_cache.stride(1), kv_cache.stride(2), kv_cache.stride(3),
        0 if cos_sin is None else cos_sin.stride(0),
        eps, 1.0 / k_scale, 1.0 / v_scale),
        HEADS=num_heads, KV_HEADS=num_kv_heads, DIM=dim, **head_shape(dim, cos_sin),
        BLOCK_SIZE=kv_cache.shape[3], BLOCK_H=block_h,
        ROPE=cos_sin is not None, INTERLEAVED=interleaved and cos_sin is not None,
        Q_NORM=q_norm is not None, K_NORM=k_norm is not None,
        FP8=kv_cache.dtype.itemsize == 1, FP8_LIMIT=FP8_MAX, PDL=pdl,
        num_warps=warps, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
