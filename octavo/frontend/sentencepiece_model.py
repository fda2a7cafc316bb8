"""A SentencePiece ``tokenizer.model`` without the sentencepiece package: its few fields, read out of the protobuf.

Field numbers are those of sentencepiece_model.proto: ModelProto{1: pieces{1: piece, 2: score, 3: type}, 2: trainer_spec{3: model_type,
40..43: special ids}, 3: normalizer_spec{2: precompiled_charsmap, 3: add_dummy_prefix, 4: remove_extra_whitespaces}}.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from octavo.errors import ModelError
from octavo.frontend.gguf_tokenizer import NORMAL, BuiltTokenizer, add_typed_tokens, sentencepiece_backend

_BPE = 2
_MODEL_TYPES = {1: "unigram", 2: "bpe", 3: "word", 4: "char"}


def build_from_sentencepiece(path: str, advice: str) -> BuiltTokenizer:
    """The tokenizer of a BPE model with the identity normalizer (Llama's and Mistral's); ModelError with ``advice`` for others."""
    with open(path, "rb") as file:
        data = file.read()
    try:
        pieces, trainer, normalizer = _parse(data)
    except (IndexError, ValueError, struct.error) as error:
        raise ModelError(f"{path} is not a SentencePiece model: {error}") from error
    kind = trainer.get(3, 1)
    if kind != _BPE:
        raise ModelError(f"{path} is a SentencePiece model of type {_MODEL_TYPES.get(kind, kind)}; only bpe can be read directly. {advice}")
    if normalizer.get(2) or normalizer.get(4, 1):
        raise ModelError(f"{path} normalizes its text (Unicode forms or extra spaces), which can't be read directly. {advice}")
    tokens = [piece for piece, _, _ in pieces]
    types = [kind for _, _, kind in pieces]
    backend = sentencepiece_backend(tokens, types, [score for _, score, _ in pieces], None, bool(normalizer.get(3, 1)), path)
    add_typed_tokens(backend, tokens, types)
    special = {}
    for name, number, default in (("unk_token", 40, 0), ("bos_token", 41, 1), ("eos_token", 42, 2), ("pad_token", 43, -1)):
        index = trainer.get(number, default)
        if isinstance(index, int) and 0 <= index < len(tokens):
            special[name] = tokens[index]
    return BuiltTokenizer(backend=backend, vocab_size=len(tokens), special_tokens=special, add_bos=True, add_eos=False)


def _parse(data: bytes) -> tuple[list[tuple[str, float, int]], dict[int, object], dict[int, object]]:
    pieces, trainer, normalizer = [], {}, {}
    for number, value in _fields(data):
        if number == 1:
            fields = dict(_fields(_as_bytes(value)))
            piece, score = _as_bytes(fields.get(1, b"")).decode("utf-8"), _as_bytes(fields.get(2, bytes(4)))
            pieces.append((piece, struct.unpack("<f", score)[0], fields.get(3, NORMAL)))
        elif number == 2:
            trainer = dict(_fields(_as_bytes(value)))
        elif number == 3:
            normalizer = dict(_fields(_as_bytes(value)))
    if not pieces:
        raise ValueError("it holds no pieces")
    return pieces, trainer, normalizer


def _as_bytes(value: int | bytes) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("a field has the wrong type")  # noqa: TRY004, the file is wrong, not the caller
    return value


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(field number, value) of one protobuf message; fixed-width values are left as bytes, varints are signed 64-bit."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield number, value - (1 << 64) if value >> 63 else value
            continue
        if wire == 2:
            size, at = _varint(data, at)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            raise ValueError(f"wire type {wire} at byte {at}")
        if at + size > len(data):
            raise ValueError("it ends within a field")
        yield number, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, at
        if shift > 63:
            raise ValueError("a number is too long")
