"""The front end over a real engine process, on a tiny model: streams, ends of every kind, and deaths of every kind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from contextlib import aclosing
from pathlib import Path

import pytest

from octavo.config import EngineConfig
from octavo.errors import ConfigError, EngineDeadError, ModelError, OutOfMemoryError, RequestError
from octavo.frontend import async_llm
from octavo.frontend.async_llm import AsyncLLM
from octavo.frontend.engine_process import EngineProcess
from octavo.frontend.output_processor import TOKEN_BYTES, RequestOutputs
from octavo.frontend.outputs import RequestOutput
from octavo.frontend.params import SamplingParams
from octavo.types import TokenDelta
from tests.tiny_model import make_tiny_model
from tests.waiting import runs, until, until_async

ROOT = Path(__file__).resolve().parents[2]
LONG = SamplingParams(max_tokens=400, ignore_eos=True, temperature=0)
ENDLESS = SamplingParams(max_tokens=16_000, ignore_eos=True, temperature=0)  # does not end before something is done about it
PROMPT = [1, 2, 3, 4, 5]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("models") / "tiny model ü", max_position=16_384))


def config(model: str, **changes: object) -> EngineConfig:
    fields = {"load_format": "dummy", "kv_cache_memory": 2**24, "max_num_seqs": 16, "dtype": "float32", "device": "cpu", **changes}
    return EngineConfig(model=model, **fields)


async def collect(llm: AsyncLLM, request_id: str, params: SamplingParams, prompt: list[int] | None = None) -> list[RequestOutput]:
    return [output async for output in llm.generate(prompt or PROMPT, params, request_id=request_id)]


def joined(outputs: list[RequestOutput], index: int = 0) -> tuple[str, list[int], str | None]:
    parts = [c for o in outputs for c in o.outputs if c.index == index]
    return "".join(c.text for c in parts), [t for c in parts for t in c.token_ids], parts[-1].finish_reason


async def wait_until_idle(llm: AsyncLLM) -> None:
    await until_async(lambda: not (llm.stats.num_running or llm.stats.num_waiting or llm.stats.kv_cache_usage))


async def test_one_engine_through_all_ends_of_requests(model: str) -> None:
    llm = await AsyncLLM.start(config(model))
    try:
        assert not os.path.exists(llm.process.folder), "nobody else can connect, and nothing can be left behind"
        await _streams_and_batches_agree(llm)
        await _closing_a_stream_aborts_it(llm)
        await _cancelling_anywhere_frees_all(llm)
        await _abort_from_outside(llm)
        await _refusals_leave_nothing(llm)
        await _a_reader_that_is_late_gets_all_at_once(llm)
        await _too_much_that_is_not_read_is_given_up(llm)
        assert await llm.reset_prefix_cache()
        with pytest.raises(Exception, match="no call"):
            await llm._call("nonsense")
        assert llm.is_healthy() and llm.num_unfinished == 0 and not llm._calls
    finally:
        await llm.shutdown()
    assert not llm.process.alive
    with pytest.raises(EngineDeadError, match="shutting down"):
        await collect(llm, "late", LONG)


async def _streams_and_batches_agree(llm: AsyncLLM) -> None:
    params = SamplingParams(max_tokens=30, n=3, seed=5, ignore_eos=True, logprobs=1)
    alone = await collect(llm, "a", params)
    many = await asyncio.gather(*(collect(llm, f"b{i}", params) for i in range(8)))
    for index in range(3):
        assert joined(alone, index)[2] == "length" and len(joined(alone, index)[1]) == 30
        assert all(joined(outputs, index) == joined(alone, index) for outputs in many)
    for output in (o for outputs in many for o in outputs):
        assert all(len(c.logprobs) == len(c.token_ids) for c in output.outputs)
    await wait_until_idle(llm)


async def _closing_a_stream_aborts_it(llm: AsyncLLM) -> None:
    before = llm.stats.generation_tokens
    async with aclosing(llm.generate(PROMPT, ENDLESS, request_id="c")) as stream:
        async for _ in stream:
            break
    assert llm.num_unfinished == 0
    await wait_until_idle(llm)
    assert llm.stats.generation_tokens - before < 16_000


async def _cancelling_anywhere_frees_all(llm: AsyncLLM) -> None:
    cancelled = 0
    for i in range(12):
        tasks = [asyncio.create_task(collect(llm, f"d{i}-{j}", SamplingParams(max_tokens=300, n=4, ignore_eos=True))) for j in range(6)]
        for turn in range(i):
            await asyncio.sleep(0.002 * (turn % 3))
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        # On a machine that is busy elsewhere one may have come to its end.
        assert all(isinstance(r, asyncio.CancelledError) or r[-1].finished for r in results)
        cancelled += sum(isinstance(r, asyncio.CancelledError) for r in results)
    assert llm.num_unfinished == 0 and cancelled >= 36
    await wait_until_idle(llm)


async def _too_much_that_is_not_read_is_given_up(llm: AsyncLLM) -> None:
    """Of three readers two stop: the one with most to read loses its answer, the others nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(async_llm, "SHED_S", 0.0)
        # Room for all that the first two can ever have, should this process not get to run for a while.
        patch.setattr(async_llm, "MAX_UNREAD", 90 * TOKEN_BYTES)
        reading = asyncio.create_task(collect(llm, "h", SamplingParams(max_tokens=60, ignore_eos=True)))
        few, many = (SamplingParams(max_tokens=count, n=n, ignore_eos=True) for count, n in ((25, 1), (50, 3)))
        small, large = llm.generate(PROMPT, few, request_id="i"), llm.generate(PROMPT, many, request_id="j")
        async with aclosing(small), aclosing(large):
            await anext(small)
            await anext(large)
            await until_async(lambda: len(llm._streams) <= 1)
            with pytest.raises(RequestError, match="not read as fast") as refusal:
                await anext(large)
            assert refusal.value.code == "client_too_slow"
            assert [o async for o in small][-1].finished
        assert len(joined(await reading)[1]) == 60
    assert llm.num_unfinished == 0
    await wait_until_idle(llm)


