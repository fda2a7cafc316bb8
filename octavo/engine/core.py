"""The engine: intake → plan → submit → apply → emit. Tokens in, tokens out; text and tensors live elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field

from octavo.config import EngineConfig
from octavo.engine.grammar import Grammar, Grammars
from octavo.engine.scheduler import Scheduler
from octavo.engine.settings import SchedulerSettings
from octavo.engine.stopwatch import Stopwatch
from octavo.errors import RequestError
from octavo.types import EngineStats, Executor, GenerateRequest, GrammarVocabulary, TokenDelta

GRAMMAR_WAIT_S = 0.002  # with nothing else to do, how long one call of ``step`` waits for a grammar


@dataclass(slots=True)
class Compiling:
    """A request that waits for its grammar, and which of its sequences were aborted meanwhile."""

    request: GenerateRequest
    number: int  # in the order of arrival
    grammar: Future[Grammar]
    aborted: set[int] = field(default_factory=set)


class Engine:
    """One model, served step by step. Not thread-safe: one thread owns it and its executor.

    Between two calls of ``step`` at most ``executor.steps_ahead`` steps are in flight.
    """

    def __init__(self, config: EngineConfig, executor: Executor, *, max_model_len: int) -> None:
        """``max_model_len`` is the resolved one. ConfigError if the token budget cannot hold what it must."""
        device_type = config.device if config.device != "auto" else ("cuda" if executor.steps_ahead else "cpu")
        if executor.whole_prompts:
            settings = SchedulerSettings.for_encoder(config, max_model_len=max_model_len, device_type=device_type)
        else:
            settings = SchedulerSettings.from_config(
                config,
                num_blocks=executor.num_blocks,
                max_model_len=max_model_len,
                device_type=device_type,
                num_cpu_blocks=executor.num_cpu_blocks,
                swap_block_s=executor.swap_block_s,
            )
        self._start(settings, executor)

    @classmethod
    def from_settings(cls, settings: SchedulerSettings, executor: Executor, clock: Callable[[], float] = time.perf_counter) -> Engine:
        """An engine from bare numbers, without the command line's configuration. ``clock``: seconds, for the steps' times."""
        engine = cls.__new__(cls)
        engine._start(settings, executor, clock)
        return engine

    def _start(self, settings: SchedulerSettings, executor: Executor, clock: Callable[[], float] = time.perf_counter) -> None:
        self.settings = settings
        self.scheduler = Scheduler(settings)
        self.executor = executor
        self.stopwatch = Stopwatch(executor.steps_ahead, clock)
        self.grammars = Grammars()
        self._compiling: dict[str, Compiling] = {}
        self._ready: list[TokenDelta] = []  # of requests that never reached the scheduler
        self._next_step = 0

    def set_vocabulary(self, vocabulary: GrammarVocabulary) -> None:
        """What grammars must know of the tokens; comes before the first request that has one."""
        self.grammars.set_vocabulary(vocabulary)

    def add_request(self, request: GenerateRequest) -> None:
        """Take a request in. RequestError, with the numbers, for one that could never finish here.

        One with a grammar waits, beside the queue, until that is compiled.
        """
        if request.params.grammar is None:
            self.scheduler.add(request)
            return
        self.scheduler.check(request)
        if request.request_id in self._compiling:
            raise RequestError(f"a request with the id {request.request_id!r} is running already; choose another.", param="request_id")
        self._compiling[request.request_id] = Compiling(
            request, self.scheduler.take_number(), self.grammars.compile(request.params.grammar)
        )
        self._take_compiled()

    def _take_compiled(self) -> None:
        """Hand requests whose grammar is ready to the scheduler, in the order they came."""
        for request_id, entry in list(self._compiling.items()):
            if not entry.grammar.done():
                continue
            del self._compiling[request_id]
            try:
                self.scheduler.add(entry.request, entry.grammar.result(), entry.number)
            except Exception as error:  # noqa: BLE001 (whatever it is, it is this request's alone)
                self._ready += [_refusal(entry.request, i, error) for i in range(entry.request.params.n)]
            for index in entry.aborted:
                self._ready += self.scheduler.abort(request_id, index)

    def abort(self, request_id: str, index: int | None = None) -> list[TokenDelta]:
        """End a request, or one of its sequences, at once. One last delta, ``finish_reason`` abort, per sequence ended."""
        entry = self._compiling.get(request_id)
        if entry is None:
            return self.scheduler.abort(request_id, index)
        if index is not None:
            entry.aborted.add(index)
            return []
        del self._compiling[request_id]
        return [TokenDelta(request_id=request_id, index=i, token_ids=[], finish_reason="abort") for i in range(entry.request.params.n)]

    def request_ids(self) -> list[str]:
        """Of all requests that have not ended."""
        return [*self.scheduler.requests, *self._compiling]

    def abort_all(self) -> list[TokenDelta]:
        """End every request (drain gave up, shutdown)."""
        return [delta for request_id in [*self._compiling, *self.scheduler.requests] for delta in self.abort(request_id)]

    def abandon(self) -> None:
        """Forget all requests, steps in flight and cached prefixes, after an exception or Ctrl-C came out of ``step``.

        It may have come in the middle of planning, or between a plan and its run, so no state is worth keeping.
        """
        old = self.scheduler
        self.scheduler = Scheduler(self.settings)
        self.scheduler.continue_from(old)
        self.stopwatch.forget()
        self.executor.forget()
        self._compiling.clear()
        self._ready.clear()

    def has_work(self) -> bool:
        """Whether ``step`` has anything to do: unfinished requests, steps in flight, or deltas not handed out."""
        return self.scheduler.has_work or bool(self._compiling or self._ready)

    def step(self) -> list[TokenDelta]:
        """Plan and submit one step, and apply the oldest once more than ``steps_ahead`` are in flight.

        When nothing can be planned ahead, the oldest is applied at once: an empty pipe adds no latency. The answer may
        be empty while the pipe fills. An exception out of the executor means that the engine is dead.
        """
        scheduler, executor = self.scheduler, self.executor
        deltas = self._take_ready()
        plan = scheduler.schedule(self._next_step)
        if plan is not None:
            self._next_step += 1
            self.stopwatch.submitting()
            executor.submit(plan)
            if plan.masked:
                deltas += self._sample_masked()
        in_flight = len(scheduler.in_flight)
        if in_flight > executor.steps_ahead or (plan is None and in_flight):
            deltas += self._apply_oldest()
        elif plan is None and self._compiling and not deltas:
            wait([entry.grammar for entry in self._compiling.values()], GRAMMAR_WAIT_S, FIRST_COMPLETED)
        return deltas

    def _take_ready(self) -> list[TokenDelta]:
        """Deltas that no step made."""
        if self._compiling:
            self._take_compiled()
        ready, self._ready = self._ready, []
        return ready + self.scheduler.take_ready()

    def _sample_masked(self) -> list[TokenDelta]:
        """The second half of the step just submitted: while its forward pass runs, the tokens of the one before arrive, and say
        what its rows may draw."""
        deltas: list[TokenDelta] = []
        while len(self.scheduler.in_flight) > 1:
            deltas += self._apply_oldest()
        masks, ended = self.scheduler.masks(self.grammars)
        self.executor.sample(masks)
        return deltas + ended

    def _apply_oldest(self) -> list[TokenDelta]:
        scheduler = self.scheduler
        self.stopwatch.collecting()
        result = self.executor.collect()
        seconds = self.stopwatch.collected()
        if seconds is not None:
            scheduler.pace.observe(scheduler.in_flight[0].work, seconds)
        return scheduler.apply(result)

    def stats(self) -> EngineStats:
        stats = self.scheduler.snapshot()
        stats.num_waiting += len(self._compiling)
        if self.executor.whole_prompts:
            stats.kv_cache_usage = 0.0  # its blocks are counters
        return stats

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; running requests go on, and nothing computed before is ever reused. Always True."""
        self.scheduler.kv.reset_prefix_cache()
        return True

    def shutdown(self) -> list[TokenDelta]:
        """Abort everything and stop the executor; returns the aborts' deltas."""
        deltas = self._take_ready() + self.abort_all()
        self.grammars.shutdown()
        self.executor.shutdown()
        return deltas


def _refusal(request: GenerateRequest, index: int, error: Exception) -> TokenDelta:
    status = error.status if isinstance(error, RequestError) else 500
    return TokenDelta(
        request_id=request.request_id, index=index, token_ids=[], finish_reason="error", error=str(error), error_status=status
    )
