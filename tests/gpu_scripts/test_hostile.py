"""scripts/gpu/hostile_load.py: what it sends is deterministic, and its checks can fail. A run of the whole is for a machine with time."""

from __future__ import annotations

import importlib
import json
import random
import sys
from typing import Any

import pytest

from tests.gpu_scripts.conftest import SCRIPTS


@pytest.fixture(scope="module")
def hostile() -> Any:
    sys.path.insert(0, str(SCRIPTS))
    try:
        yield importlib.import_module("hostile_load")
    finally:
        sys.path.remove(str(SCRIPTS))


@pytest.fixture
def forms(hostile: Any) -> Any:
    rng = random.Random(1)
    return hostile.Forms(rng, lambda count: [rng.randrange(500) for _ in range(count)], 512)


def completion(*texts: str, reason: str = "stop") -> dict[str, Any]:
    return {"choices": [{"text": text, "finish_reason": reason} for text in texts]}


def test_the_same_seed_asks_the_same(hostile: Any) -> None:
    kinds = hostile.Forms(random.Random(0), list, 9).makers
    first, second = (hostile.Generator(500, 512, 3, True, offered=set(kinds)) for _ in range(2))
    cases = [first.next() for _ in range(300)]
    assert [(c.name, c.path, c.body) for c in cases] == [(c.name, c.path, c.body) for c in (second.next() for _ in range(300))]
    assert {c.name for c in cases} >= {*kinds, "client leaves", "bad request", "n of 16"}
    plain = hostile.Generator(500, 512, 3, True)
    assert {plain.next().name for _ in range(300)}.isdisjoint(kinds)


@pytest.mark.parametrize("kind", ["json schema", "regex", "choice", "large grammar"])
def test_forms_are_checked(forms: Any, kind: str) -> None:
    for _ in range(40):
        case = forms.makers[kind]()
        count = case.body.get("n", 1)
        assert "has not its form" in case.check(completion(*["\x00 nothing of it"] * count))
        assert case.check(completion(*["\x00 cut"] * count, reason="length")) is None
        assert "choices" in case.check(completion(*["x"] * (count + 1)))
        assert case.check(completion(*["x"] * count, reason="abort")) == "finish reason abort"
        if kind == "choice":
            assert case.check(completion(*case.body["structured_outputs"]["choice"][:1] * count)) is None
        if kind == "json schema":
            schema = case.body["response_format"]["json_schema"]["schema"]
            assert case.check(completion(*[json.dumps(dict.fromkeys(schema["required"], 1))] * count)) is None


def test_calls_beams_and_vectors_are_checked(forms: Any) -> None:
    call = forms.call()
    function = call.body["tools"][0]["function"]
    (field,) = function["parameters"]["required"]

    def called(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        message = {"tool_calls": [{"function": {"name": name, "arguments": json.dumps(arguments)}}]}
        return {"choices": [{"finish_reason": "tool_calls", "message": message}]}

    assert call.check(called(function["name"], {field: "a"})) is None
    assert call.check(called("another", {field: "a"})) and call.check(called(function["name"], {}))
    assert call.check({"choices": [{"finish_reason": "stop"}]})
    beams = next(case for case in iter(forms.beams, None) if case.body["n"] == 4)

    def sequences(*scores: float) -> dict[str, Any]:
        used = beams.body["max_tokens"] * len(scores)
        return {"choices": [{"logprobs": {"token_logprobs": [score]}} for score in scores], "usage": {"completion_tokens": used}}

    assert beams.check(sequences(-1, -2, -3, -3)) is None
    assert "best first" in beams.check(sequences(-1, -3, -2, -4)) and beams.check(sequences(-1, -2))
    case = next(case for case in iter(forms.embeddings, None) if len(case.body["input"]) == 3)
    assert case.check({"data": [{"embedding": [0.6, 0.8]}] * 3}) is None
    for wrong in ([[0.6, 0.8]] * 2, [[0.6, 0.8]] * 2 + [[1.0]], [[0.6, 0.9]] * 3, [[float("nan"), 0.8]] * 3):
        assert case.check({"data": [{"embedding": vector} for vector in wrong]})