async def _abort_from_outside(llm: AsyncLLM) -> None:
    stream = llm.generate(PROMPT, ENDLESS, request_id="e")
    await anext(stream)
    llm.abort("e")
    llm.abort("unknown")
    outputs = [output async for output in stream]
    assert outputs[-1].finished and outputs[-1].outputs[0].finish_reason == "abort"


async def _refusals_leave_nothing(llm: AsyncLLM) -> None:
    running = llm.generate(PROMPT, ENDLESS, request_id="f")
    await anext(running)
    for request_id, prompt, params, match in (
        ("f", PROMPT, LONG, "running already"),
        ("g", [], LONG, "empty"),
        ("g", [288], LONG, "vocabulary"),
        ("g", [-1], LONG, "vocabulary"),
        ("g", [1] * 16_384, LONG, "context length"),
        ("g", PROMPT, SamplingParams(n=17), "max-num-seqs"),
        ("g", PROMPT, SamplingParams(n=10**9), "max-num-seqs"),
        ("g", PROMPT, SamplingParams(stop_token_ids=[10**6]), "vocabulary"),
    ):
        with pytest.raises(RequestError, match=match):
            async for _ in llm.generate(prompt, params, request_id=request_id):
                pass
    for request_id, priority, salt in (("lone \ud800", 0, None), ("h", 2**70, None), ("h", 0, "\udfff")):
        with pytest.raises(RequestError):
            async for _ in llm.generate(PROMPT, LONG, request_id=request_id, priority=priority, cache_salt=salt):
                pass
    assert llm.num_unfinished == 1
    llm.abort("f")
    assert [output async for output in running][-1].outputs[0].finish_reason == "abort"


async def _a_reader_that_is_late_gets_all_at_once(llm: AsyncLLM) -> None:
    stream = llm.generate(PROMPT, LONG, request_id="i")
    first = await anext(stream)
    outputs = llm._streams[llm.process.prefix + "i"].outputs
    await until_async(lambda: outputs.finished)
    rest = [output async for output in stream]
    assert len(rest) == 1 and rest[0].finished
    assert len(first.outputs[0].token_ids) + len(rest[0].outputs[0].token_ids) == 400


async def test_a_fault_on_one_request_fails_that_one_alone(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    push = RequestOutputs.push

    def breaks_on_bad(self: RequestOutputs, delta: TokenDelta, now: float | None = None) -> bool:
        if self.request_id == "bad":
            raise ZeroDivisionError("a fault")
        return push(self, delta, now)

    monkeypatch.setattr(RequestOutputs, "push", breaks_on_bad)
    llm = await AsyncLLM.start(config(model))
    try:
        good = asyncio.create_task(collect(llm, "good", LONG))
        with pytest.raises(ZeroDivisionError):
            await collect(llm, "bad", LONG)
        assert joined(await good)[2] == "length" and llm.is_healthy()
        await wait_until_idle(llm)
    finally:
        await llm.shutdown()


async def test_killing_the_engine_fails_every_stream_and_hangs_nothing(model: str) -> None:
    llm = await AsyncLLM.start(config(model))
    tasks = [asyncio.create_task(collect(llm, str(i), ENDLESS)) for i in range(4)]
    open_stream = llm.generate(PROMPT, ENDLESS, request_id="open")
    await anext(open_stream)
    llm.process.process.kill()
    llm.process.process.wait()
    await asyncio.sleep(0.05)  # ZeroMQ has noticed, the watch loop has not: a send now would wait for a peer for ever
    begun = time.monotonic()
    await open_stream.aclose()
    llm.abort("0")
    with pytest.raises(EngineDeadError):
        await collect(llm, "new", LONG)
    assert time.monotonic() - begun < 30
    results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 30)
    assert all(isinstance(r, EngineDeadError) and "SIGKILL" in str(r) for r in results), results
    assert not llm.is_healthy()
    with pytest.raises(EngineDeadError):
        await llm.reset_prefix_cache()
    await asyncio.wait_for(llm.shutdown(drain_s=200), 60)  # nothing left to wait for


