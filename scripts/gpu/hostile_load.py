"""A server under the worst requests that are allowed, and some that are not: nothing may break, and memory must keep its limit.

    python scripts/gpu/hostile_load.py MODEL [--seconds 60] [--concurrency 64] [--out FILE.json] [-- flags of octavo serve]

Longest prompts, n of 16, 20 log-probabilities of every token and of the prompt's, every sampler feature at the ends of its range and
all of them mixed, token lists as large as the vocabulary, one token and as many as fit, clients that go away in the middle, and bad
requests between them; and where the server offers them with this model: JSON schemas, regular expressions, choices, large grammars,
forced tool calls, beam search and embeddings (hostile_forms.py). What it does not offer is told. Checked: bad requests get a 400 and
all others a whole answer (no 5xx, no broken connection, counts that add up, the form that was asked for); the GPU's memory never
passes --gpu-memory-utilization of the card (when nothing else runs there); afterwards nothing is left running, and greedy answers
equal those from before. Status 1 if any of that failed. Works without a GPU; memory is then not checked.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import math
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from engines import ROOT, end, free_port, gpu_memory, spawn, tail, wait_for_free_gpu  # noqa: E402
from hostile_forms import NOT_OFFERED, Body, Case, Forms  # noqa: E402

sys.path.insert(0, str(ROOT))

from octavo.bench.http import Client, HttpError, parse_address, raise_file_limit, run_loop  # noqa: E402
from octavo.bench.stream import EventStream  # noqa: E402

CALM_PROMPTS = 8  # asked before and after, one at a time
CONTEXT_BYTES = 600 * 2**20  # of the driver in a process, which no share can leave out of account
GROUPS = 16  # of n


@dataclass
class Tally:
    """What became of the requests."""

    sent: Counter[str] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)
    left: int = 0  # clients that went away
    tokens: int = 0
    failures: list[str] = field(default_factory=list)

    def fail(self, case: Case, why: str) -> None:
        shown = {key: value for key, value in case.body.items() if key not in ("prompt", "allowed_token_ids", "logit_bias", "input")}
        self.failures.append(f"{case.name}: {why}; asked with {json.dumps(shown)[:300]}")


class Generator:
    """Hostile requests without end, the same for the same seed. ``context``: the server's longest sequence in tokens."""

    def __init__(self, vocab: int, context: int, seed: int, has_text: bool, offered: Collection[str] = ()) -> None:
        self.rng, self.vocab, self.context, self.has_text = random.Random(seed), vocab, context, has_text
        self._makers: list[tuple[int, Callable[[], Case]]] = [
            (3, self.longest), (3, self.many_logprobs), (2, self.prompt_logprobs), (3, self.sixteen), (4, self.extremes),
            (3, self.everything), (2, self.huge_lists), (3, self.to_the_end), (3, self.one_token), (4, self.leaver), (2, self.bad),
        ]  # fmt: skip
        self.forms, self.offered = Forms(self.rng, self.ids, context), offered
        self._makers += [(2, maker) for name, maker in self.forms.makers.items() if name in offered]

    def next(self) -> Case:
        (maker,) = self.rng.choices([m for _, m in self._makers], weights=[w for w, _ in self._makers])
        return maker()

    def ids(self, count: int) -> list[int]:
        return [self.rng.randrange(self.vocab) for _ in range(count)]

    def body(self, n_in: int, n_out: int | None, **fields: Any) -> Body:
        body: Body = {"prompt": self.ids(max(1, min(n_in, self.context - 1))), "ignore_eos": True, **fields}
        if n_out is not None:
            body["max_tokens"] = n_out
        if body.get("stream"):
            body["stream_options"] = {"include_usage": True}
        return body

    def some(self) -> int:
        """Prompts of any length, short ones more often."""
        return int(math.exp(self.rng.uniform(0, math.log(self.context - 1))))

    def longest(self) -> Case:
        n_out = self.rng.choice((1, 2, 16))
        return Case("longest prompt", self.body(self.context - n_out, n_out, stream=self.rng.random() < 0.5))

    def many_logprobs(self) -> Case:
        stream = self.rng.random() < 0.5
        return Case("logprobs", self.body(self.some(), self.rng.choice((1, 50)), logprobs=20, temperature=1.0, stream=stream))

    def prompt_logprobs(self) -> Case:
        n_in = self.rng.choice((self.some(), self.context - 4))
        extra: Body = {"echo": True, "logprobs": 5} if self.rng.random() < 0.3 else {"prompt_logprobs": 20}
        return Case("prompt logprobs", self.body(n_in, 4, **extra))

    def sixteen(self) -> Case:
        n_in = self.rng.choice((4, self.some(), self.context - 40))
        return Case(
            "n of 16", self.body(n_in, 32, n=GROUPS, temperature=1.0, logprobs=self.rng.choice((None, 20)), stream=self.rng.random() < 0.5)
        )

    def sampling(self) -> Body:
        """Every feature at an end of its range, each with a chance of its own."""
        choices: dict[str, tuple[Any, ...]] = {
            "temperature": (0, 1e-6, 0.7, 2.0, 1e4), "top_p": (1e-9, 0.5, 1.0), "top_k": (-1, 0, 1, 1024, self.vocab, 2**31 - 1),
            "min_p": (0.0, 0.05, 1.0), "presence_penalty": (-2.0, 2.0), "frequency_penalty": (-2.0, 2.0),
            "repetition_penalty": (1e-3, 1.3, 1e3), "seed": (0, -(2**63), 2**63 - 1), "stop_token_ids": (self.ids(1), self.ids(64)),
            "logit_bias": ({str(t): v for t in self.ids(1024) for v in (100.0,)}, {str(t): -100.0 for t in self.ids(1024)}),
            "allowed_token_ids": (self.ids(1), self.ids(100)), "logprobs": (0, 1, 20), "min_tokens": (0, 4),
        }  # fmt: skip
        if self.has_text:
            choices["bad_words"] = (["a"], ["the", " is", "and so on"] * 5)
            choices["stop"] = (["zzz"], [str(i) * 3 for i in range(10)])
        return {name: self.rng.choice(values) for name, values in choices.items() if self.rng.random() < 0.35}

    def extremes(self) -> Case:
        return Case("extreme sampling", self.body(self.some(), self.rng.choice((4, 40)), **self.sampling(), stream=self.rng.random() < 0.5))

    def everything(self) -> Case:
        body = self.body(self.some(), 24, **(self.sampling() | self.sampling() | self.sampling()))
        return Case("everything mixed", body | {"n": self.rng.choice((1, 2, 8)), "temperature": 1.0})

    def huge_lists(self) -> Case:
        allowed = [t for t in range(self.vocab) if t % 7]
        bias = {str(t): self.rng.uniform(-100, 100) for t in self.ids(1024)}
        return Case("huge lists", self.body(64, 16, allowed_token_ids=allowed, logit_bias=bias, temperature=1.0))

    def to_the_end(self) -> Case:
        return Case(
            "as many tokens as fit", self.body(self.context - self.rng.randint(1, 400), self.rng.choice((None, 10**6)), stream=True)
        )

    def one_token(self) -> Case:
        return Case("one token", self.body(self.some(), self.rng.choice((0, 1)), logprobs=self.rng.choice((None, 20))))

    def leaver(self) -> Case:
        if self.offered and self.rng.random() < 0.3:
            form = self.forms.makers[self.rng.choice(sorted(self.offered))]()
            return dataclasses.replace(form, name="client leaves", leaves_after=self.rng.expovariate(4))
        fields = self.rng.choice(({}, {"n": GROUPS, "temperature": 1.0}, {"logprobs": 20}))
        return Case(
            "client leaves", self.body(self.some(), None, stream=self.rng.random() < 0.7, **fields), leaves_after=self.rng.expovariate(2)
        )

    def bad(self) -> Case:
        bodies: list[Body] = [
            self.body(4, 4, temperature=-1), self.body(4, 4, n=0), self.body(4, 4, top_p=0), self.body(4, 4, logprobs=10**6),
            self.body(4, 4, allowed_token_ids=[self.vocab]), self.body(4, 4, nonsense=1), self.body(4, 4, n=10**6),
            {"prompt": [self.vocab], "max_tokens": 4}, {"prompt": self.ids(self.context + 1), "max_tokens": 4},
            {"prompt": [], "max_tokens": 4},
            self.body(4, 4, logit_bias={str(t): 1 for t in range(min(self.vocab, 2000))} | {"-1": 1}), self.body(4, 4, min_tokens=5),
        ]  # fmt: skip
        cases = [Case("", body, status=400) for body in bodies] + [case for case in self.forms.bad() if case.name in self.offered]
        return dataclasses.replace(self.rng.choice(cases), name="bad request")


