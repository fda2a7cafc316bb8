"""Logging, and the lines that tell how start-up goes. Everything goes to stderr: stdout belongs to the command's output."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from typing import TextIO

_COLOURS = {logging.DEBUG: "\x1b[2m", logging.WARNING: "\x1b[33m", logging.ERROR: "\x1b[31m", logging.CRITICAL: "\x1b[31;1m"}
_RESET = "\x1b[0m"


class _Formatter(logging.Formatter):
    """``12:03:04 WARNING message``; the level is left out at INFO, the logger's name is given at DEBUG only."""

    def __init__(self, colour: bool) -> None:
        super().__init__(datefmt="%H:%M:%S")
        self.colour = colour

    def format(self, record: logging.LogRecord) -> str:
        text = record.getMessage()
        if record.levelno != logging.INFO:
            text = f"{record.levelname} {text}"
        if record.levelno == logging.DEBUG:
            text += f"  [{record.name}]"
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        start = _COLOURS.get(record.levelno, "") if self.colour else ""
        return f"{self.formatTime(record, self.datefmt)} {start}{text}{_RESET if start else ''}"


def setup_logging(level: str = "info", stream: TextIO | None = None) -> None:
    """Make the ``octavo`` loggers write to ``stream`` (stderr) from ``level`` (debug, info, warning, error) on.

    Replaces what an earlier call set up, so it may be called again. Other libraries' loggers are not touched.
    """
    stream = stream or sys.stderr
    handler = logging.StreamHandler(stream)
    handler.setFormatter(_Formatter(colour=_is_terminal(stream)))
    logger = logging.getLogger("octavo")
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False


def get_logger(name: str) -> logging.Logger:
    """The logger of a module; pass ``__name__``."""
    return logging.getLogger(name if name == "octavo" or name.startswith("octavo.") else f"octavo.{name}")


class StartupProgress:
    """Shows the stages of start-up; call it with what an ``EngineProgress`` carries.

    On a terminal one line is rewritten while a stage runs. Elsewhere (files, containers) a stage has a line when it is
    done, and one every ``interval`` seconds before that, so that a log stays short and a long load is still seen to move.
    """

    def __init__(self, stream: TextIO | None = None, interval: float = 5.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream or sys.stderr
        self._terminal = _is_terminal(self._stream)
        self._interval = interval
        self._clock = clock
        self._stage = ""
        self._started = self._last_line = 0.0
        self._open_line = False

    def __call__(self, stage: str, fraction: float | None = None, detail: str = "") -> None:
        """``fraction`` 0..1 of the stage is done; None: not known, or the stage is a single fact, told by ``detail``."""
        now = self._clock()
        if stage != self._stage:
            self.close()
            self._stage, self._started, self._last_line = stage, now, now
        text = stage if fraction is None else f"{stage} {min(max(fraction, 0.0), 1.0):4.0%}"
        if detail:
            text += f": {detail}"
        done = fraction is None or fraction >= 1
        if done and fraction is not None:
            text += f" ({now - self._started:.1f} s)"
        if self._terminal:
            self._stream.write(f"\r\x1b[K{text}")
            self._open_line = True
            if done:
                self.close()
        elif done or now - self._last_line >= self._interval:
            self._last_line = now
            self._stream.write(text + "\n")
        self._stream.flush()

    def close(self) -> None:
        """End a line that is being rewritten."""
        if self._open_line:
            self._stream.write("\n")
            self._stream.flush()
        self._open_line = False


def kv_cache_line(num_blocks: int, block_size: int, max_model_len: int) -> str:
    """What a KV cache of ``num_blocks`` blocks of ``block_size`` tokens holds, for people."""
    tokens = num_blocks * block_size
    full_length = f"{tokens / max_model_len:.1f} requests of {max_model_len:,} tokens"
    return f"{num_blocks:,} blocks of {block_size} tokens = {tokens:,} tokens; room for {full_length}"


def _is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty()
    except (AttributeError, ValueError):  # a closed or replaced stream
        return False
