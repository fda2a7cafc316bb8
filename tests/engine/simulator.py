"""A device made of a clock and a formula, a server's load on it, and what its clients would have measured.

Run as a script for a table: ``python -m tests.engine.simulator``.
"""

from __future__ import annotations

import heapq
import random
from collections import defaultdict, deque
from dataclasses import dataclass, field, replace

from octavo.engine.core import Engine
from octavo.engine.pace import Pace, PaceRule, rule_for
from octavo.engine.settings import SchedulerSettings
from octavo.executor.step_sizes import GRAPH_PROMPT_TOKENS, MAX_PROMPTS, mixed_decodes, prompt_sizes
from octavo.types import GenerateRequest, StepPlan, StepResult, TokenParams

MS = 1e-3


@dataclass(frozen=True)
class Device:
    """Seconds of a step: the slower of reading the weights and computing the tokens, then attention, sampling and a constant.

    Not the cost model's own formula: it has a bend, pads to graph sizes, and steps that no graph holds cost the host more.
    """

    kind: str
    weights: float  # to read them once
    token: float  # to compute one
    context: float  # to read one token's K and V
    pair: float  # one query-key pair
    row: float  # to sample
    constant: float
    host: float  # per step: plan, launch, apply, emit
    host_eager: float = 0.0  # per step that no graph holds
    capture: float = 0.0  # once per size of step
    steps_ahead: int = 1
    move: float = 0.0  # to move a block of 16 tokens to or from CPU memory

    @property
    def warm(self) -> Device:
        """The same, with all graphs captured."""
        return replace(self, capture=1e-9 if self.capture else 0.0)

    def captured(self, plan: StepPlan) -> tuple[int, int] | None:
        """The step's size, if a graph can hold it: decodes and prompt tokens, rounded up."""
        chunks = [a for a in plan.advances if a.token_ids is not None]
        tokens = sum(a.count for a in chunks)
        decodes = len(plan.advances) - len(chunks)
        if not self.capture or tokens > GRAPH_PROMPT_TOKENS or len(chunks) > MAX_PROMPTS:
            return None
        if not chunks:
            return -(-decodes // 16) * 16, 0
        padded = next(s for s in mixed_decodes(1024) if s >= decodes)
        return padded, next(s for s in prompt_sizes(padded) if s >= tokens)

    def seconds(self, plan: StepPlan) -> float:
        size = self.captured(plan)
        tokens = plan.num_tokens if size is None else sum(size)
        context = sum(a.start + 1 for a in plan.advances if a.token_ids is None)
        pairs = sum(a.count * (a.start + a.count / 2) for a in plan.advances if a.token_ids is not None)
        rows = sum(len(a.sample_rows) for a in plan.advances)
        moves = self.move * (len(plan.swap_outs) + len(plan.swap_ins))
        reading = max(self.weights, self.token * tokens)
        return reading + self.context * context + self.pair * pairs + self.row * rows + self.constant + moves


# Fitted to figures measured with one H200: 8B prefills 43,000 tokens a second and decodes 50 sequences in 6 ms, 0.6B prefills
# 390,000 and decodes 256 in about 4; and to a 135M model on two CPU cores. Moves: at 40 GB/s, and as measured.
H200_8B = Device(
    "cuda", 3.9 * MS, 0.0228 * MS, 147e3 / 4.3e12, 0.6e6 / 600e12, 0.008 * MS, 0.3 * MS, 0.5 * MS, 5 * MS, 60 * MS, move=2.36e6 / 40e9
)
H200_06B = Device(
    "cuda", 0.35 * MS, 0.0025 * MS, 115e3 / 4.3e12, 0.25e6 / 500e12, 0.003 * MS, 0.3 * MS, 0.35 * MS, 4 * MS, 50 * MS, move=1.84e6 / 40e9
)
CPU_135M = Device("cpu", 7 * MS, 1.05 * MS, 2e-6, 4e-8, 0.3 * MS, 1 * MS, 0.3 * MS, steps_ahead=0, move=0.1 * MS)


class SimulatedExecutor:
    """Runs plans in time only. ``now`` is the host's clock; the device works through what was submitted beside it.

    ``device``: a ``Device``, or whatever has its ``captured``, ``seconds``, ``host``, ``host_eager``, ``capture`` and ``steps_ahead``.
    """

    num_cpu_blocks = 0
    swap_block_s = 0.0
    whole_prompts = False
    num_blocks = 1 << 20

    def __init__(self, device: Device, seed: int, noise: float, pauses: bool = True) -> None:
        self.device, self.steps_ahead = device, device.steps_ahead
        self.rng, self.noise = random.Random(seed), noise
        self.now = 0.0
        self.next_pause = 0.0 if noise and pauses else float("inf")
        self.idle_at = 0.0  # when the device has done all that was submitted
        self.pending: deque[tuple[float, StepResult]] = deque()
        self.seen: set[tuple[int, int]] = set()
        self.steps: list[tuple[int, int, float]] = []  # decodes, prompt tokens, seconds

    def submit(self, plan: StepPlan) -> None:
        device, rng = self.device, self.rng
        self.now += device.host
        size = device.captured(plan)
        if size is None:
            self.now += device.host_eager
        elif size not in self.seen:
            self.seen.add(size)
            self.now = max(self.now, self.idle_at) + device.capture * rng.uniform(0.8, 40 if len(self.seen) < 4 else 1.5)
        seconds = device.seconds(plan) * (1 + self.noise * rng.uniform(-1, 1))
        if self.now > self.next_pause:  # the clock sank, a neighbour woke up
            seconds += rng.uniform(2, 40) * MS
            self.next_pause = self.now + rng.expovariate(0.5)
        self.idle_at = max(self.now, self.idle_at) + seconds
        if not self.steps_ahead:
            self.now = self.idle_at
        decodes = sum(a.token_ids is None for a in plan.advances)
        self.steps.append((decodes, plan.num_tokens - decodes, seconds))
        rows = [row for a in plan.advances for row in a.sample_rows]
        self.pending.append((self.idle_at, StepResult(plan.step, rows, [5] * len(rows))))

    def collect(self) -> StepResult:
        done, result = self.pending.popleft()
        self.now = max(self.now, done)
        return result

    def forget(self) -> None:
        self.pending.clear()

    def shutdown(self) -> None:
        pass


@dataclass(frozen=True)
class Load:
    """``rate``: Poisson arrivals a second; without one, ``concurrency`` clients each send the next when the last is answered."""

    requests: int
    rate: float | None = None
    concurrency: int = 1
    prompt: int = 512
    output: int = 256
    spread: float = 0.0  # lengths vary by this share, evenly
    chat: bool = False  # lengths vary as chats' do: log-normally, many short and few long, and ``prompt``, ``output`` are the medians
    intake: float = 0.0  # seconds that the server's front end takes for a request, one after another
    way: float = 0.0  # seconds that a request and its tokens are under way besides

    def lengths(self, rng: random.Random) -> tuple[int, int]:
        """Tokens of a prompt and of its answer."""
        if self.chat:
            return tuple(min(4000, max(4, round(n * rng.lognormvariate(0.0, 1.0)))) for n in (self.prompt, self.output))
        return tuple(max(1, round(n * rng.uniform(1 - self.spread, 1 + self.spread))) for n in (self.prompt, self.output))


@dataclass
class Measured:
    """What clients saw, in seconds. ``gaps``: every time between two tokens of one stream."""

    ttft: list[float] = field(default_factory=list)
    tpot: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    e2e: list[float] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0
    steps: list[tuple[int, int, float]] = field(default_factory=list)
    engine: Engine | None = None

    @property
    def throughput(self) -> float:
        return self.tokens / self.seconds

    def line(self) -> str:
        ms = [1e3 * v for v in (at(self.ttft, 0.5), at(self.ttft, 0.99), at(self.tpot, 0.5), at(self.gaps, 0.5), at(self.gaps, 0.99))]
        return f"{self.throughput:8.0f} {ms[0]:9.0f} {ms[1]:9.0f} {ms[2]:8.2f} {ms[3]:8.2f} {ms[4]:8.2f} {1e3 * max(self.gaps):8.1f}"


def at(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def simulate(
    device: Device,
    load: Load,
    rule: PaceRule | None,
    *,
    max_num_seqs: int = 256,
    seed: int = 0,
    noise: float = 0.03,
    num_blocks: int = SimulatedExecutor.num_blocks,
    num_cpu_blocks: int = 0,
    pace: Pace | None = None,
    pauses: bool = True,
) -> Measured:
    """``rule`` None: the token budget alone. ``noise``: steps vary by this share; 0 also leaves out ``pauses`` of the machine.
    ``pace``: one that has learnt already, of an earlier run."""
    executor = SimulatedExecutor(device, seed, noise, pauses)
    settings = SchedulerSettings(
        num_blocks=num_blocks,
        block_size=16,
        max_model_len=1 << 17,
        num_cpu_blocks=num_cpu_blocks,
        swap_block_s=device.move,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=8192 if device.kind == "cuda" else 2048,
        prefix_caching=False,
        pace=rule,
    )
    engine = Engine.from_settings(settings, executor, clock=lambda: executor.now)
    if pace is not None:
        engine.scheduler.pace = pace
    rng = random.Random(seed + 1)
    arrivals: list[tuple[float, float]] = []  # when the engine gets a request, and when it was sent
    due = ready = 0.0

    def send(when: float) -> None:
        nonlocal ready
        ready = max(ready, when) + load.intake
        heapq.heappush(arrivals, (ready + load.way, when))

    for i in range(load.requests):
        due += rng.expovariate(load.rate) if load.rate else 0.0
        if load.rate or i < load.concurrency:
            send(due)
    to_send = load.requests - len(arrivals)
    sent: dict[str, float] = {}
    tokens_at: dict[str, list[float]] = defaultdict(list)
    out = Measured(engine=engine)
    while arrivals or engine.has_work():
        if not engine.has_work():
            executor.now = max(executor.now, arrivals[0][0])
        while arrivals and arrivals[0][0] <= executor.now:
            when = heapq.heappop(arrivals)[1]
            name = str(len(sent))
            sent[name] = when
            prompt, output = load.lengths(rng)
            params = TokenParams(max_tokens=output, temperature=0.0)
            engine.add_request(GenerateRequest(request_id=name, prompt_token_ids=[1] * prompt, params=params, arrival_time=when))
        for delta in engine.step():
            tokens_at[delta.request_id].append(executor.now + load.way)
            if delta.finish_reason and to_send:
                to_send -= 1
                send(executor.now + load.way)
    for name, times in tokens_at.items():
        out.ttft.append(times[0] - sent[name])
        out.e2e.append(times[-1] - sent[name])
        out.tpot.append((times[-1] - times[0]) / max(1, len(times) - 1))
        out.gaps.extend(b - a for a, b in zip(times, times[1:]))
        out.tokens += len(times)
    out.seconds = max(t[-1] for t in tokens_at.values()) - min(sent.values())
    out.steps = executor.steps
    return out


def main() -> None:
    heading = f"{'':34} {'tok/s':>8} {'TTFT p50':>9} {'TTFT p99':>9} {'TPOT p50':>8} {'ITL p50':>8} {'ITL p99':>8} {'max':>8}"
    loads: list[tuple[str, Device, Load]] = [
        ("8B 10/s", H200_8B, Load(200, rate=10)),
        ("8B 20/s", H200_8B, Load(400, rate=20)),
        ("8B 50 clients", H200_8B, Load(300, concurrency=50)),
        ("8B 200 clients", H200_8B, Load(800, concurrency=200)),
        ("8B 200 clients, lengths ± 50%", H200_8B, Load(800, concurrency=200, spread=0.5)),
        ("8B 1,000 at once", H200_8B, Load(1000, concurrency=1000)),
        ("8B 100 clients 4,000/100", H200_8B, Load(400, concurrency=100, prompt=4000, output=100)),
        ("0.6B 10/s", H200_06B, Load(200, rate=10)),
        ("0.6B 256 clients", H200_06B, Load(1000, concurrency=256)),
        ("0.6B 256 at once 562 ± 82%", H200_06B, Load(256, concurrency=256, prompt=562, output=562, spread=0.82)),
        ("0.6B 256 clients 32/128", H200_06B, Load(2000, concurrency=256, prompt=32, output=128)),
        ("CPU 0.5/s 128/128", CPU_135M, Load(40, rate=0.5, prompt=128, output=128)),
        ("CPU 8 clients 512/128", CPU_135M, Load(32, concurrency=8, prompt=512, output=128)),
    ]
    print(heading)
    for name, device, load in loads:
        rules = {"fixed": None, "auto": rule_for(device.kind, None), "slo": rule_for(device.kind, 20 if device.kind == "cuda" else 60)}
        for label, rule in rules.items():
            print(f"{name:29}{label:>5} {simulate(device.warm, load, rule).line()}", flush=True)


if __name__ == "__main__":
    main()
