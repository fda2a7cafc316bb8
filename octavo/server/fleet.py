"""Several HTTP processes for one engine and one port (--api-server-count): this process starts them and watches over them.

It owns the engine process and, for each HTTP process, a listening socket of the same port (SO_REUSEPORT: the system
spreads clients over them). HTTP processes talk to the engine themselves, through private sockets that the engine is
told to connect to; nothing of a request goes through here. One that ends unasked is replaced, and what it left running
in the engine is ended; its socket stays open meanwhile, so clients wait for the new one rather than being refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from typing import Any

from octavo.config import EngineConfig, ServerOptions
from octavo.errors import ConfigError, EngineDeadError, ModelError, OctavoError
from octavo.metrics.cells import Cells
from octavo.server.run import FORCED_EXIT_S, announce, bind, model_names, run_loop

logger = logging.getLogger("octavo.server")

MAX_RESTARTS = 5  # of all HTTP processes together …
RESTARTS_S = 60.0  # … in this time; more means that they cannot run
WATCH_S = 0.1
ENGINE_END_S = 10.0  # beyond the drain time, for HTTP processes to end

_CHILD = (
    "import sys; p = [*filter(None, sys.path)]; {root!r} in p or p.insert(0, {root!r}); sys.path = p; "
    "from octavo.server.fleet_worker import main; main()"
)
_ERRORS = {error.__name__: error for error in (ConfigError, ModelError)}


def serve_fleet(config: EngineConfig, options: ServerOptions, *, mock: dict[str, Any] | None = None) -> None:
    """Serve until a signal; ``options`` hold all keys. ``mock``: settings of a ``MockEngine`` in each process, instead of the engine."""
    sockets = bind_all(options.host, options.port, options.api_server_count)
    try:
        run_loop(Fleet(config, options, sockets, mock).run())
    finally:
        for sock in sockets:
            sock.close()


def bind_all(host: str, port: int, count: int) -> list[socket.socket]:
    """``count`` sockets of one address. ConfigError when another program has it, which sharing alone would not notice."""
    probe = bind(host, port)
    port = probe.getsockname()[1]
    probe.close()
    return [bind(host, port, shared=True) for _ in range(count)]


class Worker:
    """One HTTP process, as its parent sees it. ``name`` is never used twice."""

    def __init__(self, fleet: Fleet, index: int, name: str) -> None:
        self.index, self.name = index, name
        read, write = os.pipe()
        self.status = read
        start = {
            "config": dataclasses.asdict(fleet.config),
            "options": dataclasses.asdict(fleet.options),
            "model_path": fleet.model_path,
            "name": name,
            "index": index,
            "socket": fleet.sockets[index].fileno(),
            "cells": fleet.cells,
            "status": write,
            "mock": fleet.mock,
        }
        import octavo

        root = os.path.dirname(os.path.dirname(os.path.abspath(octavo.__file__)))
        # A session of its own: Ctrl-C in the terminal is for the parent, which passes it on in good order.
        self.process = subprocess.Popen(
            [sys.executable, "-c", _CHILD.format(root=root)],
            stdin=subprocess.PIPE,
            pass_fds=(write, fleet.sockets[index].fileno(), fleet.cells),
            start_new_session=True,
        )
        os.close(write)
        self.tell(start)

    def tell(self, message: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()

    async def listen(self) -> Any:
        """A stream of what it says of itself: a JSON object a line."""
        reader = asyncio.StreamReader()
        pipe = os.fdopen(self.status, "rb", 0)
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
        return reader

    @property
    def epitaph(self) -> str:
        code = self.process.poll()
        if code is not None and code < 0:
            return f"was ended by {signal.Signals(-code).name if -code in set(signal.Signals) else f'signal {-code}'}"
        return f"ended with code {code}"

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()


class Fleet:
    """The life of the server: engine, HTTP processes, signals."""

    def __init__(self, config: EngineConfig, options: ServerOptions, sockets: list[socket.socket], mock: dict[str, Any] | None) -> None:
        self.config, self.options, self.sockets, self.mock = config, options, sockets, mock
        self.model_path = ""
        self.cells = os.memfd_create("octavo-cells")
        os.ftruncate(self.cells, Cells.size(options.api_server_count))
        self.engine: Any = None
        self.workers: list[Worker | None] = [None] * options.api_server_count
        self.names = 0
        self.restarts: list[float] = []
        self.stopping = False
        self.starting: asyncio.Task[Any] | None = None
        self.telling: asyncio.Task[None] | None = None

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, signal.Signals(number).name)
        self.starting = asyncio.ensure_future(self._start())
        try:
            try:
                await self.starting
            except asyncio.CancelledError:
                logger.info("Stopped before the model was loaded.")
                return
            await self._watch()
            await self._end()
        finally:
            if self.telling is not None:
                self.telling.cancel()
            self._kill()
            if self.engine is not None:
                await self.engine.shutdown()
            os.close(self.cells)

    # -- start

    async def _start(self) -> None:
        self.engine = await self._start_engine()
        self.telling = asyncio.ensure_future(self._tell_of_death())
        await asyncio.gather(*(self._start_worker(i) for i in range(len(self.workers))))
        announce(self.sockets[0], model_names(self.config, self.options), self.engine, https=bool(self.options.ssl_certfile))
        logger.info("%d HTTP processes share the port and the engine", len(self.workers))

    async def _start_engine(self) -> Any:
        if self.mock is not None:
            return _NoEngine()
        from octavo.frontend.async_llm import AsyncLLM
        from octavo.frontend.engine_process import EngineProcess
        from octavo.log import StartupProgress
        from octavo.models.hub import resolve_model

        config = self.config
        self.model_path = await asyncio.to_thread(
            resolve_model, config.model, revision=config.revision, download_dir=config.download_dir, load_format=config.load_format
        )
        process = EngineProcess(config, self.model_path, self.options.log_level)
        progress = StartupProgress()
        try:
            return await AsyncLLM.start(
                dataclasses.replace(config, skip_tokenizer_init=True),  # no text passes through this process
                on_progress=lambda p: progress(p.stage, p.fraction, p.detail),
                process=process,
                log_stats=not self.options.disable_log_stats,
            )
        finally:
            progress.close()

    async def _start_worker(self, index: int) -> None:
        """Start one and wait until it listens. Raises what kept it from that."""
        self.names += 1
        worker = self.workers[index] = Worker(self, index, str(self.names))
        reader = await worker.listen()
        while line := await reader.readline():
            said = json.loads(line)
            if "to_engine" in said:
                await self.engine.add_client(worker.name, said["to_engine"], said["from_engine"])
            elif "failed" in said:
                raise _ERRORS.get(said["failed"], EngineDeadError)(said["message"])
            elif "listening" in said:
                return
        worker.process.wait()
        raise EngineDeadError(f"HTTP process {index} {worker.epitaph} before it listened; its output above may say why.")

    # -- while it runs

    async def _watch(self) -> None:
        """Until a signal came: replace HTTP processes that ended. Without the engine those that are left say that it is gone."""
        while not self.stopping:
            await asyncio.sleep(WATCH_S)
            ended = [(i, w) for i, w in enumerate(self.workers) if w is not None and w.process.poll() is not None]
            if ended and not self.engine.process.alive:
                if len(ended) == len(self.workers):
                    raise EngineDeadError(self.engine.process.epitaph)
                continue
            for index, worker in ended:
                if not self.stopping:
                    await self._replace(index, worker)

    async def _tell_of_death(self) -> None:
        while self.engine.process.alive:
            await asyncio.sleep(WATCH_S)
        for worker in filter(None, self.workers):
            worker.tell({"died": self.engine.process.epitaph})

    async def _replace(self, index: int, worker: Worker) -> None:
        self.workers[index] = None
        worker.kill()
        logger.error("HTTP process %d %s; its requests are lost, and it is started again.", index, worker.epitaph)
        with contextlib.suppress(OctavoError):
            ended = await self.engine.drop_client(worker.name)
            if ended:
                logger.warning("%d request(s) of it were ended in the engine.", ended)
        now = time.monotonic()
        self.restarts = [then for then in self.restarts if now - then < RESTARTS_S] + [now]
        if len(self.restarts) > MAX_RESTARTS:
            raise EngineDeadError(f"HTTP processes ended {len(self.restarts)} times in {RESTARTS_S:.0f} seconds; the server gives up.")
        if not self.stopping:
            try:
                await self._start_worker(index)
            except EngineDeadError:
                if not self.stopping:  # or the signal that ends all has ended it before it listened
                    raise

    # -- end

    def _on_signal(self, name: str) -> None:
        if self.starting is not None and not self.starting.done():
            self.starting.cancel()
            return
        if not self.stopping:
            self.stopping = True
            logger.info("%s: finishing what runs; send it again to stop now.", name)
            for sock in self.sockets:
                sock.close()  # with the workers' own, the last: nobody is accepted any more
        else:
            logger.info("%s again: stopping now.", name)
            asyncio.get_running_loop().call_later(FORCED_EXIT_S, self._kill)
        for worker in filter(None, self.workers):
            with contextlib.suppress(ProcessLookupError):
                worker.process.send_signal(signal.SIGTERM)

    def _kill(self) -> None:
        for worker in filter(None, self.workers):
            worker.kill()

    async def _end(self) -> None:
        """Wait for the HTTP processes, which drain; then nobody needs the engine."""
        deadline = time.monotonic() + self.options.drain_timeout + ENGINE_END_S
        while any(worker is not None and worker.process.poll() is None for worker in self.workers):
            if time.monotonic() > deadline:
                logger.error("HTTP processes did not end in time and are killed.")
                break
            await asyncio.sleep(0.02)


class _NoEngine:
    """Stands for the engine where each HTTP process has a mock of its own."""

    class process:  # noqa: N801
        alive = True

    model_config = None

    async def add_client(self, *names: str) -> None:
        pass

    async def drop_client(self, name: str) -> int:
        return 0

    async def shutdown(self) -> None:
        pass
