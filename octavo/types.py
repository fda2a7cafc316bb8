"""The words that travel between the layers: requests, deltas, plans and results.

Importable from anywhere; imports nothing of ours but errors, and never torch.
Structs that cross a process boundary are ``msgspec.Struct`` (MessagePack on the wire, array-like for size);
those that stay inside the engine process are plain dataclasses.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import msgspec

FinishReason = Literal["stop", "length", "abort", "error"]
PoolingKind = Literal["mean", "last", "cls"]

# ---------------------------------------------------------------------------------------------------------------------
# HTTP process -> engine process


class TokenParams(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What the engine needs to know to sample one request: only tokens, numbers and ids, no text.

    Made from the public ``SamplingParams`` by the front end, which has validated every value and has turned
    ``bad_words`` into token ids. The engine and the sampler may trust these values.
    """

    n: int = 1
    max_tokens: int = 16  # output tokens, >= 0; already capped to what the context leaves
    min_tokens: int = 0
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 keeps all
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None  # None: the engine draws one per request
    stop_token_ids: tuple[int, ...] = ()  # end the sequence with stop_reason = the id
    eos_token_ids: tuple[int, ...] = ()  # end the sequence with stop_reason = None; empty when ignore_eos
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    logprobs: int | None = None  # None: none; k >= 0: the sampled token's and the k best; -1: whole vocabulary
    prompt_logprobs: int | None = None
    grammar: str | None = None  # the output must match it: llguidance's JSON form, checked by the front end


class GrammarVocabulary(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="vocabulary"):
    """What grammars must know of the tokens; the engine gets it once, before the first request that has a grammar.

    ``tokens[i]`` are the bytes that token i adds to the text, b"" for an id that is no token. Special tokens, which add
    no text, carry their own name there, and their ids stand in ``special_token_ids``. ``eos_token_ids`` end an output.
    """

    tokens: list[bytes]
    special_token_ids: list[int]
    eos_token_ids: list[int]


