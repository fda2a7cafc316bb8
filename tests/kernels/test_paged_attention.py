from __future__ import annotations

import itertools

import pytest
import torch

from octavo.kernels.cpu.library import library
from octavo.kernels.kv_cache import read_reference, write_reference
from octavo.kernels.paged_attention import paged_attention, paged_attention_reference
from tests.kernels.attention_cases import Case, make_case, make_layer, make_metadata

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
DTYPES = list(TOLERANCE)

needs_kernels = pytest.mark.skipif(library() is None, reason="no C compiler here")


def run(case: Case) -> torch.Tensor:
    out = torch.full((case.qkv.shape[0], case.layer.num_heads * case.layer.head_dim), float("nan"), dtype=case.qkv.dtype)
    return paged_attention(case.qkv, case.layer, case.cache, case.metadata, out)


def check(case: Case) -> None:
    found = run(case)
    expected = paged_attention_reference(case.qkv, case.layer, case.cache, case.metadata, torch.empty_like(found))
    tolerance = TOLERANCE[case.qkv.dtype]
    torch.testing.assert_close(found.float(), expected.float(), atol=tolerance, rtol=tolerance)


def test_reference_agrees_with_sdpa() -> None:
    """The truth of the other tests, held against torch's own attention for one sequence."""
    case = make_case(make_layer(6, 2, 64), [50], [50], 16, torch.float32)
    q = case.qkv[:, : 6 * 64].view(50, 6, 64).transpose(0, 1)
    k, v = (x[0].repeat_interleave(3, dim=1).transpose(0, 1) for x in (case.keys, case.values))
    expected = torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0].transpose(0, 1).flatten(1)
    found = paged_attention_reference(case.qkv, case.layer, case.cache, case.metadata, torch.empty(50, 384))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_cache_layout_gives_back_what_was_written() -> None:
    for dtype in DTYPES:
        case = make_case(make_layer(2, 2, 32), [37, 5], [1, 1], 8, dtype)
        for s, length in enumerate((37, 5)):
            k, v = read_reference(case.cache, case.metadata.block_tables[s], length)
            assert torch.equal(k, case.keys[s])
            assert torch.equal(v, case.values[s])


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128, 256])
def test_head_sizes(dtype: torch.dtype, head_dim: int) -> None:
    check(make_case(make_layer(4, 2, head_dim), [1, 65, 300, 130], [1, 1, 1, 70], 16, dtype))


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [8, 16, 32, 64, 128, 256])
def test_block_sizes(dtype: torch.dtype, block_size: int) -> None:
    check(make_case(make_layer(6, 2), [33, 257, 600, 100], [1, 1, 3, 100], block_size, dtype))


@needs_kernels
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 16, 64])
def test_groups(group: int) -> None:
    for dtype in DTYPES:
        check(make_case(make_layer(group, 1, 32), [9, 150, 80], [1, 1, 40], 16, dtype))


@needs_kernels
@pytest.mark.parametrize("options", [{"sliding_window": 1}, {"sliding_window": 70}, {"sliding_window": 300}, {"logit_soft_cap": 5.0}])
def test_window_and_soft_cap(options: dict) -> None:
    for dtype in DTYPES:
        check(make_case(make_layer(4, 2, 64, **options), [3, 900, 270, 400], [1, 1, 1, 200], 16, dtype))


@needs_kernels
def test_random_steps() -> None:
    g = torch.Generator().manual_seed(1)

    def pick(*values: int) -> int:
        return values[int(torch.randint(len(values), (1,), generator=g))]

    for seed in range(40):
        kv_heads, decodes = pick(1, 2, 3), pick(0, 1, 4)
        counts = [1] * decodes + [pick(2, 7, 33, 120) for _ in range(pick(1, 2))]
        lengths = [c + pick(0, 1, 15, 16, 63, 64, 255, 700) for c in counts]
        options = {"sliding_window": pick(0, 0, 5, 200) or None, "logit_soft_cap": pick(0, 0, 20) or None}
        layer = make_layer(kv_heads * pick(1, 3, 4), kv_heads, pick(32, 64, 80, 128), **options)
        check(make_case(layer, lengths, counts, pick(8, 16, 32, 64), pick(*DTYPES), seed))  # type: ignore[arg-type,call-overload]


