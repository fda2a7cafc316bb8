"""Decode attention that writes the new tokens' K and V itself, against ``write_kv`` and the attention behind it: bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.kernels_gpu.attention_cases import DEVICE, INTERPRETED, Batch, make_batch, needs_triton, rounding
from tests.kernels_gpu.test_attention_kernels import BF16, DTYPES, FP16, FP32, LENGTHS, SMALL, reference, run_decode

pytestmark = needs_triton
ROPES = ["none", "neox", "interleaved", "partial", "partial interleaved"]


def head_options(dim: int, rope: str, norm: bool, dtype: torch.dtype) -> dict[str, Any]:
    """What ``write_kv`` and ``NewTokens`` both take; positions up to 32,767."""
    rng = torch.Generator().manual_seed(11)
    rotary = dim // 2 if "partial" in rope else dim
    weights = [(1 + torch.randn(dim, generator=rng)).to(DEVICE, dtype) if norm else None for _ in range(2)]
    angles = torch.rand(32768, rotary // 2, generator=rng) * 6.28
    return {
        "cos_sin": None if rope == "none" else torch.cat((angles.cos(), angles.sin()), dim=1).to(DEVICE),
        "interleaved": "interleaved" in rope,
        "q_norm": weights[0],
        "k_norm": weights[1],
        "eps": 1e-5,
    }


def places(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions and slots as a step has them: 0 and -1 for padding."""
    empty = (batch.seq_lens == 0).cpu()
    positions, slots = torch.tensor(batch.positions()), torch.tensor(batch.slots())
    return positions.masked_fill(empty, 0).to(DEVICE), slots.masked_fill(empty, -1).to(DEVICE)


def stale(batch: Batch, slots: torch.Tensor) -> torch.Tensor:
    """A copy of the cache with NaN where the new tokens belong: whoever reads them too early shows."""
    cache = batch.cache.clone()
    size = cache.shape[3]
    for slot in slots[slots >= 0].tolist():
        cache[slot // size, :, :, slot % size] = float("nan")
    return cache


def both(batch: Batch, qkv: torch.Tensor, heads: int, options: dict[str, Any], **decode: Any) -> tuple[Any, Any, torch.Tensor]:
    """((out, cache) of one launch, (out, cache) of two, q as the two left it)."""
    from octavo.kernels.new_tokens import NewTokens
    from octavo.kernels.write_kv import write_kv

    positions, slots = places(batch)
    scales = {name: decode[name] for name in ("k_scale", "v_scale") if name in decode}
    one, two = (Batch(stale(batch, slots), batch.tables, batch.row_index, batch.seq_lens, batch.counts) for _ in range(2))
    before = qkv.clone()
    ours = run_decode(one, qkv, heads, new=NewTokens(positions, slots, **options), **decode)
    assert torch.equal(qkv.nan_to_num(), before.nan_to_num())
    rotated = qkv.clone()
    write_kv(rotated, two.cache, positions, slots, heads, batch.cache.shape[2], **options, **scales)
    theirs = run_decode(two, rotated, heads, **decode)
    return (ours, one.cache), (theirs, two.cache), rotated


def same(ours: Any, theirs: Any, options: dict[str, Any]) -> None:
    """Equal results and caches, in all of their bits."""
    if options["interleaved"] and options["q_norm"] is not None and not INTERPRETED:
        # How a compiler lays out channels with gaps varies, and with it the order in which a norm adds up its squares.
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a.float(), b.float(), **rounding(ours[0].dtype))
        return
    assert torch.equal(ours[0], theirs[0])
    number = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[ours[1].dtype.itemsize]
    assert torch.equal(ours[1].view(number), theirs[1].view(number))


def random_qkv(seqs: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, extra: int = 0) -> torch.Tensor:
    rng = torch.Generator().manual_seed(seqs)
    return torch.randn(seqs + extra, (heads + 2 * kv_heads) * dim, generator=rng).to(DEVICE, dtype)


# (dtype, (heads, KV heads), head size, block size, window, soft cap)
CASES = [
    (FP32, heads, dim, *rest)
    for heads, dim in [((2, 2), 16), ((6, 2), 80), ((7, 1), 16)]
    for rest in [(16, None, None), (16, 140, 3.0), (128, None, 3.0), (256, 5, None)]
] if SMALL else [
    (BF16, (16, 8), 128, 16, None, None),
    (BF16, (32, 8), 128, 64, 1000, None),
    (BF16, (28, 4), 128, 256, None, 3.0),
    (BF16, (9, 3), 64, 16, None, None),
    (BF16, (32, 8), 64, 16, 130, None),
    (BF16, (8, 8), 64, 32, 5, 3.0),
    (BF16, (32, 32), 80, 16, None, None),
    (BF16, (32, 1), 128, 16, None, None),
    (BF16, (8, 4), 256, 16, 200, 3.0),
    (FP16, (32, 8), 96, 128, None, None),
    (FP32, (16, 8), 128, 16, 140, None),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(CASES)))
