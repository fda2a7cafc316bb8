"""A deterministic engine without a model, behind ``AsyncLLM``'s interface: for tests of the server and its speed.

``FakeTokenizer`` has byte tokens, a few words and special tokens. ``MockEngine`` writes a fixed text that depends on
the prompt and the sequence's index, one token per sequence and tick, and follows AsyncLLM's rules: deltas, coalescing
for slow consumers, abort when an iterator is closed, stop strings with hold-back, usage of a (pretended) prefix cache.
"""

from __future__ import annotations

import asyncio
import codecs
import functools
import json
import math
import re
import struct
import time
import zlib
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

from octavo.errors import EngineDeadError, RequestError
from octavo.frontend.logprob_buffer import Logprobs
from octavo.frontend.mailbox import Mailbox, Taker
from octavo.frontend.outputs import CompletionOutput, RequestMetrics, RequestOutput
from octavo.frontend.params import SamplingParams, check_ids
from octavo.models.pooling import PoolingConfig, Roles
from octavo.types import EngineReady, EngineStats, PoolingParams, TokenLogprobs

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "[TOOL_CALLS]")
EOS = 256 + SPECIALS.index("<|im_end|>")
TEXT = (
    "the octopus reads books about deep water and writes letters to a friend who lives near one old lighthouse ; "
    "every night they count ships , stars , caf\u00e9s and \u6f22\u5b57 until morning comes ."
)
WORDS = TEXT.split()
VOCAB: tuple[bytes, ...] = (
    *(bytes([b]) for b in range(256)),
    *(s.encode() for s in SPECIALS),
    *(b" " + w.encode() for w in sorted(set(WORDS))),
)
# The texts of tokens, None for those that are a part of a character.
TEXTS: tuple[str | None, ...] = tuple(raw.decode() if raw.isascii() or len(raw) > 1 else None for raw in VOCAB)
BLOCK = 16


class FakeTokenizer:
    """Greedy longest match over ``VOCAB``; every text can be written, as bytes if need be."""

    vocab_size = len(VOCAB)
    bos_token: str | None = None
    eos_token = "<|im_end|>"
    eos_token_id = EOS
    special_token_ids = frozenset(range(256, 256 + len(SPECIALS)))
    chat_template = "fake"
    special_tokens: dict[str, str] = {}

    def __init__(self) -> None:
        self.ids = {raw: i for i, raw in enumerate(VOCAB)}
        longest_first = sorted(VOCAB, key=len, reverse=True)
        self.tokens_of = re.compile(b"|".join(map(re.escape, longest_first)), re.DOTALL).findall

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [self.ids[raw] for raw in self.tokens_of(text.encode())]

    def encode_batch(self, texts: list[str], add_special_tokens: bool = True) -> list[list[int]]:
        return [self.encode(text, add_special_tokens) for text in texts]

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        kept = (i for i in ids if not (skip_special_tokens and i in self.special_token_ids))
        return b"".join(VOCAB[i] for i in kept).decode(errors="replace")

    def id_to_token(self, token_id: int) -> str:
        return VOCAB[token_id].decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return VOCAB[token_id]


class FakeChatTemplate:
    """ChatML. A ``tool`` message without a name is refused, to have a template error. ``marks``: what parsers are found by."""

    def __init__(self, marks: str = "<tool_call>", takes_tools: bool = True) -> None:
        self.source = self.whole_source = "<|im_start|>" + marks
        self.takes_tools = takes_tools

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: Any = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        parts = [f"[{name}={value}]" for name, value in variables.items()]
        parts += [f"[tools={json.dumps(tools)}]"] if tools else []
        for i, message in enumerate(messages):
            if message["role"] == "tool" and not message.get("name"):
                raise RequestError(f"The chat template refused messages[{i}]: a tool message needs a name.", param="messages")
            calls = "".join(f"<tool_call>{json.dumps(call['function'])}</tool_call>" for call in message.get("tool_calls", ()))
            parts.append(f"<|im_start|>{message['role']}\n{message['content']}{calls}")
            if not (continue_final_message and i == len(messages) - 1):
                parts.append("<|im_end|>\n")
        if add_generation_prompt:
            parts.append("<|im_start|>assistant\n")
        return "".join(parts)


