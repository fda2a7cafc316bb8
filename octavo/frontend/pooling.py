"""Vectors of prompts: what callers may ask for, checked, and what they get back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from octavo.errors import RequestError
from octavo.frontend.params import check_ids
from octavo.models.config import ModelConfig
from octavo.models.pooling import PoolingConfig, Roles
from octavo.types import GenerateRequest, PoolingParams, TokenDelta, TokenParams

if TYPE_CHECKING:
    import numpy as np

_NOTHING_DRAWN = TokenParams(max_tokens=0)


@dataclass(slots=True)
class EmbeddingOutput:
    """One vector. ``data``: float32 numpy array; ``embedding``: the same as a list of floats."""

    data: np.ndarray

    @property
    def embedding(self) -> list[float]:
        return self.data.tolist()


@dataclass(slots=True)
class EmbeddingRequestOutput:
    """One prompt's vector, as ``LLM.embed`` gives it."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput
    finished: bool = True


@dataclass(slots=True)
class ScoringOutput:
    score: float


@dataclass(slots=True)
class ScoringRequestOutput:
    """One pair's similarity, as ``LLM.score`` gives it; the token ids are both texts', one after the other."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: ScoringOutput
    finished: bool = True


@dataclass
class PooledOutputs:
    """The prompts of one call: which of them the engine still works on, and the vectors that are there.

    Takes deltas as ``RequestOutputs`` does.
    """

    open: dict[str, int]  # engine's request id -> index of the prompt
    vectors: list[bytes] = field(default_factory=list)  # float32 little-endian
    error: str | None = None
    error_status: int = 500

    def __post_init__(self) -> None:
        self.vectors = [b""] * len(self.open)

    @property
    def finished(self) -> bool:
        return not self.open

    def push(self, delta: TokenDelta, now: float | None = None) -> bool:
        """Take in a delta, whenever it came. Always False: nothing is ever stopped here."""
        index = self.open.pop(delta.request_id, None)
        if index is None:
            return False
        if delta.embedding is not None:
            self.vectors[index] = delta.embedding
        else:
            self.error = delta.error or "The request was aborted."
            self.error_status = delta.error_status if delta.error else 503
        return False


def pooling_params(roles: Roles, model: ModelConfig, *, dimensions: int | None = None, normalize: bool | None = None) -> PoolingParams:
    """What the engine is to do. RequestError for a server that does not embed, or dimensions that the model hasn't."""
    pooling = embedding_config(roles)
    if dimensions is not None:
        size = model.hidden_size
        if isinstance(dimensions, bool) or not isinstance(dimensions, int) or not 1 <= dimensions <= size:
            raise RequestError(
                f"dimensions must be between 1 and {size}, the size of this model's vectors; got {dimensions!r}.", param="dimensions"
            )
        dimensions = None if dimensions == size else dimensions
    return PoolingParams(kind=pooling.kind, normalize=pooling.normalize if normalize is None else normalize, dimensions=dimensions)


def embedding_config(roles: Roles) -> PoolingConfig:
    if roles.pooling is None:
        raise RequestError(roles.why_not_embed())
    return roles.pooling


def pooling_request(
    request_id: str, token_ids: list[int], params: PoolingParams, *, arrival_time: float, priority: int = 0
) -> GenerateRequest:
    return GenerateRequest(
        request_id=request_id,
        prompt_token_ids=token_ids,
        params=_NOTHING_DRAWN,
        arrival_time=arrival_time,
        priority=priority,
        pooling=params,
    )


def check_embedding_input(token_ids: Sequence[int], name: str, *, max_model_len: int, vocab_size: int) -> None:
    """RequestError, naming the input, for no tokens, too many, or ids outside of the vocabulary."""
    if not token_ids:
        raise RequestError(f"{name} is empty: it has no tokens, so there is nothing to embed.", param=name)
    if len(token_ids) > max_model_len:
        raise RequestError(
            f"{name} has {len(token_ids)} tokens, and this model's maximum context length is {max_model_len} tokens. Shorten it, or send "
            "truncate_prompt_tokens (-1: as many as fit) to use its beginning only.",
            param=name,
            code="context_length_exceeded",
        )
    if min(token_ids) < 0 or max(token_ids) >= vocab_size:
        check_ids(name, token_ids, vocab_size)


def resolve_truncation(keep: int | None, max_model_len: int) -> int | None:
    """``truncate_prompt_tokens``: -1 means as many as fit. RequestError for other values below 1 and more than fit."""
    if keep is None:
        return None
    if isinstance(keep, bool) or not isinstance(keep, int) or not (keep == -1 or 1 <= keep <= max_model_len):
        raise RequestError(
            f"truncate_prompt_tokens must be -1 (as many as fit) or between 1 and {max_model_len}; got {keep!r}.",
            param="truncate_prompt_tokens",
        )
    return max_model_len if keep == -1 else keep


def truncate_beginning(token_ids: list[int], keep: int | None, num_closing: int = 0) -> list[int]:
    """The first ``keep`` tokens, the last ``num_closing`` of which stay what they were ([SEP], an end token)."""
    if keep is None or len(token_ids) <= keep:
        return token_ids
    closing = min(num_closing, keep)
    return token_ids[: keep - closing] + token_ids[len(token_ids) - closing :]


def closing_tokens(tokenizer: Any) -> int:
    """How many special tokens the tokenizer puts behind a text."""
    plain, special = (tokenizer.encode("a", add_special_tokens=flag) for flag in (False, True))
    for start in range(len(special) - len(plain), -1, -1):
        if special[start : start + len(plain)] == plain:
            return len(special) - start - len(plain)
    return 0


def cosine_pairs(first: Sequence[bytes], second: Sequence[bytes]) -> list[float]:
    """Cosine of each pair of vectors, float32 little-endian; one vector on either side is paired with all of the other."""
    import numpy as np

    a, b = (np.stack([np.frombuffer(v, "<f4") for v in side]).astype(np.float64) for side in (first, second))
    a, b = (side / np.maximum(np.linalg.norm(side, axis=1, keepdims=True), 1e-12) for side in (a, b))
    return np.clip((a * b).sum(axis=1), -1.0, 1.0).tolist()
