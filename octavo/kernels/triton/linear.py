"""Small-M linear layers: which kernel runs a shape, and the calls that layers make.

``linear_configs.json`` beside this file holds what ``scripts/gpu/tune_linear.py`` measured, per (weight rows, K, gated,
rows of x); ``heuristic`` stands in for shapes that are not in it. More than ``MAX_ROWS`` rows, other types than 16-bit
floats, odd layouts: torch, in the same call.

A row's result is the same whatever the other rows hold, and the same for all numbers of rows that run one configuration. Where
the table gives neighbouring numbers of rows different ones, or cuBLAS, the order of float32 sums differs, and so a result may
by the last bit of its 16.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F

from octavo.kernels.silu_and_mul import silu_and_mul_reference
from octavo.kernels.sizes import cdiv, next_power_of_2
from octavo.kernels.triton.activation import silu_and_mul
from octavo.kernels.triton.gemv import gemv_kernel, skinny_kernel
from octavo.kernels.triton.launch import launch, pdl_options
from octavo.kernels.triton.norm import rms_norm, rms_norm_reference

BUCKETS = (1, 2, 4, 8, 16, 32, 64)
MAX_ROWS = BUCKETS[-1]
GEMV_ROWS = 4
CONFIG_FILE = Path(__file__).with_name("linear_configs.json")
_PARTIAL_FLOATS = 4 * 2**20  # 16 MiB of partial sums
_COUNTERS = 16384
_MAX_STEPS = 32  # of gemv_kernel's loop, which is unrolled


@dataclass(frozen=True, slots=True)
class LinearConfig:
    """How to run a shape. kernel: "gemv", "dot" (skinny_kernel) or "torch", which needs none of the rest.

    block_n counts rows of the weight; prefetch columns (see ``skinny_kernel``). ``fuse_norm``: whether a norm before it is
    better computed inside (gemv only).
    """

    kernel: str
    block_n: int = 0
    block_k: int = 0
    num_warps: int = 4
    num_stages: int = 1
    split_k: int = 1
    prefetch: int = 0
    fuse_norm: bool = False

    def problem(self, rows: int, weight_rows: int, k: int) -> str | None:
        """Why this can't run x [rows, k] against a weight [weight_rows, k]; None if it can."""
        if self.kernel == "torch":
            return None
        if self.kernel not in ("gemv", "dot"):
            return f"unknown kernel {self.kernel!r}"
        if rows > (GEMV_ROWS if self.kernel == "gemv" else MAX_ROWS):
            return f"too many rows for {self.kernel}"
        steps = cdiv(cdiv(k, self.block_k), self.split_k)
        if self.kernel == "gemv" and steps > _MAX_STEPS:
            return "too many steps to unroll"
        if steps * self.block_k * (self.split_k - 1) >= k:
            return "a split would have nothing to do"
        tiles = cdiv(weight_rows, self.block_n)
        width = GEMV_ROWS if self.kernel == "gemv" else padded_rows(rows)
        if self.split_k > 1 and (tiles > _COUNTERS or self.split_k * tiles * self.block_n * width > _PARTIAL_FLOATS):
            return "partial sums don't fit the workspace"
        return None


TORCH = LinearConfig("torch")


class Workspace:
    """Partial sums and arrival counters of split-K, one per device: kernels of one stream use it one after another.

    Never freed or moved, since captured graphs hold its addresses. Counters are zero between launches.
    """

    def __init__(self, device: torch.device) -> None:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("Run a linear layer once before capturing a graph: its workspace must exist, zeroed, by then.")
        self.partial = torch.empty(_PARTIAL_FLOATS, dtype=torch.float32, device=device)
        self.counters = torch.zeros(_COUNTERS, dtype=torch.int32, device=device)


@cache
def workspace(device: torch.device) -> Workspace:
    return Workspace(device)


def padded_rows(rows: int) -> int:
    """The rows of x that skinny_kernel is compiled for."""
    return max(16, next_power_of_2(rows))


def bucket_of(rows: int) -> int:
    return next(b for b in BUCKETS if rows <= b)


