"""Checks and compiles the grammars of structured output, off the event loop and within bounds of time and size."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import select
import struct
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property

import msgspec

from octavo.errors import RequestError
from octavo.frontend.structured import StructuredOutput
from octavo.frontend.tokenizer import Tokenizer
from octavo.types import GrammarVocabulary

MAX_SIZE = {"regex": 64 << 10, "grammar": 256 << 10}  # bytes
MAX_SIZE_ELSE = 512 << 10
COMPILE_S = 5.0
START_S = 60.0  # imports, and the tables of a large vocabulary
MAX_WAITING = 64  # compilations in line
CACHED_BYTES = 32 << 20
_LENGTH = struct.Struct("<I")
_TEXTS = {
    "json_schema": "the schema",
    "json_object": "the schema",
    "regex": "the regular expression",
    "choice": "the choices",
    "grammar": "the grammar",
    "structural_tag": "the structural tag",
}


class GrammarCompiler:
    """From a ``StructuredOutput`` to the text that the engine takes. Thread-safe; nothing is started before the first one.

    Raises RequestError, with the place in the client's request, for what can't be honoured, takes longer than ``COMPILE_S``
    or is larger than ``MAX_SIZE``. Answers are cached, errors too.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._lock = threading.Lock()  # one compilation at a time
        self._cache: OrderedDict[bytes, str | tuple[str, str]] = OrderedDict()  # a grammar, or (error, pointer)
        self._cached_bytes = 0
        self._worker: _Worker | None = None
        self._threads: ThreadPoolExecutor | None = None
        self._waiting = 0

    def check_usable(self, param: str = "structured_outputs") -> None:
        """RequestError if this model can't follow a grammar at all."""
        if self._tokenizer is None:
            raise RequestError(f"{param} needs a tokenizer, and this model was started without one.", param=param)
        if self._tokenizer.decoder_kind == "other":
            raise RequestError(f"{param} is not supported for this model: its tokens have no exact bytes.", param=param)
        if not self._eos_token_ids:
            raise RequestError(f"{param} is not supported for this model: it has no token that ends an output.", param=param)

    @cached_property
    def vocabulary(self) -> GrammarVocabulary:
        """For the engine. Takes a while for a large vocabulary."""
        tokenizer = self._tokenizer
        assert tokenizer is not None
        return GrammarVocabulary(
            tokens=[tokenizer.token_bytes(i) for i in range(self._vocab_size)],
            special_token_ids=sorted(i for i in {*tokenizer.special_token_ids, *self._eos_token_ids} if i < self._vocab_size),
            eos_token_ids=list(self._eos_token_ids),
        )

    def compile(self, output: StructuredOutput) -> str:
        """The grammar; waits for it."""
        key = self._checked_key(output)
        found = self._cached(key)
        if found is None:
            with self._lock:
                found = self._cached(key)
                if found is None:
                    found = self._work(output)
                    self._keep(key, found)
        return self._answer(output, found)

    async def compile_async(self, output: StructuredOutput) -> str:
        """The same without holding up the event loop."""
        found = self._cached(self._checked_key(output))
        if found is not None:
            return self._answer(output, found)
        if self._waiting >= MAX_WAITING:
            raise RequestError("Too many grammars wait to be compiled; try again later.", param=output.param, status=503)
        if self._threads is None:
            self._threads = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, self.compile, output)
        finally:
            self._waiting -= 1

    async def vocabulary_async(self) -> GrammarVocabulary:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: self.vocabulary)

    def close(self) -> None:
        """End the worker process. A later compilation would start another."""
        threads, self._threads = self._threads, None
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.kill()
        if threads is not None:
            threads.shutdown(wait=False, cancel_futures=True)

    def _checked_key(self, output: StructuredOutput) -> bytes:
        self.check_usable(output.param)
        try:
            data = output.value.encode()
        except UnicodeEncodeError:
            raise RequestError(f"{output.param} holds a lone surrogate, which is not a character.", param=output.param) from None
        limit = MAX_SIZE.get(output.kind, MAX_SIZE_ELSE)
        if len(data) > limit:
            raise RequestError(f"{output.param} has {len(data):,} bytes; at most {limit:,} are taken.", param=output.param)
        return output.kind.encode() + hashlib.blake2b(data, digest_size=32).digest()

    def _cached(self, key: bytes) -> str | tuple[str, str] | None:
        found = self._cache.get(key)
        if found is not None:
            with contextlib.suppress(KeyError):  # another thread's eviction
                self._cache.move_to_end(key)
        return found

    def _keep(self, key: bytes, found: str | tuple[str, str]) -> None:
        self._cache[key] = found
        self._cached_bytes += 100 + len(found)
        while self._cached_bytes > CACHED_BYTES:
            _, old = self._cache.popitem(last=False)
            self._cached_bytes -= 100 + len(old)

    def _answer(self, output: StructuredOutput, found: str | tuple[str, str]) -> str:
        if isinstance(found, str):
            return found
        error, pointer = found
        at = f" at {pointer}" if pointer else ""
        raise RequestError(f"{output.param}{at}: {error}", param=output.param, code="unsupported_grammar")

    def _work(self, output: StructuredOutput) -> str | tuple[str, str]:
        if self._worker is None or not self._worker.alive:
            self._worker = _Worker(self.vocabulary)
        worker = self._worker
        try:
            grammar, error, pointer = worker.ask([output.kind, output.value], COMPILE_S)
        except TimeoutError:
            worker.kill()
            return f"{_TEXTS[output.kind]} takes more than {COMPILE_S:.0f} seconds to compile; use a simpler one.", ""
        except (EOFError, OSError):
            worker.kill()
            return f"{_TEXTS[output.kind]} is nested too deeply or too large to compile; use a simpler one.", ""
        return grammar if grammar is not None else (error, pointer)


# Imports the same Octavo as this process, wherever that was found (see engine_process.py).
_CHILD = (
    "import sys; p = [*filter(None, sys.path)]; {root!r} in p or p.insert(0, {root!r}); sys.path = p; "
    "from octavo.frontend.grammar_worker import main; main()"
)


class _Worker:
    """A running grammar_worker.py. EOFError or OSError if it is gone, TimeoutError if it is slow; then it must be killed."""

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        import octavo

        root = os.path.dirname(os.path.dirname(os.path.abspath(octavo.__file__)))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", _CHILD.format(root=root)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            bufsize=0,
            start_new_session=True,  # Ctrl-C in the terminal is for the parent; the end of its input ends the worker
        )
        try:
            self.ask(vocabulary, START_S)
        except (TimeoutError, EOFError, OSError) as error:
            self.kill()
            raise RequestError("The process that compiles grammars did not start; the server's log may say why.", status=500) from error

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def ask(self, message: object, timeout_s: float) -> list[str]:
        assert self.process.stdin is not None
        data = msgspec.msgpack.encode(message)
        packet = memoryview(_LENGTH.pack(len(data)) + data)
        while packet:  # a pipe without a buffer takes what it has room for; the worker reads all before it works
            packet = packet[self.process.stdin.write(packet) or 0 :]
        deadline = time.monotonic() + timeout_s
        length = _LENGTH.unpack(self._read(_LENGTH.size, deadline))[0]
        return msgspec.msgpack.decode(self._read(length, deadline))

    def _read(self, count: int, deadline: float) -> bytes:
        assert self.process.stdout is not None
        data = b""
        while len(data) < count:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self.process.stdout], [], [], left)[0]:
                raise TimeoutError
            part = os.read(self.process.stdout.fileno(), count - len(data))
            if not part:
                raise EOFError
            data += part
        return data

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
