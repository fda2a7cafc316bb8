"""config.json of BERT's family of encoders → ModelConfig."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.models.config import ModelConfig, RopeConfig
from octavo.models.config_fields import Fields
from octavo.models.pooling import read_pooling

_ACTS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu")


@dataclass(frozen=True)
class Encoder:
    """``offset_positions``: RoBERTa counts positions from pad_token_id + 1, so its table has rows that no token uses."""

    model_type: str
    offset_positions: bool = False


ENCODERS: dict[str, Encoder] = {
    "BertModel": Encoder("bert"),
    "BertForMaskedLM": Encoder("bert"),
    "RobertaModel": Encoder("roberta", offset_positions=True),
    "RobertaForMaskedLM": Encoder("roberta", offset_positions=True),
    "XLMRobertaModel": Encoder("xlm-roberta", offset_positions=True),
    "XLMRobertaForMaskedLM": Encoder("xlm-roberta", offset_positions=True),
}


def read_encoder_config(config: Fields, architecture: str, folder: str, weights_format: str, dtype: str) -> ModelConfig:
    """The configuration of an encoder. ModelError for a setting that is not supported."""
    family = ENCODERS[architecture]
    hidden_size, num_heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    if hidden_size % num_heads:
        raise config.error("hidden_size", f"is {hidden_size}, which num_attention_heads {num_heads} does not divide")
    kind = config.text("position_embedding_type", "absolute")
    if kind != "absolute":
        raise config.error("position_embedding_type", f"is {kind!r}, which is not supported; absolute is")
    if config.boolean("is_decoder", False):
        raise config.error("is_decoder", "is true; only encoders of this architecture are supported")
    act = config.text("hidden_act", "gelu")
    if act not in _ACTS:
        raise config.error("hidden_act", f"is {act!r}, which is not supported; supported: {', '.join(_ACTS)}")
    offset = config.integer("pad_token_id", 1, minimum=0) + 1 if family.offset_positions else 0
    rows = config.integer("max_position_embeddings")
    if rows <= offset:
        raise config.error("max_position_embeddings", f"is {rows}, of which pad_token_id + 1 = {offset} are not used")
    return ModelConfig(
        path=folder,
        weights_format=weights_format,
        architecture=architecture,
        model_type=config.text("model_type", family.model_type),
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size"),
        num_layers=config.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
        max_position=rows - offset,
        norm_eps=config.number("layer_norm_eps", 1e-12, above=0),
        hidden_act=act,
        rope=RopeConfig(rotary_dim=0),
        tie_word_embeddings=True,
        dtype=dtype,
        encoder=True,
        position_offset=offset,
        type_vocab_size=config.integer("type_vocab_size", 2),
        pooling=read_pooling(folder),
        raw=config.values,
    )
