"""Loads the C kernels and hands out their functions, or None where they can't be had."""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from ctypes import POINTER, c_float, c_int, c_int64, c_void_p
from pathlib import Path

import torch

from octavo.kernels.cpu.build import BuildError, build

log = logging.getLogger(__name__)

# Element types as vec.h numbers them.
TYPE_CODES: dict[torch.dtype, int] = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

# What the attention kernels can do (attention.h).
MAX_HEAD_DIM = 256
MAX_GROUP = 64
ERRORS = {
    1: "a slot lies outside the KV cache",
    2: "a position lies outside the RoPE table",
    3: "a block table holds a block id outside the KV cache",
    4: "a sequence length does not fit the tokens to run",
}


class StepArgs(ctypes.Structure):
    """step_args of attention.h."""

    _fields_ = [
        ("num_tokens", c_int64),
        ("num_seqs", c_int64),
        ("block_size", c_int64),
        ("table_stride", c_int64),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("query_start", c_void_p),
        ("seq_lens", c_void_p),
        ("block_tables", c_void_p),
    ]


class LayerArgs(ctypes.Structure):
    """layer_args of attention.h."""

    _fields_ = [
        ("type", c_int64),
        ("num_heads", c_int64),
        ("num_kv_heads", c_int64),
        ("head_dim", c_int64),
        ("num_blocks", c_int64),
        ("k_cache", c_void_p),
        ("v_cache", c_void_p),
        ("rope", c_void_p),
        ("rope_rows", c_int64),
        ("rotary_dim", c_int64),
        ("interleaved", c_int64),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("window", c_int64),
        ("threads", c_int64),
        ("eps", c_float),
        ("scale", c_float),
        ("soft_cap", c_float),
    ]


class Task(ctypes.Structure):
    """task of attention.h."""

    _fields_ = [("cost", c_int64), ("slot", c_int64)] + [
        (name, ctypes.c_int32)
        for name in (
            "seq", "kv_head", "first_token", "num_tokens", "first_segment", "last_segment", "group", "pieces", "group_first", "group_last"
        )
    ]  # fmt: skip


# name -> argument types; addresses are plain integers, so that a call costs little
_SIGNATURES = {
    "octavo_rms_norm": (None, [c_void_p] * 5 + [c_int64] * 3 + [c_float, c_int, c_int]),
    "octavo_act_and_mul": (None, [c_void_p] * 2 + [c_int64] * 2 + [c_int] * 3),
    "octavo_rope_and_write_kv": (c_int, [POINTER(StepArgs), POINTER(LayerArgs), c_void_p]),
    "octavo_attention_plan": (c_int64, [POINTER(StepArgs), POINTER(LayerArgs), c_void_p, c_int64, POINTER(c_int64)]),
    "octavo_paged_attention": (c_int, [c_void_p, c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_void_p, c_void_p]),
    "octavo_attention_layer": (c_int, [c_void_p, c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_void_p, c_void_p]),
    "octavo_argmax_rows": (None, [c_void_p, c_int64, c_int64, c_int64, c_void_p, c_int]),
    "octavo_sample_rows": (c_int, [c_void_p, c_int64, c_int64, c_int64, *[c_void_p] * 6, c_int]),
    "octavo_set_gomp_parallel": (None, [c_void_p]),
}


class Library:
    """The loaded kernels: ``rms_norm``, ``act_and_mul``, ``attention_layer`` … as ctypes functions (the GIL is released)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        loaded = ctypes.CDLL(str(path))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(loaded, name)
            function.restype, function.argtypes = result, arguments
            setattr(self, name.removeprefix("octavo_"), function)
        entry = _gomp_parallel()
        if entry is None and torch.get_num_threads() > 1:
            log.info("No OpenMP runtime with GOMP_parallel in this process: the CPU kernels run on one thread.")
        self.set_gomp_parallel(entry)  # type: ignore[attr-defined]


def _gomp_parallel() -> int | None:
    """Address of GOMP_parallel in the OpenMP runtime that torch has loaded."""
    candidates: list[str] = []
    try:
        with open("/proc/self/maps") as maps:
            paths = {line.split(maxsplit=5)[-1].strip() for line in maps if "/" in line}
    except OSError:  # no /proc: macOS
        paths = {str(p) for p in (Path(torch.__file__).parent / "lib").glob("lib*omp*")}
    for runtime in ("libgomp", "libiomp5", "libomp"):
        found = [p for p in paths if os.path.basename(p).startswith(runtime)]
        candidates += sorted(found, key=lambda p: "torch" not in p)  # torch's own copy first
    for path in candidates:
        try:
            function = ctypes.CDLL(path).GOMP_parallel
        except (OSError, AttributeError):
            continue
        return ctypes.cast(function, c_void_p).value
    return None


_lock = threading.Lock()
_loaded: dict[str, Library | None] = {}


def library() -> Library | None:
    """The kernels, built and loaded at the first call; None (after one warning that says why) where that is not possible.

    ``OCTAVO_CPU_KERNELS=0`` turns them off: the torch references run instead.
    """
    if "library" not in _loaded:
        with _lock:
            if "library" not in _loaded:
                _loaded["library"] = _load()
    return _loaded["library"]


def _load() -> Library | None:
    if os.environ.get("OCTAVO_CPU_KERNELS", "").strip() == "0":
        return None
    try:
        return Library(build())
    except (BuildError, OSError, AttributeError) as error:
        log.warning("The fast CPU kernels are not available; slower torch code runs instead. %s", error)
        return None


def address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def keep_freed_memory() -> bool:
    """Tell glibc to keep memory that tensors freed for the next ones, instead of giving it back to the system. True if done.

    By default large activations are mapped anew at each allocation, and touching fresh pages costs several times what the
    operation that fills them does (measured: silu_and_mul of 512 x 3072 in 1.1 ms instead of 0.2). Process-wide.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # not glibc
        return False
    m_trim_threshold, m_mmap_threshold = -1, -3
    # 32 MiB is the most that glibc takes for the second; larger tensors (weights, KV cache) are mapped as before
    return bool(mallopt(m_trim_threshold, 1 << 30)) and bool(mallopt(m_mmap_threshold, 32 << 20))
