"""The small layers against transformers' and torch's own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from octavo.errors import ModelError
from octavo.layers.activation import gated_activation
from octavo.layers.norm import RMSNorm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rms_norm_is_transformers(dtype: torch.dtype) -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    torch.manual_seed(0)
    x, residual, weight = (torch.randn(*shape).to(dtype) for shape in ((5, 48), (5, 48), (48,)))
    ours, theirs = RMSNorm(48, 1e-5, dtype), LlamaRMSNorm(48, 1e-5).to(dtype)
    ours.weight.data.copy_(weight)
    theirs.weight.data.copy_(weight)
    kept = x.clone()

    normed, stream = ours(x.clone())
    torch.testing.assert_close(normed, theirs(kept))
    assert torch.equal(stream, kept)

    normed, stream = ours(x.clone(), residual.clone())
    assert torch.equal(stream, kept + residual)
    torch.testing.assert_close(normed, theirs(kept + residual))
    assert normed.dtype == stream.dtype == dtype


@pytest.mark.parametrize(
    ("name", "act"), [("silu", F.silu), ("gelu", F.gelu), ("gelu_pytorch_tanh", lambda x: F.gelu(x, approximate="tanh"))]
)
def test_gated_activations(name: str, act) -> None:
    x = torch.randn(4, 20, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(gated_activation(name)(x), act(x[:, :10]) * x[:, 10:])


def test_unknown_activation() -> None:
    with pytest.raises(ModelError, match=r"'relu2' is not supported; supported are .*silu"):
        gated_activation("relu2")
