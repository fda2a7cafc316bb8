"""Triton's attention kernels against their torch references: on a GPU, or by Triton's interpreter on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.kernels_gpu.attention_cases import DEVICE, INTERPRETED, Batch, make_batch, needs_triton, rounding

pytestmark = needs_triton
SMALL = INTERPRETED  # the interpreter is slow
DTYPES = [torch.float32] if INTERPRETED else [torch.bfloat16, torch.float16, torch.float32]


def run_decode(
    batch: Batch, q: torch.Tensor, heads: int, *, programs: int = 7, min_chunk: int = 128, min_tiles: int = 1, seam: int = 0,
    config: Any = None, **options: Any,
) -> torch.Tensor:  # fmt: skip
    """As a backend does it; few tiles a program and cheap seams, so that there are many cuts."""
    from octavo.kernels import attention_plan, decode_attention

    kv_heads, dim = batch.cache.shape[2], batch.cache.shape[4]
    seqs = len(batch.seq_lens)
    config = config or decode_attention.decode_config(dim, heads // kv_heads, batch.cache.dtype)
    plan = attention_plan.make_decode_plan(seqs, programs, DEVICE, block_n=config.block_n, min_chunk=min_chunk, max_chunks=16)
    workspace = decode_attention.make_decode_workspace(plan, heads, kv_heads, dim)
    attention_plan.plan_decode(
        plan, batch.seq_lens, seqs, kv_heads,
        window=options.get("window"), row_index=batch.row_index, min_tiles=min_tiles, seam=seam,
    )  # fmt: skip
    out = torch.full((seqs, heads * dim), float("nan"), dtype=q.dtype, device=DEVICE)
    decode_attention.decode_attention(q, batch.cache, batch.tables, plan, workspace, out, num_heads=heads, config=config, **options)
    assert not workspace.arrived.any()  # left ready for the next layer
    return out


def reference(batch: Batch, q: torch.Tensor, heads: int, **options) -> torch.Tensor:
    from octavo.kernels.decode_attention import attention_reference

    dim, rows, results = batch.cache.shape[4], q[:, : heads * batch.cache.shape[4]].unflatten(1, (heads, -1)), []
    assert rows.shape[2] == dim
    starts = batch.query_start.tolist()
    for s, length in enumerate(batch.seq_lens.tolist()):
        mine = rows[starts[s] : starts[s + 1]]
        table = batch.tables[int(batch.row_index[s])]
        empty = torch.zeros_like(mine, dtype=torch.float32)
        results.append(attention_reference(mine, batch.cache, table, length, **options) if length else empty)
    return torch.cat(results).flatten(1)


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# (dtype, (heads, KV heads), head size, block size, window, soft cap): everything by everything where nothing is compiled; on a
# GPU, where each is a compilation, every value at least once and the pairs that matter.
SHAPES = [
    (FP32, heads, dim, *rest)
    for heads, dim in [((2, 2), 16), ((6, 2), 80), ((7, 1), 16)]
    for rest in [(16, None, None), (16, 140, 3.0), (128, None, 3.0), (256, 5, None)]
] + [(FP32, (4, 2), dim, 16, 30, 3.0) for dim in (64, 96, 128, 256)] if SMALL else [
    (BF16, (16, 8), 128, 16, None, None),
    (BF16, (32, 8), 128, 16, None, None),
    (BF16, (32, 8), 128, 64, 1000, None),
    (BF16, (28, 4), 128, 256, None, 3.0),
    (BF16, (9, 3), 64, 16, None, None),
    (BF16, (8, 8), 64, 32, 5, 3.0),
    (BF16, (32, 32), 80, 16, None, None),
    (BF16, (32, 8), 96, 16, 140, None),
    (BF16, (32, 1), 128, 16, None, None),
    (BF16, (8, 4), 256, 16, 200, 3.0),
    (FP16, (32, 8), 128, 128, None, None),
    (FP16, (16, 2), 256, 32, None, None),
    (FP32, (16, 8), 128, 16, None, None),
    (FP32, (9, 3), 64, 16, 140, 3.0),
]  # fmt: skip
LENGTHS = [1, 300, 0, 128, 129, 517] if SMALL else [1, 1300, 0, 128, 129, 9000, 20000, 64, 2048]


@pytest.mark.parametrize(("dtype", "heads", "dim", "block_size", "window", "cap"), SHAPES)
def test_decode(dtype, heads, dim, block_size, window, cap) -> None:
    batch = make_batch(LENGTHS, [1] * len(LENGTHS), heads[1], dim, block_size, dtype)
    q = torch.randn(len(LENGTHS), (heads[0] + 3) * dim).to(DEVICE, dtype)
    options = {"scale": dim**-0.5, "window": window, "soft_cap": cap}
    ours = run_decode(batch, q, heads[0], **options)
    torch.testing.assert_close(ours.float(), reference(batch, q, heads[0], **options), **rounding(dtype))


@pytest.mark.parametrize(("block_n", "num_warps", "num_stages", "programs_per_sm"), [(32, 2, 4, 5), (64, 4, 2, 3), (128, 8, 2, 2)])
@pytest.mark.parametrize(("window", "cap"), [(None, None), (140, 3.0)])
def test_decode_however_it_is_configured(block_n, num_warps, num_stages, programs_per_sm, window, cap) -> None:
    from octavo.kernels.decode_config import DecodeConfig

    config = DecodeConfig(block_n, num_warps, num_stages=num_stages, programs_per_sm=programs_per_sm)
    heads, kv_heads, dim, dtype = (6, 2, 80, FP32) if SMALL else (32, 8, 128, BF16)
    batch = make_batch(LENGTHS, [1] * len(LENGTHS), kv_heads, dim, 16, dtype)
    q = torch.randn(len(LENGTHS), heads * dim).to(DEVICE, dtype)
    options = {"scale": dim**-0.5, "window": window, "soft_cap": cap}
    ours = run_decode(batch, q, heads, config=config, **options)
    torch.testing.assert_close(ours.float(), reference(batch, q, heads, **options), **rounding(dtype))


def test_decode_has_the_same_bits_in_every_batch() -> None:
    lengths = [400, 1, 260, 90] if SMALL else [7000, 1, 260, 513, 90, 2048, 2049, 30000]
    heads, dim, dtype = 4, 32, DTYPES[0]
    batch = make_batch(lengths, [1] * len(lengths), 2, dim, 16, dtype)
    q = torch.randn(len(lengths), heads * dim).to(DEVICE, dtype)
    together = run_decode(batch, q, heads, programs=5, scale=0.3)
    for programs in (1, 64) if SMALL else (1, 3, 64, 500):
        assert torch.equal(together, run_decode(batch, q, heads, programs=programs, scale=0.3))
    for s in range(len(lengths)):
        alone = Batch(batch.cache, batch.tables, batch.row_index[s : s + 1], batch.seq_lens[s : s + 1], [1])
        assert torch.equal(together[s : s + 1], run_decode(alone, q[s : s + 1], heads, programs=9, scale=0.3))


def test_decode_plan_gives_every_tile_once_and_evenly() -> None:
    from octavo.kernels import attention_plan

    rng = torch.Generator().manual_seed(3)
    heads, programs, block_n = 4, 24, 64
    for trial in range(4 if SMALL else 30):
        seqs = int(torch.randint(1, 20 if SMALL else 40, (1,), generator=rng))
        lengths = torch.randint(0, 4000, (seqs,), generator=rng, dtype=torch.int32)
        if trial % 2:
            lengths[0] = 60000
        window = 700 if trial % 3 == 2 else None
        seam = 10**6 if trial == 3 else 0  # then nothing is cut
        plan = attention_plan.make_decode_plan(seqs + 3, programs, DEVICE, block_n=block_n, min_chunk=256, max_chunks=32)
        plan.seqs.fill_(77)
        attention_plan.plan_decode(plan, lengths.to(DEVICE), seqs, heads, window=window, min_tiles=1, seam=seam)
        rows, found_lengths, chunks, _ = plan.seqs[: seqs + 1].T.tolist()
        assert (rows[:seqs], found_lengths) == (list(range(seqs)), [*lengths.tolist(), 0])
        begins = [max(0, n - window) // 128 * 128 if window else 0 for n in lengths.tolist()]
        assert all(c % 128 == 0 and -(-(n - b) // c) <= 32 for c, n, b in zip(chunks, lengths.tolist(), begins, strict=False))
        tiles = [max(1, -(-(n - b) // block_n)) for n, b in zip(lengths.tolist(), begins, strict=True)]
        where = [(pair, t) for pair in range(seqs * heads) for t in range(tiles[pair // heads])]
        at, loads, owner = 0, [], {}
        for p, (pair, token, count, owns) in enumerate(plan.starts.tolist()):
            loads.append(count)
            if count:
                begin = begins[pair // heads]
                first, tile = where[at]
                assert (pair, token) == (first, begin + tile * block_n)
                assert (token - begin) % chunks[pair // heads] == 0
                if token != begin:
                    assert owns == owner[pair] < p and not seam
                for started, tile in where[at : at + count]:
                    if tile == 0:
                        owner[started] = p
            at += count
        assert at == len(where)
        uneven = max(tiles) * -(-seqs * heads // programs) if seam else len(where) / programs + 1 + max(chunks[:seqs]) // block_n
        assert max(loads) <= uneven


def test_decode_cuts_only_where_it_pays() -> None:
    from octavo.kernels import attention_plan

    def loads(lengths: list[int], heads: int, programs: int) -> list[tuple[int, int]]:
        plan = attention_plan.make_decode_plan(len(lengths), programs, DEVICE, block_n=64, min_chunk=256, max_chunks=32)
        attention_plan.plan_decode(plan, torch.tensor(lengths, dtype=torch.int32, device=DEVICE), len(lengths), heads)
        return [(token, count) for _, token, count, _ in plan.starts.tolist()]

    even = loads([1024] * 8, 4, 34)
    assert [count for _, count in even if count] == [16] * 32
    alone = loads([1024], 2, 34)
    assert [count for _, count in alone if count] == [4] * 8
    uneven = loads([100] * 2 + [8192], 2, 36)
    assert max(count for _, count in uneven) < 16


def run_extend(batch: Batch, q: torch.Tensor, heads: int, first_seq: int = 0, **options) -> torch.Tensor:
    from octavo.kernels import attention_plan, extend_attention

    kv_heads, dim = batch.cache.shape[2], batch.cache.shape[4]
    config = options.pop("config", None) or extend_attention.extend_config(dim, heads // kv_heads, q.dtype)
    starts = batch.query_start
    tokens = int(starts[-1] - starts[first_seq])
    tiles = attention_plan.plan_extend(starts, batch.seq_lens, first_seq, len(batch.counts), tokens, config.block_q(heads // kv_heads))
    out = torch.full((len(q), heads * dim), 7.0, dtype=q.dtype, device=DEVICE)
    extend_attention.extend_attention(
        q, batch.cache, batch.tables, starts, batch.seq_lens, tiles, out,
        num_heads=heads, row_index=batch.row_index, config=config, **options,
    )  # fmt: skip
    return out


@pytest.mark.parametrize(("dtype", "heads", "dim", "block_size", "window", "cap"), SHAPES)
def test_extend(dtype, heads, dim, block_size, window, cap) -> None:
    lengths, counts = ([1, 150, 64, 300], [1, 150, 3, 70]) if SMALL else ([1, 1500, 64, 3000, 700], [1, 1500, 3, 300, 129])
    batch = make_batch(lengths, counts, heads[1], dim, block_size, dtype)
    q = torch.randn(sum(counts), (heads[0] + 2) * dim).to(DEVICE, dtype)
    options = {"scale": dim**-0.5, "window": window, "soft_cap": cap}
    ours = run_extend(batch, q, heads[0], first_seq=1, **options)
    assert bool((ours[0] == 7).all())  # the decode in front is not its business
    torch.testing.assert_close(ours[1:].float(), reference(batch, q, heads[0], **options)[1:], **rounding(dtype))


def test_extend_has_the_same_bits_for_every_cut() -> None:
    length, dim, dtype = (330, 16, DTYPES[0]) if SMALL else (2300, 128, DTYPES[0])
    whole = make_batch([length], [length], 2, dim, 16, dtype)
    q = torch.randn(length, 4 * dim).to(DEVICE, dtype)
    at_once, done = run_extend(whole, q, 4, scale=0.25), 0
    for count in (length // 3, 1, 17, length - length // 3 - 18):
        seen = torch.tensor([done + count], dtype=torch.int32, device=DEVICE)
        piece = Batch(whole.cache, whole.tables, whole.row_index, seen, [count])
        ours = run_extend(piece, q[done : done + count], 4, scale=0.25)
        theirs = at_once[done : done + count]
        # the interpreter's matrix products are NumPy's, whose bits depend on a row's place; the tensor cores' don't
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6) if INTERPRETED else torch.equal(ours, theirs), f"tokens from {done}"
        done += count


def test_extend_tiles_longest_context_first() -> None:
    from octavo.kernels import attention_plan

    counts, lengths = [1, 70, 5, 64, 33], [9, 700, 5, 64, 65]
    starts = torch.tensor([0, *counts]).cumsum(0).int().to(DEVICE)
    tiles = attention_plan.plan_extend(starts, torch.tensor(lengths, dtype=torch.int32, device=DEVICE), 1, 5, sum(counts[1:]), 32)
    found = [tuple(t) for t in tiles.tolist() if t[0] >= 0]
    expected = [(s, i) for s in range(1, 5) for i in range(-(-counts[s] // 32))]
    assert sorted(found) == expected
    keys = [lengths[s] - counts[s] + (i + 1) * 32 for s, i in found]
    assert keys == sorted(keys, reverse=True)


@pytest.mark.parametrize("rope", ["none", "neox", "interleaved", "partial", "partial interleaved"])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(
    ("dtype", "heads", "dim"),
    [(FP32, (4, 2), 16), (FP32, (3, 1), 80)]
    if SMALL
    else [(BF16, (32, 8), 128), (BF16, (3, 1), 80), (FP16, (9, 3), 64), (FP32, (8, 4), 256)],
)
def test_write_kv(dtype, rope, norm, heads, dim) -> None:
    from octavo.kernels.write_kv import write_kv, write_kv_reference

    lengths, counts = ([1, 30, 20], [1, 30, 3]) if SMALL else ([1, 300, 2000], [1, 300, 3])
    batch = make_batch(lengths, counts, heads[1], dim, 16, dtype)
    tokens = sum(counts)
    positions, slots = torch.tensor(batch.positions(), device=DEVICE), torch.tensor(batch.slots(), device=DEVICE)
    slots[0] = -1
    rotary = dim // 2 if "partial" in rope else dim
    options = {
        "cos_sin": None if rope == "none" else torch.randn(2048, rotary).to(DEVICE),
        "interleaved": "interleaved" in rope,
        "q_norm": torch.randn(dim).to(DEVICE, dtype) if norm else None,
        "k_norm": torch.randn(dim).to(DEVICE, dtype) if norm else None,
    }
    qkv = torch.randn(tokens + 2, (heads[0] + 2 * heads[1]) * dim).to(DEVICE, dtype)
    theirs, their_cache = qkv.clone(), batch.cache.clone()
    ours, our_cache = qkv.clone(), batch.cache.clone()
    write_kv_reference(theirs, their_cache, positions, slots, *heads, **options)
    write_kv(ours, our_cache, positions, slots, *heads, **options)
    width = heads[0] * dim
    torch.testing.assert_close(ours[:tokens, :width], theirs[:tokens, :width], **rounding(dtype))
    torch.testing.assert_close(our_cache, their_cache, **rounding(dtype))
    assert torch.equal(ours[:, width:], qkv[:, width:])
    assert torch.equal(ours[tokens:], qkv[tokens:])
    untouched = torch.ones(our_cache.shape[0], 16, dtype=torch.bool, device=DEVICE)
    untouched.view(-1)[slots[slots >= 0]] = False
    assert torch.equal(our_cache.permute(0, 3, 1, 2, 4)[untouched], batch.cache.permute(0, 3, 1, 2, 4)[untouched])


def test_fp8_cache() -> None:
    from octavo.kernels.write_kv import write_kv, write_kv_reference

    dtype = torch.float32 if INTERPRETED else torch.bfloat16
    heads, dim, lengths = (4, 2), 16 if SMALL else 128, [300, 40]
    written = make_batch(lengths, lengths, heads[1], dim, 16, dtype, cache_dtype=torch.float8_e4m3fn)
    positions, slots = torch.tensor(written.positions(), device=DEVICE), torch.tensor(written.slots(), device=DEVICE)
    qkv = torch.randn(sum(lengths), (heads[0] + 2 * heads[1]) * dim).to(DEVICE, dtype) * 40
    if INTERPRETED:  # its cast to 8 bits loses a carry into the exponent: give it values that need no rounding
        qkv = qkv.to(torch.float8_e4m3fn).float()
    scales = {"k_scale": 0.25, "v_scale": 0.5}
    their_cache = written.cache.clone()
    write_kv_reference(qkv.clone(), their_cache, positions, slots, *heads, **scales)
    write_kv(qkv, written.cache, positions, slots, *heads, **scales)
    assert torch.equal(written.cache.float(), their_cache.float())

    q = torch.randn(sum(lengths), heads[0] * dim).to(DEVICE, dtype)
    options = {"scale": 0.01, **scales}
    tolerance = {"rtol": 3e-2, "atol": 0.3}  # values up to about 200
    ours = run_extend(written, q, heads[0], **options)
    torch.testing.assert_close(ours.float(), reference(written, q, heads[0], **options), **tolerance)
    single = Batch(written.cache, written.tables, written.row_index, written.seq_lens, [1, 1])
    ours = run_decode(single, q[:2], heads[0], **options)
    torch.testing.assert_close(ours.float(), reference(single, q[:2], heads[0], **options), **tolerance)
