"""Linear layers whose weights were rearranged once for the CPU's matrix kernels (oneDNN, through torch.ops.mkldnn)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

# Rows of x that the packed layout is made for. oneDNN picks one layout for 8 rows and more; a layout made for 1 row is up to
# three times slower at every size in float32, and no faster at 1 row in bfloat16.
ROWS_HINT = 32


class PackedLinear:
    """A linear layer's weight in oneDNN's own layout; call it as ``(x, bias)``.

    Memory: as much as the weight itself. The weight that it was made from is not kept; drop it (for tied embeddings the table
    has to stay, so packing the head costs one more vocab_size * hidden_size elements).
    """

    __slots__ = ("in_features", "out_features", "packed")

    def __init__(self, packed: torch.Tensor, out_features: int, in_features: int) -> None:
        self.packed = packed
        self.out_features = out_features
        self.in_features = in_features

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return packed_linear(x, self, bias)


def packed_linear_reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [..., in] @ weight [out, in].T + bias [out]."""
    return F.linear(x, weight, bias)


def packed_linear(x: torch.Tensor, packed: PackedLinear, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [..., in] -> [..., out] for any number of rows, in the weight's dtype.

    Rows don't mix, but the order of summation may depend on the number of rows, so results can differ by rounding between
    batch sizes.
    """
    if x.shape[-1] != packed.in_features:
        raise ValueError(f"packed_linear: x has {x.shape[-1]} features, the weight takes {packed.in_features}.")
    if x.numel() == 0:
        return x.new_zeros(*x.shape[:-1], packed.out_features)
    return torch.ops.mkldnn._linear_pointwise(x, packed.packed, bias, "none", [], "")


def prepack_linear(weight: torch.Tensor) -> PackedLinear | None:
    """Pack weight [out, in] (float32 or bfloat16, on the CPU); None where that is not possible, or no faster: use F.linear then."""
    if weight.device.type != "cpu" or weight.dim() != 2 or weight.dtype not in (torch.float32, torch.bfloat16) or weight.numel() == 0:
        return None
    if not _supported(weight.dtype):
        return None
    out_features, in_features = weight.shape
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS_HINT)
    return PackedLinear(packed, out_features, in_features)


_probed: dict[torch.dtype, bool] = {}


def _supported(dtype: torch.dtype) -> bool:
    """Whether this torch, on this machine, packs and multiplies right; tried once with a small product."""
    if dtype not in _probed:
        _probed[dtype] = torch.backends.mkldnn.is_available() and _probe(dtype)
    return _probed[dtype]


def _probe(dtype: torch.dtype) -> bool:
    if dtype == torch.bfloat16 and not getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)():
        return False
    x, weight = (torch.arange(n * 32).remainder(7).view(n, 32).to(dtype) for n in (3, 48))
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS_HINT)
        y = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
    except (RuntimeError, AttributeError, TypeError):  # not in this build, or with another signature
        return False
    return torch.equal(y, F.linear(x, weight))