class PoolingParams(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Make one vector of a prompt's hidden states, instead of continuing it. The front end has checked the values.

    kind: the mean over all tokens, the last token's, or the first one's (cls; encoders only). ``dimensions``: keep so many
    of the first components (Matryoshka embeddings, arXiv 2205.13147); None keeps all. ``normalize``: to length 1, after that.
    """

    kind: PoolingKind
    normalize: bool = True
    dimensions: int | None = None


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="generate"):
    """One request, tokenized. ``arrival_time`` is ``time.time()`` seconds; lower ``priority`` runs first.

    With ``pooling`` the prompt is only run, and its vector is the result; ``params.max_tokens`` is 0 then, and n is 1.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: TokenParams
    arrival_time: float = 0.0
    priority: int = 0
    cache_salt: str | None = None
    pooling: PoolingParams | None = None


class AbortRequest(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="abort"):
    """End a request (``index`` None) or one of its sequences, whatever state it is in. Unknown ids are no error."""

    request_id: str
    index: int | None = None


class UtilityRequest(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="utility"):
    """A call on the engine beside generation: ``reset_prefix_cache``, ``stats``, ``drain`` …"""

    call_id: int
    method: str
    args: list = []


EngineInput = GenerateRequest | AbortRequest | UtilityRequest | GrammarVocabulary

# ---------------------------------------------------------------------------------------------------------------------
# engine process -> HTTP process


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one position, natural logarithm, of the distribution before temperature and truncation.

    ``token_ids[0]`` is the token that was sampled (or stands in the prompt), with its 1-based ``rank`` in the
    vocabulary; then come the k best, best first (the sampled token may be among them again).
    """

    token_ids: list[int]
    logprobs: list[float]
    rank: int


class TokenDelta(msgspec.Struct, kw_only=True, array_like=True):
    """What one step added to one sequence. A request's last delta per sequence carries ``finish_reason``.

    ``prompt_logprobs`` comes once a request, on index 0's first delta: one entry per prompt position from 1 on
    (position 0 has no predecessor, so its entry is absent here and None in the public API).
    """

    request_id: str
    index: int
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    num_cached_tokens: int = 0
    error: str | None = None
    error_status: int = 500  # HTTP status that goes with ``error``: 4xx where the request is to blame
    ends_in_text: bool = False  # a stop without a stop token: the grammar is complete, and the last token is part of the text
    embedding: bytes | None = None  # float32, little-endian: what a request with ``pooling`` asked for


class EngineStats(msgspec.Struct, kw_only=True, array_like=True):
    """A snapshot for /metrics, taken after a step. Counters are totals since start."""

    num_running: int = 0
    num_waiting: int = 0
    num_swapped: int = 0  # of those that wait and are not in num_waiting: swapped out to CPU memory
    kv_cache_usage: float = 0.0  # 0..1 of blocks held by live sequences
    num_preemptions: int = 0
    prefix_cache_queries: int = 0  # tokens
    prefix_cache_hits: int = 0  # tokens
    prompt_tokens: int = 0
    generation_tokens: int = 0
    num_steps: int = 0
    cpu_cache_usage: float = 0.0  # 0..1 of CPU blocks held by swapped-out sequences
    num_blocks_out: int = 0  # blocks swapped out
    num_blocks_in: int = 0  # blocks swapped in


class StepOutputs(msgspec.Struct, kw_only=True, array_like=True, tag="outputs"):
    """One message a step: what every sequence gained, and the statistics. ``timestamp`` is time.monotonic()."""

    deltas: list[TokenDelta]
    stats: EngineStats
    timestamp: float = 0.0


class UtilityReply(msgspec.Struct, kw_only=True, array_like=True, tag="reply"):
    call_id: int
    result: object = None
    error: str | None = None


class EngineReady(msgspec.Struct, kw_only=True, array_like=True, tag="ready"):
    """Sent once when the engine can serve. ``num_blocks`` counts usable KV blocks; ``max_num_seqs`` is the resolved one."""

    num_blocks: int
    block_size: int
    max_model_len: int
    dtype: str
    device: str
    timings: dict[str, float] = {}
    max_num_seqs: int = 256
    num_cpu_blocks: int = 0


class EngineFailed(msgspec.Struct, kw_only=True, array_like=True, tag="failed"):
    """The engine could not start or died. ``kind`` is the error class's name; ``message`` is for the user."""

    kind: str
    message: str
    traceback: str = ""


class EngineProgress(msgspec.Struct, kw_only=True, array_like=True, tag="progress"):
    """Start-up progress: ``stage`` is a short text such as ``weights``; ``fraction`` 0..1 or None."""

    stage: str
    fraction: float | None = None
    detail: str = ""


class Heartbeat(msgspec.Struct, kw_only=True, array_like=True, tag="heartbeat"):
    """Sent by a live engine every second while no step output is sent."""

    timestamp: float = 0.0


EngineOutput = StepOutputs | UtilityReply | EngineReady | EngineFailed | EngineProgress | Heartbeat

# ---------------------------------------------------------------------------------------------------------------------
# engine -> executor (inside the engine process, and by broadcast to the other ranks)


@dataclass(slots=True)
class RowInit:
    """Put a sequence on a row of the device-side batch state, before the step that names it first.

    ``output_token_ids`` are the outputs that the host knows already (not empty after a preemption by recompute); with
    ``prompt_token_ids`` they seed the penalties' counts and bad-words matching. ``seed`` is final (never None): the
    row's random stream is a function of (seed, position of the token to sample) alone. ``num_outputs`` is how many
    outputs exist when the row starts, for min_tokens.
    """

    row: int
    params: TokenParams
    seed: int
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    block_ids: list[int]


@dataclass(slots=True)
class Advance:
    """One sequence moves ``count`` tokens in this step.

    Token positions:  [0 ........ start) have K and V in blocks already ("computed tokens")
                      [start ... start+count) are run by this step; their K and V are written to the row's blocks
    ``token_ids`` are those of the run range when the host knows them; None means: take the row's last sampled token
    from the device (count is then 1).
    ``sample_rows``: rows that draw a token from the logits of the last run position: () in the middle of a prompt,
    the own row for a decode, all n rows of a request at the end of its prompt.
    ``prompt_logprobs`` k: also return log-probabilities for the run positions' next prompt tokens, which are in
    ``next_token_ids`` (len count, or count-1 at the prompt's end).
    ``pooling``: the run positions' hidden states belong into the row's vector, which is returned if ``pooling_ends``.
    """

    row: int
    start: int
    count: int
    token_ids: list[int] | None
    sample_rows: tuple[int, ...] = ()
    prompt_logprobs: int | None = None
    next_token_ids: list[int] | None = None
    pooling: PoolingParams | None = None
    pooling_ends: bool = False


@dataclass(slots=True)
class BlockAppend:
    """Append block ids to a row's device-side block table at ``offset`` (in blocks; overwrites what is there)."""

    row: int
    offset: int
    block_ids: list[int]


@dataclass(slots=True)
class StepPlan:
    """One forward pass. Executed in this order: swap_outs, swap_ins, copies, row_inits, block_appends, forward, sampling.

    ``advances`` holds those with count == 1 first (decodes), so that kernels may split the batch there.
    A row not named in ``advances`` is left as it is.
    ``masked``: some of its rows follow a grammar, so ``submit`` stops after the forward pass, and ``sample`` goes on.
    """

    step: int
    advances: list[Advance] = field(default_factory=list)
    row_inits: list[RowInit] = field(default_factory=list)
    block_appends: list[BlockAppend] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)  # (source block, target block): copy-on-write
    swap_ins: list[tuple[int, int]] = field(default_factory=list)  # (CPU block, device block)
    swap_outs: list[tuple[int, int]] = field(default_factory=list)  # (device block, CPU block)
    masked: bool = False

    @property
    def num_tokens(self) -> int:
        return sum(a.count for a in self.advances)


