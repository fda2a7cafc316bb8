"""Joined deltas equal the full decode, for every kind of vocabulary, random ids and any chunking."""

from __future__ import annotations

import random
import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_zoo import ZOO, smollm2_path, wrap

from octavo.frontend.detokenizer import Detokenizer
from octavo.frontend.tokenizer import Tokenizer, load_tokenizer
from tests.waiting import slowness

TOKENIZERS: dict[str, Tokenizer] = {}


def get(name: str) -> Tokenizer:
    if name not in TOKENIZERS:
        TOKENIZERS[name] = load_tokenizer(smollm2_path()) if name == "smollm2" else wrap(ZOO[name]())
    return TOKENIZERS[name]


NAMES = ["smollm2", *ZOO]
EXACT_TO_LIBRARY = [name for name in NAMES if not name.startswith("sentencepiece")]


def random_ids(rng: random.Random, tokenizer: Tokenizer, size: int = 40) -> list[int]:
    """Tokens of all kinds, with runs of byte tokens, specials, padding ids, and pieces of real text."""
    ids: list[int] = []
    low = [i for i in range(min(600, tokenizer.vocab_size)) if len(tokenizer.token_bytes(i)) == 1 and i not in tokenizer.special_token_ids]
    for _ in range(rng.randint(0, size)):
        kind = rng.random()
        if kind < 0.35:
            ids.append(rng.randrange(tokenizer.vocab_size))
        elif kind < 0.6 and low:
            ids += rng.choices(low, k=rng.randint(1, 5))
        elif kind < 0.75:
            ids.append(rng.choice(sorted(tokenizer.added_token_ids)))
        elif kind < 0.8:
            ids.append(tokenizer.vocab_size + rng.randrange(5))
        else:
            ids += tokenizer.encode(rng.choice(["🙂👍", " naïve", "漢字", "  x", "isn't", "\n\n", "é", "▁"]), add_special_tokens=False)
    return ids


def chunks(rng: random.Random, ids: list[int]):
    at = 0
    while at < len(ids):
        n = rng.choice([0, 1, 1, 1, 2, 3, 7])
        yield ids[at : at + n]
        at += n


def stream(tokenizer: Tokenizer, pieces, prompt=(), **options) -> str:
    detokenizer = Detokenizer(tokenizer, prompt, **options)
    return "".join(detokenizer.push(piece) for piece in pieces) + detokenizer.finish()


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_deltas_join_to_the_full_decode(name: str, skip: bool) -> None:
    tokenizer = get(name)
    rng = random.Random(name)
    for _ in range(600):
        ids = random_ids(rng, tokenizer)
        expected = tokenizer.decode(ids, skip_special_tokens=skip)
        assert stream(tokenizer, chunks(rng, ids), skip_special_tokens=skip) == expected, ids
        assert stream(tokenizer, [[i] for i in ids], skip_special_tokens=skip) == expected, ids


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("name", EXACT_TO_LIBRARY)
def test_the_full_decode_is_the_librarys(name: str, skip: bool) -> None:
    tokenizer = get(name)
    rng = random.Random(name + "!")
    for _ in range(600):
        ids = random_ids(rng, tokenizer)
        assert tokenizer.decode(ids, skip_special_tokens=skip) == tokenizer.backend.decode(ids, skip_special_tokens=skip), ids


def sentencepiece_truth(tokenizer: Tokenizer, ids: list[int], skip: bool, strip: bool) -> str:
    """SentencePiece's rule, a byte at a time: a character if the bytes there are one, else U+FFFD for one byte."""
    data = b""
    for i in ids:
        token = tokenizer.id_to_token(i)
        if token is None or (skip and i in tokenizer.special_token_ids):
            continue
        match = re.fullmatch("<0x(..)>", token)
        data += bytes([int(match[1], 16)]) if match else token.replace("▁", " ").encode()
    text, at = "", 0
    while at < len(data):
        for n in (1, 2, 3, 4):
            try:
                text += data[at : at + n].decode()
            except UnicodeDecodeError:
                continue
            at += n
            break
        else:
            text += "\ufffd"
            at += 1
    return text[1:] if strip and text.startswith(" ") else text


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("name", ["sentencepiece", "sentencepiece_no_prefix"])
def test_sentencepiece_decode(name: str, skip: bool) -> None:
    tokenizer = get(name)
    rng = random.Random(name)
    same = 0
    for _ in range(600):
        ids = random_ids(rng, tokenizer)
        got = tokenizer.decode(ids, skip_special_tokens=skip)
        assert got == sentencepiece_truth(tokenizer, ids, skip, name == "sentencepiece"), ids
        if "\ufffd" not in got:  # the library gives up a whole run of bytes when one is broken, whole characters included
            assert got == tokenizer.backend.decode(ids, skip_special_tokens=skip)
            same += 1
    assert same > 30


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_after_a_prompt(name: str, skip: bool) -> None:
    """What comes out is what the whole has beyond the prompt's own certain text."""
    tokenizer = get(name)
    rng = random.Random(name + "?")
    for _ in range(400):
        prompt, output = random_ids(rng, tokenizer, 10), random_ids(rng, tokenizer, 10)
        alone = Detokenizer(tokenizer, skip_special_tokens=skip)
        before = alone.push(prompt)
        expected = tokenizer.decode(prompt + output, skip_special_tokens=skip)
        got = stream(tokenizer, chunks(rng, output), prompt, skip_special_tokens=skip)
        assert before + got == expected, (prompt, output)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=24), st.lists(st.integers(1, 5), min_size=1))