async def test_the_engine_leaves_signals_to_its_parent(model: str) -> None:
    llm = await AsyncLLM.start(config(model))
    try:
        stream = llm.generate(PROMPT, LONG, request_id="a")
        await anext(stream)
        for number in (signal.SIGTERM, signal.SIGINT):
            llm.process.process.send_signal(number)
        assert [output async for output in stream][-1].outputs[0].finish_reason == "length"
        assert joined(await collect(llm, "b", LONG))[2] == "length"  # the signals had come by then
    finally:
        await llm.shutdown()


async def test_shutdown_drains_then_fails_what_still_runs(model: str) -> None:
    llm = await AsyncLLM.start(config(model))
    short = asyncio.create_task(collect(llm, "short", SamplingParams(max_tokens=20, ignore_eos=True)))
    await asyncio.sleep(0.02)
    await llm.shutdown(drain_s=200)
    assert joined(await short)[2] == "length"

    llm = await AsyncLLM.start(config(model))
    stream = llm.generate(PROMPT, ENDLESS, request_id="long")
    await anext(stream)
    await llm.shutdown()
    await llm.shutdown()  # twice is no error
    with pytest.raises(EngineDeadError, match="shutting down"):
        async for _ in stream:
            pass


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"kv_cache_memory": 1024}, OutOfMemoryError, "--kv-cache-memory"),
        ({"max_model_len": 10**9}, ConfigError, "--max-model-len"),
        ({"device": "cuda"}, ConfigError, "--device cuda"),
        ({"load_format": "safetensors"}, ModelError, "safetensors"),
        ({"kv_cache_memory": None, "num_gpu_blocks_override": 10**12}, OutOfMemoryError, "--num-gpu-blocks-override"),
        ({"tensor_parallel_size": 2}, ConfigError, "--tensor-parallel-size"),
    ],
)
async def test_what_keeps_the_engine_from_starting_is_raised_here(model: str, changes: dict, error: type, match: str) -> None:
    process = None
    with pytest.raises(error, match=match):
        process = EngineProcess(config(model, **changes), model)
        await AsyncLLM.start(config(model, **changes), process=process)
    assert process is None or not process.alive and not os.path.exists(process.folder)


async def test_cancelled_while_loading(model: str) -> None:
    process = EngineProcess(config(model), model)
    task = asyncio.create_task(AsyncLLM.start(config(model), process=process))
    await asyncio.sleep(0.1)  # not even a fast machine has imported torch by then
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not process.alive and not os.path.exists(process.folder)


async def test_an_engine_that_dies_while_loading(model: str) -> None:
    process = EngineProcess(config(model), model)
    process.process.kill()
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        await asyncio.wait_for(AsyncLLM.start(config(model), process=process), 120)
    assert not os.path.exists(process.folder)


@pytest.mark.parametrize("when", ["loading", "serving"])
def test_killing_the_parent_ends_the_engine_and_leaves_no_folder(model: str, when: str, tmp_path: Path) -> None:
    code = f"""
import asyncio, sys
from octavo.config import EngineConfig
from octavo.frontend.async_llm import AsyncLLM
from octavo.frontend.engine_process import EngineProcess
async def main():
    config = EngineConfig(model={model!r}, load_format="dummy", kv_cache_memory=2**24, device="cpu")
    process = EngineProcess(config, {model!r})
    if {when!r} == "serving":
        await AsyncLLM.start(config, process=process)
    print(process.process.pid, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    parent = subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    engine = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    until(lambda: not (runs(engine) or os.listdir(tmp_path)))


def test_a_module_of_the_working_directory_is_not_imported(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('the wrong json')")
    (tmp_path / "torch.py").write_text("raise SystemExit('the wrong torch')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # a relative one would name the working directory

    async def start() -> None:
        llm = await AsyncLLM.start(config(model))
        await llm.shutdown()

    asyncio.run(start())
