"""Signals before the server listens, on the real command in a process of its own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.tiny_model import make_tiny_model
from tests.waiting import runs, until

ROOT = Path(__file__).resolve().parents[2]
PATIENT = {"HF_HUB_DOWNLOAD_TIMEOUT": "200", "HF_HUB_ETAG_TIMEOUT": "200"}


def start(tmp_path: Path, *words: str, **env: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path), **env}
    command = [sys.executable, "-m", "octavo", "serve", "--port", "0", *words]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_in_the_middle_of_a_download_ends_the_process(number: signal.Signals, tmp_path: Path) -> None:
    with socket.socket() as hub:  # takes connections, and never answers
        hub.bind(("127.0.0.1", 0))
        hub.listen()
        hub.settimeout(60)
        endpoint = f"http://127.0.0.1:{hub.getsockname()[1]}"
        process = start(tmp_path, "some/model", HF_ENDPOINT=endpoint, HF_HOME=str(tmp_path / "hf"), HF_HUB_OFFLINE="0", **PATIENT)
        try:
            connection, _ = hub.accept()
            begun = time.monotonic()
            process.send_signal(number)
            output, _ = process.communicate(timeout=60)
        finally:
            process.kill()
        connection.close()
    assert process.returncode == 0 and time.monotonic() - begun < 50  # far less than the download would wait
    assert "Stopped before the model was loaded" in output and "Traceback" not in output


@pytest.mark.parametrize("delay", [0.3, 0.8, 1.5])
def test_a_signal_while_the_model_loads_leaves_nothing(delay: float, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    (tmp_path / "tmp").mkdir()
    process = start(tmp_path / "tmp", str(model), "--load-format", "dummy", "--kv-cache-memory", "8M")
    try:
        time.sleep(delay)
        engines = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode in (0, -signal.SIGTERM) and "Traceback" not in output  # not yet Octavo's handler, on a slow machine
    assert not os.listdir(tmp_path / "tmp")
    until(lambda: not any(runs(pid) for pid in engines))
