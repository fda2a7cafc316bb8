"""One HTTP process among several: the same server as alone, with an engine that its parent owns.

The first line of standard input is a JSON object with all that it needs; further ones say that the engine has died. When
standard input closes, the parent is gone and so is this process.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import threading
from typing import Any

from octavo.config import EngineConfig, ServerOptions
from octavo.errors import OctavoError
from octavo.log import setup_logging
from octavo.metrics.cells import Cells
from octavo.server.run import _Runner, run_loop
from octavo.server.tls import tls_context

logger = logging.getLogger("octavo.server")


def main() -> None:
    start = json.loads(sys.stdin.readline())
    options = ServerOptions(**{k: tuple(v) if isinstance(v, list) else v for k, v in start["options"].items()})
    config = EngineConfig(**start["config"])
    setup_logging(options.log_level)
    link = _Link(start)
    threading.Thread(target=link.follow_parent, daemon=True, name="parent-watch").start()
    cells = Cells(start["cells"], start["index"], options.api_server_count)
    runner = _Runner(
        config,
        options,
        options.api_key,
        socket.socket(fileno=start["socket"]),
        link.start_engine,
        tls_context(options),
        cells=cells,
        on_listen=lambda: link.say({"listening": True}),
    )
    try:
        run_loop(runner.run())
    except OctavoError as error:
        link.say({"failed": type(error).__name__, "message": str(error)})
        sys.exit(1)


class _Link:
    """What the parent and this process say to each other, and the engine that comes of it."""

    def __init__(self, start: dict[str, Any]) -> None:
        self.start = start
        self.engine: Any = None

    def say(self, message: dict[str, Any]) -> None:
        os.write(self.start["status"], json.dumps(message).encode() + b"\n")

    def follow_parent(self) -> None:
        for line in sys.stdin:
            if self.engine is not None:
                self.engine.died(json.loads(line)["died"])
        os._exit(2)

    async def start_engine(self, config: EngineConfig, options: ServerOptions) -> Any:
        if self.start["mock"] is not None:
            from octavo.server.mock import MockEngine

            return MockEngine(**self.start["mock"])
        from octavo.frontend.async_llm import AsyncLLM
        from octavo.frontend.engine_process import SharedEngine

        self.engine = link = SharedEngine(self.start["model_path"], self.start["name"])
        self.say({"to_engine": link.address("in"), "from_engine": link.address("out")})
        return await AsyncLLM.start(config, chat_template=options.chat_template, process=link)


if __name__ == "__main__":
    main()
