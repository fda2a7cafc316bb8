"""The short way of outputs past their reader: nothing is lost, doubled or out of order, whoever takes what."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from octavo.frontend.async_llm import AsyncLLM
from octavo.frontend.mailbox import Mailbox, Outputs
from octavo.frontend.outputs import RequestOutput
from octavo.frontend.params import SamplingParams
from tests.frontend.test_async_llm import PROMPT, collect, config, joined, wait_until_idle
from tests.tiny_model import make_tiny_model


class Numbers:
    """Outputs that are numbers."""

    def __init__(self) -> None:
        self.new: list[int] = []
        self.finished = False
        self.error: str | None = None

    def drain(self) -> Any:
        new, self.new = self.new, []
        return new


@pytest.mark.parametrize("seed", range(20))
async def test_every_output_once_and_in_order(seed: int) -> None:
    """A reader that is busy now and then, and a taker that is not always willing."""
    rng = random.Random(seed)
    outputs, seen, took = Numbers(), [], 0
    reading = False

    def take(outputs: Outputs) -> bool:
        nonlocal took
        assert not reading, "while its reader is at work"
        if rng.random() < 0.3:
            return False
        new: Any = outputs.drain()
        seen.extend(new)
        took += 1
        return True

    mailbox = Mailbox(outputs, take)

    async def read() -> None:
        nonlocal reading
        while not outputs.finished or outputs.new:
            if not outputs.new:
                await mailbox.wait(asyncio.get_running_loop())
            reading = True
            seen.extend(outputs.drain())
            for _ in range(rng.randrange(3)):
                await asyncio.sleep(0)
            reading = False

    reader = asyncio.create_task(read())
    for number in range(200):
        outputs.new.append(number)
        outputs.finished = number == 199
        mailbox.deliver()
        for _ in range(rng.randrange(3)):
            await asyncio.sleep(0)
    await reader
    assert seen == list(range(200)) and took > 20


async def test_what_a_taker_raises_reaches_the_reader() -> None:
    def take(outputs: Outputs) -> bool:
        raise ZeroDivisionError("a fault")

    outputs = Numbers()
    mailbox = Mailbox(outputs, take)
    reader = asyncio.create_task(mailbox.wait(asyncio.get_running_loop()))
    await asyncio.sleep(0)
    mailbox.deliver()
    await reader
    assert isinstance(mailbox.broken, ZeroDivisionError)


async def test_the_end_is_the_readers() -> None:
    outputs = Numbers()
    mailbox = Mailbox(outputs, lambda outputs: pytest.fail("the last output was offered"))
    for outputs.finished, outputs.error in ((True, None), (False, "refused")):
        reader = asyncio.create_task(mailbox.wait(asyncio.get_running_loop()))
        await asyncio.sleep(0)
        mailbox.deliver()
        await reader


async def test_with_a_taker_an_answer_is_the_same(tmp_path: Path) -> None:
    llm = await AsyncLLM.start(config(str(make_tiny_model(tmp_path / "model"))))
    try:
        for fields in ({}, {"n": 3, "logprobs": 2}, {"stop": ["z", "q"]}):
            params = SamplingParams(max_tokens=400, ignore_eos=True, temperature=0, **fields)
            expected = await collect(llm, "plain", params)
            taken = 0
            for _ in range(10):  # where this process gets to run too seldom, few outputs are left to be taken, or none
                outputs: list[RequestOutput] = []

                def take(source: Outputs, outputs: list[RequestOutput] = outputs) -> bool:
                    nonlocal taken
                    taken += 1
                    outputs.append(source.drain())
                    return True

                async for output in llm.generate(PROMPT, params, request_id="taken", taker=take):
                    outputs.append(output)
                for index in range(params.n):
                    assert joined(outputs, index) == joined(expected, index)
                assert outputs[-1].finished and not any(o.finished for o in outputs[:-1])
                if taken > 5:
                    break
            assert taken > 5 or fields.get("stop"), (len(outputs), len(expected), taken)
        await wait_until_idle(llm)
        assert not llm.num_unfinished
    finally:
        await llm.shutdown()
