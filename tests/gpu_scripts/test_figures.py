"""What the GPU scripts make of numbers and answers: floors, loads, merged results, tables, and what counts as wrong."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest


def floor(name: str) -> Any:
    import floors
    import model_folders

    return floors.Floor.of_config(model_folders.MODELS[name])


@pytest.mark.parametrize(
    ("name", "steps"), [("qwen3-0.6b", (0.31, 1.15, 7.4)), ("llama-3.2-1b", (0.58, 0.82, 2.8)), ("qwen3-8b", (3.56, 4.64, 13.9))]
)
def test_floors_of_decode_steps(name: str, steps: tuple[float, ...]) -> None:
    """Against figures that were worked out by hand, for a context of 1,024 tokens."""
    for batch, expected in zip((1, 32, 256), steps, strict=True):
        assert floor(name).decode_s(batch, 1024) * 1e3 == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("words", [[], ["--help"], ["--out", "models"], ["models", "qwen3"]])
def test_what_are_no_model_folders_are_not_written(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import model_folders

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["model_folders.py", *words])
    with pytest.raises(SystemExit, match="usage: python scripts/gpu/model_folders.py FOLDER"):
        model_folders.main()
    assert not list(tmp_path.iterdir())


def test_floors_of_loads_follow_from_those_of_steps() -> None:
    eight = floor("qwen3-8b")
    assert eight.kv_bytes == 2 * 36 * 8 * 128 * 2
    one = eight.mixed_s([(512, 64)])
    assert one == pytest.approx(eight.added_prefill_s(512) + sum(eight.decode_s(1, 512 + i + 0.5) for i in range(64)), rel=1e-3)
    rng = random.Random(0)
    lengths = [(rng.randint(100, 1024), rng.randint(100, 1024)) for _ in range(64)]
    assert eight.mixed_s(lengths) < eight.mixed_s(lengths, 8) < eight.mixed_s(lengths, 1)
    rates = [eight.serving_tok_s(n, 512, 256) for n in (1, 10, 100)]
    assert rates == sorted(rates) and rates[0] == pytest.approx(1 / (eight.decode_s(1, 640) + eight.added_prefill_s(512) / 256))
    assert eight.prefill_s(1, 4096, cached=4000) < 0.1 * eight.prefill_s(1, 4096)


def test_requests_are_the_same_for_every_engine() -> None:
    from engine_worker import make_requests

    spec = {"count": 5, "n_in": [3, 9], "n_out": (2, 4), "seed": 3, "temperature": 0.6}
    requests = make_requests(280, spec)
    assert requests == make_requests(280, json.loads(json.dumps(spec))) != make_requests(280, spec | {"seed": 4})
    assert all(3 <= len(ids) <= 9 and 2 <= n <= 4 and t == 0.6 and all(10 <= i <= 270 for i in ids) for ids, n, t in requests)


@pytest.mark.parametrize(
    ("name", "load"),
    [
        ("r10x200", {"request_rate": 10.0, "num_prompts": 200}),
        ("c50x200", {"max_concurrency": 50, "num_prompts": 200}),
        ("all1000", {"num_prompts": 1000}),
    ],
)
def test_names_of_loads(name: str, load: dict[str, Any]) -> None:
    from compare_parts import parse_load

    assert parse_load(name) == load


def test_a_step_is_the_difference_of_medians() -> None:
    """One slow run of five does not move it, as it would move a difference of two."""
    from compare_parts import _step

    step = _step([1.0, 1.0, 9.0, 1.0, 1.0], [3.0, 3.0, 3.0, 3.0, 30.0], 256)
    assert step["step_ms"] == pytest.approx(2 / 256 * 1e3) and step["lowest_ms"] < 0 < step["highest_ms"]


def record(part: str, engine: str, values: dict[str, Any], minute: int, error: str | None = None) -> dict[str, Any]:
    import dataclasses

    import model_folders
    from compare_parts import Sizes

    return {
        "part": part, "model": "qwen3-8b", "engine": engine, "module": engine, "version": "1", "error": error, "commit": "c",
        "machine": "H200",
        "date": f"2026-01-01T00:{minute:02d}:00", "values": values, "config": model_folders.MODELS["qwen3-8b"],
        "settings": {"sizes": dataclasses.asdict(Sizes())},
    }  # fmt: skip


def step(ms: float) -> dict[str, Any]:
    return {"step_ms": ms, "lowest_ms": ms, "highest_ms": ms}


def test_later_records_add_to_earlier_ones(tmp_path: Path) -> None:
    import report

    lines = [
        record("decode", "octavo", {"steps": {"1": step(5.0), "32": step(6.0)}, "context": 288}, 1),
        record("decode", "octavo", {"steps": {"1": step(4.0)}, "context": 288}, 2),
        record("decode", "octavo", {}, 3, error="it died"),
        record("prefill", "octavo", {}, 3, error="no memory"),
        record("serve", "octavo", {"loads": {"c1x1": {"output_throughput": 7.0}}}, 1),
        record("serve", "octavo", {"loads": {"c1x1": {"error": "late"}, "c2x2": {"error": "late"}}}, 2),
    ]
    path = tmp_path / "results.jsonl"
    path.write_text("\n".join(map(json.dumps, reversed(lines))) + '\n{"part": "cut o')
    merged = report.merge(report.read([path]))
    decode = merged["qwen3-8b", "decode", "octavo"]
    assert {b: s["step_ms"] for b, s in decode["values"]["steps"].items()} == {"1": 4.0, "32": 6.0} and decode["error"] is None
    assert merged["qwen3-8b", "prefill", "octavo"]["error"] == "no memory"
    assert merged["qwen3-8b", "serve", "octavo"]["values"]["loads"] == {"c1x1": {"output_throughput": 7.0}, "c2x2": {"error": "late"}}


def test_the_table_tells_who_is_better(tmp_path: Path) -> None:
    import report

    records = [
        record("decode", "octavo", {"steps": {"1": step(4.0)}, "context": 288.0}, 1),
        record("decode", "vllm", {"steps": {"1": step(5.0)}, "context": 288.0}, 1),
        record("prefill", "octavo", {"tok_s": 44000.0, "prompts": [16, 2048]}, 1),
        record("prefill", "vllm", {"tok_s": 40000.0, "prompts": [16, 2048]}, 1),
        record("mixed", "vllm", {}, 1, error="it broke"),
    ]
    path = tmp_path / "r.jsonl"
    path.write_text("\n".join(map(json.dumps, records)))
    model = report.Model("qwen3-8b", report.merge(report.read([path])), report.BANDWIDTH, report.FLOPS)
    lines = report.table(model)
    cells = {line.split(" | ")[0]: line.strip("| ").split(" | ") for line in lines if line.startswith("|")}
    assert cells["| decode step, batch 1, 288 tokens of context (ms)"][1:] == ["4.00", "5.00", "3.53", "88%", "1.25"]
    assert cells["| prefill, 16 x 2,048 (tok/s)"][1:] == ["44,000", "40,000", "54,496", "81%", "1.10"]
    assert "- mixed, vllm: it broke" in lines
    assert not [line for line in lines if "commit" in line]
    records += [record("prefill", "octavo", {"tok_s": 44500.0, "prompts": [16, 2048]}, 2) | {"commit": "b"}]
    path.write_text("\n".join(map(json.dumps, records)))
    lines = report.table(report.Model("qwen3-8b", report.merge(report.read([path])), report.BANDWIDTH, report.FLOPS))
    assert [line for line in lines if "commit b: prefill" in line]

    other = [r | {"model": "llama-3.2-1b"} for r in records if r["commit"] == "b"]
    path.write_text("".join(json.dumps(r) + "\n" for r in records + other))
    merged = report.merge(report.read([path]))
    models = [report.Model(name, merged, report.BANDWIDTH, report.FLOPS) for name in ("qwen3-8b", "llama-3.2-1b")]
    assert "- commit b: prefill." in report.page(report.read([path]), models, [], None).split("| llama-3.2-1b |")[1], (
        "of one, of two on the page"
    )


def case(**fields: Any) -> Any:
    import hostile_load

    return hostile_load.Case("x", {"prompt": [1, 2, 3], "max_tokens": 4, "ignore_eos": True, **fields})


def answer(tokens: int = 4, reason: str = "length", n: int = 1, logprobs: int | None = None) -> dict[str, Any]:
    made = None if logprobs is None else {"token_logprobs": [0.0] * logprobs}
    return {"usage": {"completion_tokens": tokens}, "choices": [{"finish_reason": reason, "logprobs": made}] * n}


@pytest.mark.parametrize(
    ("asked", "answered", "wrong"),
    [
        ({}, {}, None),
        ({}, {"tokens": 3}, "3 tokens instead of 4"),
        ({}, {"tokens": 5}, "at most 4"),
        ({}, {"reason": "abort"}, "finish reasons"),
        ({"n": 2}, {"tokens": 8}, "1 choices"),
        ({"n": 2}, {"tokens": 8, "n": 2}, None),
        ({"logprobs": 2}, {"logprobs": 3}, "3 log-probabilities of 4"),
        ({"stop_token_ids": [5]}, {"tokens": 2, "reason": "stop"}, None),
        ({"max_tokens": 100}, {"tokens": 13}, None),  # what is left of the context
    ],
)
def test_hostile_answers_are_checked(asked: dict[str, Any], answered: dict[str, Any], wrong: str | None) -> None:
    import hostile_load

    found = hostile_load.check_answer(answer(**answered), case(**asked), context=16)
    assert found is None if wrong is None else wrong in (found or "")


def test_hostile_requests_are_of_every_kind_and_fit() -> None:
    import hostile_load

    made = [hostile_load.Generator(2048, 512, seed, has_text=True).next() for seed in range(300)]
    assert len({c.name for c in made}) == 11
    assert all(0 < len(c.body["prompt"]) < 512 for c in made if c.status == 200)
    json.dumps([c.body for c in made])


def test_memory_over_its_share_is_a_problem() -> None:
    import hostile_load

    memory = hostile_load.Memory(highest=int(0.92 * 140e9), total=int(140e9), before=0)
    assert memory.problem(0.9) is not None and memory.problem(0.95) is None
    assert hostile_load.Memory().problem(0.9) is None


def test_answers_of_a_real_model_are_judged() -> None:
    import real_model

    asked = real_model.questions(40)
    assert len(set(asked)) == 40 and set(real_model.KNOWN) < set(asked)
    good = [f"I say that it is {real_model.KNOWN.get(q, 'so')}." for q in asked]
    same = real_model.Comparison.of(asked, good, good)
    assert (same.equal, same.common, same.problems) == (40, 1.0, [])
    bad = ["", "\ufffd\ufffd", "!!!! ???? ----", "word " * 30, *good[4:]]
    found = real_model.Comparison.of(asked, good, bad)
    assert found.equal == 36 and len(found.problems) == 4 and found.common < 1
    assert "does not say Paris" in (real_model.problem_of(asked[0], "It is London.") or "")


def test_pieces_of_a_file_are_joined(tmp_path: Path) -> None:
    import real_model

    for i, data in enumerate((b"ab", b"cd")):
        (tmp_path / f"part{i}").write_bytes(data)
    assert real_model.joined([tmp_path / "part0", tmp_path / "part1"], tmp_path).read_bytes() == b"abcd"