class _Sequence:
    """One continuation: what comes next, and what the consumer has not taken yet."""

    __slots__ = (
        "at", "broken", "count", "finish_reason", "held", "hidden", "index", "length", "logprobs", "params", "plain", "script",
        "stop_reason", "text", "token_ids",
    )  # fmt: skip

    def __init__(self, index: int, prompt_token_ids: list[int], params: SamplingParams, script: list[int], length: int) -> None:
        self.index = index
        self.params = params
        self.script = script
        self.at = (zlib.crc32(repr(prompt_token_ids[-64:]).encode()) + 7 * index) % len(script)
        self.length = length  # ends with EOS after so many tokens
        self.count = 0
        self.broken: codecs.IncrementalDecoder | None = None  # there while the text ends within a character
        self.hidden = FakeTokenizer.special_token_ids.difference(params.kept_special_tokens or ()) if params.skip_special_tokens else ()
        self.plain = params.detokenize and not params.stop  # all text goes out as it is
        self.held = ""  # text that may be the beginning of a stop string
        self.text: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] | None = [] if params.logprobs is not None else None
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None

    def step(self, max_tokens: int) -> None:
        if self.count >= max_tokens:
            return self._finish("length")
        params = self.params
        token = self.script[(self.at + self.count) % len(self.script)]
        if self.count >= self.length and self.count >= params.min_tokens and not params.ignore_eos:
            token = EOS
        if params.allowed_token_ids and token not in params.allowed_token_ids:
            token = params.allowed_token_ids[self.count % len(params.allowed_token_ids)]
        self.count += 1
        self.token_ids.append(token)
        if self.logprobs is not None:
            self.logprobs.append(fake_logprobs(token, params.logprobs or 0))
        if token == EOS and not params.ignore_eos:
            return self._finish("stop")
        if params.stop_token_ids and token in params.stop_token_ids:
            return self._finish("stop", token)
        if token not in self.hidden:
            text = TEXTS[token]
            if text is None or self.broken is not None:
                text = self._decoded(VOCAB[token])
            if self.plain:
                self.text.append(text)
            else:
                self._write(text)
        if self.finish_reason is None and self.count >= max_tokens:
            self._finish("length")

    def _decoded(self, raw: bytes) -> str:
        decoder = self.broken or codecs.getincrementaldecoder("utf-8")(errors="replace")
        text = decoder.decode(raw)
        self.broken = decoder if decoder.getstate()[0] else None
        return text

    def _write(self, text: str) -> None:
        if not self.params.detokenize:
            return
        stops = self.params.stop
        if not stops:
            self.text.append(text)
            return
        if not self.held and not any([stop[0] in text for stop in stops]):
            self.text.append(text)
            return
        self.held += text
        hits = [(self.held.find(stop), stop) for stop in stops if stop in self.held]
        if hits:
            at, stop = min(hits)
            self.text.append(self.held[: at + (len(stop) if self.params.include_stop_str_in_output else 0)])
            self.held = ""
            self._finish("stop", stop)
            return
        keep = max((n for stop in stops for n in range(1, len(stop)) if self.held.endswith(stop[:n])), default=0)
        self.text.append(self.held[: len(self.held) - keep])
        self.held = self.held[len(self.held) - keep :]

    def _finish(self, reason: str, stop_reason: int | str | None = None) -> None:
        self.text.append(self.held + (self.broken.decode(b"", final=True) if self.broken is not None else ""))
        self.finish_reason, self.stop_reason = reason, stop_reason

    def take(self) -> CompletionOutput:
        """What is new since the last call."""
        text = self.text[0] if len(self.text) == 1 else "".join(self.text)
        logprobs = None if self.logprobs is None else Logprobs(self.logprobs)
        output = CompletionOutput(self.index, text, self.token_ids, None, logprobs, self.finish_reason, self.stop_reason)
        self.text, self.token_ids = [], []
        if self.logprobs is not None:
            self.logprobs = []
        return output


@functools.lru_cache(maxsize=1 << 14)
def fake_logprobs(token: int, k: int) -> TokenLogprobs:
    """The token, then the k best, as the engine gives them. The third best has -inf, as a masked token has."""
    best = [token, *((token + rank) % len(VOCAB) for rank in range(2, k + 1))][:k]
    values = [-0.25, *(-math.inf if rank == 3 else -1.0 * rank for rank in range(2, k + 1))][:k]
    return TokenLogprobs([token, *best], [-0.25, *values], 1)


