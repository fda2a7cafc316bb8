"""Environment variables, log lines, start-up progress."""

from __future__ import annotations

import io
import logging

import pytest

from octavo import env, log
from octavo.errors import ConfigError


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_cache_dir(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert env.cache_dir() == "/home/me/.cache/octavo"
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert env.cache_dir() == "/xdg/octavo"
    monkeypatch.setenv("OCTAVO_CACHE_DIR", "~/own")
    assert env.cache_dir() == "/home/me/own"


def test_log_level(monkeypatch: pytest.MonkeyPatch) -> None:
    assert env.log_level() is None
    monkeypatch.setenv("OCTAVO_LOG_LEVEL", " Debug ")
    assert env.log_level() == "debug"
    monkeypatch.setenv("OCTAVO_LOG_LEVEL", "7")
    with pytest.raises(ConfigError, match="OCTAVO_LOG_LEVEL"):
        env.log_level()


def test_log_lines() -> None:
    stream = io.StringIO()
    log.setup_logging("info")
    log.setup_logging("info", stream)  # the second call replaces the first
    logger = log.get_logger("octavo.some.module")
    logger.debug("hidden")
    logger.info("shown %d", 1)
    logger.warning("careful")
    try:
        raise ValueError("inner")
    except ValueError:
        logger.exception("failed")
    lines = stream.getvalue().splitlines()
    assert [line[9:] for line in lines[:3]] == ["shown 1", "WARNING careful", "ERROR failed"]
    assert lines[-1] == "ValueError: inner"
    log.setup_logging("debug", stream)
    logger.debug("seen")
    assert stream.getvalue().splitlines()[-1].endswith("DEBUG seen  [octavo.some.module]")
    assert len(logging.getLogger("octavo").handlers) == 1


def test_colour_only_on_a_terminal() -> None:
    for stream, coloured in ((io.StringIO(), False), (Terminal(), True)):
        log.setup_logging("info", stream)
        log.get_logger("x").warning("w")
        assert ("\x1b[" in stream.getvalue()) is coloured


def test_progress_in_a_file_is_short() -> None:
    stream = io.StringIO()
    now = [0.0]
    progress = log.StartupProgress(stream, interval=5, clock=lambda: now[0])
    for step in range(101):
        now[0] = step / 10
        progress("weights", step / 100, "12 GiB")
    progress("KV cache", detail="64 blocks")
    lines = stream.getvalue().splitlines()
    assert lines == ["weights  50%: 12 GiB", "weights 100%: 12 GiB (10.0 s)", "KV cache: 64 blocks"]


def test_progress_on_a_terminal_rewrites_one_line() -> None:
    stream = Terminal()
    progress = log.StartupProgress(stream)
    progress("weights", 0.1)
    progress("weights", 0.9)
    progress("engine", 0.5)  # a stage that never reached its end still leaves its line whole
    progress.close()
    progress.close()
    assert stream.getvalue().count("\n") == 2
    assert stream.getvalue().count("\r") == 3


def test_kv_cache_line() -> None:
    assert log.kv_cache_line(1024, 16, 8192) == "1,024 blocks of 16 tokens = 16,384 tokens; room for 2.0 requests of 8,192 tokens"
