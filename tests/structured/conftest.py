from __future__ import annotations

from collections.abc import Iterator

import pytest

from octavo.frontend.grammar_compiler import GrammarCompiler
from octavo.frontend.tokenizer import Tokenizer, load_tokenizer
from tests.frontend.tokenizer_zoo import smollm2_path


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """The demo model's: 49,152 tokens, byte-level, out of a GGUF file."""
    return load_tokenizer(smollm2_path())


@pytest.fixture(scope="session")
def compiler(tokenizer: Tokenizer) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids)
    yield compiler
    compiler.close()
