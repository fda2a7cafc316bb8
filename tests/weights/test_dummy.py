"""Dummy weights: seeded, independent of order, of the right size."""

from __future__ import annotations

import pytest
import torch

from octavo.errors import ModelError
from octavo.weights import fill_dummy

SHAPES = {
    "model.layers.0.self_attn.qkv_proj.weight": (96, 64),
    "model.layers.1.self_attn.qkv_proj.weight": (96, 64),
    "model.layers.0.self_attn.qkv_proj.bias": (96,),
    "model.layers.0.input_layernorm.weight": (64,),
    "model.layers.0.self_attn.q_norm.weight": (64,),
    "model.norm.weight": (64,),
}


def filled(seed: int, names: list[str], dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    parameters = {name: torch.full(SHAPES[name], torch.nan, dtype=dtype) for name in names}
    fill_dummy(parameters.items(), seed)
    return parameters


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_values_by_kind(dtype):
    for name, values in filled(0, list(SHAPES), dtype).items():
        values = values.float()
        middle, spread = (1.0, 0.11) if "norm" in name else (0.0, 0.036)
        assert (values - middle).abs().max() <= spread * (1.15 if dtype.itemsize == 1 else 1), name
        assert values.unique().numel() > 2, name
    big = torch.empty(1000, 1000)
    fill_dummy([("w", big)], 0)
    assert big.std().item() == pytest.approx(0.02, rel=0.05)
    assert abs(big.mean().item()) < 1e-3


def test_large_weights_have_no_equal_rows():
    big = torch.empty(20_000, 1024)  # several tiles
    fill_dummy([("w", big)], 0)
    assert big.isfinite().all()
    assert big.std().item() == pytest.approx(0.02, rel=0.05)
    assert big[:, :2].unique(dim=0).shape[0] == big.shape[0]


def test_a_function_of_seed_and_name_alone():
    first = filled(7, list(SHAPES))
    again = filled(7, list(SHAPES)[::-1][:4])
    for name, values in again.items():
        assert torch.equal(values, first[name])
    other = filled(8, list(SHAPES))
    assert all(not torch.equal(other[name], first[name]) for name in SHAPES)
    layers = [first[f"model.layers.{i}.self_attn.qkv_proj.weight"] for i in (0, 1)]
    assert not torch.equal(*layers)


def test_parameters_that_require_gradients_and_views():
    parameter = torch.nn.Parameter(torch.empty(4, 4))
    fill_dummy([("w", parameter)], 0)
    whole = torch.zeros(8, 4)
    fill_dummy([("w", whole[4:])], 0)
    assert torch.equal(whole[4:], parameter.detach())
    assert whole[:4].count_nonzero() == 0


def test_the_global_random_state_is_left_alone():
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    filled(0, list(SHAPES))
    assert torch.equal(torch.rand(3), expected)


def test_integers_are_refused():
    with pytest.raises(ModelError, match="packed of type torch.uint8"):
        fill_dummy([("packed", torch.zeros(3, dtype=torch.uint8))], 0)
