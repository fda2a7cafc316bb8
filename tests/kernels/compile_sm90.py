"""Compiles kernels for sm_90 without a GPU and prints what each costs: registers, spills, shared memory.

    python -m tests.kernels.compile_sm90 [part of a name ... | tuned]

Run by test_triton_interpreter.py in a process of its own. Exits with 1 if one does not compile, spills, or
touches memory before it has waited for the kernel before, apart from those that load weights or plans there.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

SM90 = GPUTarget("cuda", 90, 32)
BF16, FP32, I32, I64 = "*bf16", "*fp32", "*i32", "*i64"


@dataclass
class Case:
    """A kernel with argument types (in order; "1" is the integer 1), and its constants."""

    name: str
    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any]
    options: dict[str, int] = field(default_factory=dict)
    loose: tuple[str, ...] = ()  # integers not known to be divisible by 16
    loads_early: bool = False  # weights or plans, before it waits for the kernel before
    spills: int = 0  # bytes that may be
    waits: int = 1  # for the kernel before


def gemv_case(config: Any, rows: int, weight_rows: int, k: int, gated: bool = False, norm: bool = False) -> Case:
    from octavo.kernels.triton import gemv

    types = {"x_ptr": BF16, "w_ptr": BF16, "bias_ptr": BF16, "y_ptr": BF16}
    constants = {"K": k, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k, "SPLIT_K": config.split_k}
    constants |= {"GATED": gated, "HAS_BIAS": False, "USE_PDL": True}
    name = f"{config.kernel} m{rows} {weight_rows}x{k} bn{config.block_n} bk{config.block_k} s{config.split_k} w{config.num_warps}"
    if config.kernel == "gemv":
        types |= {"residual_ptr": BF16, "total_ptr": BF16, "norm_ptr": BF16, "eps": "fp32", "partial_ptr": FP32, "counter_ptr": I32}
        types |= {"M": "i32", "N": "i32", "x_stride": "i32", "residual_stride": "i32"}
        constants |= {"ROWS": triton.next_power_of_2(rows), "HAS_NORM": norm, "HAS_RESIDUAL": norm}
        kernel = gemv.gemv_kernel
    else:
        from octavo.kernels.triton.linear import padded_rows

        types |= {"partial_ptr": FP32, "counter_ptr": I32, "M": "i32", "N": "i32", "x_stride": "i32"}
        constants |= {"BLOCK_M": padded_rows(rows), "STAGES": config.num_stages, "PREFETCH": config.prefetch}
        kernel = gemv.skinny_kernel
    suffix = (" gated" if gated else "") + (" norm" if norm else "")
    return Case(name + suffix, kernel, types, constants, {"num_warps": config.num_warps}, ("M",), config.kernel == "gemv")


def linear_cases() -> Iterator[Case]:
    from octavo.kernels.triton.linear import heuristic

    for rows, weight_rows, k, gated in [
        (1, 4096, 1024, False), (1, 6144, 1024, True), (1, 1024, 3072, False), (2, 6144, 4096, False), (4, 1024, 1024, False),
        (1, 4096, 12288, False), (8, 24576, 4096, True), (16, 4096, 4096, False),
    ]:  # fmt: skip
        yield gemv_case(heuristic(rows, weight_rows, k), rows, weight_rows, k, gated)
    yield gemv_case(heuristic(1, 6144, 4096), 1, 6144, 4096, norm=True)


def elementwise_cases() -> Iterator[Case]:
    from octavo.kernels.triton import activation, norm

    for width in (1024, 4096, 16384):
        types = {"x_ptr": BF16, "residual_ptr": BF16, "weight_ptr": BF16, "out_ptr": BF16, "total_ptr": BF16, "eps": "fp32"}
        types |= {"x_stride": "i32", "residual_stride": "i32"}
        constants = {"WIDTH": width, "BLOCK": width, "HAS_RESIDUAL": True, "USE_PDL": True}
        yield Case(f"rms_norm {width}", norm._rms_norm_kernel, types, constants, {"num_warps": norm._warps(width)}, loads_early=True)
    for kind in (activation.SILU, activation.GELU_TANH, activation.GELU):
        constants = {"WIDTH": 3072, "BLOCK": 1024, "KIND": kind, "USE_PDL": True}
        yield Case(f"act_and_mul {kind}", activation._act_and_mul_kernel, {"x_ptr": BF16, "out_ptr": BF16, "x_stride": "i32"}, constants)


def sampling_cases() -> Iterator[Case]:
    from octavo.kernels.triton import bitmask, sample

    types = {"logits_ptr": FP32, "logits_stride": "i32", "bits_ptr": I32, "words": "i32", "places_ptr": I64, "vocab": "i32"}
    constants = {"BLOCK_WORDS": bitmask._BLOCK_WORDS, "USE_PDL": True}
    yield Case("token bitmask", bitmask._bitmask_kernel, types, constants, loose=("words", "vocab", "logits_stride"))
    vocab = 151936
    blocks, peaks = triton.cdiv(vocab, sample.BLOCK), triton.cdiv(vocab, sample.PEAK)
    for mode, name in ((sample.GREEDY, "greedy"), (sample.PLAIN, "plain"), (sample.TRUNCATED, "truncated")):
        types = {"logits_ptr": FP32, "logits_stride": "i32", "packed_ptr": I64, "rows_ptr": I64, "positions_ptr": I64, "best_ptr": I64}
        types |= {"bad_ptr": I32, "score_ptr": FP32, "token_ptr": I32, "mass_ptr": "*fp64", "peaks_ptr": FP32}
        constants = {"VOCAB": vocab, "BLOCK": sample.BLOCK, "PEAKS": peaks, "MODE": mode, "HAS_ROWS": True, "USE_PDL": True}
        yield Case(f"sample scan {name}", sample._scan_kernel, types, constants, {"num_warps": 8})
        types |= {"list_ptr": I32, "values_ptr": FP32, "ids_ptr": I32, "out_ptr": I64}
        constants |= {"BLOCKS": blocks, "BLOCKS_PADDED": triton.next_power_of_2(blocks), "PEAKS_PADDED": triton.next_power_of_2(peaks)}
        constants |= {"CANDIDATES": sample.CANDIDATES, "PASS": sample.PASS}
        warps = 16 if mode == sample.TRUNCATED else 1
        yield Case(f"sample choose {name}", sample._choose_kernel, types, constants, {"num_warps": warps})


def row_cases() -> Iterator[Case]:
    from octavo.kernels.triton import embedding, rows

    pdl = {"BLOCK": 128, "USE_PDL": True}
    loose = ("places", "dummy_row", "dummy_len", "count", "size", "vocab")
    types = {"row_index_ptr": I64, "last_token_ptr": I64, "num_computed_ptr": I64, "table_ptr": I32, "table_stride": "i32"}
    out = {"token_ptr": I64, "position_ptr": I64, "slot_ptr": I64, "length_ptr": I32}
    out |= {"places": "i32", "dummy_row": "i32", "dummy_len": "i32"}
    yield Case("decode_inputs", rows._decode_inputs_kernel, types | out, pdl | {"BLOCK_SIZE": 16}, loose=loose)
    out = {"length_ptr": I32, "out_ptr": I32}
    yield Case("decode_inputs tables", rows._tables_kernel, types | out, {"WIDTH": 2560, "BLOCK_SIZE": 16, "BLOCK": 512, "USE_PDL": True})
    yield Case("store_tokens", rows._store_tokens_kernel, types | {"token_ptr": I64, "places": "i32", "dummy_row": "i32"}, pdl, loose=loose)
    yield Case("scatter_pairs", rows._scatter_kernel, {"pairs_ptr": I64, "flat_ptr": I32, "count": "i32", "size": "i32"}, pdl, loose=loose)
    types = {"token_ptr": I64, "weight_ptr": BF16, "out_ptr": BF16, "vocab": "i32"}
    yield Case("embedding", embedding._embedding_kernel, types, {"WIDTH": 1024, "BLOCK": 1024, "USE_PDL": True}, loose=loose)


def attention_cases() -> Iterator[Case]:
    from octavo.kernels.decode_config import heuristic

    for heads, kv_heads, dim, element in [(16, 8, 128, "bf16"), (32, 8, 64, "bf16"), (8, 4, 256, "bf16"), (32, 1, 80, "bf16"),
                                          (32, 8, 96, "bf16"), (16, 8, 128, "fp8e4nv")]:  # fmt: skip
        config = heuristic(dim, heads // kv_heads, torch.float8_e4m3fn if element != "bf16" else torch.bfloat16)
        for fused in (False, True)[: 1 + (dim == 128)]:
            yield decode_case(element, config, heads, kv_heads, dim, element, fused)


def write_cases() -> Iterator[Case]:
    from octavo.kernels import write_kv

    types = {"qkv": BF16, "kv": BF16, "positions": I64, "slots": I64, "cos_sin": FP32, "q_norm": BF16, "k_norm": BF16, "qkv_stride": "i32"}
    types |= dict.fromkeys((f"kv_stride_{name}" for name in ("block", "side", "head", "token")), "i32") | {"table_stride": "i32"}
    types |= dict.fromkeys(("eps", "k_inverse", "v_inverse"), "fp32")
    constants = {"HEADS": 16, "KV_HEADS": 8, "DIM": 128, "BLOCK_SIZE": 16, "BLOCK_H": 4, "PDL": True}
    constants |= write_kv.head_shape(128, None)
    constants |= {"ROPE": True, "INTERLEAVED": False, "Q_NORM": True, "K_NORM": True, "FP8": False, "FP8_LIMIT": write_kv.FP8_MAX}
    yield Case("write_kv 16/8x128", write_kv._write_kv_kernel, types, constants, {"num_warps": 2})


def tuned_cases() -> Iterator[Case]:
    """Only where they are asked for: decode attention as it is launched, with the KV write in it and without."""
    from octavo.kernels.decode_config import decode_config

    for heads, kv_heads, dim in [(16, 8, 128), (32, 8, 128), (32, 8, 64)]:
        for config in dict.fromkeys(decode_config(dim, heads // kv_heads, torch.bfloat16, batch) for batch in (1, 32, 128, 256)):
            for fused in (False, True):
                yield decode_case(f"tuned x{config.programs_per_sm}", config, heads, kv_heads, dim, "bf16", fused)


def decode_case(name: str, config: Any, heads: int, kv_heads: int, dim: int, element: str, fused: bool) -> Case:
    """``fused``: with the KV write, QK-norm and RoPE in it."""
    from octavo.kernels import attention_plan, decode_attention, new_tokens

    group = heads // kv_heads
    types = dict.fromkeys(("q", "out"), BF16) | {"kv": f"*{element}"} | dict.fromkeys(("acc_buffer", "ml_buffer"), FP32)
    types |= dict.fromkeys(("tables", "seqs", "starts", "arrived"), I32)
    types |= dict.fromkeys(("q_stride", "out_stride", "table_stride", "window"), "i32")
    types |= dict.fromkeys(("scale", "factor", "soft_cap", "v_scale"), "fp32")
    written = dict.fromkeys(("positions", "slots"), I64) | {"cos_sin": FP32} | dict.fromkeys(("q_norm", "k_norm"), BF16)
    written |= dict.fromkeys(("angles_stride", "fresh"), "i32") | dict.fromkeys(("eps", "k_inverse", "v_inverse"), "fp32")
    constants: dict[str, Any] = {"KV_HEADS": kv_heads, "GROUP": group, "GROUP_DOT": max(16, group), "GROUP_PAD": group, "DIM": dim}
    constants |= {"DIM_PAD": triton.next_power_of_2(dim), "BLOCK_SIZE": 16, "BLOCK_N": config.block_n, "ALIGN": attention_plan.ALIGN}
    constants |= {"WINDOWED": kv_heads == 4, "CAPPED": kv_heads == 4, "MAX_CHUNKS": 32, "PREFETCH": config.prefetch}
    constants |= {"FIELDS": attention_plan.FIELDS, "LOG2_E": decode_attention.LOG2_E, "PRECISION": "tf32", "PDL": True}
    new = None
    if fused:
        weight, angles = torch.empty(dim, dtype=torch.bfloat16), torch.empty(1, dim)
        new = new_tokens.NewTokens(weight, weight, angles, False, weight, weight)
        types |= written
    else:
        constants |= dict.fromkeys(written)
    constants |= new_tokens.new_constants(new, dim, config, torch.float8_e4m3fn if element != "bf16" else torch.bfloat16)
    name = f"decode_attention{' + write' * fused} {heads}/{kv_heads}x{dim} {name}"
    spills = 48 if fused else 16
    return Case(
        name, decode_attention._decode_kernel, types, constants, config.options(), ("fresh",), loads_early=True, spills=spills,
        waits=1 + fused,
    )  # fmt: skip


def compile_case(case: Case) -> Any:
    signature, attributes = {}, {}
    for index, name in enumerate(case.kernel.arg_names):
        if name in case.constants:
            signature[name] = "constexpr"
            continue
        signature[name] = case.types[name]
        if case.types[name][0] == "*" or (case.types[name][0] == "i" and name not in case.loose):
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=case.kernel, signature=signature, constexprs=case.constants, attrs=attributes)
    return triton.compile(source, target=SM90, options=case.options)


@dataclass
class Machine:
    """What the machine code says: registers a thread, bytes of local memory, accesses to global memory before the wait for the
    kernel before (prefetches aside)."""

    registers: int
    local: int
    early: int


def inspect(compiled: Any, expected: int) -> Machine:
    tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        run = [subprocess.run([tool, o, file.name], capture_output=True, text=True, check=True) for o in ("-res-usage", "-sass")]
        usage, code = (done.stdout for done in run)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found, usage
    instructions = re.findall(r"/\*[0-9a-f]{4,}\*/\s+([^;]*);", code)
    waits = [i for i, text in enumerate(instructions) if "ACQBULK" in text]
    assert len(waits) == expected, f"{len(waits)} waits"
    early = sum(bool(re.search(r"\b(LDG|LDGSTS|STG|ATOM|ATOMG|RED)\b", text)) for text in instructions[: waits[-1]])
    return Machine(int(found[1]), int(found[2]), early)


def cases() -> Iterator[Case]:
    yield from elementwise_cases()
    yield from linear_cases()
    yield from sampling_cases()
    yield from row_cases()
    yield from attention_cases()
    yield from write_cases()


def main(wanted: list[str]) -> int:
    bad = 0
    for case in tuned_cases() if wanted == ["tuned"] else cases():
        if wanted and not any(part in case.name for part in wanted):
            continue
        start = time.time()
        try:
            compiled = compile_case(case)
            machine = inspect(compiled, case.waits)
        except Exception as error:  # noqa: BLE001 - all are listed
            print(f"FAILED {case.name}: {type(error).__name__}: {str(error)[:500]}")
            bad += 1
            continue
        bad += machine.local > case.spills or (machine.early > 0) != case.loads_early
        shared = f"{compiled.metadata.shared:7} B shared, {machine.early} accesses before the wait, {time.time() - start:4.1f} s"
        print(f"{case.name:58} {machine.registers:4} registers {machine.local:4} B local {shared}", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
