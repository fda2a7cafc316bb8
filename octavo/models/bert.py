"""BERT and its relatives (RoBERTa, XLM-R, MiniLM …): bidirectional encoders, run for their hidden states.

    word + position + type embeddings -> norm -> [attention -> + -> norm -> dense, act, dense -> + -> norm] * layers

(Devlin et al., 2018, arXiv 1810.04805.) Sequences of one step stand one after another without padding; only attention needs to
know where each begins, and it takes sequences of similar length together (``PackedBatch``). Nothing is cached.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from octavo.kernels.upload import upload
from octavo.layers.embedding import VocabParallelEmbedding
from octavo.layers.linear import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from octavo.layers.slots import WeightSlot, empty_parameter, whole
from octavo.models.decoder import Build

# A group's shortest sequence has at least this share of its longest one's tokens, or lacks at most so many: padding costs
# time, and so does each call of an attention kernel. (share, tokens) by kind of device.
GROUPING = {"cpu": (0.75, 8), "cuda": (0.5, 64)}


@dataclass(frozen=True)
class Group:
    """Sequences that attention takes together: tokens [first, first + num_tokens) of the step, padded to [size, length].

    ``places``: int64 [num_tokens], where each token stands in the padded [size * length]; None if all have that length.
    ``sources``: int64 [size * length], the token (counted from ``first``) of each of those, some token for padding.
    ``keys``: bool [size, 1, 1, length], which keys are tokens.
    """

    first: int
    num_tokens: int
    size: int
    length: int
    places: torch.Tensor | None = None
    sources: torch.Tensor | None = None
    keys: torch.Tensor | None = None


class PackedBatch:
    """Where the sequences of a step are. ``lengths`` must be sorted, for groups are neighbours."""

    def __init__(self, lengths: list[int], device: torch.device, *, most_padded: int = 2**18) -> None:
        """``most_padded``: tokens with padding that one group may have."""
        self.num_tokens = sum(lengths)
        self.positions = np.concatenate([np.arange(n) for n in lengths]) if lengths else np.empty(0, np.int64)
        self.groups: list[Group] = []
        begin, first = 0, 0
        while begin < len(lengths):
            end = _group_end(lengths, begin, most_padded, *GROUPING[device.type])
            group = _group(lengths[begin:end], first, device)
            self.groups.append(group)
            begin, first = end, first + group.num_tokens


def _group_end(lengths: list[int], begin: int, most_padded: int, share: float, slack: int) -> int:
    """Index past the last sequence that goes with ``begin``, the shortest of its group."""
    shortest = lengths[begin]
    limit = max(shortest / share, shortest + slack)
    end = begin + 1
    while end < len(lengths) and lengths[end] <= limit and (end + 1 - begin) * lengths[end] <= most_padded:
        end += 1
    return end


def _group(lengths: list[int], first: int, device: torch.device) -> Group:
    size, length, total = len(lengths), lengths[-1], sum(lengths)
    if lengths[0] == length:
        return Group(first, total, size, length)
    used = np.arange(length) < np.array(lengths)[:, None]
    sources = np.minimum(np.cumsum(used).reshape(used.shape) - 1, total - 1)  # padding repeats its sequence's last token
    places = upload(np.flatnonzero(used), torch.int64, device)
    keys = upload(used[:, None, None, :], torch.bool, device)
    return Group(first, total, size, length, places, upload(sources.reshape(-1), torch.int64, device), keys)


class LayerNorm(nn.Module):
    """x [T, H] (+ residual) -> normalised to mean 0 and variance 1, times weight, plus bias (Ba et al., 2016)."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.weight = empty_parameter(size, dtype=dtype)
        self.bias = empty_parameter(size, dtype=dtype)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x + residual, self.weight.shape, self.weight, self.bias, self.eps)

    def weight_slots(self, prefix: str) -> Iterator[tuple[str, WeightSlot]]:
        yield f"{prefix}.weight", whole(self.weight)
        yield f"{prefix}.bias", whole(self.bias)


class Embeddings(nn.Module):
    """token_ids, positions int64 [T] -> [T, H]. All tokens are of type 0: a text is one segment."""

    def __init__(self, build: Build) -> None:
        super().__init__()
        config = build.config
        common = {"group": build.group, "dtype": build.dtype}
        self.word_embeddings = VocabParallelEmbedding(config.vocab_size, config.hidden_size, **common)
        rows = config.max_position + config.position_offset
        self.position_embeddings = VocabParallelEmbedding(rows, config.hidden_size, **common)
        self.token_type_embeddings = VocabParallelEmbedding(config.type_vocab_size, config.hidden_size, **common)
        self.LayerNorm = LayerNorm(config.hidden_size, config.norm_eps, build.dtype)
        self.offset = config.position_offset

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        # in transformers' order of addition
        x = F.embedding(token_ids, self.word_embeddings.weight) + self.token_type_embeddings.weight[0]
        return self.LayerNorm(x, F.embedding(positions + self.offset, self.position_embeddings.weight))


