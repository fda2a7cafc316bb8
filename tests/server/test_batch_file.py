"""Batch files on the application with the mock engine: order, bad lines, resuming, and an engine that dies in the middle."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from octavo.config import ServerOptions
from octavo.errors import ConfigError, EngineDeadError
from octavo.server.app import create_app
from octavo.server.batch_file import BatchRun, batch_urls, finished_before, local_path
from octavo.server.mock import MockEngine

MODEL = "mock-model"
HELLO = [{"role": "user", "content": "hello"}]


def app_of(engine: MockEngine) -> Any:
    return create_app(engine, ServerOptions(disable_log_requests=True), [MODEL])


def line(custom_id: str, url: str = "/v1/completions", method: str = "POST", **body: Any) -> bytes:
    start = {"messages": HELLO} if "chat" in url else {"prompt": "the octopus"}
    return json.dumps({"custom_id": custom_id, "method": method, "url": url, "body": {**start, "max_tokens": 4, **body}}).encode() + b"\n"


async def run(lines: list[bytes], *, engine: MockEngine | None = None, **settings: Any) -> tuple[list[dict[str, Any]], Any]:
    engine = engine or MockEngine()
    output = io.BytesIO()
    batch = BatchRun(app_of(engine), output, **{"concurrency": 8, **settings})
    counts = await batch.run(iter(lines))
    assert not engine.runs
    return [json.loads(x) for x in output.getvalue().splitlines()], counts


async def test_answers_are_those_of_the_server() -> None:
    results, counts = await run([line("a"), line("b", "/v1/chat/completions", n=2), b"\n", line("c", logprobs=1)])
    by_id = {r["custom_id"]: r for r in results}
    assert (counts.total, counts.succeeded, counts.failed) == (3, 3, 0)
    assert all(set(r) == {"id", "custom_id", "response", "error"} and r["error"] is None for r in results)
    assert all(r["response"]["status_code"] == 200 and r["response"]["request_id"] for r in results)
    assert by_id["a"]["response"]["body"]["object"] == "text_completion"
    assert len(by_id["b"]["response"]["body"]["choices"]) == 2
    assert by_id["c"]["response"]["body"]["choices"][0]["logprobs"]["tokens"]
    assert by_id["a"]["response"]["request_id"] in by_id["a"]["response"]["body"]["id"]


@pytest.mark.parametrize(
    ("raw", "code", "words"),
    [
        (b"{not json\n", "invalid_json", "not valid JSON"),
        (b'"text"\n', "invalid_line", "object"),
        (b'{"custom_id": "x"}\n', "invalid_line", "method"),
        (b'{"custom_id": "x", "method": "POST", "url": "/v1/completions", "body": {}, "more": 1}\n', "invalid_line", "more"),
        (b'{"custom_id": 5, "method": "POST", "url": "/v1/completions", "body": {}}\n', "invalid_line", "custom_id"),
        (b"[" * 10_000 + b"\n", "invalid_", ""),
        (b"\xff\xfe\n", "invalid_json", ""),
        (line(""), "invalid_custom_id", "empty"),
        (line("x", method="GET"), "invalid_method", "GET"),
        (line("x", "/v1/audio/speech"), "invalid_url", "/v1/chat/completions"),
        (line("x", "http://elsewhere/v1/completions"), "invalid_url", "not served"),
        (line("x", stream=True), "invalid_body", "stream"),
        (line("first"), "duplicate_custom_id", "custom_id"),
    ],
)
async def test_a_bad_line_is_an_entry_and_ends_nothing(raw: bytes, code: str, words: str) -> None:
    results, counts = await run([line("first"), raw, line("last")], concurrency=1)
    assert [r["custom_id"] for r in (results[0], results[2])] == ["first", "last"] and counts.failed == 1 and counts.succeeded == 2
    bad = results[1]
    assert bad["response"] is None and bad["error"]["code"].startswith(code) and words in bad["error"]["message"]
    assert bad["error"]["line"] == 2


@pytest.mark.parametrize("body", [{"max_tokens": -1}, {"nonsense": 1}, {"model": "gpt-4"}, {"prompt": ""}])
async def test_a_refused_request_has_its_status_and_error(body: dict[str, Any]) -> None:
    results, counts = await run([line("x", **body)])
    response = results[0]["response"]
    assert response["status_code"] in (400, 404) and response["body"]["error"]["message"] and results[0]["error"] is None
    assert counts.failed == 1


async def test_order_and_concurrency() -> None:
    """Long requests first: by completion they come last; in order they come first, and the same answers."""
    engine = MockEngine(tick_s=0.001, length=1000)
    lines = [line(str(i), max_tokens=60 - i, ignore_eos=True, seed=i) for i in range(50)]
    most = 0
    generate = engine.generate

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal most
        most = max(most, len(engine.runs) + 1)
        return generate(*args, **kwargs)

    engine.generate = counted  # type: ignore[method-assign]
    by_end, _ = await run(lines, engine=engine, concurrency=20)
    in_order, _ = await run(lines, engine=engine, concurrency=20, in_order=True)
    ids = [str(i) for i in range(50)]
    assert sorted((r["custom_id"] for r in by_end), key=int) == [r["custom_id"] for r in in_order] == ids
    assert [r["custom_id"] for r in by_end] != ids and 10 <= most <= 20
    texts = {r["custom_id"]: r["response"]["body"]["choices"][0]["text"] for r in by_end}
    assert texts == {r["custom_id"]: r["response"]["body"]["choices"][0]["text"] for r in in_order}


async def test_lines_are_read_as_they_are_needed() -> None:
    read = 0

    def lines() -> Any:
        nonlocal read
        for i in range(100):
            read += 1
            yield line(str(i))

    batch = BatchRun(app_of(MockEngine()), io.BytesIO(), 4)
    batch.progress = lambda counts: seen.append(read - counts.succeeded)
    seen: list[int] = []
    await batch.run(lines())
    assert max(seen) <= 4 and read == 100


async def test_resuming(tmp_path: Path) -> None:
    """What was answered stays, what failed is run again, and a line that was cut off in the middle is dropped."""
    lines = [line(str(i)) for i in range(6)] + [line("bad", max_tokens=-1), b"{}\n"]
    results, _ = await run(lines, concurrency=1)
    path = tmp_path / "out.jsonl"
    texts = [json.dumps(r).encode() + b"\n" for r in results]
    path.write_bytes(b"".join(texts[:3]) + texts[6] + texts[3][: len(texts[3]) // 2])
    done = finished_before(path)
    assert done == {"0", "1", "2"} and path.read_bytes() == b"".join(texts[:3])
    before = path.read_bytes()
    assert finished_before(path) == done and path.read_bytes() == before  # nothing to change the second time
    more, counts = await run(lines, done=done)
    assert {r["custom_id"] for r in more} == {"3", "4", "5", "bad", None}
    assert (counts.total, counts.skipped, counts.succeeded, counts.failed) == (8, 3, 3, 2)


async def test_a_dead_engine_ends_the_run_without_entries_for_what_it_did_not_do() -> None:
    engine = MockEngine(tick_s=0.001, length=1000)
    engine.fail_after = 30
    output = io.BytesIO()
    batch = BatchRun(app_of(engine), output, 2, is_healthy=engine.is_healthy)
    with pytest.raises(EngineDeadError, match="--resume"):
        await batch.run(iter([line(str(i), max_tokens=8, ignore_eos=True) for i in range(40)]))
    results = [json.loads(x) for x in output.getvalue().splitlines()]
    assert 0 < len(results) < 40 and all(r["response"]["status_code"] == 200 for r in results)


def test_what_a_batch_may_ask() -> None:
    assert batch_urls(app_of(MockEngine())) >= {"/v1/chat/completions", "/v1/completions"}
    assert not batch_urls(app_of(MockEngine())) & {"/ping", "/tokenize", "/v1/models", "/docs"}


@pytest.mark.parametrize("name", ["http://host/in.jsonl", "https://host/in.jsonl", "s3://bucket/in", "file:///tmp/in"])
def test_only_local_files(name: str) -> None:
    with pytest.raises(ConfigError, match="local files"):
        local_path(name, "--input-file")
