"""Grammars count bytes: what a matcher accepted is, byte for byte, the text that the client gets, for every kind of tokenizer."""

from __future__ import annotations

import json
import random
import re
from functools import cache
from typing import Any

import numpy as np
import pytest

from octavo.engine.grammar import build_tokenizer, new_matcher
from octavo.errors import RequestError
from octavo.frontend.detokenizer import Detokenizer
from octavo.frontend.grammar_compiler import GrammarCompiler
from octavo.frontend.grammars import choice_grammar, json_rule, regex_grammar
from octavo.frontend.output_processor import RequestOutputs
from octavo.frontend.params import SamplingParams
from octavo.frontend.structured import StructuredOutput
from octavo.frontend.tokenizer import Tokenizer
from octavo.types import GrammarVocabulary, TokenDelta
from tests.frontend.tokenizer_zoo import ZOO, wrap

EXACT = ["byte_level", "sentencepiece", "sentencepiece_no_prefix"]  # every byte can be written
REGEXES = ["[äöü]{2,5}-[а-я]+!", " ?the (quick|brown) [^a-z]{1,6}", "(🙂|👍|日本|é| ){1,6}", '\\{"a": [0-9]{1,3}\\}']
REGEXES += ["[\\x{10000}-\\x{10FFFF}]{1,3}", "\\s{0,3}x"]
WORDS = ["naïve café", " leading space", "日本語", "🙂👍", "a\u0301", "<0x41>", "▁", "tab\there", "\u200b", "<think>", "null"]


def vocabulary(tokenizer: Tokenizer) -> GrammarVocabulary:
    return GrammarCompiler(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids).vocabulary


@cache
def tables(tokenizer: Tokenizer) -> Any:
    return build_tokenizer(vocabulary(tokenizer))


def walk(tokenizer: Tokenizer, grammar: str, rng: random.Random, most: int = 80) -> list[int] | None:
    """A random path through a grammar, to its end; None if it is longer than ``most``."""
    matcher = new_matcher(tables(tokenizer), grammar)
    assert not matcher.is_error(), matcher.get_error()
    tokens: list[int] = []
    for _ in range(most):
        allowed = np.flatnonzero(np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little"))
        assert len(allowed) and all(i < tokenizer.vocab_size for i in allowed)
        hidden = set(allowed.tolist()) & tokenizer.special_token_ids
        assert hidden <= set(tokenizer.eos_token_ids) and bool(hidden) == matcher.is_accepting()
        token = int(rng.choice(list(allowed)))
        if token in tokenizer.eos_token_ids:
            return tokens
        tokens.append(token)
        assert matcher.consume_token(token)
        if matcher.is_stopped():
            return tokens
    return None


def shown(tokenizer: Tokenizer, tokens: list[int], value: str) -> str:
    """As a client gets it, token by token."""
    params = SamplingParams(max_tokens=None, structured_outputs={"regex": value})
    outputs = RequestOutputs("r", None, tokenizer.encode("A prompt"), params, tokenizer)
    text = ""
    for i, token in enumerate(tokens):
        last = i == len(tokens) - 1
        outputs.push(TokenDelta(request_id="r", index=0, token_ids=[token], finish_reason="stop" if last else None, ends_in_text=last))
        text += outputs.drain().outputs[0].text
    return text


@pytest.fixture(params=EXACT + ["smollm2"])
def any_tokenizer(request: pytest.FixtureRequest, tokenizer: Tokenizer) -> Tokenizer:
    return tokenizer if request.param == "smollm2" else wrap(ZOO[request.param]())


def test_regexes(any_tokenizer: Tokenizer) -> None:
    rng = random.Random(1)
    ended = 0
    for value in REGEXES:
        for _ in range(6):
            tokens = walk(any_tokenizer, regex_grammar(value), rng)
            if tokens is None:
                continue
            text = shown(any_tokenizer, tokens, value)
            plain = re.sub(r"\\x\{([0-9A-F]+)\}", lambda m: chr(int(m[1], 16)), value)
            assert re.fullmatch(plain, text), (value, text, tokens)
            assert text.encode() == b"".join(any_tokenizer.token_bytes(t) for t in tokens)
            ended += 1
    assert ended > 20


def test_choices(any_tokenizer: Tokenizer) -> None:
    rng = random.Random(2)
    seen = set()
    for _ in range(40):
        tokens = walk(any_tokenizer, choice_grammar(json.dumps(WORDS)), rng)
        assert tokens is not None
        seen.add(shown(any_tokenizer, tokens, "x"))
    assert seen <= set(WORDS) and len(seen) > 6


def test_json(any_tokenizer: Tokenizer) -> None:
    rng = random.Random(3)
    schema: dict[str, Any] = {"enum": [{"ключ": ["é", "🙂", 'a"b\\c']}, {"": " x "}, ["\u2028"]]}
    grammar = '%llguidance {"no_forcing": true}\nstart: ' + json_rule(schema)
    for _ in range(12):
        tokens = walk(any_tokenizer, grammar, rng, 300)
        assert tokens is None or json.loads(shown(any_tokenizer, tokens, "x")) in schema["enum"]


def test_a_leading_space_is_kept(any_tokenizer: Tokenizer) -> None:
    """SentencePiece takes the space off a text's beginning; a grammar that asked for it counted it."""
    tokens = walk(any_tokenizer, choice_grammar('[" a"]'), random.Random(4))
    assert tokens is not None and shown(any_tokenizer, tokens, "x") == " a"
    plain = Detokenizer(any_tokenizer)
    without = plain.push(tokens) + plain.finish()
    assert without == (" a"[any_tokenizer.lead_strip :])


@pytest.mark.parametrize("name", ["word_piece", "word_level", "suffix_bpe"])
def test_tokens_without_exact_bytes_are_refused(name: str) -> None:
    tokenizer = wrap(ZOO[name]())
    with pytest.raises(RequestError, match="no exact bytes"):
        GrammarCompiler(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids).compile(StructuredOutput("regex", "a"))


def test_ids_past_the_tokenizer_are_never_allowed(tokenizer: Tokenizer) -> None:
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size + 77, tokenizer.eos_token_ids)
    matcher = new_matcher(build_tokenizer(compiler.vocabulary), regex_grammar("(.|\n)*"))
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
    assert bits[: tokenizer.vocab_size].sum() > 0.98 * tokenizer.vocab_size and not bits[tokenizer.vocab_size :].any()
