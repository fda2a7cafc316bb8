"""A real server on a real port, as a subprocess, for end-to-end tests."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

from tests.waiting import PATIENCE_S, free_port

ROOT = Path(__file__).resolve().parents[2]


def _end_with_parent() -> None:
    """A test run that is killed leaves no servers behind (Linux: PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


class RunningServer:
    """``python -m octavo serve`` with the given flags; ``stop()`` sends SIGTERM and returns the exit code."""

    def __init__(self, *flags: str, env: dict[str, str] | None = None, ready_s: float = 240.0) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = tempfile.NamedTemporaryFile("w+", suffix=".log", delete=False)
        if not {"--kv-cache-memory", "--num-gpu-blocks-override"} & set(flags):  # several run at the same time
            flags = ("--kv-cache-memory", "512M", *flags)
        command = [sys.executable, "-m", "octavo", "serve", "--port", str(self.port), *flags]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **(env or {})}
        self.process = subprocess.Popen(
            command, stdout=self.log, stderr=subprocess.STDOUT, env=environment, cwd=ROOT, preexec_fn=_end_with_parent
        )
        deadline = time.monotonic() + ready_s
        while not self.healthy():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.process.kill()
                raise RuntimeError(f"the server did not come up:\n{self.output()}")
            time.sleep(0.05)

    def healthy(self) -> bool:
        try:
            with urllib.request.urlopen(self.url + "/health", timeout=PATIENCE_S) as response:
                return response.status == 200
        except (urllib.error.URLError, OSError):
            return False

    def metric(self, name: str) -> float:
        """Sum of a metric's samples, 0 when there are none."""
        with urllib.request.urlopen(self.url + "/metrics", timeout=PATIENCE_S) as response:
            lines = response.read().decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((name + "{", name + " ")))

    def output(self) -> str:
        return Path(self.log.name).read_text()

    def pids(self) -> list[int]:
        """The server and its children."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [self.process.pid, *map(int, children)]

    def resident_bytes(self) -> int:
        total = 0
        for pid in self.pids():
            for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                if line.startswith("VmRSS:"):
                    total += int(line.split()[1]) * 1024
        return total

    def open_files(self) -> int:
        return sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in self.pids())

    def stop(self, timeout_s: float = PATIENCE_S) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.log.close()
        Path(self.log.name).unlink(missing_ok=True)
        return self.process.returncode
