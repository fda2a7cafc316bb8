"""A real model answers rightly, alone and in a crowd: chats through the server, compared with the same chats one at a time.

    python scripts/gpu/real_model.py FILE.gguf [--clients 256] [--dtypes bfloat16,float32] [-- flags of octavo serve]
    python scripts/gpu/real_model.py PART PART …        a file that came in pieces (split -d), which are joined first

Greedy answers are compared text by text. In float32 a crowd's must all equal those of single runs. In bfloat16 the kernels that fit a
crowd round in other places than those that fit one request, so a near tie may fall the other way, and what follows it differs: at least
--equal of the answers must be the same, none may be garbage, and questions whose answer is known must be answered rightly each time.
The questions and answers are made for SmolLM2-135M-Instruct. Status 1 if any of that failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from engines import ROOT, end, free_port, spawn, tail, wait_for_free_gpu  # noqa: E402

sys.path.insert(0, str(ROOT))

from octavo.bench.http import Client, HttpError, parse_address, raise_file_limit, run_loop  # noqa: E402

MAX_TOKENS = 48
KNOWN = {  # what even a small model knows: the answer must have the word in it
    "What is the capital of France?": "Paris",
    "What is the capital of Japan?": "Tokyo",
    "What is the capital of Egypt?": "Cairo",
    "What is the capital of England?": "London",
    "What is the capital of Poland?": "Warsaw",
    "What is the capital of South Korea?": "Seoul",
    "What is the capital of Cuba?": "Havana",
    "What is the capital of Germany?": "Berlin",
    "In which country is the Eiffel Tower?": "France",
    "What language is spoken in Brazil?": "Portuguese",
    "What color is the sky on a clear day?": "blue",
    "What is 2 + 2?": "4",
    "What is the opposite of hot?": "cold",
    "Who painted the Mona Lisa?": "Leonardo",
    "Who wrote Hamlet?": "Shakespeare",
    "Who discovered gravity?": "Newton",
    "What gas do humans need to breathe?": "oxygen",
}
_ASKS = (
    "Tell me about",
    "Explain in one sentence",
    "Give me three facts about",
    "Write a short poem about",
    "Why do people like",
    "Describe",
)
_THINGS = (
    "the sea", "a lighthouse", "old maps", "the moon", "honey bees", "mountain rivers", "paper boats", "chess", "bread", "trains", "winter",
    "tea", "libraries", "volcanoes", "the violin", "gardens", "deserts", "bicycles", "clouds", "whales", "windmills", "rice", "bridges",
    "the number seven", "owls", "glass", "salt", "rainbows", "castles", "radio", "islands", "dreams", "horses", "silk", "kites", "snow",
    "letters", "telescopes", "apples", "the Roman army", "photosynthesis", "gravity", "the heart", "electricity", "soccer", "dolphins",
)  # fmt: skip


def questions(count: int, seed: int = 0) -> list[str]:
    """The known ones, and others, each different."""
    rng, asked = random.Random(seed), list(KNOWN)
    others = [f"{ask} {thing}." for ask in _ASKS for thing in _THINGS]
    rng.shuffle(others)
    if count > len(asked) + len(others):
        raise SystemExit(f"real_model: there are {len(asked) + len(others)} different questions; --clients must not be more")
    return (asked + others)[:count]


def problem_of(question: str, answer: str) -> str | None:
    """What is wrong with an answer by itself: garbage, or not what is known."""
    words = answer.split()
    if not words:
        return "is empty"
    if "\ufffd" in answer or not all(c.isprintable() or c in "\n\t" for c in answer):
        return "has what is no text"
    if sum(c.isalnum() or c.isspace() for c in answer) < 0.7 * len(answer):
        return "is hardly made of letters"
    if len(words) >= 20 and len(set(words)) < 5:
        return "repeats itself"
    known = KNOWN.get(question)
    return f"does not say {known}" if known is not None and known not in answer else None


@dataclass(frozen=True)
class Comparison:
    """A crowd's answers beside those of single runs."""

    total: int
    equal: int
    common: float  # mean share of the single run's answer that the crowd's begins with
    problems: list[str]

    @classmethod
    def of(cls, asked: Sequence[str], single: Sequence[str], crowd: Sequence[str]) -> Comparison:
        problems = []
        for which, answers in (("alone", single), ("in the crowd", crowd)):
            found = ((question, answer, problem_of(question, answer)) for question, answer in zip(asked, answers, strict=True))
            problems += [f"{question!r} {which}: the answer {problem}: {answer[:120]!r}" for question, answer, problem in found if problem]
        shares = [len(os.path.commonprefix([a, b])) / max(len(a), 1) for a, b in zip(single, crowd, strict=True)]
        return cls(len(asked), sum(a == b for a, b in zip(single, crowd, strict=True)), sum(shares) / max(len(shares), 1), problems)


