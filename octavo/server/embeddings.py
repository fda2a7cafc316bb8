"""POST /v1/embeddings: texts in, vectors out, as floats or base64."""

from __future__ import annotations

import sys
import time
from array import array
from base64 import b64encode

import msgspec
from starlette.types import Scope

from octavo.errors import RequestError
from octavo.server.limits import decode
from octavo.server.openapi import documented
from octavo.server.pooling import PoolingEndpoint, split_inputs
from octavo.server.schemas_pooling import EmbeddingEntry, Embeddings, EmbeddingsRequest, PoolingUsage, embeddings_decoder

FORMATS = ("float", "base64")


@documented("POST", "/v1/embeddings", summary="Vectors of texts.", request=EmbeddingsRequest, response=Embeddings)
class EmbeddingsEndpoint(PoolingEndpoint):
    id_prefix = "embd-"

    async def respond(self, body: bytes, scope: Scope, start: float) -> bytes:
        request: EmbeddingsRequest = decode(embeddings_decoder, body)
        model = self.context.check_model(request.model)
        encoding = request.encoding_format or "float"
        if encoding not in FORMATS:
            raise RequestError(f"encoding_format must be one of {', '.join(FORMATS)}, got {encoding[:40]!r}.", param="encoding_format")
        params = self.params(request, dimensions=request.dimensions, normalize=request.normalize)
        inputs = split_inputs(request.input, "input")
        token_ids = await self.tokenize(inputs, request)
        vectors, usage = await self.run(token_ids, params, request, scope, start)
        return await self.context.off_loop(
            sum(map(len, vectors)) // 16,  # 64 KiB of vectors take about a millisecond to write
            write_answer,
            self.response_id(request, scope),
            model,
            vectors,
            encoding,
            usage,
        )


def write_answer(response_id: str, model: str, vectors: list[bytes], encoding: str, usage: PoolingUsage) -> bytes:
    """The JSON answer. ``vectors``: float32, little-endian; base64 is of these bytes."""
    written = [b64encode(v).decode() if encoding == "base64" else floats(v) for v in vectors]
    data = [EmbeddingEntry(i, "embedding", v) for i, v in enumerate(written)]
    return msgspec.json.encode(Embeddings(response_id, "list", int(time.time()), model, data, usage))


def floats(vector: bytes) -> list[float]:
    values = array("f", vector)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()
