"""What every route shares: the engine, the names it is served under, options, metrics and the text thread pool."""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
import time
import uuid
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from octavo.config import ServerOptions
from octavo.errors import ConfigError, EngineDeadError, RequestError
from octavo.frontend.mailbox import Taker
from octavo.frontend.outputs import RequestOutput
from octavo.frontend.params import SamplingParams
from octavo.metrics.prometheus import Metrics
from octavo.models.pooling import Roles
from octavo.server.logprobs import TokenTexts
from octavo.server.model_parsers import ModelParsers, model_parsers
from octavo.types import EngineReady, EngineStats, PoolingParams

MAX_TEMPLATES = 16  # of requests that are kept compiled
T = TypeVar("T")

INLINE_CHARS = 4096  # text work on less than this stays on the loop: about a millisecond, less than a thread's round trip


class ServerEngine(Protocol):
    """The part of ``AsyncLLM`` that the server uses; ``MockEngine`` is another one."""

    tokenizer: Any
    chat_template: Any
    model_config: Any
    max_model_len: int
    vocab_size: int
    roles: Roles
    ready: EngineReady
    stats: EngineStats

    @property
    def num_unfinished(self) -> int: ...

    def generate(
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
    ) -> AsyncIterator[RequestOutput]: ...

    async def embed(self, prompts: list[list[int]], params: PoolingParams, *, request_id: str, priority: int = 0) -> list[bytes]: ...

    def check_prompt(self, prompt_token_ids: list[int], params: SamplingParams) -> None: ...

    def is_healthy(self) -> bool: ...

    @property
    def max_num_seqs(self) -> int: ...


def new_request_id() -> str:
    return uuid.uuid4().hex


@dataclass
class ServerContext:
    """Made once by ``create_app``. ``scheduling_policy`` None: not known, so priorities are not checked against it."""

    engine: ServerEngine
    options: ServerOptions
    model_names: tuple[str, ...]
    metrics: Metrics
    scheduling_policy: str | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    counter: Any = field(default_factory=itertools.count)
    templates: dict[str, Any] = field(default_factory=dict)  # compiled, of requests; by their text
    _kept: dict[tuple[str, ...], list[int]] = field(default_factory=dict)
    pool: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1), thread_name_prefix="octavo-text")
    )

    @functools.cached_property
    def parsers(self) -> ModelParsers:
        """How the model's answers are read. ConfigError for flags that can't be."""
        return model_parsers(self.engine, self.options)

    @functools.cached_property
    def texts(self) -> TokenTexts:
        return TokenTexts(self.engine.tokenizer)

    @functools.cached_property
    def texts_as_ids(self) -> TokenTexts:
        return TokenTexts(self.engine.tokenizer, as_ids=True)

    def compile_template(self, source: str) -> Any:
        """A request's chat template, kept for the next request that brings it. RequestError for one with an error."""
        from octavo.frontend.chat_template import ChatTemplate

        try:
            template = ChatTemplate(source, self.engine.tokenizer)
        except ConfigError as error:
            raise RequestError(str(error), param="chat_template") from None
        while len(self.templates) >= MAX_TEMPLATES:
            self.templates.pop(next(iter(self.templates)), None)
        self.templates[source] = template
        return template

    def check_model(self, name: str | None) -> str:
        """The model name to answer with. RequestError 404 that lists the served names."""
        if name is None:
            return self.model_names[0]
        if name not in self.model_names:
            served = ", ".join(repr(n) for n in self.model_names)
            raise RequestError(
                f"The model {name[:200]!r} does not exist here; this server serves {served}.",
                param="model",
                status=404,
                code="model_not_found",
            )
        return name

    def check_healthy(self) -> None:
        """EngineDeadError when the engine does not serve."""
        if not self.engine.is_healthy():
            raise EngineDeadError("it stopped or does not answer; restart the server")

    def check_priority(self, priority: int | None) -> None:
        """RequestError for a priority that nothing would come of."""
        if priority and self.scheduling_policy not in (None, "priority"):
            raise RequestError("priority needs a server that was started with --scheduling-policy priority.", param="priority")

    def check_queue(self, new: int) -> None:
        """RequestError 503 when ``new`` more prompts would make more than --max-queued-requests wait.

        What the engine says of its queue is a step old; of a burst within that step the requests themselves tell.
        """
        limit = self.options.max_queued_requests
        if limit is None:
            return
        waiting = self.engine.stats.num_waiting + self.engine.stats.num_swapped
        queued = max(waiting + new if waiting else 0, self.engine.num_unfinished + new - self.engine.max_num_seqs)
        if queued > limit:
            raise RequestError(
                f"The server is busy: {max(queued - new, 0)} requests wait already (--max-queued-requests {limit}). Try again later.",
                status=503,
                code="queue_full",
                retry_after=1.0,
            )

    def engine_request_id(self, response_id: str) -> str:
        """A name for the engine that is unique, even when clients choose equal request ids."""
        return f"{response_id}-{next(self.counter)}"

    def kept_tokens(self, markers: tuple[str, ...]) -> list[int]:
        """Ids of those of a parser's marks that are special tokens, which texts leave out otherwise."""
        if markers not in self._kept:
            tokenizer = self.engine.tokenizer
            ids = (tokenizer.encode(marker, add_special_tokens=False) for marker in markers)
            self._kept[markers] = [i[0] for i in ids if len(i) == 1 and i[0] in self.texts.special]
        return self._kept[markers]

    async def off_loop(self, size: int, function: Callable[..., T], *args: Any) -> T:
        """Run text work on ``size`` characters: here when it is little, in the pool when it would hold up the loop."""
        if size < INLINE_CHARS:
            return function(*args)
        return await asyncio.get_running_loop().run_in_executor(self.pool, lambda: function(*args))
