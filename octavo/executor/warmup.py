"""Compiles a model's Triton kernels before they are needed, in processes of their own, while the engine imports and loads.

``KernelWarmup.start`` spawns ``python -m octavo.executor.warmup`` with a JSON description of the model on standard input. That
process runs the steps that the engine will run, with tensors that have no memory (torch's "meta" device) in place of a GPU's, and
notes every kernel launch with its arguments: so what is compiled is what will be asked for, and no list of kernels must be kept.
Forked children then compile what was noted into Triton's cache on disk, the kernels of the first answer first. A kernel that
is not there in time is compiled where it is needed, as without all this; and so is everything if anything here fails.

Nothing here touches the GPU but a question to the driver, which makes no context. A stamp file in Triton's cache says that all
was compiled for such a model, with such versions, for such a GPU: then nothing is started.

This module imports nothing heavy: ``octavo/engine/process.py`` starts it before torch is imported.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import hashlib
import json
import logging
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from octavo.config import EngineConfig
from octavo.models.config import ModelConfig

logger = logging.getLogger("octavo.executor")

MAX_PROCESSES = 12
_ENVIRONMENT = ("TRITON_", "CUDA_VISIBLE_DEVICES", "LLVM_", "OCTAVO_FUSED_WRITE")  # variables that may change what is compiled


class KernelWarmup:
    """A running (or not needed, or failed) warm-up. Every method is safe to call whatever became of it."""

    def __init__(self, process: subprocess.Popen[bytes] | None = None) -> None:
        self._process = process
        self._seen = ""

    @classmethod
    def start(cls, config: EngineConfig, model: ModelConfig, max_model_len: int) -> KernelWarmup:
        """Never raises and never waits; on a CPU, or when the stamp says that all is there, nothing is started."""
        try:
            processes = _processes()
            elsewhere = config.device == "cpu" or config.attention_backend == "reference" or os.environ.get("TRITON_INTERPRET") == "1"
            if elsewhere or processes < 1 or not _has_gpu():
                return cls()
            task = describe(config, model, max_model_len)
            stamp = stamp_path(task)
            if stamp.exists():
                return cls()
            request = {**task, "processes": processes, "stamp": str(stamp), "parent": os.getpid()}
            return cls(_spawn(request))
        except Exception as error:  # noqa: BLE001 - it only would have saved time
            logger.debug("kernels are not compiled ahead: %s: %s", type(error).__name__, error)
            return cls()

    def wait_first(self, timeout_s: float = 20.0) -> None:
        """Wait until the kernels of the first answer are compiled, or the process has ended, or time is up."""
        self._wait("first", timeout_s)

    def wait_all(self, timeout_s: float) -> bool:
        """Wait for the end: whether everything was compiled."""
        return self._wait("all", timeout_s)

    def _wait(self, word: str, timeout_s: float) -> bool:
        process, deadline = self._process, time.monotonic() + timeout_s
        if process is None or process.stdout is None:
            return False
        with contextlib.suppress(OSError, ValueError):
            while word not in self._seen.split() and (left := deadline - time.monotonic()) > 0:
                if not select.select([process.stdout], [], [], left)[0]:
                    break
                data = os.read(process.stdout.fileno(), 4096)
                if not data:
                    break
                self._seen += data.decode()
        return word in self._seen.split()

    def ended(self) -> bool:
        """Whether nothing is being compiled (any more)."""
        return self._process is None or self._process.poll() is not None

    def stop(self) -> None:
        """End it, done or not; what it has compiled stays."""
        process, self._process = self._process, None
        if process is None:
            return
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()  # its children look at their input between two kernels
        process.poll()


def _spawn(request: dict[str, Any]) -> subprocess.Popen[bytes]:
    root = str(Path(__file__).resolve().parents[2])
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    code = f"import sys; p = [*filter(None, sys.path)]; {root!r} in p or p.insert(0, {root!r}); sys.path = p; "
    process = subprocess.Popen(
        [sys.executable, "-c", code + "from octavo.executor.warmup import main; main()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=None if logger.isEnabledFor(logging.DEBUG) else subprocess.DEVNULL,
        env=environment,
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps(request).encode() + b"\n")
    process.stdin.flush()
    return process


def _processes() -> int:
    """Half of the cores; the rest is for the engine and the HTTP process."""
    return min(MAX_PROCESSES, len(os.sched_getaffinity(0)) // 2)


def _has_gpu() -> bool:
    return os.path.exists("/proc/driver/nvidia/version") or os.path.exists("/dev/nvidiactl")


# ---------------------------------------------------------------------------------------------------------------------
# what is compiled, and whether it was


def describe(config: EngineConfig, model: ModelConfig, max_model_len: int) -> dict[str, Any]:
    """All that decides which kernels the engine launches, as JSON."""
    fields = dataclasses.asdict(model)
    for name in ("path", "generation_defaults", "eos_token_ids", "bos_token_id", "raw"):
        fields.pop(name)
    fields["raw"] = {k: v for k, v in model.raw.items() if k == "quantization_config"} if isinstance(model.raw, dict) else {}
    options = ("dtype", "quantization", "block_size", "max_num_seqs", "max_num_batched_tokens", "enable_chunked_prefill", "enforce_eager")
    options += ("attention_backend", "tensor_parallel_size", "load_format")
    return {"model": fields, "config": {name: getattr(config, name) for name in options}, "max_model_len": max_model_len}


def stamp_path(task: dict[str, Any]) -> Path:
    """Where it is noted that everything for ``task`` is in Triton's cache: a name of the task, versions, sources, environment, GPU."""
    folder = triton_cache_dir()
    key = json.dumps([task, _versions(), _sources(), _environment(), _gpus(), folder], sort_keys=True, default=str)
    return Path(folder) / f"octavo-{hashlib.sha256(key.encode()).hexdigest()[:24]}.done"


