"""Small GGUF files for the tests, written with the gguf package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, quants


def pack(values: np.ndarray, type_name: str, rng: np.random.Generator) -> np.ndarray:
    """Quantize with the package where it can; else random bytes, whose float16 scales are made finite."""
    qtype = GGMLQuantizationType[type_name]
    try:
        return quants.quantize(values, qtype)
    except NotImplementedError:
        shape = quants.quant_shape_to_byte_shape(values.shape, qtype)
        data = rng.integers(0, 256, shape, dtype=np.uint8)
        # float16 scales sit at even offsets; with a clear exponent bit none of them is an infinity or a NaN
        data[..., 1::2] &= 0xBF
        return data


def write_gguf(
    path: Path,
    architecture: str,
    metadata: dict[str, Any],
    tensors: dict[str, tuple[np.ndarray, str]],
    *,
    tokens: list[tuple[str, int]] = (),
    rng: np.random.Generator | None = None,
) -> Path:
    """``tensors`` maps GGUF names to (float32 values, type name); ``metadata`` keys beginning with '.' get the architecture's prefix."""
    writer = GGUFWriter(str(path), architecture)
    for key, value in metadata.items():
        key = architecture + key if key.startswith(".") else key
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    if tokens:
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list([token for token, _ in tokens])
        writer.add_token_types([kind for _, kind in tokens])
    rng = rng or np.random.default_rng(0)
    for name, (values, type_name) in tensors.items():
        writer.add_tensor(name, pack(values.astype(np.float32), type_name, rng), raw_dtype=GGMLQuantizationType[type_name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tiny_metadata(heads: int = 4, kv_heads: int = 2, head_dim: int = 16, hidden: int = 64, layers: int = 2, **more: Any) -> dict[str, Any]:
    return {
        ".block_count": layers,
        ".context_length": 128,
        ".embedding_length": hidden,
        ".feed_forward_length": 96,
        ".attention.head_count": heads,
        ".attention.head_count_kv": kv_heads,
        ".attention.key_length": head_dim,
        ".attention.value_length": head_dim,
        ".attention.layer_norm_rms_epsilon": 1e-5,
        ".rope.freq_base": 10000.0,
        ".rope.dimension_count": head_dim,
        ".vocab_size": 32,
        **more,
    }


def tiny_tensors(
    architecture: str, rng: np.random.Generator, heads: int = 4, kv_heads: int = 2, head_dim: int = 16, hidden: int = 64, layers: int = 2
) -> dict[str, tuple[np.ndarray, str]]:
    """All tensors of a small dense model, in mixed types, as llama.cpp's converter names them."""

    def random(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32)

    tensors = {"token_embd.weight": (random(32, hidden), "Q8_0"), "output_norm.weight": (random(hidden), "F32")}
    tensors["output.weight"] = (random(32, hidden), "F16")
    for i in range(layers):
        layer = {
            "attn_norm.weight": (random(hidden), "F32"),
            "ffn_norm.weight": (random(hidden), "F32"),
            "attn_q.weight": (random(heads * head_dim, hidden), "Q4_0"),
            "attn_k.weight": (random(kv_heads * head_dim, hidden), "Q5_1"),
            "attn_v.weight": (random(kv_heads * head_dim, hidden), "BF16"),
            "attn_output.weight": (random(hidden, heads * head_dim), "Q4_1"),
            "ffn_gate.weight": (random(96, hidden), "Q5_0"),
            "ffn_up.weight": (random(96, hidden), "F16"),
            "ffn_down.weight": (random(hidden, 96), "F32"),
        }
        if architecture == "qwen2":
            sizes = {"q": heads * head_dim, "k": kv_heads * head_dim, "v": kv_heads * head_dim}
            layer |= {f"attn_{part}.bias": (random(size), "F32") for part, size in sizes.items()}
        if architecture == "qwen3":
            layer |= {f"attn_{part}_norm.weight": (random(head_dim), "F32") for part in "qk"}
        tensors |= {f"blk.{i}.{name}": value for name, value in layer.items()}
    return tensors