def test_one_launch_equals_two(number: int) -> None:
    dtype, (heads, kv_heads), dim, block_size, window, cap = CASES[number]
    batch = make_batch(LENGTHS, [1] * len(LENGTHS), kv_heads, dim, block_size, dtype)
    qkv = random_qkv(len(LENGTHS), heads, kv_heads, dim, dtype, extra=2)
    qkv[LENGTHS.index(0)] = float("nan")  # padding: nobody wrote it
    options = head_options(dim, ROPES[number % 5], number % 2 == 0, dtype)
    decode = {"scale": dim**-0.5, "window": window, "soft_cap": cap}
    ours, theirs, q = both(batch, qkv, heads, options, **decode)
    same(ours, theirs, options)
    written = Batch(theirs[1], batch.tables, batch.row_index, batch.seq_lens, batch.counts)
    expected = reference(written, q[: len(LENGTHS)], heads, **decode)
    torch.testing.assert_close(ours[0].float(), expected, **rounding(dtype))


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("norm", [False, True])
def test_all_kinds_of_heads_against_the_reference(rope: str, norm: bool) -> None:
    from octavo.kernels.write_kv import write_kv_reference

    heads, kv_heads, dim, dtype, lengths = (4, 2, 16, FP32, [33, 129]) if SMALL else (16, 4, 128, BF16, [33, 129, 2000])
    batch = make_batch(lengths, [1] * len(lengths), kv_heads, dim, 16, dtype)
    qkv = random_qkv(len(lengths), heads, kv_heads, dim, dtype)
    options = head_options(dim, rope, norm, dtype)
    ours, theirs, _ = both(batch, qkv, heads, options, scale=0.2)
    same(ours, theirs, options)
    positions, slots = places(batch)
    cache = batch.cache.clone()
    write_kv_reference(qkv, cache, positions, slots, heads, kv_heads, **options)
    torch.testing.assert_close(ours[1], cache, **rounding(dtype))
    untouched = torch.ones(cache.shape[0], 16, dtype=torch.bool, device=DEVICE)
    untouched.view(-1)[slots] = False
    assert torch.equal(ours[1].permute(0, 3, 1, 2, 4)[untouched], batch.cache.permute(0, 3, 1, 2, 4)[untouched])
    expected = reference(Batch(cache, batch.tables, batch.row_index, batch.seq_lens, batch.counts), qkv, heads, scale=0.2)
    torch.testing.assert_close(ours[0].float(), expected, **rounding(dtype))


@pytest.mark.parametrize(("block_n", "num_warps", "num_stages", "programs_per_sm"), [(32, 2, 4, 5), (64, 4, 2, 3), (128, 8, 2, 2)])
@pytest.mark.parametrize("window", [None, 140])
def test_however_it_is_configured(block_n: int, num_warps: int, num_stages: int, programs_per_sm: int, window: int | None) -> None:
    from octavo.kernels.decode_config import DecodeConfig

    config = DecodeConfig(block_n, num_warps, num_stages=num_stages, programs_per_sm=programs_per_sm)
    heads, kv_heads, dim, dtype = (6, 2, 80, FP32) if SMALL else (32, 8, 128, BF16)
    batch = make_batch(LENGTHS, [1] * len(LENGTHS), kv_heads, dim, 16, dtype)
    qkv = random_qkv(len(LENGTHS), heads, kv_heads, dim, dtype)
    options = head_options(dim, "neox", True, dtype)
    ours, theirs, _ = both(batch, qkv, heads, options, scale=0.1, window=window, config=config)
    same(ours, theirs, options)


@pytest.mark.parametrize("seed", range(3 if SMALL else 20))
def test_random_batches(seed: int) -> None:
    """Lengths at the edges of blocks, tiles, chunks and windows, in runs of any number of programs."""
    rng = torch.Generator().manual_seed(100 + seed)
    heads, kv_heads, dim, dtype = [(4, 2, 16, DTYPES[0]), (3, 3, 32, DTYPES[0]), (8, 1, 16, DTYPES[0])][seed % 3]
    seqs = int(torch.randint(1, 6 if SMALL else 40, (1,), generator=rng))
    edges = torch.tensor([0, 1, 16, 64, 128, 256, 384] if SMALL else [0, 1, 16, 64, 128, 256, 384, 2048, 8192])
    lengths = edges[torch.randint(0, len(edges), (seqs,), generator=rng)] + torch.randint(-1, 2, (seqs,), generator=rng)
    lengths = lengths.clamp(min=0).tolist()
    window = [None, 128, 20][int(torch.randint(0, 3, (1,), generator=rng))]
    programs = int(torch.randint(1, 4 * seqs, (1,), generator=rng))
    batch = make_batch(lengths, [1] * seqs, kv_heads, dim, 16, dtype, seed=seed)
    qkv = random_qkv(seqs, heads, kv_heads, dim, dtype)
    options = head_options(dim, *[("neox", True), ("partial", True), ("interleaved", False)][seed % 3], dtype)  # few, to compile few
    seam = [0, 100][seed % 2]  # cut wherever it can be, or nowhere
    ours, theirs, _ = both(batch, qkv, heads, options, scale=0.3, window=window, programs=programs, seam=seam)
    same(ours, theirs, options)


