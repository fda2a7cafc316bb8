"""``octavo run-batch`` with the demo model: as a command, resumed, interrupted, and refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.demo import demo_model_path

ROOT = Path(__file__).parents[2]
FLAGS = ("--max-model-len", "512", "--kv-cache-memory", "64M", "--max-num-seqs", "16", "--log-level", "warning")


def command(source: Path, target: Path, *flags: str) -> list[str]:
    demo_model_path()  # skips without the wheel
    return [sys.executable, "-m", "octavo", "run-batch", "-i", str(source), "-o", str(target), *FLAGS, *flags]


def run(source: Path, target: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command(source, target, *flags), env=environment, capture_output=True, text=True, timeout=240)


def request(custom_id: str, **body: Any) -> str:
    start = {"messages": [{"role": "user", "content": f"Say the number {custom_id}."}], "max_tokens": 6, "temperature": 0}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": {**start, **body}}) + "\n"


def results(target: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in target.read_text().splitlines()]


def test_a_file_is_answered_and_resumed(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    text = json.dumps({"custom_id": "text", "method": "POST", "url": "/v1/completions", "body": {"prompt": "The sea", "max_tokens": 4}})
    source.write_text("".join(request(str(i)) for i in range(12)) + text + "\nnot json\n" + request("bad", temperature=-1))
    done = run(source, target, "--in-order")
    assert done.returncode == 0, done.stderr
    assert "15 requests: 13 answered, 2 failed" in done.stderr
    found = results(target)
    assert [r["custom_id"] for r in found] == [*map(str, range(12)), "text", None, "bad"]
    assert all(r["response"]["body"]["choices"][0]["message"]["content"] for r in found[:12])
    assert found[13]["error"]["code"] == "invalid_json" and found[14]["response"]["status_code"] == 400

    refused = run(source, target)
    assert refused.returncode == 2 and "--resume" in refused.stderr
    first = found[:4]
    target.write_text("".join(json.dumps(r) + "\n" for r in first))
    again = run(source, target, "--resume")
    assert again.returncode == 0 and "4 answered before" in again.stderr, again.stderr
    resumed = results(target)
    assert resumed[:4] == first and len(resumed) == 15
    answers = {
        r["custom_id"]: r["response"]["body"]["choices"][0]["message"]["content"] for r in resumed if r["custom_id"] in map(str, range(12))
    }
    assert answers == {r["custom_id"]: r["response"]["body"]["choices"][0]["message"]["content"] for r in found[:12]}


def test_an_interrupted_run_keeps_what_it_has(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(request(str(i), max_tokens=100, ignore_eos=True) for i in range(200)))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command(source, target, "--max-concurrency", "4"), env=environment, stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 120
    while not (target.exists() and target.stat().st_size):
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    try:
        _, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 130 and "--resume" in errors, errors
    found = results(target)  # whole lines only
    assert 0 < len(found) < 200 and all(r["response"]["status_code"] == 200 for r in found)


@pytest.mark.parametrize(
    ("source", "flags", "words"),
    [
        ("https://host/in.jsonl", (), "local files"),
        ("missing.jsonl", (), "no such file"),
        ("in.jsonl", ("--max-concurrency", "0"), "at least 1"),
        ("in.jsonl", ("--port", "1"), "unknown flag --port"),
        ("in.jsonl", ("--model", "/no/such/model"), "/no/such/model"),
    ],
)
def test_refusals(tmp_path: Path, source: str, flags: tuple[str, ...], words: str) -> None:
    (tmp_path / "in.jsonl").write_text(request("a"))
    name = source if "://" in source else str(tmp_path / source)
    done = run(Path(name) if "://" not in source else source, tmp_path / "out.jsonl", *flags)  # type: ignore[arg-type]
    assert done.returncode != 0 and words in done.stderr and not (tmp_path / "out.jsonl").exists(), done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_said(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(request("1") + request("2"))
    done = run(source, Path("/dev/full"), "--overwrite")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "octavo: error: " in done.stderr and "No space left on device" in done.stderr and "--resume" in done.stderr
