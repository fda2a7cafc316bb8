"""The ground truth itself, against a per-token, per-head loop in float64 that shares no code with it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.attention.base import AttentionLayerSpec, AttentionMetadata, ForwardContext
from octavo.attention.reference import ReferenceAttention


def loop_attention(qkv_by_sequence: list[torch.Tensor], layer: AttentionLayerSpec) -> list[torch.Tensor]:
    """Whole sequences of qkv [L, ...] -> [L, heads * dim], one scalar product at a time."""
    outputs = []
    for qkv in qkv_by_sequence:
        heads, kv_heads, dim = layer.num_heads, layer.num_kv_heads, layer.head_dim
        vectors = qkv.double().view(len(qkv), heads + 2 * kv_heads, dim)
        turned = torch.stack(
            [torch.stack([loop_turn(vectors[p, h], h, p, layer) for h in range(vectors.shape[1])]) for p in range(len(qkv))]
        )
        out = torch.zeros(len(qkv), heads, dim, dtype=torch.float64)
        for p in range(len(qkv)):
            for h in range(heads):
                g = heads + h * kv_heads // heads
                first = 0 if layer.sliding_window is None else max(0, p - layer.sliding_window + 1)
                scores = [float(turned[p, h] @ turned[s, g]) * layer.scale for s in range(first, p + 1)]
                if layer.logit_soft_cap:
                    scores = [layer.logit_soft_cap * math.tanh(x / layer.logit_soft_cap) for x in scores]
                weights = [math.exp(x - max(scores)) for x in scores]
                for weight, s in zip(weights, range(first, p + 1), strict=True):
                    out[p, h] += weight / sum(weights) * turned[s, g + kv_heads]
        outputs.append(out.flatten(1))
    return outputs


def loop_turn(x: torch.Tensor, head: int, position: int, layer: AttentionLayerSpec) -> torch.Tensor:
    """QK-norm and rotation of one head's vector; V passes through."""
    if head >= layer.num_heads + layer.num_kv_heads:
        return x
    norm = layer.q_norm if head < layer.num_heads else layer.k_norm
    x = x.clone()
    if norm is not None:
        x = x / math.sqrt(float((x * x).mean()) + layer.norm_eps) * norm.double()
    if layer.rope_cos_sin is not None:
        half = layer.rope_cos_sin.shape[1] // 2
        for i in range(half):
            a, b = (2 * i, 2 * i + 1) if layer.rope_interleaved else (i, i + half)
            turn = complex(float(layer.rope_cos_sin[position, i]), float(layer.rope_cos_sin[position, half + i]))
            z = complex(float(x[a]), float(x[b])) * turn
            x[a], x[b] = z.real, z.imag
    return x


