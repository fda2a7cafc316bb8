"""Writes model folders with published shapes, a tokenizer of one word a token, and no weights: for engines that load dummy ones.

usage: python scripts/gpu/model_folders.py FOLDER [NAME …]     (names: qwen3-0.6b, qwen3-8b, llama-3.2-1b, tiny; default: the first three)
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936, "head_dim": 128, "num_key_value_heads": 8,
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "max_position_embeddings": 40960, "attention_bias": False,
    "attention_dropout": 0.0, "use_sliding_window": False, "sliding_window": None, "max_window_layers": 99, "initializer_range": 0.02,
    "bos_token_id": 151643, "eos_token_id": 151645, "torch_dtype": "bfloat16", "use_cache": True,
}  # fmt: skip
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "hidden_act": "silu", "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0, "max_position_embeddings": 131072, "attention_bias": False, "mlp_bias": False, "initializer_range": 0.02,
    "bos_token_id": 128000, "eos_token_id": 128001, "torch_dtype": "bfloat16", "use_cache": True,
    "rope_scaling": {
        "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    },
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": QWEN3
    | {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16, "tie_word_embeddings": True},
    "qwen3-8b": QWEN3
    | {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32, "tie_word_embeddings": False},
    "llama-3.2-1b": LLAMA
    | {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8}
    | {"head_dim": 64, "tie_word_embeddings": True},
    "tiny": QWEN3  # to try the scripts out on a CPU
    | {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    | {"head_dim": 16, "vocab_size": 2048, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": True, "torch_dtype": "float32"},
}


def write(folder: Path, config: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "generation_config.json").write_text("{}")
    vocab = {"<unk>": 0} | {f"w{i}": i for i in range(1, config["vocab_size"])}
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": None, "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"},
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "model_max_length": 131072, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1].startswith("-") or any(name not in MODELS for name in sys.argv[2:]):
        sys.exit(__doc__)
    for name in sys.argv[2:] or [name for name in MODELS if name != "tiny"]:
        write(Path(sys.argv[1]) / name, MODELS[name])
        print(Path(sys.argv[1]) / name)


if __name__ == "__main__":
    main()
