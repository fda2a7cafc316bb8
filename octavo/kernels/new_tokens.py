"""What ``write_kv`` does, as the beginning of ``decode_attention``: for one new token per sequence, and by whoever attends to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from octavo.kernels.decode_config import DecodeConfig
from octavo.kernels.write_kv import FP8_MAX, channels, head_shape, heads_at_a_time, norm_weights, normed_and_turned, put


@dataclass(frozen=True, slots=True)
class NewTokens:
    """What ``write_kv`` is to be given for one new token per sequence, where ``decode_attention`` does its work. See there."""

    positions: torch.Tensor
    slots: torch.Tensor
    cos_sin: torch.Tensor | None = None
    interleaved: bool = False
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    eps: float = 1e-6


@triton.jit
def which_heads(
    block, first_pair, q_pairs, kv_pairs, positions, slots, cos_sin, angles_stride, q_norm, k_norm,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr,
    HALF: tl.constexpr, HALF_PAD: tl.constexpr, REST: tl.constexpr, REST_PAD: tl.constexpr,
    ROPE: tl.constexpr, INTERLEAVED: tl.constexpr, Q_NORM: tl.constexpr, K_NORM: tl.constexpr,
):  # fmt: skip
    """(pair, head of the pair, slot, cos, sin, weights of a, b and c) of ROWS heads: all that is known before their qkv.

    A pair is a sequence and a KV head. From ``first_pair`` on, every pair has GROUP query heads, a K and a V, in this order; those
    of the first ``q_pairs`` and ``kv_pairs`` are asked for. A head that is not has a number below 0.
    """
    at_a, at_b, j, in_half, in_rest = channels(HALF, HALF_PAD, REST_PAD, DIM, INTERLEAVED)
    item = block * ROWS + tl.arange(0, ROWS)
    nth = item // (GROUP + 2)
    head = item % (GROUP + 2)
    head = tl.where(nth < tl.where(head < GROUP, q_pairs, kv_pairs), head, -1)
    pair = first_pair + tl.where(head >= 0, nth, 0)
    seq = pair // KV_HEADS
    slot = tl.load(slots + seq, mask=head >= GROUP, other=-1)
    cos = tl.zeros([1, 1], tl.float32)  # the same kind of thing from block to block, whether needed or not
    sin, w_a, w_b, w_c = cos, cos, cos, cos
    if ROPE:
        i = tl.arange(0, HALF_PAD)
        turns = (head >= 0) & (head <= GROUP)
        angles = cos_sin + (tl.load(positions + seq, mask=turns, other=0) * angles_stride)[:, None] + i[None, :]
        cos = tl.load(angles, mask=turns[:, None] & in_half[None, :], other=1.0)
        sin = tl.load(angles + HALF, mask=turns[:, None] & in_half[None, :], other=0.0)
    if Q_NORM or K_NORM:
        w_a = norm_weights(q_norm, k_norm, head == GROUP, at_a, in_half, Q_NORM, K_NORM)
        w_b = norm_weights(q_norm, k_norm, head == GROUP, at_b, in_half, Q_NORM, K_NORM)
        if REST > 0:
            w_c = norm_weights(q_norm, k_norm, head == GROUP, j, in_rest, Q_NORM, K_NORM)
    return pair, head, slot, cos, sin, w_a, w_b, w_c


@triton.jit
def make_heads(
    pair, head, slot, cos, sin, w_a, w_b, w_c, qkv, qkv_stride, q_out, q_out_stride, kv, eps, k_inverse, v_inverse,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
    HALF: tl.constexpr, HALF_PAD: tl.constexpr, REST: tl.constexpr, REST_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    ROPE: tl.constexpr, INTERLEAVED: tl.constexpr, Q_NORM: tl.constexpr, K_NORM: tl.constexpr, FP8: tl.constexpr, FP8_LIMIT: tl.constexpr,
):  # fmt: skip
    """What ``which_heads`` named: q goes to its place in ``q_out``, K and V to their slots of a contiguous cache."""
    dtype = qkv.dtype.element_ty
    at_a, at_b, j, in_half, in_rest = channels(HALF, HALF_PAD, REST_PAD, DIM, INTERLEAVED)
    is_q = (head >= 0) & (head < GROUP)
    is_k = head == GROUP
    side = tl.where(head > GROUP, 1, 0)
    seq = (pair // KV_HEADS).to(tl.int64)
    kv_head = pair % KV_HEADS
    q_head = kv_head * GROUP + head
    row = (qkv + seq * qkv_stride + tl.where(is_q, q_head, (GROUP + side) * KV_HEADS + kv_head) * DIM)[:, None]
    pairs = (head >= 0)[:, None] & in_half[None, :]
    rests = (head >= 0)[:, None] & in_rest[None, :]
    a = tl.load(row + at_a[None, :], mask=pairs, other=0.0).to(tl.float32)
    b = tl.load(row + at_b[None, :], mask=pairs, other=0.0).to(tl.float32)
    c = 0.0
    if REST > 0:
        c = tl.load(row + j[None, :], mask=rests, other=0.0).to(tl.float32)
    a, b, c = normed_and_turned(a, b, c, is_q, is_k, w_a, w_b, w_c, cos, sin, eps, DIM, REST > 0, ROPE, Q_NORM, K_NORM, dtype)

    dest = (q_out + seq * q_out_stride + q_head * DIM)[:, None]
    tl.store(dest + at_a[None, :], a.to(dtype), mask=pairs & is_q[:, None])
    tl.store(dest + at_b[None, :], b.to(dtype), mask=pairs & is_q[:, None])
    if REST > 0:
        tl.store(dest + j[None, :], c.to(dtype), mask=rests & is_q[:, None])
    written = (slot >= 0)[:, None]
    inverse = tl.where(is_k, k_inverse, v_inverse)[:, None]
    place = (slot // BLOCK_SIZE * 2 + side) * KV_HEADS + kv_head
    dest = (kv + (place * BLOCK_SIZE + slot % BLOCK_SIZE) * DIM)[:, None]
    # what a 16-bit model stores is rounded to its own type first, as the reference does
    put(dest + at_a[None, :], a.to(dtype).to(tl.float32), pairs & written, inverse, FP8, FP8_LIMIT)
    put(dest + at_b[None, :], b.to(dtype).to(tl.float32), pairs & written, inverse, FP8, FP8_LIMIT)
    if REST > 0:
        put(dest + j[None, :], c.to(dtype).to(tl.float32), rests & written, inverse, FP8, FP8_LIMIT)


def new_arguments(new: NewTokens | None, k_scale: float, v_scale: float, fresh_plan: bool) -> tuple[Any, ...]:
    if new is None:
        return (None,) * 10
    stride = 0 if new.cos_sin is None else new.cos_sin.stride(0)
    weights = (new.cos_sin, new.q_norm, new.k_norm)
    return (new.positions, new.slots, *weights, stride, new.eps, 1.0 / k_scale, 1.0 / v_scale, int(fresh_plan))


def new_constants(new: NewTokens | None, dim: int, config: DecodeConfig, cache_dtype: torch.dtype) -> dict[str, Any]:
    if new is None:
        return _NOTHING_NEW
    rotates = new.cos_sin is not None
    return {
        "FUSED": True, "ROWS": heads_at_a_time(dim, config.num_warps), **head_shape(dim, new.cos_sin),
        "ROPE": rotates, "INTERLEAVED": new.interleaved and rotates, "Q_NORM": new.q_norm is not None, "K_NORM": new.k_norm is not None,
        "FP8": cache_dtype.itemsize == 1, "FP8_LIMIT": FP8_MAX,
    }  # fmt: skip


_NOTHING_NEW = dict.fromkeys(
    ("FUSED", "ROWS", "HALF", "HALF_PAD", "REST", "REST_PAD", "ROPE", "INTERLEAVED", "Q_NORM", "K_NORM", "FP8", "FP8_LIMIT"), 0
)
