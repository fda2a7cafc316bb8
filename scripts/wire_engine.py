#!/usr/bin/env python3
"""The two ends of the sockets between HTTP process and engine, for bench_frontend.py --wire.

    wire_engine.py serve PORT [REASONING_PARSER]  # a real server over a real AsyncLLM; prints the folder of its sockets
    wire_engine.py engine FOLDER TICK [call]      # an engine without a model: a token per request every TICK seconds, by the clock

The tokens are those of a fixed text in the demo model's vocabulary, the log-probabilities made up. The engine does not
wait for a front end that is behind, as a real one does not either.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

TEXT = (
    "The octopus reads books about deep water, and writes letters to a friend who lives near one old lighthouse; "
    "every night they count ships, stars, cafés and 漢字 until morning comes.\n"
)
CALL = '<tool_call>\n{"name": "write", "arguments": {"text": "' + TEXT.strip() * 100
NUM_CANDIDATES = 1000  # different candidates of log-probabilities


def serve(port: int, reasoning_parser: str | None) -> None:
    import logging

    from octavo.config import EngineConfig, ServerOptions
    from octavo.frontend.async_llm import AsyncLLM
    from octavo.frontend.engine_process import SharedEngine
    from octavo.frontend.parts import find_model
    from octavo.server import run

    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)

    async def start(config: EngineConfig, options: ServerOptions) -> Any:
        link = SharedEngine(find_model(config), "wire")
        print(link.folder, flush=True)
        return await AsyncLLM.start(config, process=link)

    options = ServerOptions(port=port, disable_log_requests=True, tool_call_parser="hermes", reasoning_parser=reasoning_parser)
    run.serve(EngineConfig(), options, start_engine=start)


class Engine:
    def __init__(self, folder: str, tick_s: float, call: bool) -> None:
        import msgspec
        import zmq

        from octavo.config import EngineConfig
        from octavo.frontend.parts import find_model, load_model_parts
        from octavo.types import EngineInput

        self.tick_s = tick_s
        self.poll_in = zmq.POLLIN
        config = EngineConfig()
        tokenizer = load_model_parts(config, find_model(config), None).tokenizer
        assert tokenizer is not None
        self.script = tokenizer.encode(CALL if call else TEXT, add_special_tokens=False)
        context = zmq.Context()
        self.receive, self.push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        for socket in (self.receive, self.push):
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.RCVHWM, 0)
        self.receive.connect(f"ipc://{folder}/in")
        self.push.connect(f"ipc://{folder}/out")
        self.decoder, self.encoder = msgspec.msgpack.Decoder(EngineInput), msgspec.msgpack.Encoder()
        self.running: dict[str, list[Any]] = {}  # request id -> [tokens so far, most tokens, candidates of log-probabilities]

    def run(self) -> None:
        from octavo.types import EngineReady

        self.push.send(
            self.encoder.encode(
                EngineReady(num_blocks=100000, block_size=16, max_model_len=8192, dtype="float32", device="none", max_num_seqs=4096)
            )
        )
        due = time.monotonic()
        while True:
            self._take_in(0 if self.running else None)
            if not self.running:
                continue
            due = max(due + self.tick_s, time.monotonic() - 0.1)  # what it could not keep up with is not made up for all at once
            time.sleep(max(due - time.monotonic(), 0))
            self.push.send(self.encoder.encode(self._step()))

    def _take_in(self, timeout_ms: int | None) -> None:
        from octavo.types import AbortRequest, GenerateRequest

        while self.receive.poll(timeout_ms):
            message = self.decoder.decode(self.receive.recv())
            if isinstance(message, GenerateRequest):
                self.running[message.request_id] = [0, message.params.max_tokens, message.params.logprobs]
            elif isinstance(message, AbortRequest):
                self.running.pop(message.request_id, None)
            timeout_ms = 0

    def _step(self) -> Any:
        from octavo.types import EngineStats, StepOutputs, TokenDelta, TokenLogprobs

        deltas, script, ended = [], self.script, []
        for request_id, state in self.running.items():
            at = state[0]
            token = script[at % len(script)]
            state[0] = at + 1
            reason = None
            if at + 1 == state[1]:
                reason = "length"
                ended.append(request_id)
            logprobs = None
            if state[2] is not None:
                ids = [token, *((token + 7 * at + 13 * k) % NUM_CANDIDATES + 300 for k in range(state[2]))]
                logprobs = [TokenLogprobs(token_ids=ids, logprobs=[-0.1234567 - k for k in range(len(ids))], rank=1)]
            deltas.append(TokenDelta(request_id=request_id, index=0, token_ids=[token], finish_reason=reason, logprobs=logprobs))
        for request_id in ended:
            del self.running[request_id]
        return StepOutputs(deltas=deltas, stats=EngineStats(num_running=len(self.running)))


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(int(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else None)
    else:
        Engine(sys.argv[2], float(sys.argv[3]), sys.argv[4:] == ["call"]).run()