def triton_cache_dir() -> str:
    """As Triton finds it, without importing it."""
    home = os.environ.get("TRITON_HOME") or os.path.expanduser("~/")
    return os.environ.get("TRITON_CACHE_DIR", "").strip() or os.path.join(home, ".triton", "cache")


def _versions() -> list[str]:
    from importlib.metadata import PackageNotFoundError, version

    found = [sys.version]
    for name in ("torch", "triton", "tokenspeed-fa3"):
        with contextlib.suppress(PackageNotFoundError):
            found.append(f"{name} {version(name)}")
    return found


def _sources() -> str:
    """A fingerprint of Octavo's own files: a kernel that was edited must be compiled anew."""
    root = Path(__file__).resolve().parents[1]
    digest = hashlib.sha256(str(root).encode())
    for part in ("kernels", "attention", "layers", "models", "executor", "sampling", "quantization"):
        for path in sorted((root / part).rglob("*")):
            if path.suffix in (".py", ".json"):
                status = path.stat()
                digest.update(f"{path.name} {status.st_size} {status.st_mtime_ns};".encode())
    return digest.hexdigest()


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(_ENVIRONMENT)}


def _gpus() -> list[str]:
    """The driver and the GPUs, as far as the system tells without the driver's library."""
    found = []
    for path in ["/proc/driver/nvidia/version", *sorted(map(str, Path("/proc/driver/nvidia/gpus").glob("*/information")))]:
        with contextlib.suppress(OSError):
            lines = Path(path).read_text(errors="replace").splitlines()
            found += [line for line in lines if not line.startswith(("IRQ", "Bus", "DMA", "Device Minor"))]
    return found


# ---------------------------------------------------------------------------------------------------------------------
# the process


@dataclasses.dataclass(frozen=True)
class Gpu:
    """Compute capability (major, minor), number of multiprocessors, and memory in bytes."""

    capability: tuple[int, int]
    multiprocessors: int
    total_memory: int = 0


def ask_driver() -> Gpu:
    """The first visible GPU. Raises OSError without a driver. Makes no context on the GPU."""
    cuda = ctypes.CDLL("libcuda.so.1")
    device = ctypes.c_int()
    if cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), 0):
        raise OSError("the CUDA driver shows no device")

    def attribute(number: int) -> int:
        value = ctypes.c_int()
        if cuda.cuDeviceGetAttribute(ctypes.byref(value), number, device):
            raise OSError(f"the CUDA driver does not tell attribute {number}")
        return value.value

    total = ctypes.c_size_t()
    if cuda.cuDeviceTotalMem_v2(ctypes.byref(total), device):
        raise OSError("the CUDA driver does not tell the device's memory")
    return Gpu((attribute(75), attribute(76)), attribute(16), total.value)


