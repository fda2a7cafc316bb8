"""Makes Triton find in its cache on disk what another process put there.

Up to Triton 3.6 the key under which a kernel is kept depends on which kernels the process has used before: what a called function
takes from its module counts only if that function's own key was made already. So one start finds a kernel that another missed.
Making the keys of called functions before those of their callers, in every process, leaves one key.

And makes a part of all keys that takes long, a hash of Triton's own library, beside other work.
"""

from __future__ import annotations

import logging
import threading
from contextlib import suppress
from importlib import import_module
from typing import Any

logger = logging.getLogger("octavo.executor")

MODULES = (
    "attention_plan", "decode_attention", "extend_attention", "write_kv",
    "triton.activation", "triton.draw", "triton.embedding", "triton.gemv", "triton.launch", "triton.linear", "triton.norm", "triton.rows",
    "triton.sample",
)  # fmt: skip


def settle_cache_keys() -> None:
    """Before the first kernel is launched or compiled. Imports the kernels; never raises."""
    try:
        seen: set[int] = set()
        for name in MODULES:
            for value in list(vars(import_module(f"octavo.kernels.{name}")).values()):
                _settle(value, seen)
    except Exception as error:  # noqa: BLE001 - compiled anew then
        logger.debug("kernels' cache keys: %s: %s", type(error).__name__, error)


def begin_library_key() -> threading.Thread:
    """Have a thread hash Triton's own files, half a gigabyte, which takes a process a third of a second and more; ``join`` it before the
    first kernel is launched or compiled. Processes forked after that have the hash, too."""
    thread = threading.Thread(target=_hash_library, name="library key", daemon=True)
    thread.start()
    return thread


def _hash_library() -> None:
    with suppress(Exception):  # made when the first kernel is then
        try:
            from triton.runtime.cache import triton_key
        except ImportError:  # up to Triton 3.4
            from triton.compiler.compiler import triton_key
        triton_key()


def _settle(function: Any, seen: set[int]) -> None:
    """Make the keys of all that ``function`` calls, then its own."""
    from triton.runtime.jit import JITFunction

    if not isinstance(function, JITFunction) or id(function) in seen:
        return
    seen.add(id(function))
    scope = function.fn.__globals__
    for name in function.fn.__code__.co_names:
        if name in scope:
            _settle(scope[name], seen)
    _ = function.cache_key
