"""Install the build of torch that fits this machine into the Python that runs this script. Needs nothing but pip.

A machine with an NVIDIA GPU gets the CUDA build. Elsewhere the CPU build is wanted: on Linux x86-64 the package index's
plain ``torch`` is the CUDA build with several GB of libraries, so PyTorch's own index of CPU builds is asked first,
and only if it answers within seconds.

Overrides: ``OCTAVO_TORCH_SPEC`` (what to install, e.g. ``torch==2.12.0``) and ``OCTAVO_TORCH_INDEX_URL`` (where from).
``CUDA_VISIBLE_DEVICES=`` (empty) counts as no GPU.
"""

from __future__ import annotations

import glob
import os
import platform
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Mapping

MINIMUM = (2, 11)
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PROBE_SECONDS = 4.0


def log(text: str) -> None:
    print(f"install_torch: {text}", flush=True)


def has_nvidia_gpu(environ: Mapping[str, str]) -> bool:
    if environ.get("CUDA_VISIBLE_DEVICES", "unset").strip() in ("", "-1"):
        return False
    if glob.glob("/proc/driver/nvidia/gpus/*"):
        return True
    if shutil.which("nvidia-smi") is None:
        return False
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return listed.returncode == 0 and "GPU" in listed.stdout


def plan(environ: Mapping[str, str], *, gpu: bool, cpu_index_matters: bool) -> list[tuple[str, list[str]]]:
    """What to try, in order: (why, pip's arguments). The first that succeeds ends it."""
    spec, index = environ.get("OCTAVO_TORCH_SPEC"), environ.get("OCTAVO_TORCH_INDEX_URL")
    latest = f"torch>={MINIMUM[0]}.{MINIMUM[1]}"
    if spec or index:
        return [("as OCTAVO_TORCH_SPEC / OCTAVO_TORCH_INDEX_URL say", [spec or latest, *(["--index-url", index] if index else [])])]
    if gpu:
        return [("the CUDA build, for this machine's NVIDIA GPU", [latest])]
    if not cpu_index_matters:
        return [("the plain build, which is the CPU build on this platform", [latest])]
    return [
        ("the CPU build from PyTorch's index", [latest, "--index-url", CPU_INDEX, "--timeout", "15", "--retries", "1"]),
        ("torch 2.13.0 from the default index", ["torch==2.13.0"]),
        ("any torch that is new enough from the default index", [latest]),
    ]


def reachable(index: str) -> bool:
    """Whether an index answers at all: pip itself would go on trying for minutes."""
    try:
        with urllib.request.urlopen(f"{index}/torch/", timeout=PROBE_SECONDS) as answer:
            return answer.status == 200
    except (OSError, ValueError):
        return False


def installed_problem(gpu: bool) -> str | None:
    """None if the torch that is there will do; else what is wrong with it."""
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name == "torch":
            return "torch is not installed yet"
        return f"torch can't be imported ({type(error).__name__}: {error})"
    except Exception as error:  # a broken install fails in many ways, and any of them is a reason to install
        return f"torch can't be imported ({type(error).__name__}: {error})"
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < MINIMUM:
        return f"torch {torch.__version__} is older than {MINIMUM[0]}.{MINIMUM[1]}"
    if gpu and torch.version.cuda is None:
        return f"torch {torch.__version__} is a CPU build, and this machine has an NVIDIA GPU"
    log(f"torch {torch.__version__} is there (CUDA {torch.version.cuda or 'none'})")
    if gpu and not torch.cuda.is_available():
        log("warning: this torch can't use the GPU; its CUDA is probably newer than the driver. Update the driver, or set")
        log("  OCTAVO_TORCH_INDEX_URL=https://download.pytorch.org/whl/cu126 (or another CUDA version) and run again.")
    return None


def check_in_new_process(gpu: bool) -> str | None:
    """As ``installed_problem``, for a torch that was installed after this process started."""
    code = "import sys, install_torch; problem = install_torch.installed_problem(sys.argv[1] == 'gpu'); sys.exit(problem)"
    folder = os.path.dirname(os.path.abspath(__file__))
    done = subprocess.run([sys.executable, "-c", code, "gpu" if gpu else "cpu"], cwd=folder, capture_output=True, text=True)
    print(done.stdout, end="", flush=True)
    return None if done.returncode == 0 else (done.stderr.strip() or f"exit status {done.returncode}")


def main() -> int:
    gpu = has_nvidia_gpu(os.environ)
    problem = check_in_new_process(gpu)
    if problem is None:
        return 0
    log(problem.splitlines()[-1])
    replace = ["--force-reinstall"] if "is a CPU build" in problem else []
    linux_x86 = sys.platform == "linux" and platform.machine() in ("x86_64", "AMD64")
    for why, arguments in plan(os.environ, gpu=gpu, cpu_index_matters=linux_x86):
        if CPU_INDEX in arguments and not reachable(CPU_INDEX):
            log(f"{CPU_INDEX} does not answer from here; trying the default index instead")
            continue
        log(f"installing {why}: pip install {' '.join(arguments)}")
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *replace, *arguments]
        if subprocess.run(pip).returncode != 0:
            log("that did not work")
            continue
        problem = check_in_new_process(gpu)
        if problem is None:
            return 0
        log(problem.splitlines()[-1])
    log("error: no torch could be installed. Set OCTAVO_TORCH_SPEC and OCTAVO_TORCH_INDEX_URL, or install torch into .venv yourself.")
    return 1


if __name__ == "__main__":
    sys.exit(main())
