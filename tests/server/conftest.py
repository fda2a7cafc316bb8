"""A real uvicorn on a free port, in a thread, with the mock engine."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import httpx
import openai
import pytest
import uvicorn

from octavo.config import ServerOptions
from octavo.server.app import create_app
from octavo.server.limits import limited_protocol
from octavo.server.mock import MockEngine
from tests.waiting import until

MODEL = "mock-model"


@dataclass
class Running:
    url: str
    port: int
    engine: MockEngine
    app: object
    server: uvicorn.Server

    def wait_idle(self, seconds: float = 15.0) -> None:
        """Wait until nothing runs on the engine; fail after ``seconds``, in which what should have been ended must not end by itself."""
        until(lambda: not self.engine.runs, seconds)


@contextlib.contextmanager
def running_server(engine: MockEngine | None = None, *, scheduling_policy: str | None = None, **options: object) -> Iterator[Running]:
    engine = engine or MockEngine()
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    port = sock.getsockname()[1]
    settings = ServerOptions(**options)  # type: ignore[arg-type]
    app = create_app(engine, settings, [MODEL, "second-name"], scheduling_policy=scheduling_policy)
    protocol = limited_protocol(settings.client_write_timeout)
    config = uvicorn.Config(app, http=protocol, ws="none", lifespan="off", log_config=None, access_log=False, loop="uvloop")
    config.timeout_graceful_shutdown = 1
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: server.run(sockets=[sock]), daemon=True)
    thread.start()
    until(lambda: server.started, every=0.005)
    try:
        yield Running(f"http://127.0.0.1:{port}", port, engine, app, server)
    finally:
        server.should_exit = True
        thread.join(5)


@pytest.fixture(scope="session")
def server() -> Iterator[Running]:
    with running_server() as running:
        yield running
        running.wait_idle()
        assert running.engine.is_healthy()


@pytest.fixture(scope="session")
def slow_server() -> Iterator[Running]:
    """20 ms a token and no end before 2,000 tokens: for what happens in the middle."""
    with running_server(MockEngine(tick_s=0.02, length=2000)) as running:
        yield running


@pytest.fixture
def start_server() -> Iterator[Callable[..., Running]]:
    with contextlib.ExitStack() as stack:
        yield lambda *args, **options: stack.enter_context(running_server(*args, **options))


@pytest.fixture(scope="session")
def http(server: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


@pytest.fixture(scope="session")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client