def heuristic(rows: int, weight_rows: int, k: int) -> LinearConfig:
    """A configuration for shapes that nobody measured. rows: one of BUCKETS."""
    wide = next_power_of_2(k)
    if rows <= 2 or (rows <= GEMV_ROWS and weight_rows * k <= 2**22):
        block_k = min(wide, 1024 if rows <= 2 else 512)
        while cdiv(k, block_k) > _MAX_STEPS:
            block_k *= 2
        return LinearConfig("gemv", block_n=max(2, (4096 if rows <= 2 else 2048) // block_k), block_k=block_k, num_warps=4, fuse_norm=True)
    if rows > 16:
        return TORCH
    block_k = max(16, min(128, wide))
    config = LinearConfig("dot", block_n=64, block_k=block_k, num_warps=4, num_stages=4, prefetch=min(1024, max(64, wide)))
    while cdiv(weight_rows, 64) * config.split_k < 264 and config.split_k < 8 and k // (2 * config.split_k) >= 512:
        config = LinearConfig(**asdict(config) | {"split_k": 2 * config.split_k})
    return config if config.problem(rows, weight_rows, k) is None else TORCH


def load_table(path: Path = CONFIG_FILE) -> dict[tuple[int, int, bool, int], LinearConfig]:
    """(weight rows, k, gated, bucket) -> configuration, of the entries that this file's kernels can run."""
    if not path.is_file():
        return {}
    fields = LinearConfig.__dataclass_fields__
    table = {}
    for entry in json.loads(path.read_text(encoding="utf-8"))["entries"]:
        config = LinearConfig(**{name: entry[name] for name in fields if name in entry})
        if config.problem(entry["m"], entry["weight_rows"], entry["k"]) is None:
            table[entry["weight_rows"], entry["k"], entry["gated"], entry["m"]] = config
    return table


_table: dict[tuple[int, int, bool, int], LinearConfig] | None = None


@cache
def choose(rows: int, weight_rows: int, k: int, gated: bool) -> LinearConfig:
    """The configuration for x [rows, k], rows <= MAX_ROWS: measured, or else the heuristic's."""
    global _table
    if _table is None:
        _table = load_table()
    bucket = bucket_of(rows)
    found = _table.get((weight_rows, k, gated, bucket))
    return found if found is not None else heuristic(bucket, weight_rows, k)


def linear_reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, gated: bool = False, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """See ``linear``."""
    y = F.linear(x, weight, bias)
    if gated:
        y = silu_and_mul(y) if y.is_cuda else silu_and_mul_reference(y)
    return y if out_dtype is None else y.to(out_dtype)


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, gated: bool = False, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """x [..., K], weight [R, K], bias [R] -> x W^T + b [..., R], or silu(first half) * second half [..., R / 2] if ``gated``.

    Sums in float32; results rounded to x's dtype (and stored as ``out_dtype`` if given, for logits).
    """
    k = x.shape[-1]
    if x.dim() != 2:
        return linear(x.reshape(-1, k), weight, bias, gated=gated, out_dtype=out_dtype).unflatten(0, x.shape[:-1])
    if not _applies(x, weight):
        return linear_reference(x, weight, bias, gated=gated, out_dtype=out_dtype)
    config = choose(x.shape[0], weight.shape[0], k, gated)
    if config.kernel == "torch":
        return linear_reference(x, weight, bias, gated=gated, out_dtype=out_dtype)
    return run(config, x, weight, bias, gated=gated, out_dtype=out_dtype)[0]


def norm_linear(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    gated: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``linear`` of RMSNorm(x + residual), and x + residual itself; x, residual [M, K].

    In one kernel where that was measured to be faster. The results are those of ``rms_norm`` and ``linear`` up to the order
    of the norm's float32 sum.
    """
    if x.dim() == 2 and _applies(x, weight) and (residual is None or residual.stride(-1) == 1):
        config = choose(x.shape[0], weight.shape[0], x.shape[1], gated)
        if config.kernel == "gemv" and config.fuse_norm and (residual is None or residual.dtype == x.dtype):
            return run(config, x, weight, bias, gated=gated, norm=(norm_weight, eps), residual=residual)
    normed, total = (rms_norm if x.is_cuda else rms_norm_reference)(x, norm_weight, eps, residual)
    return linear(normed, weight, bias, gated=gated), total


def _applies(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the kernels take these operands; ValueError if they don't multiply at all."""
    if weight.dim() != 2 or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"linear: x has {x.shape[-1]} features, the weight is {tuple(weight.shape)}.")
    return (
        x.is_cuda
        and 0 < x.shape[0] <= MAX_ROWS
        and x.dtype in (torch.bfloat16, torch.float16)
        and weight.dtype == x.dtype
        and weight.is_contiguous()
        and weight.numel() > 0
        and x.stride(1) == 1
        and x.shape[1] % 8 == 0  # 16-byte accesses
    )


def run(
    config: LinearConfig,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    gated: bool = False,
    out_dtype: torch.dtype | None = None,
    norm: tuple[torch.Tensor, float] | None = None,
    residual: torch.Tensor | None = None,
    compile_only: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch a configuration that has no ``problem``: (y [M, N], x + residual, or x without one). ``compile_only`` fills
    Triton's cache on disk and launches nothing."""
    rows, k = x.shape
    weight_rows = weight.shape[0]
    n = weight_rows // 2 if gated else weight_rows
    y = torch.empty(rows, n, dtype=out_dtype or x.dtype, device=x.device)
    total = x if residual is None else torch.empty(rows, k, dtype=x.dtype, device=x.device)
    space = workspace(x.device)
    grid = (cdiv(weight_rows, config.block_n), config.split_k)
    other = x if residual is None else residual
    kernel = gemv_kernel if config.kernel == "gemv" else skinny_kernel
    if config.kernel == "gemv":
        arguments = (
            x, weight, weight if bias is None else bias, y, other, total, weight if norm is None else norm[0],
            0.0 if norm is None else norm[1], space.partial, space.counters, rows, n, x.stride(0), other.stride(0),
        )  # fmt: skip
        keywords = dict(
            K=k, ROWS=next_power_of_2(rows), BLOCK_N=config.block_n, BLOCK_K=config.block_k, SPLIT_K=config.split_k,
            GATED=gated, HAS_BIAS=bias is not None, HAS_NORM=norm is not None, HAS_RESIDUAL=residual is not None,
            num_warps=config.num_warps, **pdl_options(x),
        )  # fmt: skip
    else:
        arguments = (x, weight, weight if bias is None else bias, y, space.partial, space.counters, rows, n, x.stride(0))
        keywords = dict(
            K=k, BLOCK_M=padded_rows(rows), BLOCK_N=config.block_n, BLOCK_K=config.block_k, SPLIT_K=config.split_k,
            STAGES=config.num_stages, PREFETCH=config.prefetch, GATED=gated, HAS_BIAS=bias is not None,
            num_warps=config.num_warps, **pdl_options(x),
        )  # fmt: skip
    if compile_only:
        kernel.warmup(*arguments, grid=grid, **keywords)
    else:
        launch(kernel, grid, arguments, **keywords)
    return y, total