async def send(client: Client, case: Case, tally: Tally, context: int) -> None:
    """One request, and what is wrong with its answer."""
    request = client.encode("POST", case.path, json.dumps(case.body).encode())
    events = EventStream() if case.body.get("stream") else None
    tally.sent[case.name] += 1
    try:
        sending = client.send(request, events.feed if events else None)
        status, body = await (asyncio.wait_for(sending, case.leaves_after) if case.leaves_after is not None else sending)
    except asyncio.TimeoutError:
        tally.left += 1
        return
    except HttpError as error:
        tally.fail(case, str(error))
        return
    if status != case.status:
        tally.fail(case, f"HTTP {status} instead of {case.status}: {body[:300].decode(errors='replace')}")
        return
    tally.ended[case.name] += 1
    if status == 200:
        answer = {} if events else json.loads(body)
        problem = check_stream(events, case) if events else case.check(answer) if case.check else check_answer(answer, case, context)
        if problem:
            tally.fail(case, problem)
        else:
            tally.tokens += (events.output_tokens if events else answer["usage"].get("completion_tokens")) or 0


def check_stream(events: EventStream, case: Case) -> str | None:
    if events.error:
        return events.error
    if not events.done:
        return "the stream ended without [DONE]"
    return None if events.output_tokens or case.body.get("max_tokens") == 0 else "no tokens came"


