"""The HTTP process's hold on the engine process: start it, talk to it, know whether it lives, end it."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
from typing import Any

import msgspec
import zmq

from octavo.config import EngineConfig
from octavo.env import share_cores
from octavo.types import EngineInput, EngineOutput


class EngineProcess:
    """A child process and two private Unix sockets (in a folder that only this user can enter)."""

    def __init__(self, config: EngineConfig, model_path: str, log_level: str = "info") -> None:
        self.model_path = model_path
        self.folder = tempfile.mkdtemp(prefix="octavo-")
        self.context = zmq.Context()
        self.push = self._bind(zmq.PUSH, "in")
        self.pull = self._bind(zmq.PULL, "out")
        self.encoder = msgspec.msgpack.Encoder()
        self.decoder = msgspec.msgpack.Decoder(EngineOutput)
        start = {
            "config": dataclasses.asdict(config),
            "model_path": model_path,
            "to_engine": self._address("in"),
            "from_engine": self._address("out"),
            "log_level": log_level,
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "octavo.engine.process"],
            stdin=subprocess.PIPE,
            env=_child_environment(),
        )
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(start).encode() + b"\n")
        self.process.stdin.flush()

    def send(self, message: EngineInput) -> None:
        self.push.send(self.encoder.encode(message))

    def decode(self, data: bytes) -> EngineOutput:
        return self.decoder.decode(data)

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def close(self, timeout_s: float = 5.0) -> None:
        """End the process (its standard input closes, then it is killed) and remove the sockets."""
        if self.process.stdin is not None and not self.process.stdin.closed:
            self.process.stdin.close()
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.push.close(0)
        self.pull.close(0)
        self.context.term()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _address(self, name: str) -> str:
        return f"ipc://{self.folder}/{name}"

    def _bind(self, kind: int, name: str) -> Any:
        socket = self.context.socket(kind)
        socket.setsockopt(zmq.SNDHWM if kind == zmq.PUSH else zmq.RCVHWM, 0)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(self._address(name))
        return socket


def _child_environment() -> dict[str, str]:
    """The child imports the same Octavo as this process, wherever that was found."""
    import octavo

    root = os.path.dirname(os.path.dirname(os.path.abspath(octavo.__file__)))
    env = dict(os.environ)
    paths = [p for p in env.get("PYTHONPATH", "").split(os.pathsep) if p]
    share_cores(env)
    env["PYTHONPATH"] = os.pathsep.join([root, *(p for p in paths if p != root)])
    return env