def alone(case: Case, s: int) -> Case:
    """One sequence of a case as a step of its own."""
    m, begin, end = case.metadata, int(case.metadata.query_start[s]), int(case.metadata.query_start[s + 1])
    length = int(m.seq_lens[s])
    table = m.block_tables[s, : -(-length // m.block_size)].tolist()
    metadata = make_metadata([length], [end - begin], m.block_size, [table])
    return Case(case.layer, metadata, case.cache, case.qkv[begin:end].contiguous(), case.keys, case.values)


def chunk(case: Case, first: int, last: int) -> Case:
    """Tokens first .. last - 1 of a case that is one sequence running from its start."""
    m = case.metadata
    table = m.block_tables[0, : -(-last // m.block_size)].tolist()
    return Case(
        case.layer, make_metadata([last], [last - first], m.block_size, [table]), case.cache, case.qkv[first:last].contiguous(), [], []
    )


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_the_batch(dtype: torch.dtype, threads: None) -> None:
    case = make_case(make_layer(6, 2), [900, 31, 257, 64, 500], [1, 1, 1, 20, 77], 16, dtype)
    together = run(case)
    for s in range(5):
        assert torch.equal(run(alone(case, s)), together[case.metadata.query_start[s] : case.metadata.query_start[s + 1]])


@needs_kernels
@pytest.mark.parametrize("options", [{}, {"sliding_window": 90}, {"logit_soft_cap": 10.0}])
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_chunking(dtype: torch.dtype, options: dict, threads: None) -> None:
    """One chunk of 700 tokens, chunks of odd sizes, and 30 single decodes, with split keys where threads allow."""
    case = make_case(make_layer(6, 2, 64, **options), [700], [700], 16, dtype)
    whole = run(case)
    for size in (700, 333, 64, 37):
        for first in range(0, 700, size):
            last = min(first + size, 700)
            assert torch.equal(run(chunk(case, first, last)), whole[first:last])
    for position in range(0, 700, 23):
        assert torch.equal(run(chunk(case, position, position + 1)), whole[position : position + 1])


@pytest.fixture(params=[1, 2, 4])
def threads(request: pytest.FixtureRequest):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@needs_kernels
def test_long_context_is_split_and_merged(threads: None) -> None:
    for dtype in DTYPES:
        check(make_case(make_layer(3, 1, 64), [5000, 20, 3000], [1, 1, 5], 16, dtype))


@needs_kernels
def test_nan_stays_in_its_own_sequence() -> None:
    """A broken sequence shows its NaN and does not leak it."""
    for dtype in DTYPES:
        case = make_case(make_layer(2, 1), [100, 100, 100], [1, 1, 1], 16, dtype)
        case.qkv[1, :64] = float("nan")
        out = run(case)
        assert out[1, :64].isnan().all()
        assert not out[[0, 2]].isnan().any() and not out[1, 64:].isnan().any()


@needs_kernels
def test_extreme_scores() -> None:
    """One key outweighs all others, by more than float32's exponent range."""
    for dtype in (torch.float32, torch.bfloat16):
        case = make_case(make_layer(1, 1), [200], [1], 16, dtype)
        case.qkv *= 300
        check(case)


@needs_kernels
def test_what_is_out_of_range_is_refused() -> None:
    case = make_case(make_layer(), [40, 40], [1, 1], 16, torch.float32)
    for bad in (-1, case.cache[0].shape[0]):
        case.metadata.block_tables[0, 1] = bad
        with pytest.raises(IndexError, match="block id"):
            run(case)
    case.metadata.seq_lens[0] = 0
    with pytest.raises(ValueError, match="inconsistent"):
        run(case)


@needs_kernels
def test_padding_rows_become_zero() -> None:
    case = make_case(make_layer(), [10, 20], [1, 3], 16, torch.bfloat16)
    expected = run(case)
    case.qkv = torch.cat((case.qkv, torch.full((3, case.qkv.shape[1]), float("nan"), dtype=torch.bfloat16)))
    out = run(case)
    assert torch.equal(out[:4], expected)
    assert (out[4:] == 0).all()


def test_shapes_the_kernels_do_not_cover_run_in_torch() -> None:
    for head_dim, heads, block_size in itertools.product((24, 320), (2,), (16,)):
        check(make_case(make_layer(heads, 1, head_dim), [20, 40], [1, 10], block_size, torch.float32))


@needs_kernels
@pytest.mark.parametrize("position", [0, 1, 15, 40])
def test_nan_of_a_single_key_shows(position: int) -> None:
    """Wherever in a vector the broken key stands, also if it is the only visible one."""
    for dtype in DTYPES:
        case = make_case(make_layer(2, 1, sliding_window=3), [position + 1], [1], 16, dtype)
        slot = case.metadata.slots[-1:]
        broken = torch.full((1, 1, 64), float("nan"), dtype=dtype)
        write_reference(case.cache, slot, broken, broken)
        assert run(case).isnan().all()