def check_answer(answer: dict[str, Any], case: Case, context: int) -> str | None:
    """Numbers that must add up: choices, tokens, log-probabilities; all finite."""
    body, choices = case.body, answer["choices"]
    if len(choices) != body.get("n", 1):
        return f"{len(choices)} choices"
    room = context - len(body["prompt"])
    most = min(body.get("max_tokens", room), room)
    used = answer["usage"]["completion_tokens"]
    if used > most * len(choices):
        return f"{used} tokens, at most {most} a choice were asked for"
    ends_early = "stop_token_ids" in body or "stop" in body
    if not ends_early and used != most * len(choices):
        return f"{used} tokens instead of {most} times {len(choices)}"
    if {choice["finish_reason"] for choice in choices} - ({"stop", "length"} if ends_early else {"length"}):
        return f"finish reasons {[choice['finish_reason'] for choice in choices]}"
    if body.get("logprobs") is not None and not body.get("echo"):
        counted = sum(len(choice["logprobs"]["token_logprobs"]) for choice in choices)
        if counted != used:
            return f"{counted} log-probabilities of {used} tokens"
    if body.get("prompt_logprobs") is not None and len(choices[0]["prompt_logprobs"]) != len(body["prompt"]):
        return f"{len(choices[0]['prompt_logprobs'])} prompt log-probabilities of {len(body['prompt'])} tokens"
    return None


@dataclass
class Memory:
    """The card's memory, watched from outside."""

    highest: int = 0
    total: int = 0
    before: int = 0

    async def watch(self) -> None:
        while True:
            found = await asyncio.to_thread(gpu_memory)
            if found is None:
                return
            self.highest, self.total = max(self.highest, found[0]), found[1]
            await asyncio.sleep(0.25)

    def problem(self, share: float) -> str | None:
        if not self.total:
            return None
        used, limit = self.highest - self.before, share * self.total + CONTEXT_BYTES
        if used <= limit:
            return None
        return f"the server took {used / 2**30:.2f} GiB; {share:.2f} of the card and a context are {limit / 2**30:.2f} GiB"


