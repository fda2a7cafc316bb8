"""GGUF block formats → floating-point tensors, vectorized in torch, equal bit by bit to the ``gguf`` package.

A quantized row is a run of blocks; each block packs 32 or 256 elements with their scales. Layouts are those of
ggml's ``block_q*`` structs (https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h). The common formats are
written here because the package's numpy code is about ten times slower; rarer ones go through the package.

Every ``_q*`` function takes ``blocks`` uint8 [N, bytes per block] and fills ``out`` float32 [N, elements per block].
The order of multiplications and additions is the package's, and never fused: that is what makes results equal.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from octavo.errors import ModelError
from octavo.weights.gguf_file import TENSOR_TYPES

_BLOCKS = {name: (elements, size) for name, elements, size in TENSOR_TYPES.values()}
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_CHUNK_ELEMENTS = 1 << 19  # float32 scratch of 2 MiB: stays in the cache between the passes over it
_DEVICE_CHUNK_ELEMENTS = 1 << 26  # on an accelerator: few launches, 256 MiB of scratch at most


def dequantize(raw: torch.Tensor, type_name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
    """Turn packed bytes into a new tensor.

    Args:
        raw: uint8, contiguous, as many bytes as ``shape`` needs; dequantized on its own device.
        type_name: GGUF's name of the format, such as ``Q4_K``.
        dtype: floating-point type of the result; None keeps F32, F16 and BF16 and makes the others float32.

    Raises:
        ModelError: a format that neither Octavo nor the installed ``gguf`` package knows.
    """
    if type_name in _PLAIN:
        values = raw.view(-1).view(_PLAIN[type_name]).view(shape)
        return values.to(dtype or values.dtype, copy=True)
    elements, size = _BLOCKS[type_name]
    blocks = raw.view(-1, size)
    out = torch.empty(blocks.shape[0], elements, dtype=dtype or torch.float32, device=raw.device)
    unpack = _UNPACKERS.get(type_name) or _package_unpacker(type_name)
    chunk = (_CHUNK_ELEMENTS if raw.device.type == "cpu" else _DEVICE_CHUNK_ELEMENTS) // elements
    direct = out.dtype == torch.float32
    scratch = out if direct else torch.empty(min(chunk, blocks.shape[0]), elements, dtype=torch.float32, device=raw.device)
    for start in range(0, blocks.shape[0], chunk):
        part = blocks[start : start + chunk]
        if direct:
            unpack(part, out[start : start + chunk])
        else:
            unpack(part, scratch[: part.shape[0]])
            out[start : start + chunk].copy_(scratch[: part.shape[0]])
    return out.view(shape)


def _half(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """The float16 at byte ``start`` of every block, as float32 [N, 1]."""
    return blocks[:, start : start + 2].view(torch.float16).to(torch.float32)


def _q4_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    _nibbles(blocks[:, 2:], out)
    out.sub_(8).mul_(_half(blocks, 0))


def _q4_1(blocks: torch.Tensor, out: torch.Tensor) -> None:
    _nibbles(blocks[:, 4:], out)
    out.mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q5_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    _five_bits(blocks[:, 6:], blocks[:, 2:6], out)
    out.sub_(16).mul_(_half(blocks, 0))


def _q5_1(blocks: torch.Tensor, out: torch.Tensor) -> None:
    _five_bits(blocks[:, 8:], blocks[:, 4:8], out)
    out.mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q8_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    torch.mul(blocks[:, 2:].view(torch.int8), _half(blocks, 0), out=out)


def _nibbles(packed: torch.Tensor, out: torch.Tensor) -> None:
    """uint8 [N, 16] → out [N, 32]: elements 0 … 15 are the low halves, 16 … 31 the high ones."""
    out[:, :16].copy_(packed & 15)
    out[:, 16:].copy_(packed >> 4)


def _five_bits(packed: torch.Tensor, high: torch.Tensor, out: torch.Tensor) -> None:
    """As ``_nibbles``, with element i's fifth bit at bit i of the 32 in ``high`` uint8 [N, 4]."""
    bits = ((high.unsqueeze(-1) >> _shifts(8, 1, high.device)) & 1).view(-1, 32) << 4
    out[:, :16].copy_((packed & 15) | bits[:, :16])
    out[:, 16:].copy_((packed >> 4) | bits[:, 16:])


