"""Attention as ground truth: the interface of attention/base.py in plain torch, slow and obvious, on any device."""

from __future__ import annotations

from typing import Any

import torch

from octavo.attention.base import AttentionLayerSpec, AttentionMetadata, ForwardContext


class ReferenceAttention:
    """Loops over sequences and computes in float32. What faster backends are tested against.

    A layer's cache is one tensor [num_blocks, 2, block_size, num_kv_heads, head_dim]: K at index 0, V at index 1.
    """

    name = "reference"

    def make_kv_cache(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return torch.zeros(num_blocks, 2, block_size, num_kv_heads, head_dim, dtype=dtype, device=device)

    def prepare(self, metadata: AttentionMetadata) -> None:
        pass

    def forward(self, qkv: torch.Tensor, layer: AttentionLayerSpec, kv_cache: Any, context: ForwardContext) -> torch.Tensor:
        m = context.attention
        heads, kv_heads, dim = layer.num_heads, layer.num_kv_heads, layer.head_dim
        q, k, v = (part.unflatten(-1, (-1, dim)) for part in qkv.split([heads * dim, kv_heads * dim, kv_heads * dim], dim=-1))
        # rows past the metadata's tokens are padding
        positions = m.positions[: m.num_tokens]
        q, k, v = q[: m.num_tokens], k[: m.num_tokens], v[: m.num_tokens]
        q, k = (head_norm(x, w, layer.norm_eps) for x, w in ((q, layer.q_norm), (k, layer.k_norm)))
        q, k = (rotate(x, layer.rope_cos_sin, positions, layer.rope_interleaved) for x in (q, k))
        write_kv(k, v, kv_cache, m.slots[: m.num_tokens])

        out = qkv.new_zeros(qkv.shape[0], heads, dim)
        starts, lengths = m.query_start.tolist(), m.seq_lens.tolist()
        for s in range(m.num_seqs):
            first, last = starts[s], starts[s + 1]
            if first == last:
                continue
            keys, values = read_kv(kv_cache, m.block_tables[s], lengths[s])
            out[first:last] = attend(q[first:last], keys, values, positions[first:last], layer).to(out.dtype)
        return out.flatten(1)


def head_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """RMSNorm of each head. x [T, heads, head_dim], weight [head_dim]; None leaves x as it is."""
    if weight is None:
        return x
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return normed.to(x.dtype) * weight


def rotate(x: torch.Tensor, table: torch.Tensor | None, positions: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Rotate the first rotary_dim channels of x [T, heads, head_dim] by each token's position.

    Pair i of a head is channels (i, i + rotary_dim/2) (NeoX), or (2i, 2i + 1) (interleaved).
    """
    if table is None:
        return x
    rotary = table.shape[1]
    cos, sin = table[positions].unsqueeze(1).chunk(2, dim=-1)
    turning, rest = x[..., :rotary].float(), x[..., rotary:]
    a, b = (turning[..., 0::2], turning[..., 1::2]) if interleaved else turning.chunk(2, dim=-1)
    a, b = a * cos - b * sin, b * cos + a * sin
    turned = torch.stack((a, b), dim=-1).flatten(-2) if interleaved else torch.cat((a, b), dim=-1)
    return torch.cat((turned.to(x.dtype), rest), dim=-1)


def write_kv(k: torch.Tensor, v: torch.Tensor, kv_cache: torch.Tensor, slots: torch.Tensor) -> None:
    """k, v [T, kv_heads, head_dim] to slot = block * block_size + offset; slot -1 writes nothing."""
    written = slots >= 0
    block_size = kv_cache.shape[2]
    blocks, offsets = slots[written] // block_size, slots[written] % block_size
    kv_cache[blocks, 0, offsets] = k[written].to(kv_cache.dtype)
    kv_cache[blocks, 1, offsets] = v[written].to(kv_cache.dtype)


def read_kv(kv_cache: torch.Tensor, block_table: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first ``length`` tokens' K and V [length, kv_heads, head_dim], in token order."""
    block_size = kv_cache.shape[2]
    blocks = kv_cache[block_table[: -(-length // block_size)].long()]
    return blocks[:, 0].flatten(0, 1)[:length], blocks[:, 1].flatten(0, 1)[:length]


def attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, positions: torch.Tensor, layer: AttentionLayerSpec) -> torch.Tensor:
    """q [Q, heads, dim] at ``positions`` over keys, values [L, kv_heads, dim] at positions 0 .. L-1 -> float32 [Q, heads, dim]."""
    share = layer.num_heads // layer.num_kv_heads  # query head h reads KV head h // share
    keys, values = (x.float().repeat_interleave(share, dim=1) for x in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * layer.scale
    if layer.logit_soft_cap is not None:
        scores = layer.logit_soft_cap * torch.tanh(scores / layer.logit_soft_cap)
    at = torch.arange(keys.shape[0], device=q.device)
    visible = at <= positions[:, None]
    if layer.sliding_window is not None:  # positions p - w + 1 .. p
        visible &= at > positions[:, None] - layer.sliding_window
    weights = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, values)
