"""The engine: intake → plan → submit → apply → emit. Tokens in, tokens out; text and tensors live elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable

from octavo.config import EngineConfig
from octavo.engine.scheduler import Scheduler
from octavo.engine.settings import SchedulerSettings
from octavo.engine.stopwatch import Stopwatch
from octavo.types import EngineStats, Executor, GenerateRequest, TokenDelta


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
                config, num_blocks=executor.num_blocks, max_model_len=max_model_len, device_type=device_type
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
        self._next_step = 0

    def add_request(self, request: GenerateRequest) -> None:
        """Take a request in. RequestError, with the numbers, for one that could never finish here."""
        self.scheduler.add(request)

    def abort(self, request_id: str, index: int | None = None) -> list[TokenDelta]:
        """End a request, or one of its sequences, at once. One last delta, ``finish_reason`` abort, per sequence ended."""
        return self.scheduler.abort(request_id, index)

    def abort_all(self) -> list[TokenDelta]:
        """End every request (drain gave up, shutdown)."""
        return [delta for request_id in list(self.scheduler.requests) for delta in self.scheduler.abort(request_id)]

    def abandon(self) -> None:
        """Forget all requests, steps in flight and cached prefixes, after an exception or Ctrl-C came out of ``step``.

        It may have come in the middle of planning, or between a plan and its run, so no state is worth keeping.
        """
        old = self.scheduler
        self.scheduler = Scheduler(self.settings)
        self.scheduler.continue_from(old)
        self.stopwatch.forget()
        self.executor.forget()

    def has_work(self) -> bool:
        """Whether ``step`` has anything to do: unfinished requests, steps in flight, or deltas not handed out."""
        return self.scheduler.has_work

    def step(self) -> list[TokenDelta]:
        """Plan and submit one step, and apply the oldest once more than ``steps_ahead`` are in flight.

        When nothing can be planned ahead, the oldest is applied at once: an empty pipe adds no latency. The answer may
        be empty while the pipe fills. An exception out of the executor means that the engine is dead.
        """
        scheduler, executor = self.scheduler, self.executor
        deltas = scheduler.take_ready()
        plan = scheduler.schedule(self._next_step)
        if plan is not None:
            self._next_step += 1
            self.stopwatch.submitting()
            executor.submit(plan)
        in_flight = len(scheduler.in_flight)
        if in_flight > executor.steps_ahead or (plan is None and in_flight):
            self.stopwatch.collecting()
            result = executor.collect()
            seconds = self.stopwatch.collected()
            if seconds is not None:
                scheduler.pace.observe(scheduler.in_flight[0].work, seconds)
            deltas += scheduler.apply(result)
        return deltas

    def stats(self) -> EngineStats:
        stats = self.scheduler.snapshot()
        if self.executor.whole_prompts:
            stats.kv_cache_usage = 0.0  # its blocks are counters
        return stats

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; running requests go on, and nothing computed before is ever reused. Always True."""
        self.scheduler.kv.reset_prefix_cache()
        return True

    def shutdown(self) -> list[TokenDelta]:
        """Abort everything and stop the executor; returns the aborts' deltas."""
        deltas = self.scheduler.take_ready() + self.abort_all()
        self.executor.shutdown()
        return deltas
