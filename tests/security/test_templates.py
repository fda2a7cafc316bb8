"""Chat templates are programs that come with a model; requests bring variables. Neither reaches Python, or holds up the server."""

from __future__ import annotations

import threading
import time

import httpx
import pytest

from octavo.errors import RequestError
from octavo.frontend import template_sandbox
from octavo.frontend.chat_template import ChatTemplate
from octavo.server.mock import MockEngine

HELLO = [{"role": "user", "content": "hello"}]
CHAT = "/v1/chat/completions"

ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__ }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ self._TemplateReference__context }}",
    "{{ raise_exception.__globals__ }}",
    "{{ ''|attr('__class__') }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ dict.__call__.__globals__ }}",
    "{{ (messages|map(attribute='__class__')|list)[0] }}",
    "{{ '{0.__class__}'.format(messages) }}",
    "{{ '{a.__class__}'.format_map({'a': 1}) }}",
    "{{ lipsum.__globals__ }}",
    "{% set x = messages.append(1) %}{{ x }}",
    "{{ joiner.__init__.__globals__ }}",
    "{{ strftime_now.__globals__ }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os.environ }}",
    "{% extends '/etc/passwd' %}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_a_template_does_not_get_out(source):
    try:
        text = ChatTemplate(source).render(HELLO)
    except (RequestError, ValueError):
        return
    assert not any(word in text for word in ("class", "object", "root:", "uid=", "module", "globals", "PATH")), text


ENDLESS = [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% set ns = namespace(s='ab') %}{% for i in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s }}",
    "{{ 'a' * 10 ** 10 }}",
    "{{ 9 ** (9 ** 9) }}",
    "{{ ('a' * 30000000).replace('a', 'bbbbbbbbbbbbbbbbb') }}",
    "{{ '%099999999d' % 1 }}",
    "{{ 'x'.ljust(10 ** 10) }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ range(10 ** 9)|list|length }}",
]


@pytest.mark.parametrize("source", ENDLESS)
def test_a_template_does_not_run_for_ever(source, monkeypatch):
    monkeypatch.setattr(template_sandbox, "MAX_SECONDS", 0.3)
    start = time.thread_time()
    with pytest.raises(RequestError):
        ChatTemplate(source).render(HELLO)
    assert time.thread_time() - start < 3


class Loops:
    """A template that works as long as its variable says; it is watched which thread that is."""

    source = whole_source = "<|im_start|>"
    takes_tools = False
    threads: list[str]

    def __init__(self) -> None:
        self.threads, self.in_time = [], False
        self.begun, self.answered = threading.Event(), threading.Event()
        self.template = ChatTemplate("{% for a in range(n or 0) %}{% for b in range(n) %}{% endfor %}{% endfor %}{{ messages[0].content }}")

    def render(self, messages, *, tools=None, **variables):
        self.threads.append(threading.current_thread().name)
        if variables.get("n"):
            self.begun.set()
            self.in_time = self.answered.wait(30)
        return self.template.render(messages, **{"n": 0, **variables})


def test_variables_of_a_request_do_not_hold_up_the_loop(start_server, monkeypatch):
    """A variable that makes the template work for its whole time: the request is refused, and others are answered meanwhile.

    It does not begin its work before they were: a loop that it held up would never answer.
    """
    monkeypatch.setattr(template_sandbox, "MAX_SECONDS", 1.0)
    engine = MockEngine()
    engine.chat_template = loops = Loops()
    running = start_server(engine)
    answers: list[httpx.Response] = []

    def slow() -> None:
        answers.append(httpx.post(running.url + CHAT, json={"messages": HELLO, "chat_template_kwargs": {"n": 99999}}, timeout=90))

    with httpx.Client(base_url=running.url) as http:
        http.get("/health")
        thread = threading.Thread(target=slow)
        thread.start()
        assert loops.begun.wait(60)
        assert [http.get("/health").status_code for _ in range(10)] == [200] * 10
        loops.answered.set()
        while thread.is_alive():
            assert http.get("/health").status_code == 200
        assert loops.in_time
        assert answers[0].status_code == 400 and "more than 1 seconds" in answers[0].json()["error"]["message"]
        assert http.post(CHAT, json={"messages": HELLO, "max_tokens": 2}).status_code == 200
    assert loops.threads[0].startswith("octavo-text") and not loops.threads[1].startswith("octavo-text")


NAMES = ["messages", "tools", "add_generation_prompt", "self", "__class__", "_x", "raise_exception", "range", "namespace"]


@pytest.mark.parametrize("name", NAMES)
def test_variables_replace_nothing(http, name):
    """Names with a meaning of their own are refused or stay what they are."""
    answer = http.post(CHAT, json={"messages": HELLO, "max_tokens": 2, "chat_template_kwargs": {name: "{{ 1 }}"}})
    assert answer.status_code in (200, 400)
    if name in ("messages", "tools", "add_generation_prompt", "self"):
        assert answer.status_code == 400 and name in answer.json()["error"]["message"]


def test_a_message_is_no_template():
    text = ChatTemplate("{{ messages[0].content }}").render([{"role": "user", "content": "{{ 7 * 7 }}{% raw %}"}])
    assert text == "{{ 7 * 7 }}{% raw %}"


def test_a_template_in_a_request_is_refused(http):
    answer = http.post(CHAT, json={"messages": HELLO, "chat_template": "{{ 7 * 7 }}"})
    assert answer.status_code == 400 and "--chat-template" in answer.json()["error"]["message"]
