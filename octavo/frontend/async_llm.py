"""The front end of a server: text in, streams of text out, over an engine in its own process."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import zmq

from octavo.config import EngineConfig
from octavo.errors import ConfigError, EngineDeadError, ModelError, OctavoError, OutOfMemoryError, RequestError
from octavo.frontend.engine_process import EngineLink, EngineProcess
from octavo.frontend.grammar_compiler import GrammarCompiler
from octavo.frontend.inputs import check_prompt
from octavo.frontend.mailbox import Mailbox, Taker
from octavo.frontend.output_processor import RequestOutputs
from octavo.frontend.outputs import RequestOutput
from octavo.frontend.params import SamplingParams
from octavo.frontend.parts import ModelParts, find_model, load_model_parts
from octavo.frontend.pooling import PooledOutputs, pooling_request
from octavo.models.pooling import resolve_roles
from octavo.types import (
    AbortRequest,
    EngineFailed,
    EngineProgress,
    EngineReady,
    EngineStats,
    GenerateRequest,
    PoolingParams,
    StepOutputs,
    TokenParams,
    UtilityReply,
    UtilityRequest,
)

logger = logging.getLogger("octavo.frontend")

REPORT_S = 10.0
STALL_S = 60.0  # an idle engine sends a heartbeat every second; one that is silent for this long is taken for hung
BUSY_STALL_S = 600.0  # no heartbeat leaves during a step, and a step of a large model on a CPU can take minutes
MAX_UNREAD = 2**30  # bytes of outputs that wait for readers who are busy, all together (a client that does not read holds one up)
SHED_S = 1.0  # how often they are counted
TAKE_IN_S = 0.01  # seconds spent on messages that wait, before what they brought is delivered
SLICE = 128  # streams whose outputs are delivered at a time
_ERRORS: dict[str, type[OctavoError]] = {e.__name__: e for e in (ConfigError, ModelError, OutOfMemoryError, RequestError)}

ProgressHook = Callable[[EngineProgress], None]


class AsyncLLM:
    """Use ``await AsyncLLM.start(config)``, then ``generate``; ``shutdown`` at the end. One event loop only."""

    def __init__(self, config: EngineConfig, process: EngineLink, parts: ModelParts) -> None:
        self.config = config
        self.process = process
        self.model_config = parts.model_config
        self.tokenizer = parts.tokenizer
        self.chat_template = parts.chat_template
        self.max_model_len = parts.max_model_len  # until the engine says what its KV cache can hold
        self.vocab_size = self.model_config.vocab_size
        self.roles = resolve_roles(config, parts.model_config)
        self.grammars = GrammarCompiler(self.tokenizer, self.vocab_size, self.model_config.eos_token_ids)
        self._sent_vocabulary = False
        self.ready: EngineReady | None = None
        self.stats = EngineStats()
        self._streams: dict[str, Mailbox] = {}
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._call_ids = itertools.count()
        self._last_message = time.monotonic()
        self._dead: str | None = None  # why
        self._readable = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        *,
        chat_template: str | None = None,
        on_progress: ProgressHook | None = None,
        log_level: str = "info",
        process: EngineLink | None = None,
        log_stats: bool = False,
    ) -> AsyncLLM:
        """Start the engine process and wait until it can serve.

        ``process``: an engine that was started earlier (the server starts it before its own imports), or is shared.
        ``log_stats``: log a line about the load every ten seconds.
        Raises ConfigError, ModelError, OutOfMemoryError as the engine met them; EngineDeadError if it died.
        """
        process = process or EngineProcess(config, find_model(config), log_level)
        try:
            self = cls(config, process, load_model_parts(config, process.model_path, chat_template))
            await self._wait_ready(on_progress)
        except BaseException:
            process.close(timeout_s=0.5)
            raise
        self._tasks = [asyncio.create_task(self._receive_loop()), asyncio.create_task(self._watch_loop())]
        if log_stats:
            self._tasks.append(asyncio.create_task(self._report_loop()))
        return self

    @property
    def num_unfinished(self) -> int:
        return len(self._streams)

    @property
    def max_num_seqs(self) -> int:
        return self.ready.max_num_seqs

    def is_healthy(self) -> bool:
        """Whether the engine lives and answers: its process runs and was heard of lately."""
        silent_s = time.monotonic() - self._last_message
        busy = bool(self._streams) or self.stats.num_running > 0
        return self._dead is None and self.process.alive and silent_s < (BUSY_STALL_S if busy else STALL_S)

    def check_prompt(self, token_ids: list[int], params: SamplingParams) -> None:
        """RequestError for an empty prompt, unknown ids, one that the context can't hold, or an n that can't run."""
        if not self.roles.generates:
            raise RequestError(self.roles.why_not_generate())
        check_prompt(
            token_ids,
            params,
            max_model_len=self.max_model_len,
            vocab_size=self.vocab_size,
            max_num_seqs=self.ready.max_num_seqs,
        )

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
        """Yield deltas until every one of the request's sequences has finished; closing the iterator aborts it.

        ``arrival_time``: ``time.time()`` of what it is a part of, whose place in the queue it takes. None: now.
        ``taker`` may have them first, while the reader waits, all but the last (see ``Taker``).
        Raises RequestError before the first yield for a request that can't be served, EngineDeadError if the engine dies.
        """
        self._raise_if_dead()
        self.check_prompt(prompt_token_ids, params)
        grammar = await self._grammar(params)
        name, request_id = request_id, self.process.prefix + request_id  # the caller's id, the engine's
        if request_id in self._streams:
            raise RequestError(f"A request with the id {name!r} is running already.", param="request_id")
        request = GenerateRequest(
            request_id=request_id,
            prompt_token_ids=prompt_token_ids,
            params=self._token_params(params, len(prompt_token_ids), grammar),
            arrival_time=time.time() if arrival_time is None else arrival_time,
            priority=priority,
            cache_salt=cache_salt,
        )
        stream = Mailbox(RequestOutputs(name, prompt, prompt_token_ids, params, self.tokenizer), taker)
        self._streams[request_id] = stream
        loop = asyncio.get_running_loop()
        finished = False
        try:
            try:
                self.process.send(request)
            except (OverflowError, UnicodeEncodeError) as error:
                finished = True  # the engine has never heard of it
                raise RequestError(f"The request holds what cannot be sent to the engine: {error}.") from None
            while not finished:
                if not (stream.failed or stream.broken or stream.outputs.dirty):
                    await stream.wait(loop)
                if stream.broken is not None:
                    raise stream.broken
                if stream.failed is not None and not stream.outputs.finished:
                    raise EngineDeadError(stream.failed)
                if stream.outputs.error is not None:
                    finished = True
                    raise RequestError(stream.outputs.error, status=stream.outputs.error_status)
                output = stream.outputs.drain()
                finished = output.finished
                yield output
        finally:
            if self._streams.pop(request_id, None) is not None and not finished:
                self._send_abort(request_id)

    def _token_params(self, params: SamplingParams, prompt_len: int, grammar: str | None) -> TokenParams:
        return params.to_token_params(
            prompt_len=prompt_len,
            max_model_len=self.max_model_len,
            vocab_size=self.vocab_size,
            eos_token_ids=self.model_config.eos_token_ids,
            encode_bad_word=self.tokenizer.encode_bad_word if self.tokenizer else None,
            grammar=grammar,
        )

    async def embed(self, prompts: list[list[int]], params: PoolingParams, *, request_id: str, priority: int = 0) -> list[bytes]:
        """The vectors of prompts (checked token ids), float32 little-endian, in order. A cancelled call frees what still runs.

        Raises RequestError when the engine refuses a prompt, EngineDeadError if it dies; nothing of the call goes on then.
        """
        self._raise_if_dead()
        ids = [f"{self.process.prefix}{request_id}-{i}" for i in range(len(prompts))]
        if any(i in self._streams for i in ids):
            raise RequestError(f"A request with the id {request_id!r} is running already.", param="request_id")
        outputs = PooledOutputs({name: i for i, name in enumerate(ids)})
        stream = Mailbox(outputs)
        now, loop = time.time(), asyncio.get_running_loop()
        try:
            for name, token_ids in zip(ids, prompts, strict=True):
                self.process.send(pooling_request(name, token_ids, params, arrival_time=now, priority=priority))
                self._streams[name] = stream
            while not (outputs.finished or outputs.error):
                await stream.wait(loop)
                if stream.broken is not None:
                    raise stream.broken
                if stream.failed is not None and not outputs.finished:
                    raise EngineDeadError(stream.failed)
            if outputs.error is not None:
                raise RequestError(outputs.error, status=outputs.error_status)
            return outputs.vectors
        finally:
            for name in ids:
                if self._streams.pop(name, None) is not None and name in outputs.open:
                    self._send_abort(name)

    async def _grammar(self, params: SamplingParams) -> str | None:
        """The grammar that the output must follow. The engine gets the vocabulary before the first one."""
        if params.structured_outputs is None:
            return None
        grammar = await self.grammars.compile_async(params.structured_outputs)
        if not self._sent_vocabulary:
            vocabulary = await self.grammars.vocabulary_async()
            if not self._sent_vocabulary:
                self._sent_vocabulary = True
                self.process.send(vocabulary)
        return grammar

    def abort(self, request_id: str) -> None:
        """End a request; its stream yields what it has and finishes with reason "abort". Unknown ids are no error."""
        request_id = self.process.prefix + request_id
        if request_id in self._streams:
            self._send_abort(request_id)

    def _send_abort(self, request_id: str, index: int | None = None) -> None:
        """To a dead engine it is not sent: that has let go of everything, and the streams learn of it elsewhere."""
        if self._dead is None:
            try:
                self.process.send(AbortRequest(request_id=request_id, index=index))
            except EngineDeadError:
                pass

    async def add_client(self, name: str, to_engine: str, from_engine: str) -> None:
        """Let another front end share the engine (``SharedEngine``), which is told that the engine is ready."""
        await self._call("add_client", name, to_engine, from_engine)

    async def drop_client(self, name: str) -> int:
        """A front end has gone: end what it left running. Returns how many requests that were."""
        return int(await self._call("drop_client", name))

    async def reset_prefix_cache(self) -> bool:
        return bool(await self._call("reset_prefix_cache"))

    async def shutdown(self, drain_s: float = 0.0) -> None:
        """Wait up to ``drain_s`` seconds for running requests, then end the engine; what still runs fails."""
        deadline = time.monotonic() + drain_s
        while self._streams and self._dead is None and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        self._die("The server is shutting down.")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.grammars.close()
        await asyncio.get_running_loop().run_in_executor(None, self.process.close, 2.0)

    async def _call(self, method: str, *args: Any) -> Any:
        self._raise_if_dead()
        call_id = next(self._call_ids)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        try:
            self.process.send(UtilityRequest(call_id=call_id, method=method, args=list(args)))
            return await future
        finally:
            self._calls.pop(call_id, None)

    async def _wait_ready(self, on_progress: ProgressHook | None) -> None:
        while True:
            if not self.process.pull.poll(0):
                if not self.process.alive and not self.process.pull.poll(50):
                    raise EngineDeadError(f"{self.process.epitaph} It was not ready yet; its output above may say why.")
                await asyncio.sleep(0.01)
                continue
            message = self.process.decode(self.process.pull.recv())
            if isinstance(message, EngineReady):
                self.ready = message
                self.max_model_len = message.max_model_len
                self._last_message = time.monotonic()  # however long loading took
                self.process.hide()
                return
            if isinstance(message, EngineFailed):
                logger.debug("%s", message.traceback)
                if message.kind not in _ERRORS:
                    logger.error("%s", message.traceback)
                raise _ERRORS.get(message.kind, EngineDeadError)(message.message or message.kind)
            if isinstance(message, EngineProgress) and on_progress is not None:
                on_progress(message)

    async def _receive_loop(self) -> None:
        """One message a step for all requests. Of what it touched, every stream's outputs are delivered once.

        Messages that came meanwhile are taken in together: a front end that is behind writes several tokens at a time.
        """
        loop = asyncio.get_running_loop()
        pull, readable = self.process.pull, self._readable
        # A ZeroMQ socket's descriptor signals edges, so everything that is there must be read each time.
        loop.add_reader(pull.getsockopt(zmq.FD), readable.set)
        try:
            while self._dead is None:
                if not pull.getsockopt(zmq.EVENTS) & zmq.POLLIN:
                    readable.clear()
                    if not pull.getsockopt(zmq.EVENTS) & zmq.POLLIN:
                        # Without wait_for: before Python 3.12 it can swallow a cancellation, and shutdown would hang.
                        await readable.wait()
                    continue
                touched: list[Mailbox] = []
                until = time.monotonic() + TAKE_IN_S
                while True:
                    self._handle(self.process.decode(pull.recv(zmq.NOBLOCK)), touched)
                    if not pull.getsockopt(zmq.EVENTS) & zmq.POLLIN or time.monotonic() > until:
                        break
                await self._deliver(touched)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            logger.exception("The receive loop failed")
            self._die(f"The front end failed: {error}")
        finally:
            loop.remove_reader(pull.getsockopt(zmq.FD))

    async def _deliver(self, touched: list[Mailbox]) -> None:
        """In slices: what is written leaves between them, and a long backlog does not starve the HTTP side."""
        for start in range(0, len(touched) or 1, SLICE):
            for stream in touched[start : start + SLICE]:
                stream.deliver()
            await asyncio.sleep(0)

    def _handle(self, message: Any, touched: list[Mailbox]) -> None:
        """Take in one message; streams that have something to deliver for the first time are added to ``touched``."""
        self._last_message = time.monotonic()
        if isinstance(message, StepOutputs):
            self._handle_outputs(message, touched)
        elif isinstance(message, UtilityReply):
            future = self._calls.get(message.call_id)
            if future is not None and not future.done():
                if message.error is None:
                    future.set_result(message.result)
                else:
                    future.set_exception(OctavoError(message.error))
        elif isinstance(message, EngineFailed):
            logger.error("The engine failed: %s\n%s", message.message, message.traceback)
            self._die(f"The engine failed: {message.kind}: {message.message}")

    def _handle_outputs(self, message: StepOutputs, touched: list[Mailbox]) -> None:
        self.stats = message.stats
        streams, now = self._streams, time.time()
        for delta in message.deltas:
            stream = streams.get(delta.request_id)
            if stream is None:  # its reader has left; the abort is on its way
                continue
            if not stream.touched:
                stream.touched = True
                touched.append(stream)
            try:
                if stream.outputs.push(delta, now):
                    self._send_abort(delta.request_id, delta.index)
            except Exception as error:  # noqa: BLE001 (one request's text must not take the others with it)
                stream.broken = error

    async def _watch_loop(self) -> None:
        shed_at = 0.0
        while self._dead is None:
            await asyncio.sleep(0.2)
            if time.monotonic() > shed_at:
                self._shed()
                shed_at = time.monotonic() + SHED_S
            self._readable.set()  # should an edge ever be missed, it is made up for here
            if not self.process.alive:
                await asyncio.sleep(0.1)  # its last message may still say why
                if self._dead is None:
                    logger.error("%s Requests in flight are lost; restart the server.", self.process.epitaph)
                    self._die(self.process.epitaph)

    def _shed(self) -> None:
        """The engine does not wait for readers, so what waits for them is bounded here: those with the most are given up."""
        behind = {
            name: stream.outputs.unread_bytes
            for name, stream in self._streams.items()
            if stream.waiter is None and isinstance(stream.outputs, RequestOutputs)
        }
        total = sum(behind.values())
        while total > MAX_UNREAD:
            name = max(behind, key=behind.__getitem__)
            size = behind.pop(name)
            total -= size
            why = f"The answer is not read as fast as it is made: {size / 2**20:.0f} MiB of it wait, and all that waits is too much."
            self._streams.pop(name).give_up(RequestError(why, status=503, code="client_too_slow"))
            self._send_abort(name)
            logger.warning("%s: given up, its client does not read fast enough (%.0f MiB wait)", name, size / 2**20)

    async def _report_loop(self) -> None:
        """A line every ten seconds in which something ran, so that long answers are seen to move."""
        last, then = self.stats, time.monotonic()
        while self._dead is None:
            await asyncio.sleep(REPORT_S)
            now, stats = time.monotonic(), self.stats
            prompts, outputs = stats.prompt_tokens - last.prompt_tokens, stats.generation_tokens - last.generation_tokens
            if prompts or outputs:
                seconds = now - then
                logger.info(
                    "%d running, %d waiting; %.0f prompt tok/s, %.0f output tok/s; KV cache %.0f%% used, prefix hits %.0f%%",
                    stats.num_running,
                    stats.num_waiting + stats.num_swapped,
                    prompts / seconds,
                    outputs / seconds,
                    100 * stats.kv_cache_usage,
                    100 * stats.prefix_cache_hits / max(stats.prefix_cache_queries, 1),
                )
            last, then = stats, now

    def _die(self, why: str) -> None:
        if self._dead is None:
            self._dead = why
            for stream in self._streams.values():
                stream.failed = why
                stream.wake()
            for future in self._calls.values():
                if not future.done():
                    future.set_exception(EngineDeadError(why))

    def _raise_if_dead(self) -> None:
        if self._dead is not None:
            raise EngineDeadError(self._dead)
