"""Checkpoint files → named tensors: safetensors, GGUF, seeded dummies. Names are Hugging Face's, whatever the format.

Nothing here imports torch before a tensor is asked for, so that configuration and tokenizer readers may look into
checkpoint files without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from octavo.errors import ModelError

if TYPE_CHECKING:
    import torch

    from octavo.models.config import ModelConfig

__all__ = ["fill_dummy", "iterate_weights", "rope_factors"]


def iterate_weights(
    config: ModelConfig,
    load_format: str = "auto",
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    progress: Callable[[float], None] | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of the checkpoint once, as (Hugging Face name, tensor), one in memory at a time.

    Args:
        config: where the checkpoint is and, for GGUF, how many heads its q and k rows belong to.
        load_format: ``auto`` takes ``config.weights_format``.
        dtype: type of floating-point tensors; None keeps the stored one (quantized GGUF tensors become float32).
        device: where to put them; GGUF tensors travel there packed and are dequantized there.
        progress: called with the fraction of bytes read, 0 to 1, after each tensor.

    A safetensors tensor may be a view of the mapped file: copy it, do not write to it.

    Raises:
        ModelError: a file or shard that is missing, truncated or corrupt; a tensor or type that is unknown.
    """
    weights_format = config.weights_format if load_format == "auto" else load_format
    if weights_format == "gguf":
        from octavo.weights.gguf_tensors import iterate_gguf

        return iterate_gguf(config, dtype=dtype, device=device, progress=progress)
    if weights_format == "safetensors":
        from octavo.weights.safetensors_files import iterate_safetensors

        return iterate_safetensors(config.path, dtype=dtype, device=device, progress=progress)
    raise ModelError(f"Weights of format {weights_format!r} cannot be read from a file; supported: safetensors, gguf.")


def rope_factors(config: ModelConfig) -> torch.Tensor | None:
    """The rotary frequency divisors that a GGUF file carries as tensor ``rope_freqs.weight``, float32 [rotary_dim / 2].

    None for other formats and for files without it. ``config.rope`` holds the same numbers already.
    """
    if not config.path.endswith(".gguf"):
        return None
    from octavo.weights.gguf_file import GgufFile

    values = GgufFile(config.path).read_float32("rope_freqs.weight")
    if values is None:
        return None
    import torch

    return torch.tensor(values, dtype=torch.float32)


def fill_dummy(parameters: Iterable[tuple[str, torch.Tensor]], seed: int) -> None:
    """Fill named parameters in place with small seeded random values; see ``octavo.weights.dummy``."""
    from octavo.weights.dummy import fill_dummy as fill

    fill(parameters, seed)
