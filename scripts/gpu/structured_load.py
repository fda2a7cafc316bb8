"""What grammars cost a decode step: a full batch of rows with a JSON schema against the same rows without.

    structured_load.py MODELDIR [--batch 64] [--tokens 256] [--device cuda]

Weights are random (MODELDIR needs its config.json only), and so is the vocabulary: the demo model's tokens, and joinings of
them up to the model's size. Answers are random JSON that never ends. Printed are the medians of steps that decode the full batch:

    free         captured sampling: what rows without options take
    eager        the same rows with a logit bias, which are drawn outside of the graph, as rows with a grammar are
    schema       every row follows its own copy of one schema
    apart        every row follows a schema of its own

and of the last two the host's parts of a step: what it waits for the step before, matchers and masks, and the second half.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections import defaultdict
from typing import Any

from octavo import LLM
from octavo.frontend.grammars import OPTIONS, json_rule
from octavo.frontend.tokenizer import load_tokenizer
from octavo.models.hub import resolve_model
from octavo.types import GenerateRequest, GrammarVocabulary, TokenParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    llm = LLM(
        options.model,
        load_format="dummy",
        skip_tokenizer_init=True,
        device=options.device,
        max_model_len=options.prompt + options.tokens + 16,
        max_num_seqs=max(64, options.batch),
        enable_prefix_caching=False,
    )
    llm.engine.set_vocabulary(vocabulary(llm.model_config.vocab_size, llm.model_config.eos_token_ids))
    llm.engine.grammars.compile(OPTIONS + 'start: "a"').result()  # the vocabulary's tables are made once
    same, apart = [schema(0)] * options.batch, [schema(i) for i in range(options.batch)]
    cases: dict[str, list[dict[str, Any]]] = {
        "free": [{}] * options.batch,
        "eager": [{"logit_bias": {5: 0.001}}] * options.batch,
        "schema": [{"grammar": g} for g in same],
        "apart": [{"grammar": g} for g in apart],
    }
    for name in cases:  # captures graphs, compiles kernels and grammars
        measure(llm, cases[name], options.prompt, 12)
    free = 0.0
    for name, rows in cases.items():
        step, parts = measure(llm, rows, options.prompt, options.tokens)
        free = free or step
        detail = ", ".join(f"{part} {seconds * 1e3:.3f}" for part, seconds in parts.items())
        print(f"{name:8s} {step * 1e3:8.3f} ms a step ({step / free - 1:+6.1%})   {detail}", flush=True)


def vocabulary(size: int, eos_token_ids: tuple[int, ...]) -> GrammarVocabulary:
    tokenizer = load_tokenizer(resolve_model(None))
    tokens = [tokenizer.token_bytes(i) for i in range(min(size, tokenizer.vocab_size))]
    special = sorted(i for i in tokenizer.special_token_ids if i < size)
    plain = [t for i, t in enumerate(tokens) if i not in tokenizer.special_token_ids and t]
    rng = random.Random(0)
    tokens += [(rng.choice(plain) + rng.choice(plain))[:16] for _ in range(size - len(tokens))]
    ends = [i for i in eos_token_ids if i < size] or [special[0]]
    return GrammarVocabulary(tokens=tokens, special_token_ids=sorted({*special, *ends}), eos_token_ids=ends)


def schema(number: int) -> str:
    """Objects of several kinds of members, over and over."""
    members = {
        f"name{number}": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 120 + number},
        "kind": {"enum": ["person", "company", f"other{number}"]},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 4},
        "address": {"type": "object", "properties": {"city": {"type": "string"}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}}},
    }
    item = {"type": "object", "properties": members, "required": list(members), "additionalProperties": False}
    return OPTIONS + "start: " + json_rule({"type": "array", "items": item, "minItems": 1000})


def measure(llm: LLM, rows: list[dict[str, Any]], prompt: int, tokens: int) -> tuple[float, dict[str, float]]:
    """Median seconds of a step that decodes every row, and of the host's parts of it."""
    engine, executor, rng = llm.engine, llm.executor, random.Random(1)
    for i, extra in enumerate(rows):
        params = TokenParams(max_tokens=tokens, temperature=0.7, seed=i, **extra)
        ids = [rng.randrange(10, 9000) for _ in range(prompt)]
        engine.add_request(GenerateRequest(request_id=f"{i}", prompt_token_ids=ids, params=params))
    spent: dict[str, list[float]] = defaultdict(list)
    wrapped = [(executor, "collect", "waiting"), (engine.grammars, "masks", "masks"), (executor, "sample", "second half")]
    wrapped += [(engine.scheduler, "apply", "apply")]
    for owner, method, part in wrapped:
        setattr(owner, method, timed(getattr(owner, method), spent[part]))
    steps, full = [], len(rows)
    last = time.perf_counter()
    while engine.has_work():
        deltas = engine.step()
        now = time.perf_counter()
        if len(deltas) == full and all(d.token_ids for d in deltas):
            steps.append(now - last)
        last = now
        assert not any(d.error for d in deltas), [d.error for d in deltas if d.error]
    for owner, method, _ in wrapped:
        delattr(owner, method)
    middle = steps[len(steps) // 4 :] or steps
    return statistics.median(middle), {part: statistics.median(values) for part, values in spent.items() if values}


def timed(function: Any, into: list[float]) -> Any:
    def call(*args: Any) -> Any:
        begun = time.perf_counter()
        result = function(*args)
        into.append(time.perf_counter() - begun)
        return result

    return call


if __name__ == "__main__":
    main()
