"""Typed reads of the few ``OCTAVO_*`` environment variables. A value that can't be read is a ConfigError naming it.

=====================  ==============================================================================================
``OCTAVO_API_KEY``     API keys of the server, separated by commas (``VLLM_API_KEY`` is read too).
``OCTAVO_CACHE_DIR``   Where built kernels are kept (default: ``$XDG_CACHE_HOME/octavo``, ``~/.cache/octavo``).
``OCTAVO_LOG_LEVEL``   debug, info, warning or error: how much to log when no flag says it.
=====================  ==============================================================================================
"""

from __future__ import annotations

import os

from octavo.errors import ConfigError

LOG_LEVELS = ("debug", "info", "warning", "error")


def api_keys() -> tuple[str, ...]:
    """Keys out of the environment, in order, without duplicates."""
    keys = [key.strip() for name in ("OCTAVO_API_KEY", "VLLM_API_KEY") for key in os.environ.get(name, "").split(",")]
    return tuple(dict.fromkeys(key for key in keys if key))


def cache_dir() -> str:
    """Absolute path of the folder for what can be built again; it need not exist yet."""
    own = read_str("OCTAVO_CACHE_DIR")
    if own:
        return os.path.abspath(os.path.expanduser(own))
    base = read_str("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(os.path.abspath(base), "octavo")


def log_level() -> str | None:
    """The log level that the environment asks for; None when it asks for none."""
    level = read_str("OCTAVO_LOG_LEVEL")
    if level is None:
        return None
    if level.lower() not in LOG_LEVELS:
        raise ConfigError(f"OCTAVO_LOG_LEVEL must be one of {', '.join(LOG_LEVELS)}; got {level!r}.")
    return level.lower()


def read_str(name: str) -> str | None:
    """The variable's text without surrounding space; None when it is unset or empty."""
    return os.environ.get(name, "").strip() or None