class _Run:
    """One request on the engine, and its outputs that nobody has taken."""

    __slots__ = (
        "error", "fresh", "live", "mailbox", "max_tokens", "metrics", "num_cached", "prompt", "prompt_logprobs", "prompt_token_ids",
        "request_id", "sequences",
    )  # fmt: skip

    def __init__(self, request_id: str, prompt: str | None, token_ids: list[int], sequences: list[_Sequence], max_tokens: int) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = token_ids
        self.sequences = sequences  # those that the consumer has not seen the end of
        self.live = list(sequences)
        self.max_tokens = max_tokens
        self.prompt_logprobs: Any = None
        self.metrics = RequestMetrics(time.time())
        self.num_cached = 0
        self.fresh = False  # outputs that the consumer has not taken
        self.mailbox = Mailbox(self)
        self.error: Exception | None = None

    @property
    def finished(self) -> bool:
        return not self.live

    async def wait(self) -> None:
        """Until there is something new."""
        if not self.fresh:
            await self.mailbox.wait(asyncio.get_running_loop())
        self.fresh = False
        if self.error is not None or self.mailbox.broken is not None:
            raise self.error or self.mailbox.broken  # type: ignore[misc]

    def wake(self) -> None:
        self.fresh = True
        self.mailbox.wake()

    def drain(self) -> RequestOutput:
        self.fresh = False
        sequences = self.sequences
        outputs = [sequences[0].take()] if len(sequences) == 1 else [s.take() for s in sequences]
        self.sequences = self.live
        logprobs, self.prompt_logprobs = self.prompt_logprobs, None
        return RequestOutput(
            self.request_id, self.prompt, self.prompt_token_ids, outputs, not self.live, logprobs, self.num_cached, self.metrics
        )

    def step(self) -> int:
        live = self.live
        for sequence in live:
            sequence.step(self.max_tokens)
            if sequence.finish_reason is not None:
                self.live = [s for s in self.live if s is not sequence]
        self.fresh = True
        self.mailbox.deliver()
        return len(live)


