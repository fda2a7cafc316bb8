"""The engine process: sockets around the engine's loop.

Started by the HTTP process as ``python -m octavo.engine.process``; the first line of standard input is a JSON object with
the configuration and the two socket addresses (private Unix sockets). Standard input then stays open: when it closes,
the parent is gone and so is this process. Messages are MessagePack of the structs in types.py; nothing is unpickled.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from octavo.config import EngineConfig
from octavo.engine.clients import Clients
from octavo.engine.core import Engine
from octavo.errors import OctavoError, RequestError
from octavo.garbage import collect_rarely
from octavo.types import (
    AbortRequest,
    EngineFailed,
    EngineInput,
    EngineProgress,
    EngineReady,
    FinishReason,
    GenerateRequest,
    GrammarVocabulary,
    Heartbeat,
    TokenDelta,
    UtilityReply,
    UtilityRequest,
)

logger = logging.getLogger("octavo.engine")

HEARTBEAT_S = 1.0
# Without a request before something is prepared, which the next one may have to wait for: soon at the start, and then in pauses that
# are no mere gaps between the questions of one client. PREPARING_MS: between two things that are.
FIRST_IDLE_MS, IDLE_MS, PREPARING_MS = 50, 100, 1


class EngineServer:
    """Feeds an Engine from a socket and sends what it makes to others: one message a step and front end."""

    def __init__(
        self,
        engine: Engine,
        receive: zmq.Socket,
        send: Any,
        prepare: Callable[[], bool] = lambda: False,
        *,
        ready: EngineReady | None = None,
        connect: Callable[[str], Any] | None = None,
    ) -> None:
        """``prepare`` is called again and again while there is nothing to do, until it answers False.

        ``ready`` is what further front ends are greeted with; ``connect`` opens a socket to an address of theirs.
        """
        self.engine = engine
        self.prepare = prepare
        self.idle_wait_ms = FIRST_IDLE_MS
        self.receive = receive
        self.clients = Clients(send, clock=lambda: time.monotonic())
        self.ready, self.connect = ready, connect
        self.closers: dict[str, Callable[[], None]] = {}
        self.decoder = msgspec.msgpack.Decoder(EngineInput)
        self.stopping = False

    def run(self) -> None:
        while not self.stopping:
            outputs = self._intake()
            if self.engine.has_work():
                outputs += self.engine.step()
            if outputs:
                self.clients.send_outputs(outputs, self.engine.stats())
            self.clients.send_all(Heartbeat(timestamp=time.monotonic()), older_than_s=HEARTBEAT_S)

    def _intake(self) -> list[TokenDelta]:
        """Take in everything that has arrived; with nothing to do, wait for it."""
        outputs: list[TokenDelta] = []
        busy = self.engine.has_work()
        while self.receive.poll(0 if busy else self.idle_wait_ms):
            outputs += self._handle(self.decoder.decode(self.receive.recv(copy=False).buffer))
            busy, self.idle_wait_ms = True, IDLE_MS
        if not busy:
            self.idle_wait_ms = PREPARING_MS if self.prepare() else int(HEARTBEAT_S * 1000)
        return outputs

    def _handle(self, message: EngineInput) -> list[TokenDelta]:
        if isinstance(message, GenerateRequest):
            try:
                self.engine.add_request(message)
            except OctavoError as error:
                status = error.status if isinstance(error, RequestError) else 400
                return [_error_delta(message.request_id, i, str(error), status) for i in range(message.params.n)]
            except Exception as error:  # a fault of ours, but one that must not take the other requests with it
                logger.exception("The engine could not take in request %s", message.request_id)
                text = f"The engine could not take the request in ({type(error).__name__}); the server's log has the details."
                return [_error_delta(message.request_id, i, text, 500) for i in range(message.params.n)]
            return []
        if isinstance(message, AbortRequest):
            return self.engine.abort(message.request_id, message.index)
        if isinstance(message, GrammarVocabulary):
            self.engine.set_vocabulary(message)
            return []
        if message.method == "drop_client":
            return self._drop_client(message)
        self.clients.sends[""](self._call(message))
        return []

    def _add_client(self, name: str, to_engine: str, from_engine: str) -> bool:
        """A further front end: hear what it asks, and tell it that the engine is ready."""
        assert self.connect is not None
        self.receive.connect(to_engine)
        send, close = self.connect(from_engine)

        def end() -> None:
            self.receive.disconnect(to_engine)
            close()

        self.closers[name] = end
        self.clients.add(name, send)
        send(self.ready)
        return True

    def _drop_client(self, call: UtilityRequest) -> list[TokenDelta]:
        """A front end has gone, however it went: nobody waits for its requests any more."""
        name = call.args[0]
        ids = [request_id for request_id in self.engine.request_ids() if self.clients.owns(name, request_id)]
        outputs = [delta for request_id in ids for delta in self.engine.abort(request_id)]
        self.clients.drop(name)
        close = self.closers.pop(name, None)
        if close is not None:
            close()
        self.clients.sends[""](UtilityReply(call_id=call.call_id, result=len(ids)))
        return outputs

    def _call(self, call: UtilityRequest) -> UtilityReply:
        if call.method == "add_client":
            return UtilityReply(call_id=call.call_id, result=self._add_client(*call.args))
        if call.method == "reset_prefix_cache":
            return UtilityReply(call_id=call.call_id, result=self.engine.reset_prefix_cache())
        if call.method == "shutdown":
            self.stopping = True
            return UtilityReply(call_id=call.call_id, result=True)
        return UtilityReply(call_id=call.call_id, error=f"The engine has no call {call.method!r}.")


def _error_delta(request_id: str, index: int, message: str, status: int) -> TokenDelta:
    reason: FinishReason = "error"
    return TokenDelta(request_id=request_id, index=index, token_ids=[], finish_reason=reason, error=message, error_status=status)


def main() -> None:
    # Ctrl-C may reach the whole group, and a service manager's SIGTERM every process; the parent says when to stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    start = json.loads(sys.stdin.readline())
    logging.basicConfig(level=start["log_level"].upper(), format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    _exit_with_parent(os.path.dirname(start["to_engine"].removeprefix("ipc://")))
    context = zmq.Context()
    receive = context.socket(zmq.PULL)
    receive.setsockopt(zmq.RCVHWM, 0)
    receive.connect(start["to_engine"])
    encoder = msgspec.msgpack.Encoder()

    def connect(address: str) -> tuple[Callable[[Any], None], Callable[[], None]]:
        push = context.socket(zmq.PUSH)
        push.setsockopt(zmq.SNDHWM, 0)
        push.setsockopt(zmq.LINGER, 1000)
        push.connect(address)
        return (lambda message: push.send(encoder.encode(message))), (lambda: push.close(0))

    send, _ = connect(start["from_engine"])
    code = 0
    try:
        engine, executor, ready = _build(start, send)
        collect_rarely()
        send(ready)
        EngineServer(engine, receive, send, executor.prepare, ready=ready, connect=connect).run()
        executor.shutdown()
    except BaseException as error:  # whatever it is, the parent must learn of it
        code = 1
        send(EngineFailed(kind=type(error).__name__, message=str(error), traceback=traceback.format_exc()))
    context.destroy(linger=1000)
    sys.stderr.flush()
    os._exit(code)  # worker threads of libraries don't hold the process up


def _build(start: dict[str, Any], send: Any) -> tuple[Engine, Any, EngineReady]:
    begun = time.perf_counter()
    from octavo.executor.select import make_executor, start_warmup
    from octavo.executor.warmup import open_gpu
    from octavo.models.config import read_model_config
    from octavo.models.context import resolve_max_model_len

    config = EngineConfig(**start["config"])
    model_config = read_model_config(start["model_path"], config.load_format)
    max_model_len = resolve_max_model_len(config.max_model_len, model_config)
    timings = {"config": round(time.perf_counter() - begun, 3)}
    kernels = start_warmup(config, model_config, max_model_len)  # other cores compile while this one imports and loads
    if config.device != "cpu":
        threading.Thread(target=open_gpu, daemon=True).start()
    import octavo.executor.local  # noqa: F401  # imports torch

    timings["imports"] = round(time.perf_counter() - begun - timings["config"], 3)
    executor = make_executor(
        config,
        model_config,
        max_model_len=max_model_len,
        progress=lambda stage, fraction, detail: send(EngineProgress(stage=stage, fraction=fraction, detail=detail)),
        kernels=kernels,
    )
    engine = Engine(executor.config, executor, max_model_len=executor.max_model_len)
    timings.update(executor.timings)
    timings["total"] = round(time.perf_counter() - begun, 3)
    logger.debug("%s", startup_tree(timings))
    ready = EngineReady(
        num_blocks=executor.num_blocks,
        block_size=config.block_size,
        max_model_len=executor.max_model_len,
        dtype=str(executor.dtype).removeprefix("torch."),
        device=str(executor.device),
        timings=timings,
        max_num_seqs=executor.config.rows,
        num_cpu_blocks=executor.num_cpu_blocks,
    )
    return engine, executor, ready


def startup_tree(timings: dict[str, float]) -> str:
    """The parts of start-up as lines of text, with what no part accounts for; ``timings`` in seconds, "total" among them."""
    total = timings["total"]
    parts = [(name, seconds) for name, seconds in timings.items() if name != "total"]
    parts.append(("rest", max(0.0, total - sum(seconds for _, seconds in parts))))
    lines = [f"start-up {total:17.2f} s"]
    for i, (name, seconds) in enumerate(parts):
        branch = "└─" if i == len(parts) - 1 else "├─"
        lines.append(f"  {branch} {name.replace('_', ' '):12} {seconds:8.2f} s {seconds / max(total, 1e-9):5.0%}")
    return "\n".join(lines)


def _exit_with_parent(folder: str) -> None:
    """Standard input is a pipe from the parent: its end means that the parent is gone, however it went.

    ``folder`` holds the sockets; a parent that was killed could not remove it.
    """

    def watch() -> None:
        while sys.stdin.buffer.raw.read(4096):
            pass
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(2)

    threading.Thread(target=watch, daemon=True, name="parent-watch").start()


if __name__ == "__main__":
    main()
