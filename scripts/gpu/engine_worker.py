"""One engine in a process of its own, told what to run: compare.py starts it. Nothing of Octavo is imported unless it is the engine.

usage: engine_worker.py ENGINE MODELDIR REPLY_FD START OPTIONS_JSON
ENGINE is a module with vLLM's LLM and SamplingParams (octavo, vllm), or transformers for its generate(). START is the time on the
clock that all processes share at which the process was started. Commands come as JSON lines on standard input; answers leave on the
given file descriptor, since engines print what they like.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import os
import random
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

STUCK_S = 20.0
Request = tuple[list[int], int, float]  # prompt, output tokens, temperature


def make_requests(vocab: int, spec: dict[str, Any]) -> list[Request]:
    """The same requests for every engine: ``count`` prompts, lengths drawn from ``n_in`` and ``n_out`` (low, high), by ``seed``."""
    rng = random.Random(spec["seed"])
    shapes = [(rng.randint(*spec["n_in"]), rng.randint(*spec["n_out"])) for _ in range(spec["count"])]
    temperature = spec.get("temperature", 0.0)
    return [([rng.randint(10, vocab - 10) for _ in range(n_in)], n_out, temperature) for n_in, n_out in shapes]


class OfflineEngine:
    """``LLM`` with dummy weights; ``run`` hands over all requests at once."""

    def __init__(self, name: str, folder: str, options: dict[str, Any]) -> None:
        self.module = importlib.import_module(name)
        self.version = str(getattr(self.module, "__version__", "?"))
        self.imported = time.monotonic()
        self.llm = self.module.LLM(model=folder, load_format="dummy", skip_tokenizer_init=True, **options)

    def run(self, requests: list[Request]) -> dict[str, Any]:
        params = [
            self.module.SamplingParams(temperature=temperature, ignore_eos=True, max_tokens=n_out, detokenize=False)
            for _, n_out, temperature in requests
        ]
        prompts = [{"prompt_token_ids": prompt} for prompt, _, _ in requests]
        begun = time.perf_counter()
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - begun
        made = sum(len(output.outputs[0].token_ids) for output in outputs)
        wanted = sum(n_out for _, n_out, _ in requests)
        if made != wanted:
            raise RuntimeError(f"{made} tokens came, {wanted} were asked for")
        return {"seconds": seconds, "output_tokens": made}


class StaticBatches:
    """transformers' ``generate`` on a batch that is padded to its longest prompt and runs to its longest answer."""

    def __init__(self, name: str, folder: str, options: dict[str, Any]) -> None:
        begun = time.perf_counter()
        self.module = importlib.import_module(name)
        self.version = str(self.module.__version__)
        import torch

        self.torch, self.imported = torch, time.monotonic()
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        config = self.module.AutoConfig.from_pretrained(folder)
        dtype = {"bfloat16": torch.bfloat16, "float32": torch.float32}[json.loads(Path(folder, "config.json").read_text())["torch_dtype"]]
        print(f"imported after {time.perf_counter() - begun:.1f} s", flush=True)
        with torch.device(self.device), _no_init():
            self.model = self.module.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        for parameter in self.model.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        print(f"the model is there after {time.perf_counter() - begun:.1f} s", flush=True)
        self.model.generation_config.eos_token_id = None

    def run(self, requests: list[Request]) -> dict[str, Any]:
        """Counts only the tokens that were asked for, not those of rows that wait for the longest."""
        torch, longest = self.torch, max(len(prompt) for prompt, _, _ in requests)
        steps, temperature = max(n_out for _, n_out, _ in requests), requests[0][2]
        ids = torch.zeros(len(requests), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, (prompt, _, _) in enumerate(requests):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
        begun = time.perf_counter()
        with torch.inference_mode():
            made = self.model.generate(
                ids.to(self.device),
                attention_mask=mask.to(self.device),
                max_new_tokens=steps,
                min_new_tokens=steps,
                pad_token_id=0,
                **sampling,
            )
        made.cpu()
        seconds = time.perf_counter() - begun
        if made.shape[1] != longest + steps:
            raise RuntimeError(f"{made.shape[1] - longest} steps ran, {steps} were asked for")
        return {"seconds": seconds, "output_tokens": sum(n_out for _, n_out, _ in requests), "steps": steps}


def _no_init() -> Any:
    """transformers' context in which it leaves weights as they are."""
    for place in ("initialization", "modeling_utils"):
        with contextlib.suppress(ImportError, AttributeError):
            return importlib.import_module(f"transformers.{place}").no_init_weights()
    return contextlib.nullcontext()


def watch(done: threading.Event) -> None:
    """Tell every now and then, in the log, where all threads are: an engine that does not come up, or does not answer.

    In a thread, which holds Python's lock then: faulthandler's own timer doesn't, and ends the process now and then (SIGSEGV) by reading
    frames that change.
    """
    while not done.wait(STUCK_S):
        print(f"after another {STUCK_S:g} s:", file=sys.stderr, flush=True)
        faulthandler.dump_traceback()


def main() -> None:
    name, folder, fd, start, options = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]), json.loads(sys.argv[5])
    sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() != Path(__file__).resolve().parent]  # our names are not theirs
    os.set_inheritable(fd, False)  # or the engine's own processes would hold it open when this one has died
    replies = os.fdopen(fd, "w", buffering=1)

    def reply(**fields: Any) -> None:
        replies.write(json.dumps(fields) + "\n")

    vocab = json.loads(Path(folder, "config.json").read_text())["vocab_size"]
    up = threading.Event()
    threading.Thread(target=watch, args=(up,), daemon=True).start()
    try:
        engine = (StaticBatches if name == "transformers" else OfflineEngine)(name, folder, options)
        ready = time.monotonic()
        engine.run(make_requests(vocab, {"count": 1, "n_in": (16, 16), "n_out": (1, 1), "seed": 0}))
        if name != "transformers":
            up.set()
        marks = {"import_s": engine.imported - start, "ready_s": ready - start, "first_answer_s": time.monotonic() - start}
        reply(version=engine.version, **marks)
    except BaseException as error:
        traceback.print_exc()
        reply(error=f"{type(error).__name__}: {error}")
        raise SystemExit(1) from None
    for line in sys.stdin:
        try:
            reply(**engine.run(make_requests(vocab, json.loads(line))))
        except Exception as error:  # noqa: BLE001 (told to the one who asked; the next command may work)
            traceback.print_exc()
            reply(error=f"{type(error).__name__}: {error}")


if __name__ == "__main__":  # engines start processes that import this file again
    main()
