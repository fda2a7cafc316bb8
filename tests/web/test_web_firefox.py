"""The page in Firefox as Mozilla makes it, under its own policy: it starts, answers, counts, and fits a phone.

Spoken to by Marionette, Firefox's own protocol, which needs nothing but a socket; the other tests need more than Playwright
can do with a Firefox that it did not build. Skipped, with the reason, where there is none.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo.server.mock import MockEngine
from tests.server.conftest import Running, running_server
from tests.waiting import until

ENTER = "\ue007"
PREFERENCES = {
    "marionette.port": 0,
    "app.update.enabled": False,
    "browser.shell.checkDefaultBrowser": False,
    "datareporting.policy.dataSubmissionEnabled": False,
    "network.captive-portal-service.enabled": False,
    "network.connectivity-service.enabled": False,
    "toolkit.telemetry.reportingpolicy.firstRun": False,
}


class Firefox:
    """Messages are "length:[kind, number, command, parameters]", answers "length:[1, number, error, result]"."""

    def __init__(self, program: str, folder: Path) -> None:
        profile = folder / "profile"
        profile.mkdir()
        lines = (f"user_pref({json.dumps(name)}, {json.dumps(value)});\n" for name, value in PREFERENCES.items())
        (profile / "user.js").write_text("".join(lines))
        self.log, port = folder / "output", profile / "MarionetteActivePort"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [program, "--headless", "--no-remote", "--marionette", "--remote-allow-system-access", "--profile", profile],
                env={**os.environ, "HOME": str(folder)},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        end = time.monotonic() + 120
        while not (port.exists() and port.read_text()):
            assert self.process.poll() is None and time.monotonic() < end, self.log.read_text()
            time.sleep(0.05)
        self.socket = socket.create_connection(("127.0.0.1", int(port.read_text())), timeout=120)
        self.buffer, self.number = b"", 0
        self._read()  # its greeting
        self("WebDriver:NewSession", strictFileInteractability=True)

    def __call__(self, command: str, **parameters: Any) -> Any:
        self.number += 1
        message = json.dumps([0, self.number, command, parameters]).encode()
        self.socket.sendall(b"%d:%b" % (len(message), message))
        _, number, error, result = self._read()
        assert number == self.number and error is None, error
        return result

    def _read(self) -> Any:
        while b":" not in self.buffer or len(self.buffer) < self._end():
            part = self.socket.recv(2**16)
            assert part, "Firefox has gone"
            self.buffer += part
        end = self._end()
        body, self.buffer = self.buffer[self.buffer.index(b":") + 1 : end], self.buffer[end:]
        return json.loads(body)

    def _end(self) -> int:
        length = self.buffer.partition(b":")[0]
        return len(length) + 1 + int(length)

    def value(self, expression: str) -> Any:
        """In a sandbox that sees the page and is not bound by its policy."""
        return self("WebDriver:ExecuteScript", script=f"return {expression};", args=[])["value"]

    def until(self, expression: str) -> None:
        until(lambda: self.value(expression), every=0.02)

    def errors(self, url: str) -> list[str]:
        """What the browser's console has of errors on ``url``'s pages, since the start."""
        self("Marionette:SetContext", value="chrome")
        messages = self.value("Services.console.getMessageArray().map(m => m.message)")
        self("Marionette:SetContext", value="content")
        return [m for m in messages if m.startswith("[JavaScript Error") and url in m]

    def element(self, selector: str) -> str:
        return next(iter(self("WebDriver:FindElement", using="css selector", value=selector)["value"].values()))

    def open(self, url: str) -> None:
        self("WebDriver:Navigate", url=url)
        self.until("document.documentElement.dataset.ready !== undefined")

    def close(self) -> None:
        self.socket.close()
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@pytest.fixture(scope="module")
def firefox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Firefox]:
    program = shutil.which("firefox") or shutil.which("firefox-esr")
    if program is None:
        pytest.skip("needs Firefox (Debian: apt-get install firefox-esr)")
    firefox = Firefox(program, tmp_path_factory.mktemp("firefox"))
    try:
        yield firefox
    finally:
        firefox.close()


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running_server(MockEngine(tick_s=0.005, length=60)) as running:
        yield running


def test_it_answers_and_counts(firefox: Firefox, server: Running) -> None:
    firefox.open(server.url + "/")
    firefox("WebDriver:ElementSendKeys", id=firefox.element("#prompt"), text="hello" + ENTER)
    firefox.until("document.querySelector('.message.answer:last-child:not(.writing)') !== null")
    answer = firefox.value("document.querySelector('.message.answer').textContent")
    assert re.search(r"6[01] tokens", answer) and len(answer) > 100, answer
    firefox("WebDriver:ElementClick", id=firefox.element("#tab-dashboard"))
    firefox.until("/Finished\\s*1\\b/.test(document.querySelector('#dashboard').innerText)")
    firefox.open(server.url + "/")
    firefox.until("document.querySelectorAll('#conversations a').length === 1")  # kept in the browser


def test_a_phones_side_panel(firefox: Firefox, server: Running) -> None:
    """Firefox's windows are 450 pixels wide at least; the page's narrow form begins above that."""
    firefox("WebDriver:SetWindowRect", width=450, height=740)
    firefox.open(server.url + "/")
    firefox.until("document.querySelector('#sidebar').inert")
    firefox("WebDriver:ElementClick", id=firefox.element("#open-sidebar"))
    firefox.until("document.querySelector('#page').inert && document.activeElement.id === 'close-sidebar'")
    until(lambda: firefox("WebDriver:IsElementDisplayed", id=firefox.element("#new-chat"))["value"])  # it glides in
    assert firefox.value("document.documentElement.scrollWidth <= innerWidth")
    firefox.until("document.querySelector('#sidebar').getAnimations().length === 0")
    firefox("WebDriver:ElementClick", id=firefox.element("#close-sidebar"))
    firefox.until("!document.querySelector('#page').inert")


def test_it_broke_nothing(firefox: Firefox, server: Running) -> None:
    """Neither errors of scripts, nor what the policy forbids, in all of the above. (This check can fail.)"""
    assert firefox.errors(server.url) == []
    firefox.open(server.url + "/")
    firefox.value("document.body.setAttribute('onclick', 'forbidden()')")
    firefox("WebDriver:ExecuteScript", script="document.body.click()", args=[])
    assert "blocked an event handler" in "".join(firefox.errors(server.url))