@pytest.mark.parametrize("name", ["byte_level", "sentencepiece_no_prefix"])
def test_any_bytes_in_any_cut(name: str, data: bytes, widths: list[int]) -> None:
    tokenizer = get(name)
    of_byte = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size - 1, -1, -1)}
    ids = [of_byte[bytes([b])] for b in data]
    pieces, at = [], 0
    while at < len(ids):
        width = widths[len(pieces) % len(widths)]
        pieces.append(ids[at : at + width])
        at += width
    if name == "byte_level":
        assert stream(tokenizer, pieces) == data.decode("utf-8", "replace")
    else:
        assert stream(tokenizer, pieces) == sentencepiece_truth(tokenizer, ids, True, False)


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece_no_prefix"])
def test_a_character_comes_out_at_once_when_it_is_complete(name: str) -> None:
    tokenizer = get(name)
    of_byte = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size - 1, -1, -1)}
    detokenizer = Detokenizer(tokenizer)
    deltas = [detokenizer.push([of_byte[bytes([b])]]) for b in "é🙂x".encode()]
    assert deltas == ["", "é", "", "", "", "🙂", "x"] and detokenizer.finish() == ""
    # 0xFF can't begin a character, and 0xE6 0x41 can't be one: both are known as soon as they are seen.
    deltas = [detokenizer.push([of_byte[bytes([b])]]) for b in b"\xff\xe6A\xf0\x9f"]
    assert deltas == ["\ufffd", "", "\ufffdA", "", ""]
    assert detokenizer.finish() == ("\ufffd" if name == "byte_level" else "\ufffd\ufffd")


def test_leading_space_of_sentencepiece() -> None:
    tokenizer = get("sentencepiece")
    ids = tokenizer.encode("ab cd", add_special_tokens=False)
    assert stream(tokenizer, [[i] for i in ids]) == "ab cd"
    bos = tokenizer.bos_token_id
    assert stream(tokenizer, [[i] for i in ids], [bos]) == "ab cd"
    assert stream(tokenizer, [[i] for i in ids], [bos, *ids]) == " ab cd"
    assert stream(tokenizer, [[bos], [bos], *([i] for i in ids)], skip_special_tokens=True) == "ab cd"


@pytest.mark.parametrize("name", ["word_level", "word_piece"])
def test_spaces_between_special_tokens(name: str) -> None:
    tokenizer = get(name)
    bos, eos, word = tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.encode("the", add_special_tokens=False)
    ids = [*word, bos, eos, *word, eos]
    options = {"skip_special_tokens": False, "spaces_between_special_tokens": False}
    assert tokenizer.decode(ids, False) == "the <s> </s> the </s>"
    assert tokenizer.decode(ids, **options) == "the <s></s> the </s>"
    assert stream(tokenizer, [[i] for i in ids], **options) == "the <s></s> the </s>"
    assert stream(tokenizer, [[i] for i in ids[1:]], [bos], **options) == "<s></s> the </s>"
    assert tokenizer.decode(ids, True, spaces_between_special_tokens=False) == "the the"


def test_memory_is_bounded() -> None:
    for name in NAMES:
        tokenizer = get(name)
        detokenizer = Detokenizer(tokenizer)
        broken = [i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == b"\xf0"] or [3]
        for _ in range(2000):
            detokenizer.push(broken)
        state = detokenizer._stream
        assert len(getattr(state, "_pending", b"")) <= 3 and len(getattr(state, "_ids", [])) < 40


def test_a_long_prompt_costs_nothing() -> None:
    tokenizer = get("sentencepiece")
    prompt = tokenizer.encode("ab cd " * 50_000)

    class Counting(list):
        reads = 0

        def __iter__(self):
            for item in super().__iter__():
                Counting.reads += 1
                yield item

        def __reversed__(self):
            for item in super().__reversed__():
                Counting.reads += 1
                yield item

    Detokenizer(tokenizer, Counting(prompt))
    assert Counting.reads < 20


def test_speed() -> None:
    tokenizer = get("smollm2")
    ids = tokenizer.encode("The quick brown fox jumps over the lazy dog. naïve 🙂\n" * 200)
    best = float("inf")
    for _ in range(5):
        detokenizer = Detokenizer(tokenizer)
        start = time.process_time()
        for token_id in ids:
            detokenizer.push([token_id])
        best = min(best, time.process_time() - start)
    assert best / len(ids) < 10e-6 * slowness()  # measured: under 1 us on a quiet machine


@pytest.mark.parametrize("name", NAMES)
def test_kept_special_tokens_stay(name):
    """As if they were no special tokens, and only they."""
    tokenizer, rng = get(name), random.Random(5)
    special = sorted(tokenizer.special_token_ids)
    kept = special[:1]
    for _ in range(30):
        ids = random_ids(rng, tokenizer) + [special[0], special[-1], special[0]]
        rng.shuffle(ids)
        left = [i for i in ids if i not in tokenizer.special_token_ids or i in kept]
        assert stream(tokenizer, chunks(rng, ids), kept=kept) == stream(tokenizer, [left], skip_special_tokens=False)
