"""Grammars through ``LLM``, with a real sampler: whatever else runs and however steps are cut, the same tokens."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from octavo import LLM, SamplingParams, StructuredOutputsParams
from octavo.errors import RequestError
from octavo.frontend.outputs import RequestOutput
from tests.structured.test_schemas import FORMATS
from tests.tiny_model import EOS, make_tiny_model

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "é": {"enum": ["ß", "日本"]},
    },
    "required": ["name", "age", "é"],
    "additionalProperties": False,
}
TAG = {"type": "tag", "begin": "<a>", "content": {"type": "regex", "pattern": "[1-9][0-9]"}, "end": "</a>"}
CONSTRAINTS: list[dict[str, Any] | None] = [
    {"json": SCHEMA},
    {"json": json.dumps(SCHEMA)},
    {"regex": r"(\d{3}-\d{2}|[äöü]+x)!"},
    {"choice": ["yes", "no", "ja, größer", "はい"]},
    {"grammar": 'start: ("a" | "bé")+ "."'},
    {"grammar": 'root ::= "x" item+ "."\nitem ::= [0-9] | "z"'},
    {"json": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 4}},
    {"structural_tag": {"type": "structural_tag", "format": TAG}},
    None,
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def make_llm(folder: Path, **options: Any) -> LLM:
    defaults: dict[str, Any] = {"kv_cache_memory": 2**21, "max_num_seqs": 8}
    return LLM(folder, load_format="dummy", dtype="float32", device="cpu", **defaults | options)


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return make_llm(folder)


def holds(constraint: dict[str, Any], text: str) -> bool:
    if "json" in constraint:
        schema = constraint["json"]
        validator = jsonschema.Draft202012Validator(json.loads(schema) if isinstance(schema, str) else schema, format_checker=FORMATS)
        return validator.is_valid(json.loads(text))
    if "regex" in constraint:
        return re.fullmatch(constraint["regex"], text) is not None
    if "choice" in constraint:
        return text in constraint["choice"]
    if "structural_tag" in constraint:
        return re.fullmatch(r"<a>\d\d</a>", text) is not None
    return re.fullmatch(r"(a|bé)+\." if "start" in constraint["grammar"] else r"x[0-9z]+\.", text) is not None


def random_work(rng: random.Random, count: int) -> tuple[list[str], list[SamplingParams]]:
    prompts = ["The same beginning of a prompt. " * rng.choice((0, 1, 1)) + "p" * rng.randint(1, 30) + str(i) for i in range(count)]
    params = [
        SamplingParams(
            n=rng.choice((1, 1, 2)),
            max_tokens=rng.choice((12, 60, 60)),
            min_tokens=rng.choice((0, 0, 5)),
            temperature=rng.choice((0.0, 1.0)),
            top_k=rng.choice((0, 7)),
            repetition_penalty=rng.choice((1.0, 1.2)),
            frequency_penalty=rng.choice((0.0, 0.5)),
            seed=rng.randint(0, 1000),
            logprobs=rng.choice((None, 0, 3)),
            stop=rng.choice((None, None, ["zz", "0-"])),
            bad_words=rng.choice((None, None, ["q"])),
            ignore_eos=rng.random() < 0.2,
            # Random weights end a text once in 288 tokens; closing what is open comes more often so.
            logit_bias={token: 3.0 for token in (*make_ids('"}],.!'), EOS)},
            structured_outputs=rng.choice(CONSTRAINTS),
        )
        for _ in range(count)
    ]
    return prompts, params


def make_ids(text: str) -> list[int]:
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return [alphabet.index(char) for char in text]


def essence(results: list[RequestOutput]) -> list[Any]:
    return [
        [(o.index, o.token_ids, o.text, o.finish_reason, o.stop_reason, [list(e) for e in o.logprobs or []]) for o in r.outputs]
        for r in results
    ]


@pytest.fixture(scope="module")
def expected(llm: LLM) -> tuple[list[str], list[SamplingParams], list[Any]]:
    """Each request alone."""
    prompts, params = random_work(random.Random(5), 40)
    results = [llm.generate(prompt, p, use_tqdm=False)[0] for prompt, p in zip(prompts, params, strict=True)]
    complete = 0
    for p, result in zip(params, results, strict=True):
        for output in result.outputs:
            assert (output.finish_reason == "length") == (len(output.token_ids) == p.max_tokens and output.finish_reason != "stop")
            constraint = p.structured_outputs
            if constraint is None or output.finish_reason != "stop" or output.stop_reason is not None:
                continue
            given = next(c for c in CONSTRAINTS if c and SamplingParams(structured_outputs=c).structured_outputs == constraint)
            assert holds(given, output.text), (given, output.text)
            complete += 1
    assert complete >= 20
    return prompts, params, essence(results)


@pytest.mark.parametrize(
    ("steps_ahead", "graphs", "options"),
    [
        ("0", "0", {}),
        ("1", "0", {}),
        ("1", "1", {"max_num_batched_tokens": 16}),
        ("1", "1", {"num_gpu_blocks_override": 26, "max_model_len": 128, "block_size": 8}),
        ("0", "0", {"max_num_batched_tokens": 9, "enable_prefix_caching": False}),
    ],
)
def test_batches_change_no_token(
    folder: Path, expected: Any, monkeypatch: pytest.MonkeyPatch, steps_ahead: str, graphs: str, options: dict[str, Any]
) -> None:
    monkeypatch.setenv("OCTAVO_STEPS_AHEAD", steps_ahead)
    monkeypatch.setenv("OCTAVO_DECODE_GRAPHS", graphs)
    prompts, params, alone = expected
    llm = make_llm(folder, **options)
    got = essence(llm.generate(prompts, params, use_tqdm=False))
    for i, (a, b) in enumerate(zip(got, alone, strict=True)):
        assert a == b, params[i]
    if "num_gpu_blocks_override" in options:
        assert llm.engine.stats().num_preemptions > 0
    llm.shutdown()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_second_half_of_a_step_runs_like_a_captured_one(
    folder: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    monkeypatch.setenv("OCTAVO_STEPS_AHEAD", "1")
    monkeypatch.setenv("OCTAVO_DECODE_GRAPHS", "1")
    ahead = make_llm(folder)
    graphs = ahead.executor.runner.graphs
    draw, drawn = graphs.draw, []
    monkeypatch.setattr(graphs, "draw", lambda rows, *rest: drawn.append(len(rows)) or draw(rows, *rest))
    prompts = [f"number {i} of" for i in range(7)]
    params = [
        SamplingParams(temperature=temperature, seed=i, max_tokens=30, structured_outputs=CONSTRAINTS[-1 if i % 3 == 2 else i % 3])
        for i in range(7)
    ]
    ahead.generate(prompts, params, use_tqdm=False)  # the grammars are compiled, so that no request waits and all run together
    drawn.clear()
    got = essence(ahead.generate(prompts, params, use_tqdm=False))
    assert got == [essence(llm.generate(p, q, use_tqdm=False))[0] for p, q in zip(prompts, params, strict=True)]
    assert len(drawn) > 10 and max(drawn) == 7
    ahead.shutdown()


def test_spellings(llm: LLM) -> None:
    def text(value: Any) -> str:
        return llm.generate("p", SamplingParams(temperature=0, max_tokens=40, structured_outputs=value), use_tqdm=False)[0].outputs[0].text

    assert text({"choice": ["only this"]}) == text(StructuredOutputsParams(choice=["only this"])) == "only this"
    assert text(StructuredOutputsParams(regex="")) == ""
    assert text({"regex": "a\nb"}) == "a\nb" and text({"regex": "^a/b$"}) == "a/b"
    assert text({"regex": "a\\nb"}) == text({"regex": "a\\\nb"}) == "a\nb"
    assert text({"choice": ['q"\\/\n\x01é']}) == 'q"\\/\n\x01é'
    assert json.loads(text({"json": {"const": {"k": ["é", '"', None]}}})) == {"k": ["é", '"', None]}
    assert text({"grammar": 'start: "a" <|im_end|>'}) == "a"
    for value, match in [
        ({}, "exactly one"),
        ({"json": {}, "regex": "a"}, "exactly one"),
        ({"jsn": {}}, "no field 'jsn'"),
        ("json", "must be an object"),
        ({"choice": []}, "list of texts"),
        ({"choice": ["a", 1]}, "list of texts"),
        ({"regex": 5}, "must be a text"),
        ({"json": 5}, "must be a JSON object"),
        ({"json": {"a": object()}}, "not JSON"),
        ({"json_object": "yes"}, "must be true"),
    ]:
        with pytest.raises(RequestError, match=match):
            text(value)


def test_conflicts_end_their_request_alone(llm: LLM) -> None:
    good = SamplingParams(temperature=0, max_tokens=30, structured_outputs={"choice": ["fine"]})
    yes_no = {"choice": ["yes", "no"]}
    bad = SamplingParams(temperature=0, max_tokens=30, structured_outputs=yes_no, allowed_token_ids=make_ids("abc"))
    hidden = SamplingParams(temperature=0, max_tokens=30, structured_outputs=yes_no, bad_words=["y", "n"])
    for params in (bad, hidden):
        with pytest.raises(RequestError, match="forbid every token"):
            llm.generate(["a", "b"], [good, params], use_tqdm=False)
        assert llm.generate("a", good, use_tqdm=False)[0].outputs[0].text == "fine"
        assert not llm.engine.has_work()


def test_min_tokens_and_ends(llm: LLM) -> None:
    def run(**fields: Any) -> Any:
        return llm.generate("p", SamplingParams(seed=1, **fields), use_tqdm=False)[0].outputs[0]

    many = run(structured_outputs={"regex": "a*"}, min_tokens=7, max_tokens=20, logit_bias={EOS: 100})
    assert many.text == "a" * 7 and many.finish_reason == "stop" and many.token_ids[-1] == EOS
    none = run(structured_outputs={"regex": "a*"}, max_tokens=20, logit_bias={EOS: 100})
    assert none.text == "" and none.token_ids == [EOS]
    endless = run(structured_outputs={"regex": "a*"}, max_tokens=9, ignore_eos=True, logit_bias={EOS: 100})
    assert endless.text == "a" * 9 and endless.finish_reason == "length"
    short = run(structured_outputs={"choice": ["ab"]}, min_tokens=7, max_tokens=20)
    assert short.text == "ab" and short.finish_reason == "stop" and len(short.token_ids) == 2
    exact = run(structured_outputs={"choice": ["ab"]}, max_tokens=2)
    assert exact.text == "ab" and exact.finish_reason == "stop"
    stopped = run(structured_outputs={"regex": "abcdef"}, stop=["cd"], max_tokens=9)
    assert stopped.text == "ab" and stopped.stop_reason == "cd"
    by_token = run(structured_outputs={"regex": "abcdef"}, stop_token_ids=make_ids("c"), max_tokens=9)
    assert by_token.text == "ab" and by_token.stop_reason == make_ids("c")[0]
    drawn = run(structured_outputs={"choice": ["ab"]}, logprobs=2)
    assert len(drawn.logprobs) == 2 and all(v.logprob < -2 for entry in drawn.logprobs for v in entry.values())  # of all tokens
