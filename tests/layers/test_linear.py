"""Layers cut over 2 and 4 ranks give what one rank gives, from the same checkpoint tensors."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from octavo.distributed.group import Group
from octavo.errors import ConfigError
from octavo.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from octavo.layers.linear import ColumnParallelLinear, MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from octavo.quantization.unquantized import UnquantizedScheme

from .fake_group import run_ranks

SIZES = [1, 2, 4]
COMMON = {"scheme": UnquantizedScheme(), "dtype": torch.float32}


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def fill(module: torch.nn.Module, tensors: dict[str, torch.Tensor], prefix: str = "block.layer"):
    slots = dict(module.weight_slots(prefix))
    assert set(slots) == set(tensors)
    for name, slot in slots.items():
        assert slot.shape == tuple(tensors[name].shape)
        slot.load(tensors[name])
    return module


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("bias", [False, True])
def test_column_then_row(size: int, bias: bool) -> None:
    x, w1, w2, b1, b2 = rand(5, 12), rand(16, 12), rand(12, 16), rand(16), rand(12)
    expected = F.linear(F.linear(x, w1, b1 if bias else None), w2, b2 if bias else None)

    def work(group: Group) -> torch.Tensor:
        column = ColumnParallelLinear(12, 16, bias=bias, group=group, **COMMON)
        row = RowParallelLinear(16, 12, bias=bias, group=group, **COMMON)
        fill(column, {"block.layer.weight": w1, **({"block.layer.bias": b1} if bias else {})})
        fill(row, {"block.layer.weight": w2, **({"block.layer.bias": b2} if bias else {})})
        assert column.weight.shape == (16 // size, 12)
        return row(column(x))

    for result in run_ranks(size, work):
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", SIZES)
def test_merged_column_keeps_gate_and_up_apart(size: int) -> None:
    x, gate, up = rand(3, 8), rand(12, 8, seed=1), rand(12, 8, seed=2)

    def work(group: Group) -> torch.Tensor:
        layer = MergedColumnParallelLinear(8, {"gate_proj": 12, "up_proj": 12}, bias=False, group=group, **COMMON)
        return fill(layer, {"block.gate_proj.weight": gate, "block.up_proj.weight": up})(x)

    parts = [y.chunk(2, dim=-1) for y in run_ranks(size, work)]
    torch.testing.assert_close(torch.cat([g for g, _ in parts], -1), F.linear(x, gate))
    torch.testing.assert_close(torch.cat([u for _, u in parts], -1), F.linear(x, up))


@pytest.mark.parametrize(("kv_heads", "size"), [(4, 1), (4, 2), (4, 4), (2, 4), (1, 2), (1, 4)])
def test_qkv_heads(kv_heads: int, size: int) -> None:
    """Each rank has its query heads and exactly the KV heads that they read, replicated when there are fewer than ranks."""
    heads, dim = 8, 3
    x = rand(5, 10)
    full = {f"block.{n}_proj.{kind}": rand(*shape, seed=ord(n)) for n, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))
            for kind, shape in (("weight", (count * dim, 10)), ("bias", (count * dim,)))}  # fmt: skip
    q, k, v = (F.linear(x, full[f"block.{n}_proj.weight"], full[f"block.{n}_proj.bias"]).unflatten(-1, (-1, dim)) for n in "qkv")

    def work(group: Group) -> tuple[torch.Tensor, QKVParallelLinear]:
        layer = fill(QKVParallelLinear(10, dim, heads, kv_heads, bias=True, group=group, **COMMON), full)
        return layer(x), layer

    share = heads // kv_heads
    for rank, (y, layer) in enumerate(run_ranks(size, work)):
        assert (layer.num_heads, layer.num_kv_heads) == (heads // size, max(1, kv_heads // size))
        mine = list(range(rank * layer.num_heads, (rank + 1) * layer.num_heads))
        read = sorted({head // share for head in mine})
        assert len(read) == layer.num_kv_heads
        expected = torch.cat([q[:, mine], k[:, read], v[:, read]], dim=1).flatten(1)
        torch.testing.assert_close(y, expected)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("vocab", [16, 9])  # 9 over 4 ranks: rows of 3, the last rank has none
@pytest.mark.parametrize("tied", [False, True])
def test_embedding_and_head(size: int, vocab: int, tied: bool) -> None:
    table, head = rand(vocab, 6), rand(vocab, 6, seed=9)
    ids = torch.tensor([0, vocab - 1, 3, 3, 7])

    def work(group: Group) -> tuple[torch.Tensor, torch.Tensor]:
        embed = VocabParallelEmbedding(vocab, 6, group=group, dtype=torch.float32)
        lm_head = ParallelLMHead(vocab, 6, group=group, tied=embed if tied else None, **COMMON)
        fill(embed, {"block.layer.weight": table})
        fill(lm_head, {} if tied else {"block.layer.weight": head})
        x = embed(ids)
        return x, lm_head(x)

    for x, logits in run_ranks(size, work):
        assert torch.equal(x, table[ids])
        torch.testing.assert_close(logits, F.linear(table[ids], table if tied else head))


def test_head_gives_float32() -> None:
    embed = VocabParallelEmbedding(8, 4, group=Group.single(), dtype=torch.bfloat16)
    head = ParallelLMHead(8, 4, group=Group.single(), scheme=UnquantizedScheme(), dtype=torch.bfloat16, tied=embed)
    assert head(torch.ones(2, 4, dtype=torch.bfloat16)).dtype == torch.float32


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "works"),
    [(9, 3, 2, "1, 3, 9"), (8, 2, 3, "1, 2, 4, 8"), (12, 4, 3, "1, 2, 4, 12"), (14, 2, 4, "1, 2, 14")],
)
def test_heads_that_cannot_be_cut(heads: int, kv_heads: int, size: int, works: str) -> None:
    with pytest.raises(ConfigError) as error:
        QKVParallelLinear(8, 4, heads, kv_heads, bias=False, group=Group(0, size), **COMMON)
    message = str(error.value)
    assert f"{heads} attention heads" in message
    assert f"{kv_heads} KV heads" in message
    assert f"not divisible by the parallel size {size}" in message
    assert f"Sizes that would work: {works} (" in message


def test_widths_that_cannot_be_cut() -> None:
    with pytest.raises(
        ConfigError, match="10 output features of gate_proj are not divisible by the parallel size 4. Sizes that would work: 1, 2, 5, 10"
    ):
        MergedColumnParallelLinear(8, {"gate_proj": 10}, bias=False, group=Group(0, 4), **COMMON)


def test_prepacked_weight_replaces_the_plain_one() -> None:
    calls = []

    def prepack(weight: torch.Tensor):
        kept = weight.clone()
        return lambda x, bias: (calls.append(1), F.linear(x, kept, bias))[1]

    scheme = UnquantizedScheme(prepack)
    w, b, x = rand(6, 4), rand(6), rand(2, 4)
    layer = ColumnParallelLinear(4, 6, bias=True, group=Group.single(), scheme=scheme, dtype=torch.float32)
    fill(layer, {"block.layer.weight": w, "block.layer.bias": b}).finalize()
    assert layer.weight is None
    torch.testing.assert_close(layer(x), F.linear(x, w, b))
    assert calls

    embed = VocabParallelEmbedding(6, 4, group=Group.single(), dtype=torch.float32)
    fill(embed, {"block.layer.weight": w})
    head = ParallelLMHead(6, 4, group=Group.single(), scheme=scheme, dtype=torch.float32, tied=embed)
    head.finalize()
    assert torch.equal(embed(torch.tensor([5])), w[5:6])  # a tied embedding keeps its weight
    torch.testing.assert_close(head(x), F.linear(x, w))


def test_a_group_without_transport_refuses() -> None:
    with pytest.raises(NotImplementedError, match="2 ranks"):
        Group(0, 2).all_reduce(torch.ones(1))
    with pytest.raises(ValueError, match="rank"):
        Group(2, 2)
