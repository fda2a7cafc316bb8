from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from octavo.kernels import packed_linear as module
from octavo.kernels.packed_linear import packed_linear, prepack_linear


@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("rows", [0, 1, 2, 7, 32, 33, 300])
@pytest.mark.parametrize("shape", [(960, 576), (51, 40)])
def test_any_number_of_rows(dtype: torch.dtype, tolerance: float, rows: int, shape: tuple[int, int]) -> None:
    g = torch.Generator().manual_seed(rows)
    weight = (torch.randn(shape, generator=g) / shape[1] ** 0.5).to(dtype)
    bias, x = torch.randn(shape[0], generator=g).to(dtype), torch.randn(rows, shape[1], generator=g).to(dtype)
    packed = prepack_linear(weight)
    if packed is None:
        pytest.skip("this torch has no oneDNN for it")
    kept = weight.clone()
    for b in (None, bias):
        torch.testing.assert_close(packed(x, b), F.linear(x, weight, b), atol=tolerance, rtol=tolerance)
    assert torch.equal(kept, weight)
    weight.zero_()  # the packed copy stands alone
    torch.testing.assert_close(packed_linear(x, packed), F.linear(x, kept), atol=tolerance, rtol=tolerance)


def test_what_cannot_be_packed_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert prepack_linear(torch.ones(4, 4, dtype=torch.float64)) is None
    assert prepack_linear(torch.ones(0, 4)) is None
    monkeypatch.setattr(module, "_probed", {torch.float32: False})
    assert prepack_linear(torch.ones(4, 4)) is None


def test_wrong_width_is_refused() -> None:
    packed = prepack_linear(torch.ones(8, 16))
    if packed is not None:
        with pytest.raises(ValueError, match="16"):
            packed(torch.ones(2, 8))
