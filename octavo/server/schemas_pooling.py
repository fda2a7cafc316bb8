"""What clients may send to /v1/embeddings, /v1/rerank and /v1/score. See ``schemas.py`` for the rules."""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class PoolingRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields that all of them share."""

    model: str | None = None  # None: the first served name
    truncate_prompt_tokens: int | None = None  # use the first k tokens of longer texts; -1: as many as fit
    add_special_tokens: bool | None = None
    priority: int | None = None  # lower runs first; needs --scheduling-policy priority
    request_id: str | None = None
    user: str | None = None  # accepted without effect: names the end user, for OpenAI's abuse monitoring


class EmbeddingsRequest(PoolingRequest, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/embeddings. ``input``: a text, a list of texts, token ids, or a list of lists of token ids."""

    input: str | list[str | int | list[int]]
    encoding_format: str | None = None  # float or base64
    dimensions: int | None = None
    normalize: bool | None = None  # None: as the model does


class Document(msgspec.Struct, forbid_unknown_fields=True):
    text: str


class RerankRequest(PoolingRequest, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/rerank, /v2/rerank and /rerank, as Cohere and Jina have it."""

    query: str
    documents: list[str | Document]
    top_n: int | None = None
    return_documents: bool | None = None
    max_tokens_per_doc: int | None = None  # Cohere's name: only so many tokens of a document are used


class ScoreRequest(PoolingRequest, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/score and /score: one ``text_1`` with each ``text_2``, or as many of both, pair by pair."""

    text_1: str | list[str | int | list[int]]
    text_2: str | list[str | int | list[int]]


# ---------------------------------------------------------------------------------------------------------------------
# what is answered


class PoolingUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int

    @property
    def completion_tokens(self) -> int:
        """For the log line; not sent."""
        return 0


class EmbeddingEntry(msgspec.Struct):
    """``embedding``: numbers, or base64 of little-endian float32."""

    index: int
    object: Literal["embedding"]
    embedding: list[float] | str


class Embeddings(msgspec.Struct):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[EmbeddingEntry]
    usage: PoolingUsage


class Ranked(msgspec.Struct, omit_defaults=True):
    index: int
    relevance_score: float
    document: Document | None = None


class Ranking(msgspec.Struct, omit_defaults=True):
    """``meta``: Cohere's; /v2/rerank only."""

    id: str
    model: str
    results: list[Ranked]
    usage: PoolingUsage
    meta: dict[str, Any] | None = None


class ScoreEntry(msgspec.Struct):
    index: int
    object: Literal["score"]
    score: float


class Scores(msgspec.Struct):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[ScoreEntry]
    usage: PoolingUsage


embeddings_decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(EmbeddingsRequest)
rerank_decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(RerankRequest)
score_decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(ScoreRequest)
