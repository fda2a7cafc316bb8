"""Requests and sequences, as the scheduler sees them: counters, from which everything else is derived.

A sequence's tokens, as half-open ranges of positions:

    [0 ............ num_computed)                  K and V are in its blocks, or will be by a step already planned
    [0 ......................... len(tokens))      values known to the host
    [0 .................................. length)  known, plus those drawn by steps in flight

A decoding sequence has ``num_computed == length - 1``: it always runs exactly its newest token, which the device
knows even while the host does not.
"""

from __future__ import annotations

import hashlib
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

from octavo.engine.grammar import Matcher
from octavo.types import GenerateRequest, TokenLogprobs

if TYPE_CHECKING:
    from octavo.engine.swap_tier import SwappedOut

NEVER = 1 << 62


class Status(Enum):
    HELD = auto()  # waits for its request's prompt, which a sibling computes
    WAITING = auto()  # in the waiting queue: new, or preempted (and perhaps swapped out)
    RUNNING = auto()  # has a row and blocks
    FINISHED = auto()  # owns nothing


class Request:
    """What a client asked for, and its ``n`` sequences."""

    __slots__ = (
        "allowed_bits", "cache_salt", "end_ids", "id", "num_cached_tokens", "order", "params", "pooling", "prompt", "prompt_logprobs",
        "sequences", "started",
    )  # fmt: skip

    def __init__(self, source: GenerateRequest, order: tuple, max_length: int, seed: int) -> None:
        """``order`` sorts requests (see policy.py); ``max_length`` bounds prompt and output together, in tokens."""
        params = source.params
        self.id = source.request_id
        self.params = params
        self.prompt = source.prompt_token_ids
        self.cache_salt = source.cache_salt
        self.pooling = source.pooling
        self.end_ids = frozenset(params.eos_token_ids) | frozenset(params.stop_token_ids)
        self.allowed_bits: Any = None  # allowed_token_ids as a mask, once a grammar needs it
        self.order = order
        self.started = False  # whether it was ever admitted
        self.num_cached_tokens = 0  # prompt tokens found in the prefix cache when it started
        self.prompt_logprobs: list[TokenLogprobs] | None = None if params.prompt_logprobs is None else []
        self.sequences = [Sequence(self, index, max_length, derive_seed(seed, index)) for index in range(params.n)]
        leader = self.sequences[0]
        leader.status = Status.WAITING
        leader.tokens = list(self.prompt)

    @property
    def live(self) -> list[Sequence]:
        return [s for s in self.sequences if s.status is not Status.FINISHED]

    @property
    def held(self) -> list[Sequence]:
        """Sequences that wait for a sibling to compute the prompt; empty once they stand on their own."""
        return [s for s in self.sequences if s.status is Status.HELD]

    @property
    def awaits_prompt_logprobs(self) -> bool:
        """Whether the prompt must (still) be run for log-probabilities. Position 0 has none."""
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) < len(self.prompt) - 1

    @property
    def runs_whole_prompt(self) -> bool:
        """Whether every position of the prompt must be run, so that none may come out of the prefix cache."""
        return self.awaits_prompt_logprobs or (self.pooling is not None and self.pooling.kind != "last")

    def gather_prompt_logprobs(self, start: int, entries: list[TokenLogprobs]) -> None:
        """Add the entries that the run of positions ``start`` … gave. After a preemption a position may come twice."""
        have = self.prompt_logprobs
        if have is not None and start <= len(have):
            have.extend(entries[len(have) - start :])

    def take_prompt_logprobs(self) -> list[TokenLogprobs] | None:
        """The gathered list, once; None afterwards, or when the request did not ask."""
        taken, self.prompt_logprobs = self.prompt_logprobs, None
        return taken


class Sequence:
    """One continuation being generated: prompt tokens + output tokens, and what it owns while it runs."""

    __slots__ = (
        "blocks",
        "generation",
        "hashes",
        "index",
        "length",
        "matcher",
        "max_length",
        "min_length",
        "num_computed",
        "num_prefill",
        "num_prompt",
        "num_published",
        "order",
        "publish_at",
        "request",
        "row",
        "row_ready",
        "sample_rows",
        "seed",
        "status",
        "swapped",
        "tokens",
        "writable",
    )

    def __init__(self, request: Request, index: int, max_length: int, seed: int) -> None:
        self.request = request
        self.index = index
        self.order = (*request.order, index)
        self.seed = seed
        self.status = Status.HELD
        self.tokens = request.prompt  # its own list once it stops being held; never changed before
        self.num_prompt = self.length = len(request.prompt)
        self.min_length = self.num_prompt + request.params.min_tokens
        self.max_length = max_length
        self.num_computed = 0
        self.num_prefill = 0  # tokens to run before it decodes: those known when it got its row
        # Owned blocks, and how far it may write without asking the KV manager: tokens [num_computed, writable).
        self.blocks: list[int] = []
        self.writable = 0
        self.swapped: SwappedOut | None = None  # while it waits with K and V in CPU memory
        # Chain hashes of its full blocks, the cache generation they belong to, how many are published, and the
        # length at which the next one can be.
        self.hashes: list[bytes] = []
        self.generation = 0
        self.num_published = 0
        self.publish_at = NEVER
        self.row = -1
        self.sample_rows: tuple[int, ...] = ()
        self.matcher: Matcher | None = None  # of its grammar; has taken in the outputs among ``tokens``
        self.row_ready = False  # whether the device's row has been initialized for this sequence

    @property
    def num_in_flight(self) -> int:
        """Tokens drawn by steps that were planned but whose values the host does not know yet."""
        return self.length - len(self.tokens)

    @property
    def num_outputs(self) -> int:
        return len(self.tokens) - self.num_prompt


def derive_seed(*parts: int) -> int:
    """A 63-bit seed that depends on every part (any Python ints)."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
