"""What the host spends on a decode step, and whether a GPU would wait for it.   usage: bench_host.py [--rows 1,32,256,1024]

Engine, scheduler, model runner and step graphs are the real ones, with tensors on the CPU; where a graph would be replayed there are
tokens at once, which can be collected when a GPU would be done with them (``--gpu-ms``, one for each of ``--rows``). What a GPU's driver
takes for its calls is not in it. Counted are steps that only decode, in three places:

    ids      LLM.generate without text          text     LLM.generate with it
    served   the engine process's loop, whose messages another process decodes

Host time is from one result to the wait for the next, in microseconds: it is hidden as long as it is below the GPU's step. ``idle`` is
for how long the GPU had nothing to do, on average. Of ``--repeats`` runs the quickest counts.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from types import ModuleType, SimpleNamespace
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
os.environ.setdefault("OMP_NUM_THREADS", "1")

PROMPT, BLOCK, MAX_LEN = 128, 16, 2048
PLACES = ("ids", "text", "served")
Steps = list[tuple[float, float]]  # microseconds of the host, and that the GPU was idle before


class HostExecutor:
    """``LocalExecutor`` on a GPU, as far as the host sees it."""

    num_cpu_blocks, swap_block_s, whole_prompts, steps_ahead = 0, 0.0, False, 1

    def __init__(self, config: Any, model_config: Any, *, max_model_len: int) -> None:
        import dataclasses

        import torch

        from octavo.executor.model_runner import ModelRunner

        kernels = ModuleType("octavo.kernels.triton.rows")
        kernels.scatter_pairs = lambda pairs, table: None  # type: ignore[attr-defined]
        sys.modules[kernels.__name__] = kernels
        self.config = dataclasses.replace(config, max_num_seqs=1024)
        self.max_model_len, self.num_blocks = max_model_len, 1024 * 64
        self.runner = ModelRunner(
            SimpleNamespace(attention_layers=[]),
            SimpleNamespace(),  # type: ignore[arg-type]
            [],
            block_size=config.block_size,
            max_rows=self.config.rows,
            max_model_len=max_model_len,
            vocab_size=model_config.vocab_size,
            device=torch.device("cpu"),
            use_graphs=True,
        )
        self.runner.rows._table_view = None  # block tables go up in one packed copy
        graphs = self.runner.graphs
        tokens = torch.randint(300, 40000, (4 * self.config.rows,))
        graphs.pool.on_gpu = True
        graphs.pool.run = lambda *args: tokens
        graphs._mixed_body = lambda *args: tokens
        self.gpu_s = 0.0
        self.pending: deque[tuple[Any, bool, float]] = deque()  # step, whether it only decodes, when it was submitted
        self.ended = 0.0  # when the GPU was done with the last step collected
        self.returned = 0.0  # when its result was there
        self.steps: list[tuple[int, float, float]] = []

    def submit(self, plan: Any) -> None:
        step = self.runner.execute(plan)
        decodes = plan.advances[-1].token_ids is None  # prompts come last
        self.pending.append((step, decodes, time.perf_counter()))

    def collect(self) -> Any:
        called = time.perf_counter()
        step, decodes, submitted = self.pending.popleft()
        idle = max(submitted - self.ended, 0.0)
        due = self.ended + idle + self.gpu_s
        while (now := time.perf_counter()) < due:
            pass
        self.ended = waited = now  # later than due if another process took the core
        result = step.to_result()
        now = time.perf_counter()
        if decodes and self.pending and self.pending[0][1]:
            self.steps.append((len(result.rows), called - self.returned + now - waited, idle))
        self.returned = now
        return result

    def forget(self) -> None:
        self.pending.clear()

    def shutdown(self) -> None:
        self.pending.clear()

    def take(self, rows: int) -> Steps:
        """Of the steps with so many rows since the last call, but for the first two: their pipe was filling."""
        taken = [(host * 1e6, idle * 1e6) for count, host, idle in self.steps if count == rows]
        self.steps.clear()
        return taken[2:]


def report(place: str, rows: int, gpu_ms: float, runs: list[Steps]) -> None:
    steps = min(runs, key=lambda run: statistics.mean(host for host, _ in run))
    host = sorted(host for host, _ in steps)
    at = {share: host[int(share * (len(host) - 1))] for share in (0.5, 0.99, 1.0)}
    figures = (statistics.mean(host), *at.values(), statistics.mean(idle for _, idle in steps))
    print(f"| {place} | {rows:,} | {gpu_ms:g} | " + " | ".join(f"{x:,.0f}" for x in figures) + f" | {len(steps)} |", flush=True)


def prompts(rows: int, seed: int | str) -> list[list[int]]:
    """Never the same for two seeds: what is cached would all start in one step, and reach the ends of its blocks together."""
    rng = random.Random(seed)
    return [[rng.randint(300, 40000) for _ in range(PROMPT)] for _ in range(rows)]


def offline(args: argparse.Namespace) -> None:
    import octavo.executor.select as select
    from octavo import LLM, SamplingParams

    select.make_executor = lambda config, model, *, max_model_len: HostExecutor(config, model, max_model_len=max_model_len)
    llm = LLM(max_model_len=MAX_LEN, block_size=BLOCK)
    for place in (place for place in ("ids", "text") if place in args.only):
        params = SamplingParams(temperature=0.0, max_tokens=args.tokens, ignore_eos=True, detokenize=place == "text")
        for rows, gpu_ms in zip(args.rows, args.gpu_ms, strict=True):
            llm.executor.gpu_s = gpu_ms / 1e3
            runs = []
            for seed in range(args.repeats):
                work = [{"prompt_token_ids": p} for p in prompts(rows, f"{place} {seed}")]
                llm.generate(work, params, use_tqdm=False)
                runs.append(llm.executor.take(rows))
            report(place, rows, gpu_ms, runs)


def served(args: argparse.Namespace) -> None:
    import msgspec
    import zmq

    from octavo.config import EngineConfig
    from octavo.engine.core import Engine
    from octavo.engine.process import EngineServer
    from octavo.frontend.parts import find_model, load_model_parts
    from octavo.garbage import collect_rarely
    from octavo.types import GenerateRequest, TokenParams, UtilityRequest

    config = EngineConfig(max_model_len=MAX_LEN)
    executor = HostExecutor(config, load_model_parts(config, find_model(config), None).model_config, max_model_len=MAX_LEN)
    engine = Engine(executor.config, executor, max_model_len=MAX_LEN)
    context, encoder = zmq.Context(), msgspec.msgpack.Encoder()
    collect_rarely()
    with tempfile.TemporaryDirectory() as folder:
        sockets = requests, receive, push = [context.socket(kind) for kind in (zmq.PUSH, zmq.PULL, zmq.PUSH)]
        for socket in sockets:
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.RCVHWM, 0)
        requests.bind(f"ipc://{folder}/in")
        receive.connect(f"ipc://{folder}/in")
        push.connect(f"ipc://{folder}/out")
        reader = subprocess.Popen([sys.executable, __file__, "--read", f"ipc://{folder}/out"])

        def run(rows: int, seed: int) -> Steps:
            params = TokenParams(max_tokens=args.tokens, temperature=0.0)
            for i, prompt in enumerate(prompts(rows, seed)):
                requests.send(encoder.encode(GenerateRequest(request_id=f"cmpl-{seed:024x}-{i}", prompt_token_ids=prompt, params=params)))
            server = EngineServer(engine, receive, lambda message: push.send(encoder.encode(message)))
            end = engine.scheduler.stats.generation_tokens + rows * args.tokens

            def stop() -> None:
                while engine.scheduler.stats.generation_tokens < end or engine.has_work():
                    time.sleep(0.1)
                requests.send(encoder.encode(UtilityRequest(call_id=0, method="shutdown")))

            threading.Thread(target=stop).start()
            server.run()
            return executor.take(rows)

        try:
            for rows, gpu_ms in zip(args.rows, args.gpu_ms, strict=True):
                executor.gpu_s = gpu_ms / 1e3
                report("served", rows, gpu_ms, [run(rows, seed) for seed in range(args.repeats)])
        finally:
            reader.kill()
            context.destroy(0)


def read(address: str) -> None:
    """A front end that decodes what comes and throws it away."""
    import msgspec
    import zmq

    from octavo.types import EngineOutput

    socket = zmq.Context().socket(zmq.PULL)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.bind(address)
    decoder = msgspec.msgpack.Decoder(EngineOutput)
    while True:
        decoder.decode(socket.recv())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=lambda text: [int(x) for x in text.split(",")], default=[1, 32, 256, 1024])
    parser.add_argument("--gpu-ms", type=lambda text: [float(x) for x in text.split(",")], default=[0.79, 1.26, 3.3, 12.0])
    parser.add_argument("--only", type=lambda text: text.split(","), default=PLACES, help="of " + ", ".join(PLACES))
    parser.add_argument("--tokens", type=int, default=288, help="per sequence")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--read", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.read:
        return read(args.read)
    if len(args.rows) != len(args.gpu_ms) or not set(args.only) <= set(PLACES):
        parser.error(f"--gpu-ms needs as many values as --rows, and --only some of {', '.join(PLACES)}")
    print("| where | rows | GPU (ms) | host: mean | p50 | p99 | longest | GPU idle | steps |\n|---|" + "---:|" * 8)
    offline(args)
    if "served" in args.only:
        served(args)


if __name__ == "__main__":
    main()
