"""How fast safetensors files come to the GPU: mapped and copied, and streamed; out of the page cache, and from disk.

    python scripts/gpu/load_weights.py [--gib 4] [--folder /tmp/weights] [--device cuda]

Writes two files of tensors of an 8B model's sizes, and takes them again afterwards.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
import time
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

from octavo.weights.safetensors_files import _mapped  # noqa: E402
from octavo.weights.streaming import Stream  # noqa: E402

SHAPES = [(24576, 4096), (4096, 12288), (6144, 4096), (4096, 4096), (4096,)]


def make(folder: Path, gib: float) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    layer = sum(2 * torch.Size(shape).numel() for shape in SHAPES)
    layers = max(2, round(gib * 2**30 / layer))
    noise = torch.randn(24576, 4096).bfloat16()
    files = []
    for part in range(2):
        files.append(folder / f"part{part}.safetensors")
        numbers = range(part * layers // 2, (part + 1) * layers // 2)
        save_file(
            {f"{n}.{i}": noise.flatten()[: torch.Size(s).numel()].view(s).clone() for n in numbers for i, s in enumerate(SHAPES)}, files[-1]
        )
    return files


def forget(files: list[Path]) -> None:
    """Out of the page cache."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def seconds(source: Iterable[tuple[str, torch.Tensor, Path]], places: dict[str, torch.Tensor], device: str) -> float:
    begun = time.perf_counter()
    for name, tensor, _ in source:
        places[name].copy_(tensor)
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=4.0)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/octavo-weights"))
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    begun = time.perf_counter()
    files = make(args.folder, args.gib)
    size = sum(file.stat().st_size for file in files)
    print(f"{size / 2**30:.2f} GiB written in {time.perf_counter() - begun:.1f} s", flush=True)
    places = {name: torch.empty_like(tensor, device=args.device) for name, tensor, _ in _mapped(files)}
    try:
        for cold in (False, True):
            for kind in ("mapped", "streamed", "mapped", "streamed"):
                if cold:
                    forget(files)
                with contextlib.closing(_mapped(files) if kind == "mapped" else Stream(files, args.device)) as source:
                    took = seconds(source, places, args.device)
                print(f"{'disk' if cold else 'page cache':10s} {kind:9s} {took:6.2f} s  {size / took / 1e9:6.2f} GB/s", flush=True)
    finally:
        shutil.rmtree(args.folder)


if __name__ == "__main__":
    main()