def test_the_same_bits_in_every_batch() -> None:
    from octavo.kernels.new_tokens import NewTokens

    lengths = [400, 1, 260, 90] if SMALL else [7000, 1, 260, 513, 90, 2048, 2049, 30000]
    heads, kv_heads, dim, dtype = 4, 2, 32, DTYPES[0]
    batch = make_batch(lengths, [1] * len(lengths), kv_heads, dim, 16, dtype)
    qkv = random_qkv(len(lengths), heads, kv_heads, dim, dtype)
    options = head_options(dim, "neox", True, dtype)
    positions, slots = places(batch)
    missing = stale(batch, slots)

    def run(which: slice, programs: int) -> tuple[torch.Tensor, torch.Tensor]:
        part = Batch(missing.clone(), batch.tables, batch.row_index[which], batch.seq_lens[which], batch.counts[which])
        new = NewTokens(positions[which].clone(), slots[which].clone(), **options)
        return run_decode(part, qkv[which].clone(), heads, programs=programs, scale=0.3, new=new), part.cache

    together, cache = run(slice(None), 5)
    for programs in (1, 64) if SMALL else (1, 3, 64, 500):
        out, other = run(slice(None), programs)
        assert torch.equal(out, together) and torch.equal(other, cache)
    for s in range(len(lengths)):
        out, other = run(slice(s, s + 1), 9)
        assert torch.equal(out, together[s : s + 1])
        slot = int(slots[s])
        assert torch.equal(other[slot // 16, :, :, slot % 16], cache[slot // 16, :, :, slot % 16])


def test_padding_writes_nothing() -> None:
    from octavo.kernels.new_tokens import NewTokens

    heads, kv_heads, dim, dtype = 4, 2, 16, DTYPES[0]
    batch = make_batch([0, 0, 0], [1] * 3, kv_heads, dim, 16, dtype)
    before = batch.cache.clone()
    qkv = random_qkv(3, heads, kv_heads, dim, dtype)
    out = run_decode(batch, qkv, heads, scale=0.3, new=NewTokens(*places(batch), **head_options(dim, "neox", True, dtype)))
    assert torch.equal(batch.cache, before) and not out.any()


@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.25, 0.5)])
def test_fp8_cache(scales: tuple[float, float]) -> None:
    heads, kv_heads, dim, lengths = 4, 2, 16 if SMALL else 128, [300, 40, 0, 1]
    dtype = FP32 if INTERPRETED else BF16
    batch = make_batch(lengths, [1] * len(lengths), kv_heads, dim, 16, dtype, cache_dtype=torch.float8_e4m3fn)
    qkv = random_qkv(len(lengths), heads, kv_heads, dim, dtype) * 40  # some beyond what the cache can hold
    options = head_options(dim, "neox", False, dtype)
    if INTERPRETED:  # its cast to 8 bits loses a carry into the exponent: give it values that need no rounding
        qkv = qkv.to(torch.float8_e4m3fn).float()
        options["cos_sin"] = None
    ours, theirs, q = both(batch, qkv, heads, options, scale=0.01, k_scale=scales[0], v_scale=scales[1])
    same(ours, theirs, options)
    written = Batch(theirs[1], batch.tables, batch.row_index, batch.seq_lens, batch.counts)
    expected = reference(written, q, heads, scale=0.01, k_scale=scales[0], v_scale=scales[1])
    torch.testing.assert_close(ours[0].float(), expected, rtol=3e-2, atol=0.3)


def test_results_of_another_type_are_refused() -> None:
    from octavo.kernels import attention_plan, decode_attention
    from octavo.kernels.new_tokens import NewTokens

    batch = make_batch([5], [1], 2, 16, 16, DTYPES[0])
    plan = attention_plan.make_decode_plan(1, 2, DEVICE)
    workspace = decode_attention.make_decode_workspace(plan, 4, 2, 16)
    out = torch.empty(1, 64, dtype=torch.float64, device=DEVICE)
    with pytest.raises(ValueError, match="float64"):
        decode_attention.decode_attention(
            random_qkv(1, 4, 2, 16, DTYPES[0]), batch.cache, batch.tables, plan, workspace, out,
            num_heads=4, scale=1.0, config=decode_attention.DecodeConfig(), new=NewTokens(*places(batch)),
        )  # fmt: skip
