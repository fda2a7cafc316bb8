"""GGUF files as a stream of tensors under Hugging Face's names and in Hugging Face's row order."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch

from octavo.errors import ModelError
from octavo.weights.gguf_dequant import dequantize
from octavo.weights.gguf_file import GgufFile, GgufTensor

if TYPE_CHECKING:
    from octavo.models.config import ModelConfig

_TOP_LEVEL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Rotary tables: they belong to the configuration (read by models/), not to the weights.
_NOT_WEIGHTS = re.compile(r"^(blk\.\d+\.)?(rope_freqs|rope_factors_long|rope_factors_short|attn_rot_embd)\.weight$")
_LAYER_NAME = re.compile(r"^blk\.(\d+)\.(\w+)\.(weight|bias)$")
_TOP_NAME = re.compile(r"^(\w+)\.(weight|bias)$")


def hf_name(name: str) -> str | None:
    """``blk.3.attn_q.weight`` → ``model.layers.3.self_attn.q_proj.weight``; None for a name that is not known."""
    if match := _LAYER_NAME.match(name):
        module = _IN_LAYER.get(match[2])
        return module and f"model.layers.{match[1]}.{module}.{match[3]}"
    if match := _TOP_NAME.match(name):
        module = _TOP_LEVEL.get(match[1])
        return module and f"{module}.{match[2]}"
    return None


def iterate_gguf(
    config: ModelConfig,
    *,
    dtype: torch.dtype | None,
    device: torch.device | str,
    progress: Callable[[float], None] | None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (Hugging Face name, tensor) in file order; see ``octavo.weights.iterate_weights``."""
    file = GgufFile(config.path)
    tensors = [t for t in file.tensors.values() if not _NOT_WEIGHTS.match(t.name)]
    unknown = [t.name for t in tensors if hf_name(t.name) is None]
    if unknown:
        raise ModelError(f"{config.path}: {len(unknown)} tensors are not known for {config.architecture}: {', '.join(unknown[:8])}.")
    total, done = sum(t.num_bytes for t in tensors) or 1, 0
    for tensor in tensors:
        raw = _raw_rows(tensor)
        num_heads = _interleaved_heads(config, file, tensor.name)
        if num_heads:
            raw = _undo_interleaving(config, tensor, raw, num_heads)
        yield str(hf_name(tensor.name)), dequantize(raw.to(device), tensor.type_name, tensor.shape, dtype)
        done += tensor.num_bytes
        if progress is not None:
            progress(done / total)


def _raw_rows(tensor: GgufTensor) -> torch.Tensor:
    """The tensor's packed bytes, uint8 [rows, bytes per row], as a view of the mapped file (read-only)."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")  # nobody writes: dequantize copies
        raw = torch.frombuffer(tensor.buffer, dtype=torch.uint8, count=tensor.num_bytes, offset=tensor.offset)
    rows = 1
    for size in tensor.shape[:-1]:
        rows *= size
    return raw.view(rows, -1)


def _interleaved_heads(config: ModelConfig, file: GgufFile, name: str) -> int:
    """How many heads the rows of this tensor interleave; 0 when its rows are in Hugging Face's order.

    llama.cpp rotates pairs (2i, 2i+1) for its architecture ``llama`` but halves (i, i + d/2), as Hugging Face does, for
    the qwen ones. Its converter therefore reorders q's and k's output rows, weights and biases, of llama models only.
    """
    if file.get("general.architecture") != "llama":
        return 0
    part = name.split(".")[2] if name.startswith("blk.") else ""
    return {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}.get(part, 0)


def _undo_interleaving(config: ModelConfig, tensor: GgufTensor, raw: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Reorder the rows of every head from (0, d/2, 1, d/2 + 1, …) to (0, 1, …, d - 1), while they are still packed."""
    if len(tensor.shape) == 1:  # a bias: every element is a row
        raw = raw.view(tensor.shape[0], -1)
    rows = raw.shape[0]
    if rows % (2 * num_heads):
        raise ModelError(f"{config.path}: tensor {tensor.name} has {rows} rows, which {num_heads} heads of even size cannot share.")
    return raw.view(num_heads, rows // num_heads // 2, 2, -1).transpose(1, 2).reshape(rows, -1)
