"""safetensors checkpoints, sharded or not, as a stream of tensors: mapped for the CPU, streamed to a GPU (streaming.py)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import torch

from octavo.errors import ModelError
from octavo.weights.files import INDEX_NAME, find_weights, read_index, safetensors_files


def iterate_safetensors(
    folder: str,
    *,
    dtype: torch.dtype | None,
    device: torch.device | str,
    progress: Callable[[float], None] | None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) file by file; see ``octavo.weights.iterate_weights``."""
    files = safetensors_files(folder)
    if not files:
        find_weights(folder, "safetensors")  # raises, and says what the folder holds
    total, done = sum(file.stat().st_size for file in files) or 1, 0
    seen: dict[str, Path] = {}
    source = _streamed(files, device) if torch.device(device).type == "cuda" else _mapped(files)
    with contextlib.closing(source):
        for name, tensor, file in source:
            if name in seen:
                raise ModelError(f"Tensor {name} is both in {seen[name]} and in {file}.")
            seen[name] = file
            done += tensor.nbytes
            if dtype is not None and tensor.is_floating_point():
                tensor = tensor.to(dtype)
            yield name, tensor.to(device)
            if progress is not None:
                progress(min(done / total, 1.0))
    _check_index(Path(folder), seen)
    if progress is not None:
        progress(1.0)


def _mapped(files: list[Path]) -> Generator[tuple[str, torch.Tensor, Path], None, None]:
    from safetensors import SafetensorError, safe_open

    for file in files:
        try:
            with safe_open(file, framework="pt", device="cpu") as reader:
                for name in reader.keys():  # noqa: SIM118 - not a mapping
                    yield name, reader.get_tensor(name), file
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{file} cannot be read: {error}. It is truncated or corrupt; copy or download it again.") from error


def _streamed(files: list[Path], device: torch.device | str) -> Generator[tuple[str, torch.Tensor, Path], None, None]:
    from octavo.weights.streaming import Stream

    with contextlib.closing(Stream(files, device)) as stream:
        yield from stream


def _check_index(folder: Path, seen: dict[str, Path]) -> None:
    """Every tensor that the index promises must have come out of the file that it names."""
    index = folder / INDEX_NAME
    if not index.is_file():
        return
    missing = [f"{name} (in {file})" for name, file in read_index(index).items() if name not in seen]
    if missing:
        raise ModelError(f"{index} names {len(missing)} tensors that their files lack: {', '.join(missing[:8])}.")
