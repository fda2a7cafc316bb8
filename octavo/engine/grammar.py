"""Grammars: which tokens may come next in a sequence whose output must have a form.

The front end has checked every grammar that comes here, in a process of its own and within the same limits
(frontend/grammar.py). Still nothing of it may stop the loop: grammars are compiled in a thread, each step's work is bounded,
and an error ends the request that it belongs to.

llguidance does the matching (byte by byte, so any tokenizer whose tokens have exact bytes will do). It is imported when the
first grammar comes.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Items
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from octavo.errors import RequestError
from octavo.types import GrammarVocabulary, bits_of

if TYPE_CHECKING:
    from octavo.engine.request import Sequence

T = TypeVar("T")

CACHED_GRAMMARS = 128
MOST_STARTS, SHARE = 8, 4
# Bounds on what a grammar may cost, a third of the library's own for each step: the most hostile ones found take 20 ms a mask.
_LIMITS = {"initial_lexer_fuel": 1_000_000, "step_lexer_fuel": 70_000, "step_max_items": 50_000, "max_lexer_states": 50_000}
MAX_GRAMMAR_SIZE = 300_000  # symbols in productions
# Most masks take some microseconds, and waking other threads for a batch of those costs more than it saves: measured with 64 rows,
# 0.6 ms in one thread and 1.0 ms in twelve. Others take milliseconds.
ALONE_S = 0.0005


def build_tokenizer(vocabulary: GrammarVocabulary) -> Any:
    """llguidance's view of the tokens. Takes up to a second for a large vocabulary."""
    from llguidance import LLTokenizer, TokenizerWrapper

    return LLTokenizer(TokenizerWrapper(_Tokens(vocabulary)), n_vocab=len(vocabulary.tokens), eos_token=vocabulary.eos_token_ids)


class _Tokens:
    """What llguidance asks of a tokenizer. Grammars are compiled without forced tokens, so nothing is ever encoded."""

    bos_token_id = None

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        self.eos_token_id = vocabulary.eos_token_ids[0]
        self.tokens = vocabulary.tokens
        self.special_token_ids = vocabulary.special_token_ids

    def __call__(self, text: str | bytes) -> list[int]:
        return []


def new_matcher(tokenizer: Any, grammar: str) -> Any:
    """An ``LLMatcher`` at the grammar's start. Never raises for a bad grammar: ask the matcher. Releases the GIL."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(**_LIMITS, max_grammar_size=MAX_GRAMMAR_SIZE, verbose_errors=False)
    return LLMatcher(tokenizer, grammar, log_level=0, limits=limits)


class Matcher:
    """How far one sequence is in its grammar: it has taken in every output token whose value the host knows."""

    __slots__ = ("grammar", "state")

    def __init__(self, grammar: Grammar) -> None:
        self.grammar = grammar
        self.state = grammar.take_start().deep_copy()

    def accept(self, token: int) -> bool:
        """Take in a token; False if the grammar does not allow it, or a limit was hit: ``failed`` from then on."""
        return self.state.consume_token(token)

    @property
    def may_end(self) -> bool:
        """Whether the output matches as it is."""
        return self.state.is_accepting()

    @property
    def finished(self) -> bool:
        """Whether the output is complete and nothing can follow."""
        return self.state.is_stopped()

    @property
    def failed(self) -> bool:
        return self.state.is_error()

    @property
    def complaint(self) -> str:
        """Why the output can't go on, for the client."""
        if self.failed and "satisfy the grammar" not in self.state.get_error():
            return "The grammar asks for too much work at this point of the output; use a simpler one."
        return (
            "The output can't go on: the other parameters (allowed_token_ids, bad_words, logit_bias, min_tokens) forbid every token that "
            "the grammar allows next."
        )


class Grammar:
    """A compiled grammar, shared by the sequences that follow it.

    Copies of one start share what their lexer has learnt, behind a lock. So that the masks of a large batch are computed side by
    side there is one more start, up to ``MOST_STARTS``, for every SHARE sequences.
    """

    __slots__ = ("another", "making", "starts", "taken")

    def __init__(self, start: Any, another: Callable[[], Future[Any]] | None = None) -> None:
        """``another`` makes one more start, elsewhere."""
        self.starts = [start]
        self.another = another
        self.making = False
        self.taken = 0

    def take_start(self) -> Any:
        self.taken += 1
        if self.another is not None and not self.making and self.taken >= SHARE * len(self.starts) and len(self.starts) < MOST_STARTS:
            self.making = True
            self.another().add_done_callback(self._add)
        return self.starts[self.taken % len(self.starts)]

    def _add(self, start: Future[Any]) -> None:
        if not start.cancelled() and start.exception() is None:
            self.starts.append(start.result())
            self.making = False


