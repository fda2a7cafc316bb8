"""Engines as processes: offline workers and servers that are started with an environment of their own, and surely ended.

Processes stay in the session of the one who starts them, in a group of their own: what ends the session (a time limit outside) ends them
too, and one signal to the group reaches the processes that an engine starts. Should this process die first, the kernel kills them.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
STOP_S = 15.0
GONE_S = 3.0  # that the rest of a killed group gets, zombies that nobody waits for included
CACHES = (
    "XDG_CACHE_HOME", "OCTAVO_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "CUDA_CACHE_PATH",
    "VLLM_CACHE_ROOT", "FLASHINFER_WORKSPACE_BASE",
)  # fmt: skip


class EngineError(Exception):
    """An engine that did not start, answer or keep to its time."""


@dataclass(frozen=True)
class Engine:
    """What is compared. ``module``: octavo, vllm or transformers; ``label``: its name in results; ``site``: where it is installed,
    None: where this runs; ``caches``: folder for what it compiles; ``offline`` and ``serve``: more options, as JSON and as words."""

    module: str
    label: str
    caches: Path
    site: Path | None = None
    offline: tuple[tuple[str, Any], ...] = ()
    serve: tuple[str, ...] = ()

    def cache_of(self, model: str) -> Path:
        return self.caches / self.label / model

    def environment(self, model: str) -> dict[str, str]:
        folder = self.cache_of(model)
        folder.mkdir(parents=True, exist_ok=True)
        paths = [str(self.site)] if self.site else [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        own = {name: str(folder / name.lower()) for name in CACHES}
        settings = {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", "PYTHONPATH": os.pathsep.join(paths)}
        # vLLM's own first start otherwise spends two minutes on compiling a sampler, which no user would want counted
        return os.environ | own | settings | {"VLLM_NO_USAGE_STATS": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}

    def serve_command(self, folder: str, port: int, *, max_model_len: int, name: str = "m") -> list[str]:
        program = {"vllm": ["vllm.entrypoints.cli.main"], "octavo": ["octavo"]}[self.module]
        quiet = {"vllm": ["--disable-uvicorn-access-log"], "octavo": ["--disable-log-requests"]}[self.module]
        return [
            sys.executable, "-m", *program, "serve", folder, "--load-format", "dummy", "--max-model-len", str(max_model_len), "--host",
            "127.0.0.1", "--port", str(port), "--served-model-name", name, *quiet, *self.serve,
        ]  # fmt: skip


def _die_with_parent() -> None:
    """In the child, before it becomes the engine: SIGKILL when the parent ends (Linux)."""
    os.setpgid(0, 0)
    with contextlib.suppress(OSError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def spawn(command: Sequence[str], log: Path, environment: dict[str, str], **options: Any) -> subprocess.Popen[bytes]:
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        file.write(f"$ {' '.join(command)}\n".encode())
        file.flush()
        return subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=environment, cwd=log.parent, preexec_fn=_die_with_parent, **options
        )


def end(process: subprocess.Popen[bytes], patience_s: float = STOP_S) -> None:
    """SIGTERM to the process, then SIGKILL to its whole group: what it started goes too."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience_s)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + GONE_S
    while time.monotonic() < deadline:  # until the others are gone, too: what they held on a GPU is free then
        try:
            os.killpg(process.pid, 0)
        except (ProcessLookupError, PermissionError):
            return
        time.sleep(0.05)


def tail(log: Path, lines: int = 12) -> str:
    with contextlib.suppress(OSError):
        return "\n".join(log.read_text(errors="replace").strip().splitlines()[-lines:])
    return ""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def gpu_memory() -> tuple[int, int] | None:
    """Bytes used and there in all, of the first GPU; None without one."""
    try:
        asked = ["nvidia-smi", "--query-gpu=memory.used,memory.total", "--format=csv,noheader,nounits"]
        line = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=20).stdout.splitlines()[0]
        used, total = (int(part) * 2**20 for part in line.split(","))
        return used, total
    except (OSError, ValueError, IndexError, subprocess.SubprocessError):
        return None


def wait_for_free_gpu(seconds: float = 10.0) -> None:
    """What a killed process held is given back a moment later."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and (memory := gpu_memory()) is not None and memory[0] > 0.03 * memory[1]:
        time.sleep(0.3)


class Worker:
    """An offline engine that answers commands. ``marks``: seconds from the process's start to its stages, and its version."""

    def __init__(self, engine: Engine, folder: str, options: dict[str, Any], log: Path, timeout: float) -> None:
        self.engine, self.log = engine, log
        self._buffer = b""
        self._replies, write = os.pipe()
        options = options | dict(engine.offline)
        start = time.monotonic()
        command = [sys.executable, str(HERE / "engine_worker.py"), engine.module, folder, str(write), str(start), json.dumps(options)]
        self.process = spawn(command, log, engine.environment(Path(folder).name), stdin=subprocess.PIPE, pass_fds=(write,))
        os.close(write)
        try:
            self.marks = self._reply(timeout)
        except BaseException:  # Ctrl-C, too: nobody else knows of this process yet
            self.close(patience_s=0.5)
            raise

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def ask(self, command: dict[str, Any], timeout: float) -> dict[str, Any]:
        """Raises EngineError for what went wrong; after a timeout the worker is ended."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(command).encode() + b"\n")
            self.process.stdin.flush()
        except OSError as error:
            raise EngineError(f"the engine's process is gone ({error}): {tail(self.log)}") from None
        return self._reply(timeout)

    def _reply(self, timeout: float) -> dict[str, Any]:
        deadline = time.monotonic() + timeout
        while b"\n" not in self._buffer:
            gone = not self.alive  # asked before reading: what it wrote last is read still
            if select.select([self._replies], [], [], 0 if gone else min(max(deadline - time.monotonic(), 0), 0.5))[0]:
                data = os.read(self._replies, 65536)
                self._buffer += data
                gone = gone and not data
            elif not gone and time.monotonic() > deadline:
                self.close(patience_s=0.5)
                raise EngineError(f"no answer within {timeout:.0f} s: {tail(self.log, 3)}")
            if gone:  # children of its own may hold the pipe open
                self.close(patience_s=0.5)
                raise EngineError(f"the engine's process ended with status {self.process.returncode}: {tail(self.log)}")
        line, _, self._buffer = self._buffer.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise EngineError(answer["error"])
        return answer

    def close(self, patience_s: float = STOP_S) -> None:
        if self._replies < 0:
            return
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()  # the end of its commands: it leaves by itself
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(patience_s)
        end(self.process, 2.0)
        os.close(self._replies)
        self._replies = -1


class Server:
    """``ENGINE serve`` on a free port; use as a context. Whether it answers is for the client to find out."""

    def __init__(self, engine: Engine, folder: str, log: Path, *, max_model_len: int) -> None:
        self.engine, self.log, self.port = engine, log, free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.start = time.monotonic()
        command = engine.serve_command(folder, self.port, max_model_len=max_model_len)
        self.process = spawn(command, log, engine.environment(Path(folder).name))

    def check(self) -> None:
        if self.process.poll() is not None:
            raise EngineError(f"the server ended with status {self.process.returncode}: {tail(self.log)}")

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        end(self.process)
