"""What the commands share: from a command line to the engine's and the server's configuration."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any

from octavo import env
from octavo.cli import flags
from octavo.config import CacheOptions, DeviceOptions, EngineConfig, ModelOptions, SchedulerOptions, ServerOptions, check_choices, flag_name
from octavo.errors import ConfigError
from octavo.log import get_logger, setup_logging

ENGINE_CLASSES = (ModelOptions, CacheOptions, SchedulerOptions, DeviceOptions)
MAX_DRAIN_S = 7 * 24 * 3600
DEMO_LINE = "No model given: serving the embedded demo model SmolLM2-135M-Instruct."

logger = get_logger(__name__)


def add_engine_flags(parser: argparse.ArgumentParser, *, exclude: tuple[str, ...] = ()) -> None:
    flags.add_options(parser, *ENGINE_CLASSES, exclude=exclude)


def add_log_level(parser: argparse.ArgumentParser) -> None:
    """``--log-level`` for commands that have no server flags; quieter than a server, whose output is its log."""
    choices = env.LOG_LEVELS
    parser.add_argument("--log-level", choices=choices, metavar="{" + ",".join(choices) + "}", help="How much to log (default: warning).")


def engine_options(args: argparse.Namespace, from_file: dict[str, Any] | None = None) -> dict[str, Any]:
    """The engine options that the user chose, as keyword arguments of ``EngineConfig`` or ``LLM``.

    The flags win over ``from_file`` (which may hold other classes' options too).
    """
    names = {field.name for field in dataclasses.fields(EngineConfig)}
    values = {name: value for name, value in (from_file or {}).items() if name in names}
    return values | flags.collect(args, *ENGINE_CLASSES)


def server_options(args: argparse.Namespace, from_file: dict[str, Any] | None = None) -> ServerOptions:
    """The server's options; keys out of the environment come after those of the flags. Raises ConfigError."""
    names = {field.name for field in dataclasses.fields(ServerOptions)}
    values = {name: value for name, value in (from_file or {}).items() if name in names}
    values |= flags.collect(args, ServerOptions)
    level = env.log_level()
    if level is not None:
        values.setdefault("log_level", level)
    values["api_key"] = tuple(dict.fromkeys((*values.get("api_key", ()), *env.api_keys())))
    for name in ("allowed_origins", "allowed_methods", "allowed_headers"):
        if name in values:
            values[name] = _words(name, values[name])
    options = ServerOptions(**values)
    check_choices(options)
    if not 0 <= options.port <= 65535:
        raise ConfigError(f"--port must be between 0 (any free port) and 65535, got {options.port}.")
    if any(not key.strip() for key in options.api_key):
        raise ConfigError("--api-key must not be empty: an empty key would let every client in.")
    if any(not name.strip() for name in options.served_model_name):
        raise ConfigError("--served-model-name must not be empty: clients could not ask for the model.")
    if not 0 <= options.drain_timeout <= MAX_DRAIN_S:
        raise ConfigError(f"--drain-timeout must be between 0 and {MAX_DRAIN_S} seconds, got {options.drain_timeout}.")
    for name in _AT_LEAST_ONE:
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ConfigError(f"{flag_name(name)} must be at least 1, got {value}.")
    if options.max_queued_requests is not None and options.max_queued_requests < 0:
        raise ConfigError(f"--max-queued-requests must be at least 0, got {options.max_queued_requests}.")
    if not 0 < options.client_write_timeout < float("inf"):
        raise ConfigError(f"--client-write-timeout must be a number of seconds above 0, got {options.client_write_timeout}.")
    if options.allow_credentials and "*" in options.allowed_origins:
        raise ConfigError("--allow-credentials with --allowed-origins * would let every web page act for its visitors; name the origins.")
    return options


_AT_LEAST_ONE = (
    "api_server_count",
    "max_logprobs",
    "max_n",
    "max_prompts_per_request",
    "max_body_size",
    "max_requests_per_minute",
    "max_tokens_per_minute",
    "max_concurrent_requests_per_key",
)


def _words(name: str, values: tuple[str, ...]) -> tuple[str, ...]:
    """Words, or vLLM's spelling of several: one JSON list."""
    if len(values) == 1 and values[0].startswith("["):
        try:
            words = json.loads(values[0])
        except ValueError as error:
            raise ConfigError(f"{flag_name(name)}: not a JSON list: {error}.") from None
        if not all(isinstance(word, str) for word in words):
            raise ConfigError(f"{flag_name(name)}: a list of texts is needed, got {values[0]}.")
        return tuple(words)
    return values


def check_engine(values: dict[str, Any]) -> EngineConfig:
    """The configuration that the options make; ConfigError before anything heavy is imported."""
    return EngineConfig.from_kwargs(**values)


def start_logging(args: argparse.Namespace) -> str:
    """Logging of a command that is not a server; returns the level."""
    level: str = args.log_level or env.log_level() or "warning"
    setup_logging(level)
    return level
