"""Typed reads of the few ``OCTAVO_*`` environment variables. A value that can't be read is a ConfigError naming it.

=====================  ==============================================================================================
``OCTAVO_API_KEY``     API keys of the server, separated by commas (``VLLM_API_KEY`` is read too).
``OCTAVO_CACHE_DIR``   Where built kernels are kept (default: ``$XDG_CACHE_HOME/octavo``, ``~/.cache/octavo``).
``OCTAVO_CPU_KERNELS`` 0 runs the torch references instead of the C kernels (tests, and to look for a fault).
``OCTAVO_STEPS_AHEAD`` 1 runs the GPU's one-step-ahead pipeline on the CPU too (tests).
``OCTAVO_DECODE_GRAPHS`` 1 runs decode steps from the device-side rows on the CPU too, as CUDA graphs do (tests).
``OCTAVO_FUSED_WRITE`` Decode attention of up to so many sequences writes their K and V itself (Triton; default 64; 0: none).
``OCTAVO_LOG_LEVEL``   debug, info, warning or error: how much to log when no flag says it.
=====================  ==============================================================================================
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

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


def steps_ahead(default: int) -> int:
    """How many steps the executor runs ahead of what the host has read: 0 or 1."""
    return _read_bit("OCTAVO_STEPS_AHEAD", default)


def decode_graphs(default: bool) -> bool:
    """Whether decode steps run from the device-side rows alone."""
    return bool(_read_bit("OCTAVO_DECODE_GRAPHS", default))


def fused_write(default: int = 64) -> int:
    """Up to how many decoding sequences are served by one attention kernel a layer, which writes their K and V too.

    It takes a launch out of a chain of short ones: measured on an H200, 3 to 6% of a step of 8 to 64 sequences, and 1% more at 256.
    """
    text = read_str("OCTAVO_FUSED_WRITE")
    if text is None:
        return default
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(f"OCTAVO_FUSED_WRITE must be a number of sequences, 0 or more; got {text!r}.")
    return int(text)


def _read_bit(name: str, default: int) -> int:
    text = read_str(name)
    if text is None:
        return int(default)
    if text not in ("0", "1"):
        raise ConfigError(f"{name} must be 0 or 1; got {text!r}.")
    return int(text)


def prepare_cpu_libraries(environment: MutableMapping[str, str] = os.environ) -> None:
    """Settings for libraries that torch brings, which they read when it is imported; what the user set stays.

    Idle OpenMP threads (GNU's) spin for microseconds only. A thread that spins at a barrier takes the core that the HTTP
    process, or whatever else runs, needs to get on: with as many busy processes as cores, steps were several times slower with
    the default of some milliseconds; not to spin at all ("passive") costs a third of the speed on a quiet machine.

    oneDNN keeps a megabyte for each shape that it multiplied, a thousand of them by default.
    """
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", "2000")
    environment.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "256")
    environment.setdefault("LRU_CACHE_CAPACITY", "256")  # torch's own layer above it