def run_paged(qkv: list[torch.Tensor], layer: AttentionLayerSpec, cuts: list[list[int]], block_size: int, seed: int) -> list[torch.Tensor]:
    """Feed each sequence in pieces of ``cuts[s]`` tokens, one piece of every unfinished sequence a step, over shuffled blocks."""
    backend = ReferenceAttention()
    num_blocks = sum(-(-len(x) // block_size) for x in qkv) + 4
    # the last block stays out: a slot of -1 taken for an index would end there
    free = torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(seed)).tolist()
    cache = backend.make_kv_cache(num_blocks, block_size, layer.num_kv_heads, layer.head_dim, qkv[0].dtype, torch.device("cpu"))
    cache.fill_(1e4)  # what nobody wrote must not be read
    tables = [[free.pop() for _ in range(-(-len(x) // block_size))] for x in qkv]
    done = [0] * len(qkv)
    results: list[list[torch.Tensor]] = [[] for _ in qkv]
    for step in range(max(map(len, cuts))):
        work = sorted(((s, cuts[s][step]) for s in range(len(qkv)) if step < len(cuts[s])), key=lambda item: item[1] != 1)
        positions = [p for s, count in work for p in range(done[s], done[s] + count)]
        owners = [s for s, count in work for _ in range(count)]
        slots = [tables[s][p // block_size] * block_size + p % block_size for s, p in zip(owners, positions, strict=True)]
        for s, count in work:
            done[s] += count
        width = max(map(len, tables))
        metadata = AttentionMetadata(
            num_tokens=len(positions) + 2 * (step % 2),  # padding may be counted or not
            num_seqs=len(work),
            num_decodes=sum(count == 1 for _, count in work),
            max_query_len=max(count for _, count in work),
            max_seq_len=max(done),
            block_size=block_size,
            positions=torch.tensor([*positions, 0, 0]),
            slots=torch.tensor([*slots, -1, -1]),
            query_start=torch.tensor([0, *(count for _, count in work)]).cumsum(0).int(),
            seq_lens=torch.tensor([done[s] for s, _ in work], dtype=torch.int32),
            block_tables=torch.tensor([tables[s] + [10**6] * (width - len(tables[s])) for s, _ in work], dtype=torch.int32),
        )
        rows = torch.stack([qkv[s][p] for s, p in zip(owners, positions, strict=True)])
        padded = torch.cat([rows, torch.full((2, rows.shape[1]), 7.0, dtype=rows.dtype)])  # two rows of padding, as a graph has
        backend.prepare(metadata)
        out = backend.forward(padded, layer, cache, ForwardContext(metadata, backend, [cache]))
        assert out.shape == (len(padded), layer.num_heads * layer.head_dim)
        assert out.dtype == rows.dtype
        for (s, _), piece in zip(work, out[: len(positions)].split([count for _, count in work]), strict=True):
            results[s].append(piece)
    untouched = cache[[*free, num_blocks - 1]]
    assert bool((untouched == 1e4).all())  # padding and neighbours wrote nowhere else
    return [torch.cat(pieces) for pieces in results]


def cut(length: int, rng: torch.Generator) -> list[int]:
    pieces = []
    while length:
        pieces.append(min(length, int(torch.randint(1, 6, (1,), generator=rng))))
        length -= pieces[-1]
    return pieces


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    shape=st.sampled_from([(1, 1), (2, 2), (4, 2), (3, 1), (6, 3)]),
    rope=st.sampled_from(["none", "neox", "interleaved", "partial"]),
    window=st.sampled_from([None, 1, 3, 100]),
    cap=st.sampled_from([None, 0.8]),
    qk_norm=st.booleans(),
    block_size=st.sampled_from([1, 4, 16]),
)
def test_against_the_loop(seed, shape, rope, window, cap, qk_norm, block_size) -> None:
    rng = torch.Generator().manual_seed(seed)
    heads, kv_heads = shape
    dim, rotary = 8, 4 if rope == "partial" else 8
    lengths = torch.randint(1, 12, (3,), generator=rng).tolist()
    layer = AttentionLayerSpec(
        layer_index=0,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        scale=0.4,
        rope_cos_sin=None if rope == "none" else torch.randn(16, rotary, generator=rng),
        rope_interleaved=rope == "interleaved",
        q_norm=torch.randn(dim, generator=rng) if qk_norm else None,
        k_norm=torch.randn(dim, generator=rng) if qk_norm else None,
        sliding_window=window,
        logit_soft_cap=cap,
    )
    qkv = [torch.randn(length, (heads + 2 * kv_heads) * dim, generator=rng) for length in lengths]
    results = run_paged(qkv, layer, [cut(length, rng) for length in lengths], block_size, seed)
    for ours, truth in zip(results, loop_attention(qkv, layer), strict=True):
        torch.testing.assert_close(ours.double(), truth, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rounds_only_what_it_stores(dtype: torch.dtype) -> None:
    rng = torch.Generator().manual_seed(0)
    layer = AttentionLayerSpec(layer_index=0, num_heads=4, num_kv_heads=2, head_dim=8, scale=8**-0.5, rope_cos_sin=None)
    qkv = [torch.randn(9, 64, generator=rng).to(dtype)]
    (ours,) = run_paged(qkv, layer, [[4, 1, 4]], 4, 0)
    (truth,) = loop_attention(qkv, layer)
    torch.testing.assert_close(ours, truth.to(dtype), rtol=2**-7, atol=2**-9)
