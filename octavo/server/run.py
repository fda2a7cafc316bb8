"""Run a server from start to end: bind, start the engine, serve, drain on SIGTERM, stop.

Nothing heavy is imported before the port is bound; the HTTP stack is imported while the engine loads its weights.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import signal
import socket
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from octavo import env
from octavo.config import EngineConfig, ServerOptions
from octavo.errors import ConfigError
from octavo.garbage import collect_rarely
from octavo.server.tls import tls_context

if TYPE_CHECKING:
    import ssl

    import uvicorn

    from octavo.metrics.cells import Cells

logger = logging.getLogger("octavo.server")

KEEP_ALIVE_S = 60  # an idle connection; longer than clients' pools keep theirs, so they close first
BACKLOG = 4096
FILE_LIMIT = 65536  # open files that are asked for
DOWNLOAD_EXIT_S = 1.0  # from a signal in the middle of a download to the end of the process
FORCED_EXIT_S = 5.0  # after a second signal the process ends in this time, whatever hangs

T = TypeVar("T")
StartEngine = Callable[[EngineConfig, ServerOptions], Awaitable[Any]]


def serve(config: EngineConfig, options: ServerOptions, *, start_engine: StartEngine | None = None) -> None:
    """Serve until SIGTERM or SIGINT has drained the running requests, or a second one stops them.

    Raises ConfigError when the address cannot be used, and whatever keeps the engine from starting.
    ``start_engine`` replaces ``AsyncLLM.start`` (tests, benchmarks of the server alone).
    """
    keys = api_keys(options)
    check_parser_names(options)
    tls = tls_context(options)
    raise_file_limit()
    if options.api_server_count > 1:
        from octavo.server.fleet import serve_fleet

        serve_fleet(config, dataclasses.replace(options, api_key=keys))
        return
    sock = bind(options.host, options.port)
    try:
        run_loop(_Runner(config, options, keys, sock, start_engine or _start_async_llm, tls).run())
    finally:
        sock.close()


def run_loop(work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` to its end on a loop of its own."""
    loop = _new_loop()
    try:
        asyncio.set_event_loop(loop)
        return loop.run_until_complete(work)
    finally:
        try:
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            asyncio.set_event_loop(None)
            loop.close()


def api_keys(options: ServerOptions) -> tuple[str, ...]:
    """Keys of --api-key, of --api-key-file and of the environment. ConfigError for an empty one, which anybody could send."""
    if any(not key.strip() for key in options.api_key):
        raise ConfigError("--api-key must not be empty.")
    from_file = _keys_in(options.api_key_file) if options.api_key_file else ()
    return tuple(dict.fromkeys((*options.api_key, *from_file, *env.api_keys())))


def check_parser_names(options: ServerOptions) -> None:
    """ConfigError for a parser that there is not, before a model is loaded. Whether it fits the model is seen when that is there."""
    if options.tool_call_parser is None and options.reasoning_parser is None:
        return
    from octavo.frontend.parsers.registry import check_pair

    check_pair(*(None if name == "none" else name for name in (options.tool_call_parser, options.reasoning_parser)))


def _keys_in(path: str) -> tuple[str, ...]:
    try:
        with open(path, encoding="utf-8") as file:
            lines = [line.strip() for line in file]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--api-key-file {path}: {getattr(error, 'strerror', None) or error}.") from None
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise ConfigError(f"--api-key-file {path} holds no key: the server would be open to everybody.")
    return keys


