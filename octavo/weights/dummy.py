"""Seeded random weights: for benchmarks and tests of shapes, without a checkpoint."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch

from octavo.errors import ModelError

_SPREAD = 0.035  # uniform in ±0.035 has the standard deviation 0.02 that language models are initialized with
_TILE = 4_194_301  # a prime, so that the repeats of a tile never line up with rows and no two rows are equal


@torch.no_grad()
def fill_dummy(parameters: Iterable[tuple[str, torch.Tensor]], seed: int) -> None:
    """Fill named parameters in place: norm weights in 1 ± 0.1, everything else uniform in ±0.035.

    Each parameter has its own random stream, a function of (seed, name), so neither the order nor the presence of
    others changes it. Streams differ between kinds of device. Works on any device, without a host copy.
    Large parameters on the CPU repeat a tile of random numbers, shifted against their rows.

    Raises:
        ModelError: a parameter that is not floating-point.
    """
    for name, parameter in parameters:
        if not parameter.is_floating_point():
            raise ModelError(f"Dummy weights for {name} of type {parameter.dtype} cannot be made; only floating-point ones can.")
        digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
        generator = torch.Generator(device=parameter.device).manual_seed(int.from_bytes(digest, "little") >> 1)
        low, high = (0.9, 1.1) if _is_norm_weight(name) else (-_SPREAD, _SPREAD)
        if parameter.dtype.itemsize == 1:  # float8 has no random kernels
            values = torch.empty(parameter.shape, dtype=torch.float32, device=parameter.device)
            parameter.copy_(values.uniform_(low, high, generator=generator))
        elif parameter.device.type == "cpu" and parameter.is_contiguous() and parameter.numel() > _TILE:
            _fill_tiled(parameter.view(-1), low, high, generator)
        else:
            parameter.uniform_(low, high, generator=generator)


def _fill_tiled(flat: torch.Tensor, low: float, high: float, generator: torch.Generator) -> None:
    """Draw one tile and repeat it: on a CPU a copy is ten times faster than random numbers, which one thread draws."""
    flat[:_TILE].uniform_(low, high, generator=generator)
    for start in range(_TILE, flat.numel(), _TILE):
        count = min(_TILE, flat.numel() - start)
        flat[start : start + count].copy_(flat[:count])


def _is_norm_weight(name: str) -> bool:
    module, _, kind = name.rpartition(".")
    return kind == "weight" and module.rpartition(".")[2].endswith("norm")
