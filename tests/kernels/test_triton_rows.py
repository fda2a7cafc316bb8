"""The kernels at the ends of a decode step, against torch."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.triton_cases import DEVICE, gpu, needs_triton, rand

pytestmark = needs_triton


def state(rows: int, block_size: int, max_blocks: int, computed_type: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    last_token = torch.randint(0, 150000, (rows,))
    num_computed = torch.randint(0, block_size * max_blocks - 1, (rows,), dtype=computed_type)
    table = torch.randint(0, 9999, (rows, max_blocks), dtype=torch.int32)
    return last_token.to(DEVICE), num_computed.to(DEVICE), table.to(DEVICE)


@pytest.mark.parametrize(("places", "rows", "block_size", "max_blocks"), [(1, 2, 16, 4), (5, 9, 1, 30), (130, 300, 32, 600), (7, 8, 13, 5)])
@pytest.mark.parametrize("computed_type", [torch.int32, torch.int64])
def test_decode_inputs(places: int, rows: int, block_size: int, max_blocks: int, computed_type: torch.dtype) -> None:
    from octavo.kernels.triton.rows import DecodeInputs, decode_inputs, decode_inputs_reference

    last_token, num_computed, table = state(rows, block_size, max_blocks, computed_type)
    dummy = rows - 1
    index = torch.randperm(rows - 1)[:places].to(DEVICE)
    index[places // 2 + 1 :] = dummy
    before = (last_token.clone(), num_computed.clone(), table.clone())
    for with_tables in (False, True):
        made = [DecodeInputs.empty(places, DEVICE, max_blocks if with_tables else None) for _ in range(2)]
        options = {"block_size": block_size, "dummy_row": dummy, "dummy_len": places % 2}
        decode_inputs(index, last_token, num_computed, table, made[0], **options)
        decode_inputs_reference(index, last_token, num_computed, table, made[1], **options)
        for name in ("token_ids", "positions", "slots", "seq_lens", "block_tables"):
            got, expected = getattr(made[0], name), getattr(made[1], name)
            assert (got is None and expected is None) or torch.equal(got, expected), name
    assert all(torch.equal(a, b) for a, b in zip(before, (last_token, num_computed, table), strict=True))


@pytest.mark.parametrize("computed_type", [torch.int32, torch.int64])
def test_store_tokens(computed_type: torch.dtype) -> None:
    from octavo.kernels.triton.rows import store_tokens, store_tokens_reference

    last_token, num_computed, _ = state(200, 16, 4, computed_type)
    index = torch.randperm(199)[:150].to(DEVICE)
    index[140:] = 199
    tokens = torch.arange(150, device=DEVICE)
    expected = (last_token.clone(), num_computed.clone())
    store_tokens(index, tokens, last_token, num_computed, dummy_row=199)
    store_tokens_reference(index, tokens, *expected, dummy_row=199)
    assert torch.equal(last_token, expected[0]) and torch.equal(num_computed, expected[1])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_scatter_pairs(dtype: torch.dtype) -> None:
    from octavo.kernels.triton.rows import scatter_pairs, scatter_pairs_reference

    target = torch.zeros(7, 50, dtype=dtype, device=DEVICE)
    expected = target.clone()
    index = torch.randperm(350)[:140]
    index[::10] = -1
    pairs = torch.stack([index, torch.arange(1, 141)], dim=1).to(DEVICE)
    scatter_pairs(pairs, target)
    scatter_pairs_reference(pairs, expected)
    assert torch.equal(target, expected) and (target != 0).sum() == 126
    scatter_pairs(pairs[:0], target)
    scatter_pairs(torch.tensor([[350, 1]], device=DEVICE), target)  # out of range: nothing is written
    assert torch.equal(target, expected)
    with pytest.raises(ValueError, match="contiguous"):
        scatter_pairs(pairs, target.t())


@pytest.mark.parametrize(("tokens", "vocab", "width"), [(1, 10, 64), (5, 300, 576), (3, 7, 5000)])
def test_embedding(tokens: int, vocab: int, width: int) -> None:
    from octavo.kernels.triton.embedding import embedding, embedding_reference

    weight = rand(vocab, width, dtype=torch.float16)
    ids = torch.randint(0, vocab, (tokens,)).to(DEVICE)
    assert torch.equal(embedding(ids, weight), embedding_reference(ids, weight))
    ids[0] = -1
    assert not embedding(ids, weight)[0].any()
    ids[0] = vocab
    assert not embedding(ids, weight)[0].any()


@gpu
def test_a_decode_step_in_a_graph() -> None:
    """Inputs, then the rows' update, replayed: positions advance, tokens come round."""
    from octavo.kernels.triton.rows import DecodeInputs, decode_inputs, store_tokens

    rows, places, block_size = 600, 512, 16
    last_token, num_computed, table = state(rows, block_size, 100, torch.int64)
    num_computed.clamp_(max=1000)
    index = torch.randperm(rows - 1, device=DEVICE)[:places]
    inputs = DecodeInputs.empty(places, DEVICE)
    first_position, first_token = num_computed[index].clone(), last_token[index].clone()

    def step() -> None:
        decode_inputs(index, last_token, num_computed, table, inputs, block_size=block_size, dummy_row=rows - 1)
        store_tokens(index, inputs.token_ids + 1, last_token, num_computed, dummy_row=rows - 1)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(9):
        graph.replay()
    assert torch.equal(num_computed[index], first_position + 10)
    assert torch.equal(last_token[index], first_token + 10)
    assert torch.equal(inputs.positions, first_position + 9)