async def calm(client: Client, vocab: int, context: int, salt: str) -> list[list[int]]:
    """Greedy answers to a few prompts, one at a time; without what the prefix cache may hold of them."""
    rng, answers = random.Random(5), []
    for i in range(CALM_PROMPTS):
        prompt = [rng.randrange(vocab) for _ in range(min(8 + 40 * i, context // 2))]
        body = {
            "prompt": prompt,
            "max_tokens": 24,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "cache_salt": f"{salt}{i}",
        }
        answers.append((await client.get_json("/v1/completions", body))["choices"][0]["token_ids"])
    return answers


async def wait_idle(client: Client, seconds: float = 60.0) -> float:
    """Until the engine runs nothing; returns how many requests it still has."""
    deadline = time.monotonic() + seconds
    while True:
        _, text = await client.send(client.encode("GET", "/metrics"))
        lines = [line for line in text.decode().splitlines() if line.startswith(("vllm:num_requests_running", "vllm:num_requests_waiting"))]
        running = sum(float(line.rsplit(" ", 1)[1]) for line in lines)
        if running == 0 or time.monotonic() > deadline:
            return running
        await asyncio.sleep(0.1)


async def run(args: argparse.Namespace, url: str, vocab: int, memory: Memory, process: Any, log: Path) -> dict[str, Any]:
    client = Client(parse_address(url), timeout=args.patience)
    watching = asyncio.create_task(memory.watch())  # from the start on: profiling and loading have their own peaks
    try:
        model = await wait_ready(client, process, log)
        context = int(model["max_model_len"])
        before = await calm(client, vocab, context, "before")
        tally = Tally()
        offered, missing = await offers(client, vocab, context, args.seed, tally)
        generator = Generator(vocab, context, args.seed, has_text=not args.textless, offered=offered)
        stop = time.monotonic() + args.seconds

        async def visitor() -> None:
            while time.monotonic() < stop and process.poll() is None and len(tally.failures) < 50:
                await send(client, generator.next(), tally, context)

        visitors = [asyncio.create_task(visitor()) for _ in range(args.concurrency)]
        _, late = await asyncio.wait(visitors, timeout=args.seconds + args.patience)
        for task in late:
            task.cancel()
        for ended in await asyncio.gather(*visitors, return_exceptions=True):
            if isinstance(ended, asyncio.CancelledError):
                tally.failures.append(f"a request was not answered {args.patience:.0f} s after the end")
            elif isinstance(ended, BaseException):
                raise ended
        left_over = await wait_idle(client)
        after = await calm(client, vocab, context, "after")
        status, _ = await client.send(client.encode("GET", "/health"))
    except HttpError as error:
        raise SystemExit(f"hostile_load: the server does not answer any more ({error}):\n{tail(log, 30)}") from None
    finally:
        watching.cancel()
        client.close()
    problems = list(tally.failures)
    if left_over:
        problems.append(f"{left_over:.0f} requests are left in the engine")
    if status != 200:
        problems.append(f"/health says {status}")
    equal = sum(a == b for a, b in zip(before, after, strict=True))
    if equal < CALM_PROMPTS:
        problems.append(f"only {equal} of {CALM_PROMPTS} greedy answers are as before")
    if over := memory.problem(args.share):
        problems.append(over)
    return {
        "sent": dict(tally.sent), "answered": dict(tally.ended), "clients_left": tally.left, "output_tokens": tally.tokens,
        "not_offered": missing, "context": context, "equal_afterwards": f"{equal} of {CALM_PROMPTS}", "problems": problems,
        "gpu_memory_gib": {k: round(getattr(memory, k) / 2**30, 2) for k in ("before", "highest", "total")} if memory.total else None,
    }  # fmt: skip


async def offers(client: Client, vocab: int, context: int, seed: int, tally: Tally) -> tuple[set[str], dict[str, str]]:
    """The kinds of forms that the server offers with this model, and why not the others; a refusal for no such reason is a failure."""
    rng, found, missing = random.Random(seed), set(), {}
    for name, make in Forms(rng, lambda count: [rng.randrange(vocab) for _ in range(count)], context).makers.items():
        case = make()
        asked = {key: value for key, value in case.body.items() if key not in ("stream", "stream_options")}
        status, body = await client.send(client.encode("POST", case.path, json.dumps(asked).encode()))
        if status in (400, 404) and NOT_OFFERED.search(text := body.decode(errors="replace")):
            missing[name] = text[:200]
            continue
        found.add(name)  # also what fails: then it is told, and asked for again
        if status != 200:
            tally.fail(case, f"HTTP {status} instead of 200: {body[:300].decode(errors='replace')}")
    return found, missing


async def wait_ready(client: Client, process: Any, log: Path, seconds: float = 300.0) -> dict[str, Any]:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(HttpError):
            found: dict[str, Any] = (await client.get_json("/v1/models"))["data"][0]
            return found
        await asyncio.sleep(0.1)
    raise SystemExit(f"hostile_load: the server did not come up:\n{tail(log, 30)}")


def vocab_of(model: str) -> int:
    from octavo.models.config import read_model_config

    return read_model_config(model, "auto" if has_weights(Path(model)) else "dummy").vocab_size


def has_weights(model: Path) -> bool:
    return not model.is_dir() or any(model.glob("*.safetensors")) or any(model.glob("*.gguf"))


def serve_words(args: argparse.Namespace) -> list[str]:
    """Flags that the model needs and the user did not give."""
    words, folder = list(args.serve), Path(args.model)
    if folder.is_dir():
        if not has_weights(folder):
            words += ["--load-format", "dummy"]
        args.textless = not (folder / "tokenizer.json").exists()
        if args.textless:
            words.append("--skip-tokenizer-init")
    return words


def parse(argv: list[str]) -> argparse.Namespace:
    own, serve = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    parser = argparse.ArgumentParser(usage="%(prog)s MODEL [flags] [-- flags of octavo serve]")
    parser.add_argument("model", help="folder (weights are dummies where it has none) or GGUF file")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long (60)")
    parser.add_argument("--concurrency", type=int, default=64, help="clients at the same time (64)")
    parser.add_argument("--patience", type=float, default=90.0, help="seconds after which an answer counts as lost (90)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write the result as JSON there")
    args = parser.parse_args(own)
    args.serve, args.textless, args.share = serve, False, 0.9
    for word, following in zip(serve, [*serve[1:], ""], strict=False):
        if word.startswith("--gpu-memory-utilization"):
            args.share = float(word.partition("=")[2] or following)
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(sys.argv[1:] if argv is None else argv)
    raise_file_limit(args.concurrency)
    words = serve_words(args)
    vocab = vocab_of(args.model)
    wait_for_free_gpu()
    memory = Memory(before=(gpu_memory() or (0, 0))[0])
    port = free_port()
    log = Path(f"/tmp/hostile-load-{os.getpid()}.log") if args.out is None else args.out.with_suffix(".log").resolve()
    command = [sys.executable, "-m", "octavo", "serve", args.model, "--port", str(port), "--disable-log-requests", *words]
    command[4] = str(Path(args.model).resolve()) if Path(args.model).exists() else args.model
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    process = spawn(command, log, os.environ | {"PYTHONPATH": paths})
    try:
        result = run_loop(run(args, f"http://127.0.0.1:{port}", vocab, memory, process, log))
    finally:
        end(process)
    if "Traceback" in (text := log.read_text(errors="replace")):
        result["problems"].append("the server's log has a traceback: " + text[text.index("Traceback") :][:1500])
    if args.out:
        args.out.write_text(json.dumps(result, indent=1))
    print(json.dumps({key: value for key, value in result.items() if key != "problems"}, indent=1))
    for problem in result["problems"][:20]:
        print(f"PROBLEM {problem}")
    print("hostile load: " + (f"{len(result['problems'])} problems" if result["problems"] else "no problem"))
    return 1 if result["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
