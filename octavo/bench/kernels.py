"""``octavo bench kernels``: runs the benchmarks that lie beside the kernels, each in a process of its own.

A process each, so that none finds the GPU's memory filled or the environment changed by another; and so that they are
what ``python -m octavo.kernels.bench.NAME`` runs.
"""

from __future__ import annotations

import importlib.util
import pkgutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from octavo.errors import ConfigError

PACKAGE = "octavo.kernels.bench"
ELSEWHERE = {"attention": "octavo.attention.bench", "cpu": "octavo.kernels.cpu.bench"}
WITHOUT_GPU = ("cpu",)


def find() -> dict[str, str]:
    """Name to module of every benchmark that this installation has: modules that do something when run as a program."""
    package = importlib.util.find_spec(PACKAGE)
    folders = (package.submodule_search_locations or []) if package is not None else []
    names = {module.name: f"{PACKAGE}.{module.name}" for module in pkgutil.iter_modules(list(folders))}
    return {name: module for name, module in (names | ELSEWHERE).items() if _runs(module)}


def _runs(module: str) -> bool:
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        return False
    return spec is not None and spec.origin is not None and "__main__" in Path(spec.origin).read_text(encoding="utf-8")


def run(names: Sequence[str]) -> int:
    """Run those named, or all that this machine can. Status 1 if one failed, or found a wrong result."""
    known = find()
    for name in names:
        if name not in known:
            raise ConfigError(f"Unknown kernel benchmark {name!r}; known are {', '.join(known)}.")
    has_gpu = _has_gpu()
    chosen = list(names) or [name for name in known if has_gpu or name in WITHOUT_GPU]
    needy = [name for name in chosen if name not in WITHOUT_GPU]
    if needy and not has_gpu:
        raise ConfigError(f"The kernel benchmark {needy[0]} needs an NVIDIA GPU; without one there are {', '.join(WITHOUT_GPU)}.")
    status = 0
    for name in chosen:
        print(f"== {name}", flush=True)
        if subprocess.run([sys.executable, "-m", known[name]]).returncode:
            print(f"octavo: error: the kernel benchmark {name} failed, or found a wrong result", file=sys.stderr, flush=True)
            status = 1
    return status


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