class MockEngine:
    """See the module. ``tick_s``: seconds a step; ``length``: tokens until EOS; ``first_s``: delay before the first token."""

    def __init__(
        self,
        *,
        tick_s: float = 0.0,
        first_s: float = 0.0,
        length: int = 24,
        max_model_len: int = 2048,
        defaults: dict[str, Any] | None = None,
        template: FakeChatTemplate | None = None,
    ) -> None:
        self.tokenizer: Any = FakeTokenizer()
        self.chat_template: Any = template or FakeChatTemplate()
        self.model_config = SimpleNamespace(generation_defaults=defaults or {}, hidden_size=8)
        self.roles = Roles(generates=True, pooling=PoolingConfig("last"))
        self.max_model_len = max_model_len
        self.vocab_size = len(VOCAB)
        self.max_num_seqs = 256
        self.ready = EngineReady(num_blocks=4096, block_size=BLOCK, max_model_len=max_model_len, dtype="float32", device="mock")
        self.stats = EngineStats()
        self.tick_s, self.first_s, self.length = tick_s, first_s, length
        self.script = self.tokenizer.encode("".join(" " + w for w in WORDS))
        self.says: Callable[[str, int, SamplingParams], str | None] | None = None
        """(text before the answer, the sequence's index, parameters) -> the answer; None: the usual words."""
        self._scripts: dict[str, list[int]] = {}
        self.runs: dict[str, _Run] = {}
        self.seen: set[tuple[int, ...]] = set()  # prompts' full blocks, as chains
        self.last_params: SamplingParams | None = None
        self.last_request: dict[str, Any] = {}
        self.fail_after: int | None = None  # die after so many steps
        self.dead = False
        self._driver: asyncio.Task[None] | None = None
        self._steps_in_a_row = 0

    @property
    def num_unfinished(self) -> int:
        return len(self.runs)

    def is_healthy(self) -> bool:
        return not self.dead

    def check_prompt(self, prompt_token_ids: list[int], params: SamplingParams) -> None:
        if not prompt_token_ids:
            raise RequestError("prompt must not be empty.", param="prompt")
        check_ids("prompt", prompt_token_ids, self.vocab_size)
        need = len(prompt_token_ids) + (0 if params.max_tokens == 0 else 1)
        if need > self.max_model_len:
            raise RequestError(
                f"The prompt has {len(prompt_token_ids)} tokens; this model's maximum context length is {self.max_model_len} tokens.",
                param="prompt",
                code="context_length_exceeded",
            )

    async def embed(self, prompts: list[list[int]], params: PoolingParams, *, request_id: str, priority: int = 0) -> list[bytes]:
        """Counts of the tokens modulo 8, cut and normalized as asked."""
        await asyncio.sleep(self.tick_s)
        vectors = []
        for prompt in prompts:
            counts = [float(sum(t % 8 == i for t in prompt)) for i in range(params.dimensions or 8)]
            length = (math.hypot(*counts) or 1.0) if params.normalize else 1.0
            vectors.append(struct.pack(f"<{len(counts)}f", *(c / length for c in counts)))
        return vectors

    async def generate(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str | None = None,
        prompt: str | None = None,
        arrival_time: float | None = None,
        taker: Taker | None = None,
    ) -> AsyncIterator[RequestOutput]:
        if self.dead:
            raise EngineDeadError("it stopped")
        self.check_prompt(prompt_token_ids, params)
        self.last_params = params
        self.last_request = {"request_id": request_id, "priority": priority, "cache_salt": cache_salt, "prompt": prompt}
        cached = self._lookup(prompt_token_ids)
        left = self.max_model_len - len(prompt_token_ids)
        max_tokens = left if params.max_tokens is None else min(params.max_tokens, left)
        sequences = [self._sequence(i, prompt_token_ids, params) for i in range(params.n)]
        run = self.runs[request_id] = _Run(request_id, prompt, prompt_token_ids, sequences, max_tokens)
        run.mailbox.taker = taker
        run.num_cached = cached
        self.stats.num_running = len(self.runs)
        if params.prompt_logprobs is not None:
            run.prompt_logprobs = [None, *Logprobs([fake_logprobs(token, params.prompt_logprobs) for token in prompt_token_ids[1:]])]
        try:
            if self.first_s:
                await asyncio.sleep(self.first_s)
            self._wake()
            while run.sequences:
                await run.wait()
                yield run.drain()
        finally:
            self.abort(request_id)

    def _sequence(self, index: int, prompt: list[int], params: SamplingParams) -> _Sequence:
        answer = self.says(self.tokenizer.decode(prompt, skip_special_tokens=False), index, params) if self.says else None
        if answer is None:
            return _Sequence(index, prompt, params, self.script, self.length)
        script = self._scripts.get(answer)
        if script is None:
            script = self._scripts[answer] = [*self.tokenizer.encode(answer), EOS]
        sequence = _Sequence(index, prompt, params, script, len(script) - 1)
        sequence.at = 0
        return sequence

    def abort(self, request_id: str) -> None:
        self.runs.pop(request_id, None)
        self.stats.num_running = len(self.runs)

    async def shutdown(self, drain_s: float = 0) -> None:
        self.dead = True
        if self._driver is not None:
            self._driver.cancel()

    def die(self) -> None:
        """As when the engine process is killed: all that run learn it, and nothing new starts."""
        self.dead = True
        for run in self.runs.values():
            run.error = EngineDeadError("it was killed")
            run.wake()

    def _lookup(self, prompt: list[int]) -> int:
        blocks = [tuple(prompt[: i + BLOCK]) for i in range(0, len(prompt) - BLOCK + 1, BLOCK)]
        hit = 0
        for chain in blocks:
            if chain not in self.seen:
                break
            hit = len(chain)
        hit = min(hit, (len(prompt) - 1) // BLOCK * BLOCK)  # the last token is always computed
        self.seen.update(blocks)
        self.stats.prompt_tokens += len(prompt)
        self.stats.prefix_cache_queries += len(prompt)
        self.stats.prefix_cache_hits += hit
        return hit

    def _wake(self) -> None:
        if self._driver is None or self._driver.done():
            self._driver = asyncio.create_task(self._drive())

    async def _drive(self) -> None:
        """A step every ``tick_s`` by the clock: like an engine of its own, it does not wait for a front end that is behind."""
        due = time.monotonic()
        while self.runs and not self.dead:
            due += self.tick_s
            late = time.monotonic() - due
            if late < 0 or not self.tick_s or self._steps_in_a_row >= 8:
                self._steps_in_a_row = 0
                await asyncio.sleep(max(-late, 0))
            self._steps_in_a_row += 1
            self._step()

    def _step(self) -> None:
        tokens = 0
        for run in list(self.runs.values()):
            if run.live:
                tokens += run.step()
        self.stats.generation_tokens += tokens
        self.stats.num_steps += 1
        if self.fail_after is not None:
            self.fail_after -= 1
            if self.fail_after <= 0:
                self.die()


def main() -> None:
    """``python -m octavo.server.mock PORT [TICK_SECONDS [PROCESSES [call]]]``: the whole server, with the mock for an engine.

    Of several HTTP processes each has a mock of its own. With "call" its answers are one endless call of a tool named "write".
    """
    import logging
    import sys

    from octavo.config import EngineConfig, ServerOptions
    from octavo.log import setup_logging

    tick = float(sys.argv[2]) if len(sys.argv) > 2 else 0.0
    count = int(sys.argv[3]) if len(sys.argv) > 3 else 1
    settings = {"tick_s": tick, "length": 1000, "max_model_len": 8192}
    options = ServerOptions(port=int(sys.argv[1]), served_model_name=("mock-model",), disable_log_requests=True, api_server_count=count)
    if count > 1:
        from octavo.server.fleet import serve_fleet

        setup_logging(stream=sys.stdout)
        serve_fleet(EngineConfig(), options, mock=settings)
        return

    from octavo.server.run import serve

    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)

    async def start(config: EngineConfig, options: ServerOptions) -> MockEngine:
        engine = MockEngine(**settings)  # type: ignore[arg-type]
        if sys.argv[4:] == ["call"]:
            call = '<tool_call>\n{"name": "write", "arguments": {"text": "' + "".join(" " + word for word in WORDS) * 100
            engine.says = lambda prompt, index, params: call
        return engine

    serve(EngineConfig(), options, start_engine=start)


if __name__ == "__main__":
    main()
