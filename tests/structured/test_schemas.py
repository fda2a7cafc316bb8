"""Outputs keep their schema: random schemas, each followed by several sequences on a device that draws at random."""

from __future__ import annotations

import datetime
import json
import random
import re
from collections import Counter

import jsonschema
import pytest

from octavo.engine.core import Engine
from octavo.engine.settings import SchedulerSettings
from octavo.errors import RequestError
from octavo.frontend.grammar_compiler import GrammarCompiler
from octavo.frontend.params import SamplingParams
from octavo.frontend.tokenizer import Tokenizer
from octavo.types import GenerateRequest
from tests.structured.random_device import RandomDevice
from tests.structured.schemas import random_schema

NUM_SCHEMAS = 500
MAX_TOKENS = 300


FORMATS = jsonschema.FormatChecker(["email", "ipv4", "ipv6", "uuid"])


@FORMATS.checks("date")
def is_date(text: object) -> bool:
    """RFC 3339 knows a year 0, Python does not."""
    try:
        return not isinstance(text, str) or text.startswith("0000") or bool(datetime.date.fromisoformat(text))
    except ValueError:
        return False


@FORMATS.checks("time")
def is_time(text: object) -> bool:
    return not isinstance(text, str) or re.fullmatch(r"\d\d:\d\d:\d\d(\.\d+)?(z|[+-]\d\d:\d\d)", text, re.I) is not None


def engine_for(compiler: GrammarCompiler, steps_ahead: int) -> Engine:
    vocabulary = compiler.vocabulary
    closing = [i for i, token in enumerate(vocabulary.tokens) if token and set(token) <= set(b'"}],:{[0') and len(token) < 4]
    device = RandomDevice(len(vocabulary.tokens), steps_ahead=steps_ahead, favoured=[*closing, *vocabulary.eos_token_ids])
    settings = SchedulerSettings(
        num_blocks=device.num_blocks, block_size=16, max_model_len=1024, max_num_seqs=64, max_num_batched_tokens=256, prefix_caching=True
    )
    engine = Engine.from_settings(settings, device)
    engine.set_vocabulary(vocabulary)
    return engine


@pytest.mark.parametrize("part", range(5))
def test_outputs_validate(compiler: GrammarCompiler, tokenizer: Tokenizer, part: int) -> None:
    rng = random.Random(part)
    engine = engine_for(compiler, steps_ahead=part % 2)
    schemas: dict[str, dict] = {}
    seen: Counter[str] = Counter()
    for i in range(NUM_SCHEMAS // 5):
        schema = random_schema(rng)
        jsonschema.Draft202012Validator.check_schema(schema)
        params = SamplingParams(n=2, max_tokens=MAX_TOKENS, seed=i, structured_outputs={"json": schema})
        try:
            grammar = compiler.compile(params.structured_outputs)
        except RequestError as error:
            assert any(why in str(error) for why in ("Unsatisfiable", "No output", "oneOf")), (schema, str(error))
            seen["refused"] += 1
            continue
        schemas[str(i)] = schema
        token_params = params.to_token_params(
            prompt_len=3,
            max_model_len=1024,
            vocab_size=tokenizer.vocab_size,
            eos_token_ids=tokenizer.eos_token_ids,
            grammar=grammar,
        )
        engine.add_request(GenerateRequest(request_id=str(i), prompt_token_ids=[5, 6, 7 + i], params=token_params))
    outputs: dict[tuple[str, int], list[int]] = {}
    ends: dict[tuple[str, int], str] = {}
    while engine.has_work():
        for delta in engine.step():
            assert delta.error is None, (schemas[delta.request_id], delta.error)
            outputs.setdefault((delta.request_id, delta.index), []).extend(delta.token_ids)
            if delta.finish_reason:
                ends[delta.request_id, delta.index] = delta.finish_reason
    for (request_id, index), tokens in outputs.items():
        reason = ends[request_id, index]
        seen[reason] += 1
        if reason != "stop":
            continue
        text = tokenizer.decode(tokens)
        try:
            jsonschema.Draft202012Validator(schemas[request_id], format_checker=FORMATS).validate(json.loads(text))
        except (ValueError, jsonschema.ValidationError) as error:
            best = jsonschema.exceptions.best_match([error]) if isinstance(error, jsonschema.ValidationError) else error
            raise AssertionError(f"{text!r} does not keep {json.dumps(schemas[request_id])}: {best}") from None
    assert seen["stop"] > 0.8 * (seen["stop"] + seen["length"]) and seen["refused"] < 10, seen
    assert part % 2 == 0 or engine.executor.num_ahead > 10