async def chat(client: Client, question: str) -> str:
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": MAX_TOKENS, "temperature": 0}
    choice = (await client.get_json("/v1/chat/completions", body))["choices"][0]
    if choice["finish_reason"] not in ("stop", "length"):
        raise HttpError(f"{question!r} ended with {choice['finish_reason']}")
    return str(choice["message"]["content"])


async def measure(url: str, process: Any, log: Path, clients: int) -> tuple[Comparison, dict[str, float]]:
    client = Client(parse_address(url), timeout=300.0)
    asked = questions(clients)
    try:
        await wait_ready(client, process, log)
        begun = time.perf_counter()
        single = [await chat(client, question) for question in asked]
        alone_s = time.perf_counter() - begun
        mixed = random.Random(1).sample(range(clients), clients)
        begun = time.perf_counter()
        answers = await asyncio.gather(*(chat(client, asked[i]) for i in mixed))
        crowd_s = time.perf_counter() - begun
    except HttpError as error:
        raise SystemExit(f"real_model: {error}\n{tail(log, 30)}") from None
    finally:
        client.close()
    crowd = [answer for _, answer in sorted(zip(mixed, answers, strict=True))]
    return Comparison.of(asked, single, crowd), {"alone_s": alone_s, "crowd_s": crowd_s}


async def wait_ready(client: Client, process: Any, log: Path, seconds: float = 300.0) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        try:
            await client.get_json("/v1/models")
            return
        except HttpError:
            await asyncio.sleep(0.1)
    raise SystemExit(f"real_model: the server did not come up:\n{tail(log, 30)}")


def check(dtype: str, model: Path, args: argparse.Namespace) -> dict[str, Any]:
    """One server of one type. ``problems`` is empty if all is well."""
    wait_for_free_gpu()
    port = free_port()
    log = args.logs / f"real-model-{dtype}.log"
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    command = [sys.executable, "-m", "octavo", "serve", str(model), "--dtype", dtype, "--port", str(port), "--disable-log-requests"]
    process = spawn([*command, *args.serve], log, os.environ | {"PYTHONPATH": paths})
    try:
        found, seconds = run_loop(measure(f"http://127.0.0.1:{port}", process, log, args.clients))
    finally:
        end(process)
    least = found.total if dtype == "float32" else args.equal * found.total
    problems = list(found.problems)
    if found.equal < least:
        problems.append(f"{found.equal} of {found.total} answers are the same; at least {least:.0f} must be")
    return {
        "dtype": dtype, "clients": found.total, "equal": found.equal, "mean_common_share": round(found.common, 4),
        **{name: round(value, 2) for name, value in seconds.items()}, "problems": problems,
    }  # fmt: skip


def joined(files: Sequence[Path], folder: Path) -> Path:
    """The one file, or the pieces put together."""
    if len(files) == 1:
        return files[0].resolve()
    whole = folder / "model.gguf"
    with whole.open("wb") as out:
        for file in files:
            out.write(file.read_bytes())
    return whole


def parse(argv: list[str]) -> argparse.Namespace:
    own, serve = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    parser = argparse.ArgumentParser(usage="%(prog)s FILE.gguf [flags] [-- flags of octavo serve]")
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help="the model, or its pieces in order")
    parser.add_argument("--clients", type=int, default=256, help="chats at the same time (256)")
    parser.add_argument("--dtypes", default="bfloat16,float32", help="one server each (bfloat16,float32)")
    # an H200 gave 0.43 for a crowd of 256
    parser.add_argument("--equal", type=float, default=0.35, help="least share of equal answers in bfloat16 (0.35)")
    parser.add_argument("--logs", type=Path, default=Path(tempfile.gettempdir()), help="folder for the servers' output")
    parser.add_argument("--out", type=Path, help="write the results as JSON there")
    args = parser.parse_args(own)
    args.serve, args.logs = serve, args.logs.resolve()
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(sys.argv[1:] if argv is None else argv)
    raise_file_limit(args.clients)
    with tempfile.TemporaryDirectory(prefix="real-model-") as folder:
        model = joined(args.files, Path(folder))
        results = [check(dtype, model, args) for dtype in args.dtypes.split(",")]
    if args.out:
        args.out.write_text(json.dumps(results, indent=1))
    for result in results:
        print(json.dumps({key: value for key, value in result.items() if key != "problems"}))
        for problem in result["problems"][:12]:
            print(f"PROBLEM {problem}")
    return 1 if any(result["problems"] for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