def _shifts(count: int, step: int, device: torch.device) -> torch.Tensor:
    return torch.arange(0, count * step, step, dtype=torch.uint8, device=device)


def _split(packed: torch.Tensor, width: int, bits: int, count: int) -> torch.Tensor:
    """uint8 [N, G * width] → uint8 [N, G * count * width]: each run of ``width`` bytes gives ``count`` runs, low bits first."""
    runs = packed.unflatten(1, (-1, 1, width))
    return ((runs >> _shifts(count, bits, packed.device).view(1, 1, -1, 1)) & ((1 << bits) - 1)).flatten(1)


def _q2_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    scales, d, dmin = blocks[:, :16], _half(blocks, 80), _half(blocks, 82)
    values = out.view(-1, 16, 16)
    values.copy_(_split(blocks[:, 16:80], 32, 2, 4).view(-1, 16, 16))
    values.mul_((d * (scales & 15)).unsqueeze(-1)).sub_((dmin * (scales >> 4)).unsqueeze(-1))


def _q3_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    packed, d = blocks[:, 96:108], _half(blocks, 108)
    scales = _split(packed[:, :8], 8, 4, 2) | (_split(packed[:, 8:], 4, 2, 4) << 4)  # [N, 16], six bits each
    low = _split(blocks[:, 32:96], 32, 2, 4)
    absent = _split(blocks[:, :32], 32, 1, 8) ^ 1  # a clear bit takes 4 away
    values = out.view(-1, 16, 16)
    values.copy_((low.view(torch.int8) - (absent << 2).view(torch.int8)).view(-1, 16, 16))
    values.mul_((d * (scales.view(torch.int8) - 32)).unsqueeze(-1))


def _q4_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    _scale_min_k(blocks, _split(blocks[:, 16:144], 32, 4, 2), out)


def _q5_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    _scale_min_k(blocks, _split(blocks[:, 48:176], 32, 4, 2) | (_split(blocks[:, 16:48], 32, 1, 8) << 4), out)


def _scale_min_k(blocks: torch.Tensor, values: torch.Tensor, out: torch.Tensor) -> None:
    """Q4_K and Q5_K: eight runs of 32, each with a six-bit scale and minimum packed into 12 bytes (4 low, 4 low, 4 mixed)."""
    d, dmin, packed = _half(blocks, 0), _half(blocks, 2), blocks[:, 4:16]
    low_scale, low_min, mixed = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scale = torch.cat([low_scale & 63, (mixed & 15) | ((low_scale >> 2) & 48)], dim=1)
    minimum = torch.cat([low_min & 63, (mixed >> 4) | ((low_min >> 2) & 48)], dim=1)
    runs = out.view(-1, 8, 32)
    runs.copy_(values.view(-1, 8, 32))
    runs.mul_((d * scale).unsqueeze(-1)).sub_((dmin * minimum).unsqueeze(-1))


def _q6_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    scales, d = blocks[:, 192:208].view(torch.int8), _half(blocks, 208)
    values = _split(blocks[:, :128], 64, 4, 2) | (_split(blocks[:, 128:192], 32, 2, 4) << 4)
    runs = out.view(-1, 16, 16)
    runs.copy_((values.view(torch.int8) - 32).view(-1, 16, 16))
    runs.mul_((d * scales).unsqueeze(-1))


_Unpacker = Callable[[torch.Tensor, torch.Tensor], None]
_UNPACKERS: dict[str, _Unpacker] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}


def _package_unpacker(type_name: str) -> _Unpacker:
    """The ``gguf`` package's numpy code for a format that has none here."""
    from gguf import GGMLQuantizationType, quants

    qtype = getattr(GGMLQuantizationType, type_name, None)

    def unpack(blocks: torch.Tensor, out: torch.Tensor) -> None:
        try:
            values = quants.dequantize(blocks.cpu().numpy(), qtype)
        except (NotImplementedError, KeyError) as error:
            raise ModelError(f"GGUF type {type_name} cannot be dequantized: {error}. Use a Q4_K_M, Q8_0 or F16 file.") from error
        out.copy_(torch.from_numpy(values))

    return unpack
