"""The server of tests/server, in this process with the mock engine."""

from __future__ import annotations

from tests.server.conftest import http, server, slow_server, start_server  # noqa: F401 (fixtures)