@dataclass(slots=True)
class TokenMasks:
    """Which tokens the rows with a grammar may draw in a step.

    ``places[i]``: the index, among the rows that the plan samples (in plan order), of the row that ``bits[i]`` is for; the
    others are free. ``bits``: numpy int32 [len(places), W]; token t is bit t % 32 of word t // 32.
    """

    places: list[int]
    bits: Any


def bits_of(tokens: Collection[int], words: int) -> Any:
    """A row of ``TokenMasks.bits``, numpy int32 [words], with these tokens' bits set. All of them are below 32 * words."""
    import numpy as np

    mask = np.zeros(words * 32, np.uint8)
    mask[list(tokens)] = 1
    return np.packbits(mask, bitorder="little").view(np.int32)


@dataclass(slots=True)
class StepResult:
    """What the host learns of a step: the sampled token of every row in ``sample_rows``, in plan order.

    ``rows[i]`` drew ``token_ids[i]``; ``logprobs[i]`` is None unless the row asked for them.
    ``prompt_logprobs`` maps row -> entries for the advance's ``next_token_ids``, in order.
    ``errors`` maps a row that the step named -> what went wrong with it alone; its request ends with that message.
    Such a row still has its (meaningless) entry in ``token_ids``.
    ``pooled`` maps a row whose advance had ``pooling_ends`` -> its vector, float32 little-endian.
    """

    step: int
    rows: list[int]
    token_ids: list[int]
    logprobs: list[TokenLogprobs | None] | None = None
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    pooled: dict[int, bytes] = field(default_factory=dict)


class Executor(Protocol):
    """Runs plans on devices, in submission order.

    ``steps_ahead`` says how many steps may be submitted before the oldest is collected: 0 means that ``submit`` does
    the work and ``collect`` returns at once (CPU), 1 means one step ahead (GPU).
    ``num_cpu_blocks``: blocks of CPU memory for ``swap_outs``; ``swap_block_s``: seconds that one takes, there or back.
    """

    steps_ahead: int
    num_blocks: int
    num_cpu_blocks: int
    swap_block_s: float
    whole_prompts: bool  # it has no KV cache, so each prompt is run in one step (encoders)

    def submit(self, plan: StepPlan) -> None: ...

    def sample(self, masks: TokenMasks) -> None:
        """The second half of the newest submitted step, whose plan is ``masked``: it draws. Comes before the next submit."""
        ...

    def collect(self) -> StepResult:
        """The oldest submitted, uncollected step's result; blocks until it is there."""
        ...

    def forget(self) -> None:
        """Drop what was submitted and not collected; nobody will ask for it."""
        ...

    def shutdown(self) -> None: ...
