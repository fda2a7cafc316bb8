"""Batches in several threads share one collector."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest

from octavo.garbage import RARE, no_collections, rare_collections

BEFORE = (701, 11, 12)


@pytest.fixture(autouse=True)
def _thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(*BEFORE)
    yield
    gc.set_threshold(*before)


def test_the_last_thread_out_puts_back_what_the_first_one_found() -> None:
    first_in, second_in, first_out = threading.Event(), threading.Event(), threading.Event()
    seen = []

    def first() -> None:
        with rare_collections():
            first_in.set()
            second_in.wait(60)
        seen.append(gc.get_threshold())  # the second one's batch goes on
        first_out.set()

    def second() -> None:
        first_in.wait(60)
        with rare_collections():
            second_in.set()
            first_out.wait(60)

    threads = [threading.Thread(target=run) for run in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert seen == [RARE]
    assert gc.get_threshold() == BEFORE


def test_a_batch_within_a_batch_and_one_that_fails() -> None:
    with pytest.raises(KeyboardInterrupt), rare_collections():
        with rare_collections():
            assert gc.get_threshold() == RARE
        assert gc.get_threshold() == RARE
        raise KeyboardInterrupt
    assert gc.get_threshold() == BEFORE


@pytest.mark.parametrize("first_out", ["a", "b"])
def test_two_may_forbid_collections_at_once(first_out: str) -> None:
    a, b = no_collections(), no_collections()
    a.__enter__()
    b.__enter__()
    assert not gc.isenabled()
    for context in (a, b) if first_out == "a" else (b, a):
        context.__exit__(None, None, None)
    assert gc.isenabled()


def test_who_has_turned_collections_off_finds_them_off() -> None:
    gc.disable()
    try:
        with pytest.raises(RuntimeError), no_collections():
            raise RuntimeError
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_ctrl_c_on_the_way_in_leaves_collections_on(monkeypatch: pytest.MonkeyPatch) -> None:
    disable = gc.disable

    def interrupted() -> None:
        disable()
        raise KeyboardInterrupt

    monkeypatch.setattr(gc, "disable", interrupted)
    with pytest.raises(KeyboardInterrupt), no_collections():
        pass
    assert gc.isenabled()
