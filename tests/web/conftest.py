"""Headless Chromium by Playwright, against real servers. Skipped, with the reason, where either is missing."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from octavo.server.mock import MockEngine
from tests.e2e.demo import demo_model_path
from tests.e2e.server import RunningServer
from tests.server.conftest import Running, running_server
from tests.waiting import PATIENCE_S

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "microsoft-edge")
CHECKS = (Path(__file__).parent / "checks.js").read_text()
FLAGS = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]


@pytest.fixture(scope="session")
def chromium() -> str:
    """The browser's path: OCTAVO_TEST_BROWSER, else Playwright's own Chromium, else the system's; the first that starts."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs the package playwright (pip install playwright)")
    with sync_api.sync_playwright() as playwright:
        named = os.environ.get("OCTAVO_TEST_BROWSER")
        candidates = [named] if named else [playwright.chromium.executable_path, *filter(None, map(shutil.which, NAMES))]
        errors = []
        for path in filter(os.path.exists, candidates):
            try:
                playwright.chromium.launch(executable_path=path, args=FLAGS).close()
                return path
            except sync_api.Error as error:
                errors.append(f"{path}: {str(error).splitlines()[0]}")
    pytest.skip(f"needs Chromium (apt-get install chromium, or playwright install chromium): {'; '.join(errors) or 'none found'}")


@pytest.fixture(scope="module")
def browser(chromium: str) -> Iterator[Any]:
    """One for a file: while Playwright's synchronous interface is open, asyncio's tests can't run in the same process."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        yield browser
        browser.close()


@dataclass
class Tab:
    """A page in a context of its own (storage, permissions), which may not speak to other hosts nor complain in its console."""

    page: Any
    url: str
    complaints: list[str] = field(default_factory=list)
    hosts: set[str] = field(default_factory=set)

    def open(self, where: str = "") -> Any:
        self.page.goto(self.url + "/" + where)
        self.page.wait_for_selector("html[data-ready]")
        return self.page

    def send(self, text: str) -> None:
        self.page.fill("#prompt", text)
        self.page.press("#prompt", "Enter")

    def finished(self, timeout_s: float = PATIENCE_S) -> Any:
        """The last answer, when it is over."""
        self.page.wait_for_selector(".message.answer:last-child:not(.writing)", timeout=1e3 * timeout_s)
        return self.page.locator(".message.answer").last

    def check(self, function: str, *arguments: Any) -> Any:
        """What a function of checks.js says."""
        call = f"{function}({', '.join(map(json.dumps, arguments))})"
        return self.page.evaluate(f"(() => {{ {CHECKS}\nreturn {call}; }})()")

    def until(self, expression: str | Callable[[], Any], timeout_s: float = PATIENCE_S) -> None:
        """Wait until a JavaScript expression, or a function here, is true.

        Playwright's own wait evaluates strings inside the page, which its policy forbids.
        """
        end = time.monotonic() + timeout_s
        while not (value := expression() if callable(expression) else self.page.evaluate(expression)):
            assert time.monotonic() < end, (expression, value)
            self.page.wait_for_timeout(20)

    def answers(self, text: str, *, reasoning: str = "", finish: str = "stop", usage: bool = True, cut: int = 7) -> None:
        """Let chat requests be answered with ``text``, in pieces of ``cut`` characters, instead of by the server."""
        self.page.unroute_all()
        body = stream(text, reasoning, finish, usage, cut)
        self.page.route("**/v1/chat/completions", lambda r: r.fulfill(status=200, content_type="text/event-stream", body=body))


def stream(text: str, reasoning: str = "", finish: str = "stop", usage: bool = True, cut: int = 7) -> str:
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    deltas += [{"reasoning_content": reasoning[i : i + cut]} for i in range(0, len(reasoning), cut)]
    deltas += [{"content": text[i : i + cut]} for i in range(0, len(text), cut)]
    chunks: list[dict[str, Any]] = [{"choices": [{"index": 0, "delta": d, "finish_reason": None}]} for d in deltas]
    chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
    if usage:
        counts = {"prompt_tokens": 42, "completion_tokens": len(deltas), "prompt_tokens_details": {"cached_tokens": 16}}
        chunks.append({"choices": [], "usage": counts})
    return "".join(f"data: {json.dumps(c)}\n\n" for c in chunks) + "data: [DONE]\n\n"


@pytest.fixture
def new_tab(browser: Any, start_mock: Any) -> Iterator[Callable[..., Tab]]:
    """new_tab(url, width, height, allow=(), **context options) -> Tab; every complaint must contain one of ``allow``.

    Pages are closed before the servers of ``start_mock``: a page whose server has gone complains.
    """
    with contextlib.ExitStack() as stack:

        def make(url: str, width: int = 1280, height: int = 800, allow: tuple[str, ...] = (), **options: Any) -> Tab:
            context = browser.new_context(viewport={"width": width, "height": height}, **options)
            context.set_default_timeout(1e3 * PATIENCE_S)
            tab = Tab(context.new_page(), url.rstrip("/"))
            tab.page.on("console", lambda m: m.type in ("error", "warning") and tab.complaints.append(m.text))
            tab.page.on("pageerror", lambda e: tab.complaints.append(str(e)))
            tab.page.on("request", lambda r: tab.hosts.add(urlsplit(r.url).netloc) if not r.url.startswith(("blob:", "data:")) else None)
            stack.callback(check, tab, allow)
            stack.callback(context.close)
            return tab

        yield make


def check(tab: Tab, allow: tuple[str, ...]) -> None:
    assert tab.hosts <= {urlsplit(tab.url).netloc}
    assert not [c for c in tab.complaints if not any(a in c for a in allow)], tab.complaints


@pytest.fixture(scope="session")
def demo(chromium: str) -> Iterator[RunningServer]:
    """The whole thing: ``octavo serve`` with the demo model, in processes of its own."""
    server = RunningServer("--served-model-name", "demo", "--max-model-len", "4096", "--kv-cache-memory", "256M", "--", demo_model_path())
    yield server
    assert server.stop() == 0


@pytest.fixture(scope="session")
def mock(chromium: str) -> Iterator[Running]:
    """The server with an engine that writes 300 tokens, 5 ms each."""
    with running_server(MockEngine(tick_s=0.005, length=300)) as running:
        yield running


@pytest.fixture
def start_mock() -> Iterator[Callable[..., Running]]:
    with contextlib.ExitStack() as stack:
        yield lambda engine=None, **options: stack.enter_context(running_server(engine, **options))


@pytest.fixture
def tab(new_tab: Callable[..., Tab], mock: Running) -> Tab:
    """A desktop's page on the mock server, opened."""
    tab = new_tab(mock.url, permissions=["clipboard-read", "clipboard-write"])
    tab.open()
    return tab
