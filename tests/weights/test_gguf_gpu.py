"""GGUF on a GPU: blocks are dequantized there to what they are on the CPU. Apart from the other tests, which want the demo model."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from octavo.weights.gguf_dequant import dequantize
from octavo.weights.gguf_file import TENSOR_TYPES

sys.path.insert(0, str(Path(__file__).parent))
from gguf_samples import random_blocks

QUANTIZED = [name for name, elements, _ in TENSOR_TYPES.values() if elements > 1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("type_name", QUANTIZED)
def test_dequantize_on_a_gpu_equals_the_cpu(type_name):
    rng = np.random.default_rng(3)
    raw = torch.from_numpy(random_blocks((7, 768), type_name, rng))
    for dtype in (torch.float32, torch.bfloat16):
        got = dequantize(raw.cuda(), type_name, (7, 768), dtype)
        assert got.is_cuda
        assert torch.equal(got.cpu(), dequantize(raw, type_name, (7, 768), dtype))
