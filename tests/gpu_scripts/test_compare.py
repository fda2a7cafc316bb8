"""compare.py and report.py from end to end, on an engine whose speed and faults are known."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.gpu_scripts.conftest import SCRIPTS, read_jsonl
from tests.waiting import until

FAST = ["--sizes", "tiny", "--engine-a", "vllm", "--engine-b", "none", "--repeats", "2"]


def compare(out: Path, folder: Path, site: Path, *words: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """The command's status, and its records by part."""
    import compare as script

    status = script.main([str(folder), "--out", str(out), "--peer-site", str(site), "--caches", str(out / "caches"), *FAST, *words])
    return status, {record["part"]: record for record in read_jsonl(out / "results.jsonl")}


def processes_of(out: Path) -> list[str]:
    """Command lines of processes that work for a run: those that know its folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                environment = (entry / "environ").read_bytes()
                if str(out / "caches").encode() in environment:
                    found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
            except OSError:
                pass
    return found


def test_every_part_is_measured_and_reported(
    tmp_path: Path, model_folder: Path, peer_site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    only = "startup,decode,prefill,mixed,mixed1024,serve,prefix"
    status, records = compare(out, model_folder, peer_site, "--only", only, "--loads", "r50x5,c1x2,c4x8,all8")
    assert status == 0 and set(records) == set(only.split(","))
    assert all(record["error"] is None and record["engine"] == "vllm" for record in records.values())
    assert records["decode"]["version"] == "0.0-fake"
    for batch, step in records["decode"]["values"]["steps"].items():
        expected = 2.0 * int(batch) ** 0.5  # the fake's own
        assert 0.6 * expected <= step["step_ms"] < 10 * expected and step["lowest_ms"] <= step["step_ms"] <= step["highest_ms"]
        assert len(step["long_s"]) == 2
    startup = records["startup"]["values"]
    assert 0 < startup["cold"]["import_s"] <= startup["cold"]["ready_s"] < startup["cold"]["first_answer_s"]
    loads = records["serve"]["values"]["loads"]
    assert [load["completed"] for load in loads.values()] == [5, 2, 8, 8] and all(load["failed"] == 0 for load in loads.values())
    assert all(load["total_output_tokens"] == load["completed"] * 8 for load in loads.values())
    assert records["prefix"]["values"]["cold_ttft_ms"] > 0
    assert (out / "parts" / "tiny-decode.json").exists() and processes_of(out) == []

    import report

    page = tmp_path / "performance.md"
    page.write_text("# Performance\n\nWords.\n")
    for _ in range(2):  # the second time it replaces what the first wrote
        assert report.main([str(out / "results.jsonl"), "--images", str(tmp_path / "img"), "--into", str(page)]) == 0
    text = page.read_text()
    assert text.startswith("# Performance\n\nWords.\n") and text.count(report.BEGIN) == 1
    assert "decode step, batch 4" in text and "serving 32/8, 4 at a time: TPOT median (ms)" in text and "(img/serving_tiny.png)" in text
    assert (tmp_path / "img" / "decode_tiny.png").stat().st_size > 5000


@pytest.mark.parametrize(
    ("fault", "message"), [("short", "tokens came"), ("die", "ended with status 3"), ("start", "no room for the cache")]
)
def test_a_fault_costs_a_part_and_is_told(tmp_path: Path, model_folder: Path, peer_site: Path, fault: str, message: str) -> None:
    """The faults are in runs of four prompts, which decode has and prefill (two prompts) has not."""
    out = tmp_path / "out"
    options = json.dumps({"fault": fault})
    status, records = compare(out, model_folder, peer_site, "--only", "decode,prefill", "--options-a", options)
    assert status == 1 and message in records["decode"]["error"]
    assert (records["prefill"]["error"] is None) == (fault != "start")
    assert processes_of(out) == []


def test_an_engine_that_hangs_is_given_up(tmp_path: Path, model_folder: Path, peer_site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import compare_parts

    words = ["--only", "decode,prefill", "--options-a", '{"fault": "hang"}']
    for patience in (1.5, 10.0, 60.0):  # a busy machine may need longer than the first for what does not hang
        monkeypatch.setattr(compare_parts.Clock, "timeout", property(lambda self, patience=patience: patience))
        out = tmp_path / f"out{patience}"
        begun = time.monotonic()
        status, records = compare(out, model_folder, peer_site, *words)
        assert status == 1 and "no answer within" in records["decode"]["error"]
        assert time.monotonic() - begun < 500 and processes_of(out) == []  # it would hang for 600 s
        if records["prefill"]["error"] is None:
            break
    assert records["prefill"]["error"] is None


@pytest.mark.parametrize(("slow", "batches"), [(0, []), (2, ["8"]), (3, ["8", "32"])])
def test_a_static_batch_that_is_not_over_in_time_leaves_the_others(slow: int, batches: list[str]) -> None:
    import compare_parts as parts
    from engines import EngineError

    class Slow:
        """Answers in no time, but for the ``slow``-th question after the first."""

        asked = -1

        def ask(self, spec: dict[str, Any], timeout: float) -> dict[str, Any]:
            self.asked += 1
            if self.asked == slow + 1:
                raise EngineError("no answer within 20 s")
            return {"output_tokens": 100 * spec["count"], "seconds": 2.0}

    sizes = parts.Sizes(static_batches=((8, 16), (32, 64)))
    values = parts.static_batches(Slow(), sizes, parts.Clock(20.0))  # type: ignore[arg-type]
    assert [batch for batch, run in values.items() if "tok_s" in run] == batches
    last = list(values.values())[-1]
    assert last.get("error") == (None if "tok_s" in last else "no answer within 20 s")
    if batches:
        assert values["8"]["tok_s"] == 400.0


def test_a_server_that_does_not_start(tmp_path: Path, model_folder: Path, peer_site: Path) -> None:
    out = tmp_path / "out"
    status, records = compare(out, model_folder, peer_site, "--only", "serve,prefix", "--serve-a=--fail")
    assert status == 1 and "cannot serve today" in records["serve"]["error"] and "cannot serve today" in records["prefix"]["error"]


def test_without_time_parts_are_told_as_not_run(tmp_path: Path, model_folder: Path, peer_site: Path) -> None:
    status, records = compare(tmp_path / "out", model_folder, peer_site, "--only", "decode,serve", "--budget", "0")
    assert status == 1 and all("--budget was used up" in record["error"] for record in records.values()) and len(records) == 2


def test_nothing_is_left_when_the_script_is_ended(tmp_path: Path, model_folder: Path, peer_site: Path) -> None:
    """By SIGTERM it cleans up; by SIGKILL the kernel does."""
    for sign in ("terminate", "kill"):
        out = tmp_path / sign
        words = [str(model_folder), "--out", str(out), "--peer-site", str(peer_site), "--caches", str(out / "caches"), *FAST]
        command = [sys.executable, str(SCRIPTS / "compare.py"), *words, "--only", "decode", "--options-a", '{"fault": "hang"}']
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until(lambda: any("engine_worker" in line for line in processes_of(out)))  # noqa: B023
        getattr(process, sign)()
        process.wait(60)
        until(lambda: processes_of(out) == [])  # noqa: B023


@pytest.mark.parametrize("words", [["--only", "decoding"], ["--loads", "x3"]])
def test_what_it_does_not_know_is_refused(tmp_path: Path, model_folder: Path, words: list[str]) -> None:
    import compare as script

    with pytest.raises((SystemExit, ValueError)):
        script.main([str(model_folder), "--out", str(tmp_path), *FAST, *words])


def test_the_static_batches_have_their_time_from_the_start_of_their_engine_on(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import compare as script
    import compare_parts as parts

    left, later = [], [0.0]
    monkeypatch.setattr(parts, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + later[0]))

    def start(self: Any, engine: Any, folder: Path) -> Any:
        later[0] += 1000.0
        return SimpleNamespace(marks={"version": "1"})

    def measure(worker: Any, sizes: Any, clock: Any) -> dict[str, Any]:
        left.append(clock.left)
        return {"2": {"tok_s": 1.0}}

    monkeypatch.setattr(script.Comparison, "worker", start)
    monkeypatch.setattr(parts, "static_batches", measure)
    words = [str(model_folder), "--out", str(tmp_path), "--only", "hf", "--part-seconds", "hf=200", *FAST]
    assert script.main(words) == 0 and left[0] > 100


WORKER = """
import sys
import engine_worker
engine_worker.STUCK_S = 0.2
sys.argv[1:] = ["vllm", MODEL, "1", "0", OPTIONS]
engine_worker.main()
"""


def test_an_engine_that_does_not_come_up_shows_where_it_is(model_folder: Path, peer_site: Path) -> None:
    """In a thread of Python's own: faulthandler's timer reads frames while they change, which has ended a process now and then."""
    options = {name: 0 for name in ("max_model_len", "enable_prefix_caching", "gpu_memory_utilization")} | {"fault": "slow"}
    code = WORKER.replace("MODEL", repr(str(model_folder))).replace("OPTIONS", repr(json.dumps(options)))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(peer_site), str(SCRIPTS)))}
    done = subprocess.run([sys.executable, "-c", code], env=environment, input="", capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "0.0-fake" in done.stdout
    assert all(words in done.stderr for words in ("after another 0.2 s", "in watch", "in __init__", "in main"))