def bind(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """A bound socket that does not listen yet: clients are refused, rather than kept waiting, until the model is loaded.

    ``shared``: more sockets of this user may be bound to the same address; the system spreads clients over them.
    """
    if not 0 <= port <= 65535:
        raise ConfigError(f"--port must be between 0 (any free one) and 65535, got {port}.")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except socket.gaierror as error:
        raise ConfigError(f"Cannot listen on {host}:{port}: {error}. Check --host and --port.") from None
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6 and address[0] == "::":
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise _cannot_listen(host, port, error) from None
    return sock


def raise_file_limit() -> None:
    """Every client is a file descriptor, and the usual soft limit of 1,024 is fewer than the clients that fit."""
    try:
        import resource
    except ImportError:  # not there on Windows
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILE_LIMIT if hard == resource.RLIM_INFINITY else min(FILE_LIMIT, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _cannot_listen(host: str, port: int, error: OSError) -> ConfigError:
    return ConfigError(
        f"Cannot listen on {host}:{port}: {os.strerror(error.errno or 0)}. Choose another --port (or --host), or stop what listens there."
    )


def model_names(config: EngineConfig, options: ServerOptions) -> tuple[str, ...]:
    if options.served_model_name:
        return tuple(options.served_model_name)
    if config.model is not None:
        return (config.model,)
    from octavo.models.hub import DEMO_MODEL_NAME

    return (DEMO_MODEL_NAME,)


async def _start_async_llm(config: EngineConfig, options: ServerOptions) -> Any:
    """The engine process first, for it takes longest; everything that this process imports loads beside it."""
    from octavo.frontend.engine_process import EngineProcess
    from octavo.log import StartupProgress
    from octavo.models.hub import resolve_model

    try:
        path = await asyncio.to_thread(
            resolve_model, config.model, revision=config.revision, download_dir=config.download_dir, load_format=config.load_format
        )
    except asyncio.CancelledError:
        _exit_soon()
        raise
    process = EngineProcess(config, path, options.log_level)
    try:
        from octavo.frontend.async_llm import AsyncLLM
    except BaseException:
        process.close(0.5)
        raise
    progress = StartupProgress()
    try:
        return await AsyncLLM.start(
            config,
            chat_template=options.chat_template,
            on_progress=lambda p: progress(p.stage, p.fraction, p.detail),
            log_level=options.log_level,
            process=process,
            log_stats=not options.disable_log_stats,
        )
    finally:
        progress.close()


def announce(sock: socket.socket, names: tuple[str, ...], engine: Any, *, https: bool) -> None:
    defaults = getattr(engine.model_config, "generation_defaults", None)
    if defaults:
        values = ", ".join(f"{name} {value}" for name, value in defaults.items())
        logger.info("Requests that do not say otherwise use the model's %s (--generation-config none: OpenAI's defaults)", values)
    host, port = sock.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    logger.info("Octavo serves %s on %s://%s:%d", ", ".join(names), "https" if https else "http", shown, port)


def _exit_soon() -> None:
    """A download's threads can't be stopped, and Python waits for them before it exits: end the process without that."""
    timer = threading.Timer(DOWNLOAD_EXIT_S, os._exit, (0,))
    timer.daemon = True
    timer.start()


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:  # not there on Windows
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def _import_http() -> None:
    import uvicorn  # noqa: F401

    import octavo.server.app  # noqa: F401


class _Runner:
    """The life of one server, with its signals: before it listens they stop the start, then they drain, then they end."""

    def __init__(
        self,
        config: EngineConfig,
        options: ServerOptions,
        keys: tuple[str, ...],
        sock: socket.socket,
        start_engine: StartEngine,
        tls: ssl.SSLContext | None = None,
        *,
        cells: Cells | None = None,
        on_listen: Callable[[], None] | None = None,
    ) -> None:
        """``cells``, ``on_listen``: of one HTTP process among several, which says nothing itself when it listens."""
        self.config = config
        self.options = options
        self.keys = keys
        self.sock = sock
        self.start_engine = start_engine
        self.tls = tls
        self.cells = cells
        self.on_listen = on_listen
        self.server: uvicorn.Server | None = None
        self.starting: asyncio.Task[Any] | None = None

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, signal.Signals(number).name)
        self.starting = asyncio.ensure_future(self.start_engine(self.config, self.options))
        imports = loop.run_in_executor(None, _import_http)
        try:
            engine = await self.starting
        except asyncio.CancelledError:
            logger.info("Stopped before the model was loaded.")
            return
        finally:
            await imports
        try:
            await self._serve(engine)
        finally:
            await engine.shutdown()

    async def _serve(self, engine: Any) -> None:
        import uvicorn

        from octavo.server.app import create_app
        from octavo.server.limits import limited_protocol

        options = dataclasses.replace(self.options, api_key=self.keys)
        names = model_names(self.config, options)
        app = create_app(engine, options, names, scheduling_policy=self.config.scheduling_policy, cells=self.cells)
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # what is not HTTP gets its 400, and no line in the log
        settings = uvicorn.Config(
            app,
            http=limited_protocol(options.client_write_timeout),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=options.drain_timeout,  # type: ignore[arg-type]
        )
        settings.load()
        settings.ssl = self.tls
        self.server = make_server(settings, self.on_listen or (lambda: self._announce(names, engine)))
        collect_rarely()
        try:
            await self.server.serve(sockets=[self.sock])
        except OSError as error:  # another server began to listen after we had bound
            raise _cannot_listen(options.host, options.port, error) from None
        await _end_tasks(self.server)
        app.state.context.pool.shutdown(wait=False, cancel_futures=True)

    def _announce(self, names: tuple[str, ...], engine: Any) -> None:
        announce(self.sock, names, engine, https=self.tls is not None)

    def _on_signal(self, name: str) -> None:
        server = self.server
        if server is None:
            if self.starting is not None:
                self.starting.cancel()
        elif not server.should_exit:
            running = len(server.server_state.tasks)
            if running:
                logger.info("%s: finishing %d running request(s); send it again to stop now.", name, running)
            else:
                logger.info("%s: stopping.", name)
            server.should_exit = True
        elif not server.force_exit:
            logger.info("%s again: stopping now.", name)
            server.force_exit = True
            loop = asyncio.get_running_loop()
            for task in list(server.server_state.tasks):
                task.cancel()
            loop.call_later(0.2, _abort_connections, server)
            loop.call_later(FORCED_EXIT_S, os._exit, 1)


async def _end_tasks(server: uvicorn.Server) -> None:
    """Let cancelled requests say goodbye, then cut those whose clients do not listen."""
    for _ in range(2):
        if tasks := list(server.server_state.tasks):
            await asyncio.wait(tasks, timeout=1.0)
            _abort_connections(server)


def _abort_connections(server: uvicorn.Server) -> None:
    """Clients that do not read their last event hold nothing up."""
    for connection in list(server.server_state.connections):
        connection.transport.abort()


def make_server(settings: uvicorn.Config, on_listen: Callable[[], None]) -> uvicorn.Server:
    """A uvicorn server that leaves signals alone and says when it listens."""
    import contextlib
    from collections.abc import Generator

    import uvicorn

    class Server(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Generator[None, None, None]:
            yield

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            on_listen()

    return Server(settings)