class SelfAttention(nn.Module):
    """x [T, H] -> every token's attention over all of its own sequence, [T, H]."""

    def __init__(self, build: Build) -> None:
        super().__init__()
        config = build.config
        self.head_dim = config.head_dim
        self.qkv = QKVParallelLinear(
            config.hidden_size,
            config.head_dim,
            config.num_heads,
            config.num_heads,
            bias=True,
            group=build.group,
            scheme=build.scheme,
            dtype=build.dtype,
            names=("query", "key", "value"),
        )

    def forward(self, x: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
        qkv = self.qkv(x)
        out = qkv.new_empty(len(x), qkv.shape[1] // 3)
        out[batch.num_tokens :].zero_()
        for group in batch.groups:
            self._attend(qkv, group, out)
        return out

    def _attend(self, qkv: torch.Tensor, group: Group, out: torch.Tensor) -> None:
        rows = slice(group.first, group.first + group.num_tokens)
        mine = qkv[rows]
        if group.sources is not None:
            mine = mine.index_select(0, group.sources)
        q, k, v = mine.view(group.size, group.length, 3, -1, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=group.keys)
        mixed = mixed.transpose(1, 2).reshape(group.size * group.length, -1)
        if group.places is None:
            out[rows] = mixed
        else:
            torch.index_select(mixed, 0, group.places, out=out[rows])


class AttentionOutput(nn.Module):
    """x, residual -> norm(dense(x) + residual); closes both halves of a layer."""

    def __init__(self, build: Build, in_features: int) -> None:
        super().__init__()
        config = build.config
        common = {"group": build.group, "scheme": build.scheme, "dtype": build.dtype}
        self.dense = RowParallelLinear(in_features, config.hidden_size, bias=True, **common)
        self.LayerNorm = LayerNorm(config.hidden_size, config.norm_eps, build.dtype)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self.LayerNorm(self.dense(x), residual)


class Attention(nn.Module):
    def __init__(self, build: Build) -> None:
        super().__init__()
        self.self = SelfAttention(build)
        self.output = AttentionOutput(build, build.config.hidden_size)

    def forward(self, x: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
        return self.output(self.self(x, batch), x)


class Intermediate(nn.Module):
    """x [T, H] -> act(dense(x)) [T, I]."""

    def __init__(self, build: Build) -> None:
        super().__init__()
        config = build.config
        self.dense = ColumnParallelLinear(
            config.hidden_size, config.intermediate_size, bias=True, group=build.group, scheme=build.scheme, dtype=build.dtype
        )
        self.act = config.hidden_act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.dense(x)
        if self.act == "relu":
            return F.relu(y)
        return F.gelu(y, approximate="none" if self.act == "gelu" else "tanh")


class EncoderLayer(nn.Module):
    def __init__(self, build: Build) -> None:
        super().__init__()
        self.attention = Attention(build)
        self.intermediate = Intermediate(build)
        self.output = AttentionOutput(build, build.config.intermediate_size)

    def forward(self, x: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
        x = self.attention(x, batch)
        return self.output(self.intermediate(x), x)


class Layers(nn.Module):
    def __init__(self, build: Build) -> None:
        super().__init__()
        self.layer = nn.ModuleList(EncoderLayer(build) for _ in range(build.config.num_layers))


class BertModel(nn.Module):
    """token_ids, positions int64 [T] (padding behind the batch's tokens is run along) -> hidden [T, H] after the last norm."""

    ignored_weights: tuple[str, ...] = (
        "position_ids", "pooler.dense.weight", "pooler.dense.bias",
        # the head of masked language models, of which only the encoder is run
        "predictions.bias", "predictions.decoder.weight", "predictions.decoder.bias", "transform.dense.weight", "transform.dense.bias",
        "transform.LayerNorm.weight", "transform.LayerNorm.bias", "seq_relationship.weight", "seq_relationship.bias",
        "lm_head.bias", "lm_head.dense.weight", "lm_head.dense.bias", "lm_head.layer_norm.weight", "lm_head.layer_norm.bias",
        "lm_head.decoder.weight", "lm_head.decoder.bias",
    )  # fmt: skip

    def __init__(self, build: Build) -> None:
        super().__init__()
        self.config = build.config
        self.embeddings = Embeddings(build)
        self.encoder = Layers(build)

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
        x = self.embeddings(token_ids, positions)
        for layer in self.encoder.layer:
            x = layer(x, batch)
        return x

    @staticmethod
    def checkpoint_name(name: str) -> str:
        """Models with a head keep the encoder under bert. or roberta.; the oldest files have TensorFlow's names of norms."""
        for prefix in ("bert.", "roberta."):
            name = name.removeprefix(prefix)
        return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
