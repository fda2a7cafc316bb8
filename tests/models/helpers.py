"""Tiny transformers models, their ModelConfig, and a driver that runs ours step by step over scattered blocks."""

from __future__ import annotations

import torch

from octavo.attention.base import AttentionMetadata, ForwardContext
from octavo.attention.reference import ReferenceAttention
from octavo.distributed.group import Group
from octavo.models.config import ModelConfig, RopeConfig
from octavo.models.loader import load_model


def tiny_transformers_model(family: str, seed: int = 0, **changes):
    """A float32 model of 64 hidden units whose every parameter is random: norms and biases too, which start trivial otherwise."""
    import transformers

    settings = {
        "vocab_size": 131,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
        "attn_implementation": "eager",
        **changes,
    }
    if family == "Qwen2":
        settings.pop("head_dim")
    model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**settings)).float().eval()
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = 1 + 0.2 * noise if "norm" in name else noise * (0.3 if name.endswith("bias") else 0.12)
    return model


def model_config(hf, *, max_position: int | None = None) -> ModelConfig:
    """What a configuration reader would make of a transformers configuration."""
    rope = dict(hf.rope_parameters)
    rope.setdefault("original_max_position_embeddings", hf.max_position_embeddings)
    head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    bias = bool(getattr(hf, "attention_bias", False))
    layer_types = getattr(hf, "layer_types", None)
    return ModelConfig(
        path="memory",
        weights_format="safetensors",
        architecture={"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}[hf.model_type] + "ForCausalLM",
        model_type=hf.model_type,
        vocab_size=hf.vocab_size,
        hidden_size=hf.hidden_size,
        intermediate_size=hf.intermediate_size,
        num_layers=hf.num_hidden_layers,
        num_heads=hf.num_attention_heads,
        num_kv_heads=hf.num_key_value_heads,
        head_dim=head_dim,
        max_position=max_position or hf.max_position_embeddings,
        norm_eps=hf.rms_norm_eps,
        hidden_act=hf.hidden_act,
        rope=RopeConfig(
            theta=rope.pop("rope_theta"),
            kind=rope.pop("rope_type"),
            rotary_dim=int(head_dim * (rope.pop("partial_rotary_factor", None) or 1.0)),
            parameters=rope,
        ),
        tie_word_embeddings=hf.tie_word_embeddings,
        attention_bias=bias or hf.model_type == "qwen2",
        attention_out_bias=bias,
        mlp_bias=bool(getattr(hf, "mlp_bias", False)),
        qk_norm=hf.model_type == "qwen3",
        sliding_window=getattr(hf, "sliding_window", None),
        sliding_window_layers=None
        if layer_types is None
        else tuple(i for i, kind in enumerate(layer_types) if kind == "sliding_attention"),
    )


def checkpoint(hf_model) -> dict[str, torch.Tensor]:
    """The tensors as a checkpoint file holds them: a tied head is stored once."""
    tensors = {name: tensor.clone() for name, tensor in hf_model.state_dict().items()}
    if hf_model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    return tensors


def load_like(hf_model, *, max_position: int | None = None, group: Group | None = None, dtype: torch.dtype = torch.float32):
    config = model_config(hf_model.config, max_position=max_position)
    return load_model(config, dtype=dtype, device="cpu", group=group, weights=checkpoint(hf_model).items())


class PagedRunner:
    """Runs a model on ReferenceAttention; sequences' blocks are handed out in shuffled order from a pool."""

    def __init__(self, model, *, block_size: int = 4, num_blocks: int = 128, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        self.model = model
        self.block_size = block_size
        self.backend = ReferenceAttention()
        self.free = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed)).tolist()
        self.tables: dict[str, list[int]] = {}
        self.lengths: dict[str, int] = {}
        self.caches = [
            self.backend.make_kv_cache(num_blocks, block_size, layer.num_kv_heads, layer.head_dim, dtype, torch.device("cpu"))
            for layer in model.attention_layers
        ]

    @torch.no_grad()
    def step(self, work: list[tuple[str, list[int]]]) -> list[torch.Tensor]:
        """Advance each named sequence by its tokens in one forward pass -> per sequence float32 logits [tokens, vocab]."""
        work = sorted(work, key=lambda item: len(item[1]) != 1)  # decodes first
        tokens = [token for _, new in work for token in new]
        hidden = self.model(torch.tensor(tokens), ForwardContext(self._metadata(work), self.backend, self.caches))
        logits = self.model.compute_logits(hidden)
        assert logits.dtype == torch.float32
        return list(logits.split([len(new) for _, new in work]))

    def _metadata(self, work: list[tuple[str, list[int]]]) -> AttentionMetadata:
        positions: list[int] = []
        slots: list[int] = []
        for name, new in work:
            start, table = self.lengths.get(name, 0), self.tables.setdefault(name, [])
            self.lengths[name] = start + len(new)
            while len(table) * self.block_size < start + len(new):
                table.append(self.free.pop())
            for position in range(start, start + len(new)):
                positions.append(position)
                slots.append(table[position // self.block_size] * self.block_size + position % self.block_size)
        counts = [len(new) for _, new in work]
        width = max(len(self.tables[name]) for name, _ in work) + 2
        # -7: entries past a sequence's length are undefined, so nobody may read them
        tables = torch.tensor([self.tables[name] + [-7] * (width - len(self.tables[name])) for name, _ in work], dtype=torch.int32)
        lengths = [self.lengths[name] for name, _ in work]
        return AttentionMetadata(
            num_tokens=len(positions),
            num_seqs=len(work),
            num_decodes=sum(count == 1 for count in counts),
            max_query_len=max(counts),
            max_seq_len=max(lengths),
            block_size=self.block_size,
            positions=torch.tensor(positions),
            slots=torch.tensor(slots),
            query_start=torch.tensor([0, *counts]).cumsum(0).int(),
            seq_lens=torch.tensor(lengths, dtype=torch.int32),
            block_tables=tables,
        )
