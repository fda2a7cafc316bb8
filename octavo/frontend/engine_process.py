"""A front end's hold on the engine process: start it, or join it; talk to it, know whether it lives, end it."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from typing import Any

import msgspec
import zmq

from octavo.config import EngineConfig
from octavo.env import prepare_cpu_libraries
from octavo.errors import EngineDeadError
from octavo.types import EngineInput, EngineOutput

# Imports the same Octavo as this process, wherever that was found, and nothing out of the working directory, where a
# user's json.py may lie (``-m`` would put it first; ``-P`` needs Python 3.11).
_CHILD = (
    "import sys; p = [*filter(None, sys.path)]; {root!r} in p or p.insert(0, {root!r}); sys.path = p; "
    "from octavo.engine.process import main; main()"
)

CONNECT_MS = 5000  # the engine connects at once; its sockets must be reachable until it has


class EngineLink:
    """Two private Unix sockets (in a folder that only this user can enter) that an engine connects to.

    ``prefix`` begins the ids of this front end's requests, if it shares the engine with others.
    """

    prefix = ""

    def __init__(self, model_path: str) -> None:
        self.model_path = model_path
        self.folder = tempfile.mkdtemp(prefix="octavo-")
        self.context = zmq.Context()
        self.push = self._bind(zmq.PUSH, "in")
        self.pull = self._bind(zmq.PULL, "out")
        self.encoder = msgspec.msgpack.Encoder()
        self.decoder = msgspec.msgpack.Decoder(EngineOutput)
        self.closed = False

    def send(self, message: EngineInput) -> None:
        """Never waits: the queue has no limit. EngineDeadError when the engine is gone, UnicodeEncodeError for lone surrogates."""
        data = self.encoder.encode(message)
        try:
            self.push.send(data, zmq.NOBLOCK)
        except zmq.ZMQError as error:  # without a peer a send would wait for one, and with it the whole event loop
            raise EngineDeadError(self.epitaph if not self.closed else "The server is shutting down.") from error

    def decode(self, data: bytes) -> EngineOutput:
        return self.decoder.decode(data)

    @property
    def alive(self) -> bool:
        raise NotImplementedError

    @property
    def epitaph(self) -> str:
        """How the engine ended, in words."""
        raise NotImplementedError

    def hide(self) -> None:
        """Remove the sockets' folder once the engine is connected: nobody else can connect, and nothing is ever left behind."""
        self.push.poll(CONNECT_MS, zmq.POLLOUT)
        shutil.rmtree(self.folder, ignore_errors=True)

    def close(self, timeout_s: float = 5.0) -> None:
        raise NotImplementedError

    def _close_sockets(self) -> None:
        self.push.close(0)
        self.pull.close(0)
        self.context.term()
        shutil.rmtree(self.folder, ignore_errors=True)

    def address(self, name: str) -> str:
        return f"ipc://{self.folder}/{name}"

    def _bind(self, kind: int, name: str) -> Any:
        socket = self.context.socket(kind)
        socket.setsockopt(zmq.SNDHWM if kind == zmq.PUSH else zmq.RCVHWM, 0)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(self.address(name))
        return socket


class SharedEngine(EngineLink):
    """An engine that another process started, and that ``name`` shares. Its owner says when it has died (``died``)."""

    def __init__(self, model_path: str, name: str) -> None:
        super().__init__(model_path)
        self.prefix = name + ":"
        self._epitaph: str | None = None

    @property
    def alive(self) -> bool:
        return self._epitaph is None

    @property
    def epitaph(self) -> str:
        return self._epitaph or "The engine process does not take requests any more."

    def died(self, epitaph: str) -> None:
        self._epitaph = epitaph

    def close(self, timeout_s: float = 5.0) -> None:
        """Let go of it; the engine goes on for others."""
        if not self.closed:
            self.closed = True
            self._close_sockets()


class EngineProcess(EngineLink):
    """The engine as a child process."""

    def __init__(self, config: EngineConfig, model_path: str, log_level: str = "info") -> None:
        super().__init__(model_path)
        start = {
            "config": dataclasses.asdict(config),
            "model_path": model_path,
            "to_engine": self.address("in"),
            "from_engine": self.address("out"),
            "log_level": log_level,
        }
        try:
            self.process = self._spawn(json.dumps(start).encode() + b"\n")
        except BaseException:
            self._close_sockets()
            raise

    def _spawn(self, first_line: bytes) -> subprocess.Popen[bytes]:
        """A session of its own: Ctrl-C in the terminal is for this process, which then ends the child in good order."""
        import octavo

        root = os.path.dirname(os.path.dirname(os.path.abspath(octavo.__file__)))
        environment = dict(os.environ)
        prepare_cpu_libraries(environment)
        process = subprocess.Popen(
            [sys.executable, "-c", _CHILD.format(root=root)], stdin=subprocess.PIPE, env=environment, start_new_session=True
        )
        assert process.stdin is not None
        try:
            process.stdin.write(first_line)
            process.stdin.flush()
        except BrokenPipeError:  # it died at once; whoever waits for it to be ready learns that
            pass
        return process

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    @property
    def epitaph(self) -> str:
        """How the engine process ended, in words."""
        code = self.process.poll()
        if code is None:
            return "The engine process does not take requests any more."
        if code >= 0:
            return f"The engine process ended with code {code}."
        name = signal.Signals(-code).name if -code in signal.Signals._value2member_map_ else f"signal {-code}"
        hint = " (when memory runs out, the system does that)" if -code == signal.SIGKILL else ""
        return f"The engine process was ended by {name}{hint}."

    def close(self, timeout_s: float = 5.0) -> None:
        """End the process (its standard input closes, then it is killed) and remove the sockets. Once is enough."""
        if self.closed:
            return
        self.closed = True
        try:
            if self.process.stdin is not None:
                self.process.stdin.close()
        except BrokenPipeError:
            pass
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._close_sockets()