class Grammars:
    """Compiles grammars, off the loop, and computes the masks of a step."""

    def __init__(self) -> None:
        self._vocabulary: GrammarVocabulary | None = None
        self._tokenizer: Any = None
        self._executor: Any = None  # llguidance's threads
        self._thread: ThreadPoolExecutor | None = None
        self._cache: OrderedDict[str, Future[Grammar]] = OrderedDict()

    def set_vocabulary(self, vocabulary: GrammarVocabulary) -> None:
        """Must come before the first grammar; later ones are the same and change nothing."""
        if self._vocabulary is None:
            self._vocabulary = vocabulary

    @property
    def eos_token_ids(self) -> list[int]:
        return self._vocabulary.eos_token_ids if self._vocabulary else []

    def compile(self, grammar: str) -> Future[Grammar]:
        """The compiled grammar, or the promise of it. It may raise RequestError."""
        found = self._cache.get(grammar)
        if found is None:
            if self._vocabulary is None:
                raise RequestError("A grammar came before the vocabulary that it is made of.", status=500)
            found = self._cache[grammar] = self._in_thread(self._compile, grammar)
            while len(self._cache) > CACHED_GRAMMARS:
                self._cache.popitem(last=False)
        self._cache.move_to_end(grammar)
        return found

    def _compile(self, grammar: str) -> Grammar:
        if self._tokenizer is None:
            assert self._vocabulary is not None
            self._tokenizer = build_tokenizer(self._vocabulary)
        return Grammar(self._start(grammar), lambda: self._in_thread(self._start, grammar))

    def _start(self, grammar: str) -> Any:
        start = new_matcher(self._tokenizer, grammar)
        if not start.is_error():
            start.deep_copy().compute_bitmask()  # the first mask costs most; copies share what is learnt by it
        if start.is_error():
            raise RequestError(f"The grammar can't be used: {start.get_error()}")
        return start

    def _in_thread(self, work: Callable[[str], T], grammar: str) -> Future[T]:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        return self._thread.submit(work, grammar)

    def masks(self, sequences: Items[Sequence]) -> tuple[np.ndarray, list[Sequence]]:
        """What sequences with a matcher may draw next (see ``fill``), and those for which no token is left."""
        bits = self.fill([seq.matcher for seq in sequences])
        stuck: list[Sequence] = []
        for seq, row in zip(sequences, bits, strict=True):
            params = seq.request.params
            early = len(seq.tokens) < seq.min_length
            if seq.matcher.failed:
                stuck.append(seq)
            elif early or not params.eos_token_ids or params.allowed_token_ids is not None:
                self._narrow(seq, row, early)
                if not row.any():
                    stuck.append(seq)
        return bits, stuck

    def _narrow(self, seq: Sequence, row: np.ndarray, early: bool) -> None:
        """Take the end tokens out of a mask where they may not come, and what allowed_token_ids leaves out.

        min_tokens and allowed_token_ids are kept on the device, too. Here it shows whether a token is left.
        """
        request = seq.request
        if early or not request.params.eos_token_ids:
            words = row.view(np.uint32)
            for token in (*self.eos_token_ids, *request.end_ids) if early else self.eos_token_ids:
                words[token // 32] &= np.uint32(~(1 << token % 32) & 0xFFFFFFFF)
        if request.params.allowed_token_ids is not None:
            if request.allowed_bits is None:
                request.allowed_bits = bits_of(request.params.allowed_token_ids, len(row))
            row &= request.allowed_bits

    def fill(self, matchers: Items[Matcher]) -> np.ndarray:
        """int32 [len(matchers), W]: bit t of row i (bit t % 32 of word t // 32) says whether token t may come next.

        A matcher may fail here; its row then means nothing. Rows are computed in this thread until ALONE_S are over, and the rest
        side by side in llguidance's.
        """
        words = -(-self._tokenizer.vocab_size // 32)
        bits = np.zeros((len(matchers), words), np.int32)
        at, size, deadline = bits.ctypes.data, words * 4, time.perf_counter() + ALONE_S
        for i, matcher in enumerate(matchers):
            matcher.state.unsafe_compute_mask_ptr(at + i * size, size)
            if time.perf_counter() > deadline:
                break
        else:
            return bits
        rest = [(matcher.state, row) for row, matcher in enumerate(matchers[i + 1 :])]
        if rest:
            if self._executor is None:
                from llguidance import LLExecutor

                self._executor = LLExecutor()
            self._executor.unsafe_compute_mask_ptr(rest, at + (i + 1) * size, size, len(rest))
        return bits

    def shutdown(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
            self._thread = None
