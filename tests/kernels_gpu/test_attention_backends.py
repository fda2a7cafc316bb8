"""GPU attention backends as a runner uses them, step by step, against the ground truth of attention/reference.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from octavo.attention.base import AttentionLayerSpec, AttentionMetadata, ForwardContext
from octavo.attention.reference import ReferenceAttention
from tests.kernels_gpu.attention_cases import DEVICE, INTERPRETED, needs_triton, rounding

pytestmark = needs_triton
DTYPE = torch.float32 if INTERPRETED else torch.bfloat16
BLOCK_SIZE = 16


def make_layer(heads: int, kv_heads: int, dim: int, **options: Any) -> AttentionLayerSpec:
    rng = torch.Generator().manual_seed(1)
    angles = torch.rand(8192, dim // 2, generator=rng) * 6.28
    table = torch.cat((angles.cos(), angles.sin()), dim=1).to(DEVICE)
    return AttentionLayerSpec(0, heads, kv_heads, dim, dim**-0.5, rope_cos_sin=table, **options)


def norms(dim: int) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(2)
    return {name: (1 + 0.1 * torch.randn(dim, generator=rng)).to(DEVICE, DTYPE) for name in ("q_norm", "k_norm")}


def make_step(done: list[int], counts: list[int], tables: torch.Tensor, rows: list[int] | None, padding: int) -> AttentionMetadata:
    """One step in which sequence s runs ``counts[s]`` tokens (0: it isn't in the step), decodes first, then padding tokens."""
    work = sorted((s for s in range(len(done)) if counts[s]), key=lambda s: counts[s] != 1)
    positions = [p for s in work for p in range(done[s], done[s] + counts[s])]
    owners = [s for s in work for _ in range(counts[s])]
    where = tables.cpu() if rows is None else tables.cpu()[rows]
    slots = [int(where[s, p // BLOCK_SIZE]) * BLOCK_SIZE + p % BLOCK_SIZE for s, p in zip(owners, positions, strict=True)]
    index = torch.tensor(work if rows is None else [rows[s] for s in work], device=DEVICE)
    return AttentionMetadata(
        num_tokens=len(positions),
        num_seqs=len(work),
        num_decodes=sum(counts[s] == 1 for s in work),
        max_query_len=max(counts[s] for s in work),
        max_seq_len=max(done[s] + counts[s] for s in work),
        block_size=BLOCK_SIZE,
        positions=torch.tensor(positions + [0] * padding, device=DEVICE),
        slots=torch.tensor(slots + [-1] * padding, device=DEVICE),
        query_start=torch.tensor([0] + [counts[s] for s in work], device=DEVICE).cumsum(0).int(),
        seq_lens=torch.tensor([done[s] + counts[s] for s in work], dtype=torch.int32, device=DEVICE),
        block_tables=tables[index] if rows is None else tables,
        extra={} if rows is None else {"row_index": index},
    )


def run_steps(backend: Any, layer: AttentionLayerSpec, cuts: list[list[int]], indirect: bool) -> list[torch.Tensor]:
    """Every sequence is fed in the pieces of its cuts; the outputs of the steps."""
    rng = torch.Generator().manual_seed(5)
    lengths = [sum(c) for c in cuts]
    width = -(-max(lengths) // BLOCK_SIZE) + 1
    tables = torch.randperm(len(cuts) * width, generator=rng).view(len(cuts), width).int()
    rows = None
    if indirect:
        rows = [2 * s + 1 for s in range(len(cuts))]
        spread = torch.zeros(2 * len(cuts) + 1, width, dtype=torch.int32)
        spread[rows] = tables
        tables = spread
    tables = tables.to(DEVICE)
    cache = backend.make_kv_cache(len(cuts) * width, BLOCK_SIZE, layer.num_kv_heads, layer.head_dim, DTYPE, DEVICE)
    columns = (layer.num_heads + 2 * layer.num_kv_heads) * layer.head_dim
    qkv = [torch.randn(length, columns, generator=rng).to(DEVICE, DTYPE) for length in lengths]
    done, outputs = [0] * len(cuts), []
    for step in range(max(map(len, cuts))):
        counts = [c[step] if step < len(c) else 0 for c in cuts]
        padding = step % 3
        metadata = make_step(done, counts, tables, rows, padding)
        order = sorted((s for s in range(len(cuts)) if counts[s]), key=lambda s: counts[s] != 1)
        empty = torch.ones(padding, columns, device=DEVICE, dtype=DTYPE)
        tokens = torch.cat([qkv[s][done[s] : done[s] + counts[s]] for s in order] + [empty])
        if isinstance(backend, ReferenceAttention) and rows is not None:
            metadata.block_tables = tables[metadata.extra["row_index"]]
        backend.prepare(metadata)
        outputs.append(backend.forward(tokens, layer, cache, ForwardContext(metadata, backend, [cache])))
        done = [a + b for a, b in zip(done, counts, strict=True)]
    return outputs


CUTS = [[5, 1, 1, 1, 20], [1, 1, 1], [150, 1, 3, 1, 1, 1], [40, 100, 1, 1]]
LONG = [[1000, 1, 1, 1], [1, 1, 1], [40, 700, 1, 1, 300, 1], [3000, 5, 1, 1]]


def backends() -> list[str]:
    """Names of backends, and how they decode."""
    own = ["triton", "triton fused"]
    return own if INTERPRETED else [*own, "flash_attention", "flash_attention fused", "flash_attention fa3"]


def make_backend(name: str) -> Any:
    from octavo.attention.triton import TritonAttention

    fused_write = 1 << 20 if name.endswith("fused") else 0
    if name.startswith("triton"):
        return TritonAttention(fused_write=fused_write)
    from octavo.attention.flash_attention import FlashAttention, available

    if not available():
        pytest.skip("FlashAttention 3 needs the tokenspeed-fa3 wheel and a Hopper GPU")
    return FlashAttention(decode="fa3" if name.endswith("fa3") else "triton", fused_write=fused_write)


@pytest.mark.parametrize("name", backends())
@pytest.mark.parametrize("indirect", [False, True])
@pytest.mark.parametrize(
    ("heads", "dim", "options"),
    [
        ((4, 2), 16 if INTERPRETED else 128, {}),
        ((6, 2), 16 if INTERPRETED else 64, {"sliding_window": 30, "logit_soft_cap": 2.0, "rope_interleaved": True}),
        ((4, 4), 16 if INTERPRETED else 256, {"sliding_window": 130}),
    ],
)
def test_against_the_ground_truth(name: str, indirect: bool, heads, dim, options) -> None:
    if INTERPRETED and indirect == (name == "triton"):
        pytest.skip("slow; one of the two shows each")
    layer = make_layer(*heads, dim, **norms(dim), **options)
    cuts = CUTS if INTERPRETED else LONG
    ours = run_steps(make_backend(name), layer, cuts, indirect)
    theirs = run_steps(ReferenceAttention(), layer, cuts, indirect)
    for step, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        torch.testing.assert_close(a, b, **rounding(DTYPE), msg=lambda m, step=step: f"step {step}: {m}")


def test_one_launch_and_two_give_the_same_step_by_step() -> None:
    """Decodes alone and beside prompts, and where only small steps are fused."""
    from octavo.attention.triton import TritonAttention

    layer = make_layer(4, 2, 16, **norms(16))
    cuts = [[5, 1, 1, 7], [33, 1, 1], [1, 1, 10, 1]]
    expected = run_steps(TritonAttention(fused_write=0), layer, cuts, indirect=True)
    for limit in (2, 100):
        ours = run_steps(TritonAttention(fused_write=limit), layer, cuts, indirect=True)
        assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


def test_the_limit_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    from octavo.attention.triton import TritonAttention
    from octavo.errors import ConfigError

    assert TritonAttention()._fused_write == 64
    monkeypatch.setenv("OCTAVO_FUSED_WRITE", "32")
    assert TritonAttention()._fused_write == 32 and TritonAttention(fused_write=0)._fused_write == 0
    monkeypatch.setenv("OCTAVO_FUSED_WRITE", "yes")
    with pytest.raises(ConfigError, match="OCTAVO_FUSED_WRITE.*'yes'"):
        TritonAttention()


@pytest.mark.parametrize("name", ["triton", "triton fused"])
def test_two_layers_share_a_plan_and_windows_have_their_own(name: str) -> None:
    backend = make_backend(name)
    full, window = make_layer(4, 2, 16), make_layer(4, 2, 16, sliding_window=20)
    tables = torch.arange(64, dtype=torch.int32, device=DEVICE).view(2, 32)
    metadata = make_step([300, 40], [1, 1], tables, None, 0)
    caches = [torch.randn(64, 2, 2, BLOCK_SIZE, 16).to(DEVICE, DTYPE) for _ in range(3)]
    backend.prepare(metadata)
    context = ForwardContext(metadata, backend, caches)
    truth = ReferenceAttention()
    for layer, cache in zip((full, window, full), caches, strict=True):
        qkv = torch.randn(2, 8 * 16).to(DEVICE, DTYPE)
        plain = cache.transpose(2, 3).contiguous()
        ours = backend.forward(qkv.clone(), layer, cache, context)
        torch.testing.assert_close(ours, truth.forward(qkv, layer, plain, context), **rounding(DTYPE))
    assert len(metadata.extra["triton"]) == 2


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="CUDA graphs need an NVIDIA GPU")
@pytest.mark.parametrize("name", ["triton", "triton fused", "flash_attention", "flash_attention fa3"])
def test_in_a_cuda_graph(name: str) -> None:
    """Captured once with 8 rows; replayed with other lengths, tables, slots and fewer sequences."""
    backend, layer = make_backend(name), make_layer(16, 8, 128, **norms(128))
    max_blocks, rows, blocks = 300, 8, 8 * 300
    tables = torch.randperm(blocks).view(rows, max_blocks).int().to(DEVICE)
    cache = backend.make_kv_cache(blocks, BLOCK_SIZE, 8, 128, DTYPE, DEVICE)
    cache.copy_(torch.randn(cache.shape).to(DTYPE))
    static = {
        "positions": torch.zeros(rows, dtype=torch.int64, device=DEVICE),
        "slots": torch.full((rows,), -1, dtype=torch.int64, device=DEVICE),
        "seq_lens": torch.zeros(rows, dtype=torch.int32, device=DEVICE),
        "row_index": torch.arange(rows, device=DEVICE),
        "qkv": torch.zeros(rows, 32 * 128, dtype=DTYPE, device=DEVICE),
    }
    starts = torch.arange(rows + 1, dtype=torch.int32, device=DEVICE)

    def step() -> torch.Tensor:
        extra = {"row_index": static["row_index"]}
        metadata = AttentionMetadata(
            rows, rows, rows, 1, max_blocks * BLOCK_SIZE, BLOCK_SIZE,
            static["positions"], static["slots"], starts, static["seq_lens"], tables, extra,
        )  # fmt: skip
        backend.prepare(metadata)
        context = ForwardContext(metadata, backend, [cache])
        backend.forward(static["qkv"].clone(), layer, cache, context)
        return backend.forward(static["qkv"].clone(), layer, cache, context)

    backend.make_workspace(rows, [layer], DTYPE, DEVICE)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    truth = ReferenceAttention()
    for used in (8, 3, 8, 1):
        lengths = torch.randint(1, max_blocks * BLOCK_SIZE, (used,))
        order = torch.randperm(rows)[:used]
        static["qkv"].copy_(torch.randn(rows, 32 * 128).to(DTYPE))
        for name_, values, empty in (
            ("positions", lengths - 1, 0),
            ("seq_lens", lengths, 0),
            ("row_index", order, 0),
            ("slots", tables.cpu()[order, (lengths - 1) // BLOCK_SIZE].long() * BLOCK_SIZE + (lengths - 1) % BLOCK_SIZE, -1),
        ):
            static[name_].fill_(empty)
            static[name_][:used] = values.to(DEVICE, static[name_].dtype)
        plain = cache.transpose(2, 3).contiguous()
        graph.replay()
        metadata = AttentionMetadata(
            used, used, used, 1, int(lengths.max()), BLOCK_SIZE, static["positions"], static["slots"], starts[: used + 1],
            static["seq_lens"][:used], tables[static["row_index"][:used]],
        )  # fmt: skip
        expected = truth.forward(static["qkv"].clone(), layer, plain, ForwardContext(metadata, truth, [plain]))
        torch.testing.assert_close(out[:used], expected[:used], **rounding(DTYPE))
        assert not out[used:].any()
        torch.testing.assert_close(cache.transpose(2, 3), plain, **rounding(DTYPE))


class Fa3InTorch:
    """The two operators of FlashAttention 3 that are called, for few sequences: what the views are that it is given."""

    @staticmethod
    def get_scheduler_metadata(**options: Any) -> torch.Tensor:
        return torch.tensor([options["batch_size"], options["max_seqlen_q"], options["num_splits"]], dtype=torch.int32)

    @staticmethod
    def fwd(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, out: torch.Tensor, **options: Any) -> None:
        starts, lengths, rows = options["cu_seqlens_q"], options["seqused_k"], options["kv_batch_idx"]
        longest = 1 if starts is None else options["max_seqlen_q"]
        assert options["scheduler_metadata"].tolist() == [len(lengths), longest, options["num_splits"]] and options["is_causal"]
        if starts is None:
            q, out, starts = q.squeeze(1), out.squeeze(1), torch.arange(len(lengths) + 1)
        assert len(q) == len(out) == starts[-1]
        for s, length in enumerate(lengths.tolist()):
            table = options["page_table"][s if rows is None else rows[s]]
            keys, values = (x[table].flatten(0, 1)[:length].repeat_interleave(q.shape[1] // k.shape[2], 1) for x in (k, v))
            a, b = int(starts[s]), int(starts[s + 1])
            assert b - a <= longest
            scores = torch.einsum("qhd,khd->hqk", q[a:b].float(), keys.float()) * options["softmax_scale"]
            age = torch.arange(length - (b - a), length)[:, None] - torch.arange(length)
            seen = (age >= 0) & (age <= (options["window_size_left"] if options["window_size_left"] >= 0 else length))
            weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
            out[a:b] = torch.einsum("hqk,khd->qhd", weights, values.float()).to(out.dtype)


@pytest.mark.skipif(not INTERPRETED, reason="the operators themselves are tested on a GPU")
@pytest.mark.parametrize("decode", ["triton", "fa3"])
@pytest.mark.parametrize("window", [None, 30])
@pytest.mark.parametrize("indirect", [False, True])
def test_what_flash_attention_is_given(decode: Any, window: int | None, indirect: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from octavo.attention import flash_attention as backend
    from octavo.kernels import flash_attention_3 as kernel

    for module in (backend, kernel):
        monkeypatch.setattr(module, "library", lambda: Fa3InTorch)
    monkeypatch.setattr(backend, "covers", lambda *shape: True)
    layer = make_layer(4, 2, 16, sliding_window=window, **norms(16))
    cuts = [[5, 1, 1, 20], [33, 1, 1], [1, 1, 10, 1]]
    ours, theirs = (run_steps(b, layer, cuts, indirect) for b in (backend.FlashAttention(decode=decode), ReferenceAttention()))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, **rounding(DTYPE))