def open_gpu() -> None:
    """Make the context on the first visible GPU that torch will use, which takes a while; beside torch's import it costs nothing.

    Never raises: without a GPU, or a driver, there is nothing to do.
    """
    with contextlib.suppress(OSError, AttributeError):
        cuda = ctypes.CDLL("libcuda.so.1")
        device, context = ctypes.c_int(), ctypes.c_void_p()
        if not cuda.cuInit(0) and not cuda.cuDeviceGet(ctypes.byref(device), 0):
            cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)  # kept for the life of the process


def main() -> None:
    """Read the task from standard input; write "first", then "all" to standard output as they are done."""
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    logger.setLevel(logging.DEBUG)  # standard error is closed to it unless the engine logs as much
    request = json.loads(sys.stdin.readline())
    begun = time.perf_counter()
    gpu = Gpu(tuple(request["gpu"][:2]), *request["gpu"][2:]) if "gpu" in request else ask_driver()
    from octavo.executor import kernel_trace

    parts = kernel_trace.trace(request, gpu)

    def find(wanted: str) -> list[Callable[[], Any]]:
        launches = next(parts)
        logger.debug("%d kernels %s, found after %.1f s", len(launches), wanted, time.perf_counter() - begun)
        return [launch.compile for launch in launches]

    # The first answer waits for the first ones, so no core is spared; the others are looked for meanwhile.
    first = [kernel_trace.build_driver_module, *find("for the first answer")]
    manager = os.fork()
    if manager == 0:
        failed = compile_all(first, request["processes"] * 2, {len(first): "first"})
        logger.debug("those compiled after %.1f s, %d failed", time.perf_counter() - begun, failed)
        os._exit(failed > 0)
    others = find("for other steps")
    well = os.waitpid(manager, 0)[1] == 0
    os.nice(19)  # the engine, which serves meanwhile, goes first: launching was twice as slow beside compilers at 5
    failed = compile_all(others, request["processes"], {})
    logger.debug("all compiled after %.1f s, %d failed", time.perf_counter() - begun, failed)
    if well and not failed:
        _write_stamp(Path(request["stamp"]))
        _say("all")
    os._exit(0)


def _say(word: str) -> None:
    with contextlib.suppress(OSError):
        os.write(1, word.encode() + b"\n")


def _write_stamp(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}")
    part.write_text(time.strftime("%Y-%m-%d %H:%M:%S\n"))
    os.replace(part, path)


def compile_all(jobs: list[Callable[[], Any]], processes: int, milestones: dict[int, str]) -> int:
    """Run all jobs in forked children, in order, each when a child is free; how many failed (or were left when the parent went).

    ``milestones``: number of jobs -> a word written to standard output when all jobs before it are done.
    """
    numbers_out, numbers_in = os.pipe()
    results_out, results_in = os.pipe()
    children = []
    for _ in range(max(1, min(processes, len(jobs)))):
        child = os.fork()
        if child == 0:
            os.close(numbers_in)
            _child(jobs, numbers_out, results_in)
        children.append(child)
    os.close(numbers_out)
    os.close(results_in)
    done, failed = [False] * len(jobs), len(jobs)
    with contextlib.suppress(BrokenPipeError):
        os.write(numbers_in, b"".join(i.to_bytes(4, "little") for i in range(len(jobs))))  # a pipe holds 16,000 of them
    os.close(numbers_in)
    for number, well in _records(results_out):
        done[number] = True
        failed -= well
        for count in [c for c in milestones if all(done[:c])]:
            _say(milestones.pop(count))
    for child in children:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(child, 0)
    return failed


def _records(pipe: int) -> Iterator[tuple[int, bool]]:
    while record := os.read(pipe, 5):
        yield int.from_bytes(record[:4], "little"), bool(record[4])


def _child(jobs: list[Callable[[], Any]], numbers: int, results: int) -> None:
    """Take numbers from the pipe, 4 bytes at a time, which no other child can split."""
    code = 1
    with contextlib.suppress(BaseException):
        while (number := os.read(numbers, 4)) and not _left_alone():
            index, well = int.from_bytes(number, "little"), 1
            try:
                jobs[index]()
            except Exception as error:  # noqa: BLE001 - the engine meets it again, or never needs it
                well = 0
                logger.debug("kernel %d: %s: %.200s", index, type(error).__name__, error)
            os.write(results, number + bytes([well]))
        code = 0
    os._exit(code)


def _left_alone() -> bool:
    """Whether the engine has closed our standard input: it is gone, or has had enough."""
    ready = select.select([0], [], [], 0)[0]
    return bool(ready) and not os.read(0, 1)


if __name__ == "__main__":
    main()
