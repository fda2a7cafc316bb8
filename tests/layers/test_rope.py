"""RoPE tables equal transformers' cos and sin, whatever the variant."""

from __future__ import annotations

import pytest
import torch

from octavo.errors import ModelError
from octavo.layers.rope import make_rope_table
from octavo.models.config import RopeConfig

ORIGINAL = 64
FACTORS = {"short_factor": [1.0 + 0.01 * i for i in range(16)], "long_factor": [1.0 + 0.4 * i for i in range(16)]}

CASES = {
    "default": ({"rope_type": "default", "rope_theta": 10000.0}, 300),
    "theta": ({"rope_type": "default", "rope_theta": 1e6}, 300),
    "linear": ({"rope_type": "linear", "factor": 3.0}, 192),
    "dynamic-within": ({"rope_type": "dynamic", "factor": 4.0}, 50),
    "dynamic-past": ({"rope_type": "dynamic", "factor": 4.0}, 200),
    "llama3": ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}, 512),
    "yarn": ({"rope_type": "yarn", "factor": 4.0}, 256),
    "yarn-betas": ({"rope_type": "yarn", "factor": 4.0, "beta_fast": 8, "beta_slow": 2, "truncate": False}, 256),
    "yarn-mscale": ({"rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.7}, 256),
    "yarn-attention-factor": ({"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.3}, 256),
    "longrope-short": ({"rope_type": "longrope", "factor": 4.0, **FACTORS}, 64),
    "longrope-long": ({"rope_type": "longrope", "factor": 4.0, **FACTORS}, 65),
    "longrope-attention-factor": ({"rope_type": "longrope", "factor": 4.0, "attention_factor": 1.1, **FACTORS}, 65),
}


def rope_config(parameters: dict, rotary_dim: int = 32) -> RopeConfig:
    rest = {"original_max_position_embeddings": ORIGINAL, **parameters}
    return RopeConfig(theta=rest.pop("rope_theta", 10000.0), kind=rest.pop("rope_type"), rotary_dim=rotary_dim, parameters=rest)


@pytest.mark.parametrize("case", CASES)
def test_table_equals_transformers(case: str) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    parameters, length = CASES[case]
    given = {"rope_theta": 10000.0, **parameters}
    if given["rope_type"] in ("llama3", "yarn", "longrope"):
        given["original_max_position_embeddings"] = ORIGINAL
    rotary = LlamaRotaryEmbedding(
        LlamaConfig(hidden_size=128, num_attention_heads=4, max_position_embeddings=ORIGINAL, rope_parameters=given)
    )
    cos, sin = rotary(torch.zeros(1), torch.arange(length)[None])
    table = make_rope_table(rope_config(parameters), length)
    assert table.shape == (length, 32)
    assert table.dtype == torch.float32
    # transformers raises the dynamic base to its power in float32, we in float64
    tolerance = 1e-4 if case == "dynamic-past" else 1e-6
    torch.testing.assert_close(table, torch.cat([cos[0, :, :16], sin[0, :, :16]], dim=-1), rtol=0, atol=tolerance)


def test_chunks_join() -> None:
    """Longer than what is computed at a time: every row is its own position's."""
    table = make_rope_table(rope_config({"rope_type": "default"}), 20000)
    rows = torch.tensor([0, 8191, 8192, 16384, 19999])
    angles = torch.outer(rows.float(), 1.0 / 10000.0 ** (torch.arange(0, 32, 2) / 32))
    torch.testing.assert_close(table[rows], torch.cat([angles.cos(), angles.sin()], -1), rtol=0, atol=2e-3)
    assert torch.equal(table[:100], make_rope_table(rope_config({"rope_type": "default"}), 100))


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        (
            RopeConfig(kind="spiral", rotary_dim=8),
            "'spiral' is not supported; supported are default, linear, dynamic, llama3, yarn, longrope",
        ),
        (RopeConfig(kind="default", rotary_dim=7), "even, positive rotary dimension"),
        (RopeConfig(kind="linear", rotary_dim=8), "'linear' needs 'factor'"),
        (RopeConfig(kind="yarn", rotary_dim=8, parameters={"factor": 2}), "'yarn' needs 'original_max_position_embeddings'"),
        (
            RopeConfig(
                kind="longrope", rotary_dim=8, parameters={"factor": 2, "original_max_position_embeddings": 4, "long_factor": [1, 2]}
            ),
            "'long_factor' has 2 entries; a rotary dimension of 8 needs 4",
        ),
    ],
)
def test_refusals(rope: RopeConfig, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        make_rope_table(rope, 16)
