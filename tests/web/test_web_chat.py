"""The chat, as people use it."""

from __future__ import annotations

import json
import re

import pytest

from octavo.server.mock import MockEngine

# -- against the demo model


def test_a_message_is_answered_word_by_word(demo, new_tab):
    tab = new_tab(demo.url)
    page = tab.open()
    assert page.locator("#model").input_value() == "demo"
    page.evaluate("""() => {
        window.lengths = new Set();
        new MutationObserver(() => lengths.add(document.querySelector(".answer .prose")?.textContent.length ?? 0))
            .observe(document.querySelector("#thread"), {childList: true, subtree: true, characterData: true});
    }""")
    page.click("#toggle-panel")
    page.fill("#s-temperature", "0")
    page.fill("#s-max_tokens", "40")
    before = demo.metric("vllm:generation_tokens_total")
    tab.send("What is the capital of France?")
    answer = tab.finished()
    assert "Paris" in answer.locator(".prose").inner_text()
    stats = answer.locator(".stats").inner_text()
    tokens = int(re.search(r"(\d+) tokens\b", stats).group(1))  # type: ignore[union-attr]
    tab.until(lambda: tokens == demo.metric("vllm:generation_tokens_total") - before)
    assert re.search(r"first token [\d.]+ m?s", stats) and re.search(r"prompt \d+", stats)
    assert "of 4,096 tokens of context" in page.locator("#context").inner_text()
    page.click("#new-chat")
    page.fill("#s-max_tokens", "200")  # so long that it takes many frames on a fast machine, too
    page.evaluate("lengths.clear()")
    goes_on(page)
    tab.send("Count from one to five hundred in words, one number a line.")
    answer = tab.finished()
    assert len(page.evaluate("[...lengths]")) >= 5
    assert re.search(r"\b200 tokens\b.*[\d.]+ tokens/s", answer.locator(".stats").inner_text(), re.S)


def goes_on(page):
    """Let the model's answers be as long as they may: it has ended some after ten characters."""
    longer = {"ignore_eos": True}
    page.route("**/v1/chat/completions", lambda r: r.continue_(post_data=json.dumps({**json.loads(r.request.post_data), **longer})))


def test_stop_ends_the_request_on_the_server(demo, new_tab):
    tab = new_tab(demo.url)
    page = tab.open()
    goes_on(page)
    tab.send("Count from one to five hundred in words, one number a line.")
    tab.until("document.querySelector('.answer .prose')?.textContent.length > 10")
    assert page.locator("#send").get_attribute("aria-label") == "Stop"
    page.click("#send")
    answer = tab.finished()
    assert "stopped" in answer.locator(".stats").inner_text()
    text = answer.locator(".prose").inner_text()
    tab.until("/≈ \\d+ tokens/.test(document.querySelector('.answer .stats').textContent)")
    tab.until(lambda: demo.metric("vllm:num_requests_running") == 0)
    assert answer.locator(".prose").inner_text() == text and page.locator("#send").get_attribute("aria-label") == "Send"


# -- keys


def test_enter_sends_shift_enter_does_not_escape_stops(new_tab, start_mock):
    running = start_mock(MockEngine(tick_s=0.03, length=2000))
    tab = new_tab(running.url)
    page = tab.open()
    page.click("#prompt")
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    assert page.locator("#prompt").input_value() == "one\ntwo" and page.locator(".message").count() == 0
    page.keyboard.press("Enter")
    assert page.locator(".bubble").inner_text() == "one\ntwo" and page.locator("#prompt").input_value() == ""
    page.wait_for_selector(".writing .prose p")
    page.keyboard.press("Enter")  # nothing to send, and nothing happens
    assert page.locator(".message").count() == 2
    page.keyboard.press("Escape")
    assert "stopped" in tab.finished().locator(".stats").inner_text()
    running.wait_idle()
    page.keyboard.press("Enter")
    assert page.locator(".message").count() == 2
    page.fill("#prompt", "three")
    page.keyboard.press("Control+Shift+O")
    assert page.locator(".message").count() == 0 and page.locator("#conversations a").count() == 1


# -- one conversation


def test_what_is_sent(tab):
    page = tab.page
    bodies: list[dict] = []
    tab.answers("yes")
    page.on("request", lambda r: bodies.append(json.loads(r.post_data)) if r.url.endswith("completions") else None)
    tab.send("first")
    tab.finished()
    assert bodies[0] == {
        "model": "mock-model",
        "messages": [{"role": "user", "content": "first"}],
        "max_tokens": 2048,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    page.select_option("#model", "second-name")
    page.click("#toggle-panel")
    values = {"temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "max_tokens": 99, "seed": 7}
    values |= {"repetition_penalty": 1.1, "presence_penalty": -0.5, "frequency_penalty": 0.25}
    for name, value in values.items():
        page.fill(f"#s-{name}", str(value))
    page.fill("#s-stop", "END\n\\n\\n")
    page.select_option("#s-thinking", "off")
    page.fill("#system", "Be brief.")
    tab.send("second")
    tab.finished()
    talk = [("system", "Be brief."), ("user", "first"), ("assistant", "yes"), ("user", "second")]
    assert bodies[1]["messages"] == [{"role": r, "content": c} for r, c in talk]
    assert {k: bodies[1][k] for k in values} == values and bodies[1]["stop"] == ["END", "\n\n"]
    assert bodies[1]["model"] == "second-name" and bodies[1]["chat_template_kwargs"] == {"enable_thinking": False}
    page.reload()
    page.wait_for_selector("html[data-ready]")
    assert page.locator("#s-top_k").input_value() == "40" and page.locator("#system").input_value() == "Be brief."
    page.click("#toggle-panel")
    page.click("#reset-sampling")
    assert page.locator("#s-top_k").input_value() == "" and page.locator("#s-max_tokens").input_value() == "2048"


WRONG = [("temperature", "3", "Between 0 and 2"), ("seed", "1.5", "whole"), ("top_k", "x", "number")]


@pytest.mark.parametrize(("name", "value", "says"), WRONG)
def test_a_wrong_setting_is_said_and_not_sent(tab, name, value, says):
    page = tab.page
    page.click("#toggle-panel")
    page.fill(f"#s-{name}", value)
    page.click("#close-panel")
    tab.send("hello")
    assert page.locator(".message").count() == 0 and page.locator("#prompt").input_value() == "hello"
    assert page.evaluate("document.activeElement.id") == f"s-{name}"
    assert page.locator(f"#s-{name}").get_attribute("aria-invalid") == "true" and says in page.locator(f"#s-{name}-error").inner_text()


def test_regenerate_edit_continue(tab):
    page = tab.page
    tab.answers("A", finish="length")
    tab.send("question")
    tab.finished()
    tab.answers("B", finish="length")
    page.get_by_label("Write again").click()
    tab.until("document.querySelector('.answer .prose').textContent === 'B'")
    answer = tab.finished()
    assert answer.locator(".place").inner_text() == "2 / 2"
    page.get_by_label("Previous version").click()
    assert answer.locator(".prose").inner_text() == "A"
    bodies: list[dict] = []
    page.on("request", lambda r: bodies.append(json.loads(r.post_data)) if r.url.endswith("completions") else None)
    tab.answers("C")
    page.get_by_label("Continue this answer").click()
    tab.until("document.querySelector('.answer .prose').textContent === 'AC'")
    tab.finished()
    assert bodies[0]["continue_final_message"] is True and bodies[0]["messages"][-1] == {"role": "assistant", "content": "A"}
    assert answer.locator(".stats").inner_text().startswith("4 tokens")  # two by two requests
    tab.answers("D")
    page.get_by_label("Edit and send again").click()
    page.fill(".editor textarea", "another question")
    page.get_by_role("button", name="Send", exact=True).first.click()
    tab.until("document.querySelector('.answer:last-child .prose')?.textContent === 'D'")
    assert page.locator(".message").count() == 2 and page.locator(".bubble").inner_text() == "another question"
    page.get_by_label("Edit answer").click()
    page.fill(".editor textarea", "E")
    page.get_by_role("button", name="Save").click()
    tab.answers("F")
    tab.send("go on")
    tab.until("document.querySelector('.answer:last-child .prose')?.textContent === 'F'")
    assert [m["content"] for m in bodies[-1]["messages"]] == ["another question", "E", "go on"]


def test_copy(tab):
    page = tab.page
    tab.answers("Some *text*.\n\n```py\nprint('a')\n\nprint(2)\n```\n")
    tab.send("code, please")
    tab.finished()
    page.get_by_label("Copy answer").click()
    tab.until("document.querySelector('#toast.shown')?.textContent === 'Copied'")
    assert page.evaluate("navigator.clipboard.readText()") == "Some *text*.\n\n```py\nprint('a')\n\nprint(2)\n```\n"
    page.get_by_role("button", name="Copy", exact=True).click()
    tab.until("document.querySelector('.copy-code').textContent === 'Copied'")
    assert page.evaluate("navigator.clipboard.readText()") == "print('a')\n\nprint(2)"


def test_reasoning_is_folded(tab):
    tab.answers("The answer.", reasoning="First this, then that.")
    tab.send("why?")
    answer = tab.finished()
    details = answer.locator("details")
    assert details.get_attribute("open") is None and not answer.locator(".thought").is_visible()
    details.locator("summary").click()
    tab.until("document.querySelector('.thought').textContent === 'First this, then that.'")
    assert re.fullmatch(r"Thoughts|Thought for .*s", details.locator("summary").inner_text())
    assert answer.locator(".prose").inner_text() == "The answer."


# -- several conversations


def test_conversations_live_through_a_reload(tab, tmp_path):
    page = tab.page
    for text in ("alpha", "beta"):
        tab.answers(f"about {text}")
        page.click("#new-chat")
        tab.send(text)
        tab.until(f"document.querySelector('.answer .prose')?.textContent === 'about {text}'")
        tab.finished()
    page.reload()
    page.wait_for_selector("html[data-ready]")
    assert page.locator("#conversations a").all_inner_texts() == ["beta", "alpha"]
    assert page.locator(".answer .prose").inner_text() == "about beta"  # the address says which
    page.click("#conversations a >> text=alpha")
    tab.until("document.querySelector('.answer .prose').textContent === 'about alpha'")

    page.get_by_label("Actions for alpha").click()
    page.get_by_role("menuitem", name="Rename").click()
    page.keyboard.type("gamma")
    page.keyboard.press("Enter")
    page.get_by_label("Actions for gamma").click()
    with page.expect_download() as download:
        page.get_by_role("menuitem", name="Export as JSON").click()
    exported = json.loads(download.value.path().read_text())["conversations"]
    assert download.value.suggested_filename == "gamma.json" and exported[0]["title"] == "gamma"
    assert exported[0]["messages"][1]["versions"][0]["text"] == "about alpha"
    page.get_by_label("Actions for gamma").click()
    with page.expect_download() as download:
        page.get_by_role("menuitem", name="Export as Markdown").click()
    assert download.value.path().read_text() == "# gamma\n\n## You\n\nalpha\n\n## mock-model\n\nabout alpha\n"
    with page.expect_download() as download:
        page.click("#export-all")
    assert len(json.loads(download.value.path().read_text())["conversations"]) == 2

    page.get_by_label("Actions for gamma").click()
    page.get_by_role("menuitem", name="Delete").click()
    page.click("#confirm >> text=Cancel")
    assert page.locator("#conversations a").count() == 2
    page.get_by_label("Actions for gamma").click()
    page.get_by_role("menuitem", name="Delete").click()
    page.click("#confirm-yes")
    tab.until("document.querySelectorAll('#conversations a').length === 1")
    assert page.locator(".message").count() == 0
    page.reload()
    page.wait_for_selector("html[data-ready]")
    assert page.locator("#conversations a").all_inner_texts() == ["beta"]


def test_an_answer_goes_on_while_another_conversation_is_shown(new_tab, start_mock):
    running = start_mock(MockEngine(tick_s=0.05, length=2000))
    tab = new_tab(running.url)
    page = tab.open()
    tab.send("write")
    page.wait_for_selector(".writing .prose p")
    page.click("#new-chat")
    assert page.locator(".message").count() == 0 and page.locator("#send").get_attribute("aria-label") == "Send"
    page.wait_for_selector("#conversations .pulse")
    page.click("#conversations a >> text=write")
    assert "tokens" not in page.locator(".answer .stats").inner_text()
    running.engine.tick_s = 0.0  # it would take a minute; all that was to be seen meanwhile has been
    answer = tab.finished()
    assert "2,001 tokens" in answer.locator(".stats").inner_text()
    tab.until(lambda: page.locator("#conversations .pulse").count() == 0)
    text = answer.locator(".prose").inner_text()
    page.reload()
    page.wait_for_selector("html[data-ready]")
    assert page.locator(".answer .prose").inner_text() == text


def test_another_tab_sees_what_this_one_did(tab):
    page = tab.page
    other = page.context.new_page()
    other.goto(tab.url)
    other.wait_for_selector("html[data-ready]")
    tab.answers("there")
    tab.send("here")
    tab.finished()
    other.wait_for_selector("#conversations a >> text=here")


# -- what goes wrong


def test_the_key_is_asked_for(new_tab, start_mock):
    running = start_mock(api_key=("right-key",), metrics_require_api_key=True)
    tab = new_tab(running.url, allow=("401",))
    page = tab.open()
    assert page.locator("#key-dialog").evaluate("d => d.open")
    page.fill("#key", "wrong-key")
    page.keyboard.press("Enter")
    page.wait_for_selector("#key-error:not([hidden])")
    assert "did not accept" in page.locator("#key-error").inner_text()
    page.fill("#key", "right-key")
    page.keyboard.press("Enter")
    page.wait_for_selector("#key-dialog", state="hidden")
    page.wait_for_selector('#status[data-state="up"]')
    tab.send("hello")
    assert tab.finished().locator(".prose").inner_text()
    page.reload()
    page.wait_for_selector('#status[data-state="up"]')
    assert not page.locator("#key-dialog").evaluate("d => d.open")
    page.goto(running.url + "/#dashboard")
    tab.until("document.querySelector('.tile .value').textContent !== '–'")
    page.click("#change-key")
    page.click("#key-forget")
    page.wait_for_selector("#key-dialog[open]")
    assert page.evaluate("JSON.stringify([localStorage, sessionStorage])").count("right-key") == 0


def test_a_key_can_be_for_this_tab_only(new_tab, start_mock):
    running = start_mock(api_key=("right-key",))
    tab = new_tab(running.url, allow=("401",))
    page = tab.open()
    page.uncheck("#key-remember")
    page.fill("#key", "right-key")
    page.click("text=Use this key")
    page.wait_for_selector("#key-dialog", state="hidden")
    assert page.evaluate("[sessionStorage['octavo.key'], localStorage['octavo.key'] ?? null]") == ["right-key", None]


def test_errors_are_shown_and_can_be_tried_again(new_tab, start_mock):
    running = start_mock(MockEngine(tick_s=0.002, length=20))
    tab = new_tab(running.url, allow=("400", "503", "ERR_", "500"))
    page = tab.open()
    tab.send("long " * 3000)
    problem = tab.finished().locator(".problem")
    assert "context" in problem.inner_text() and "refused" in problem.inner_text()
    page.click("#new-chat")
    body = 'data: {"choices":[{"index":0,"delta":{"content":"half"},"finish_reason":null}]}\n\ndata: {"error":{"message":"It broke."}}\n\n'
    page.route("**/v1/chat/completions", lambda r: r.fulfill(status=200, content_type="text/event-stream", body=body))
    tab.send("hi")
    answer = tab.finished()
    assert answer.locator(".prose").inner_text() == "half" and "It broke." in answer.locator(".problem").inner_text()
    page.unroute_all()
    half = body.split("\n\n")[0] + "\n\n"
    page.route("**/v1/chat/completions", lambda r: r.fulfill(status=200, content_type="text/event-stream", body=half))
    page.get_by_text("Try again").click()
    tab.until("document.querySelector('.answer .problem')?.textContent.includes('ended before')")
    page.unroute_all()
    page.route("**/v1/chat/completions", lambda r: r.abort())
    page.get_by_label("Write again").click()
    tab.until("document.querySelector('.answer .problem')?.textContent.includes('be reached')")
    page.unroute_all()
    page.get_by_text("Try again").click()
    tab.until("document.querySelector('.answer .problem').hidden")
    assert tab.finished().locator(".prose").inner_text()


def test_under_a_prefix(new_tab, start_mock):
    """The page asks for everything relative to itself, so a proxy may put it anywhere."""
    running = start_mock()
    tab = new_tab("http://octavo.test")
    seen: list[str] = []

    def proxy(route):
        path = route.request.url.removeprefix("http://octavo.test")
        seen.append(path)
        if not path.startswith("/some/prefix/"):
            return route.abort()
        answer = route.fetch(url=running.url + path.removeprefix("/some/prefix"))
        route.fulfill(response=answer)

    tab.page.context.route("http://octavo.test/**", proxy)
    tab.open("some/prefix/")
    tab.send("hello")
    assert tab.finished().locator(".prose").inner_text()
    tab.page.get_by_label("Copy answer").click()  # without the clipboard interface, which plain HTTP does not have
    tab.until("document.querySelector('#toast.shown')?.textContent === 'Copied'")
    assert "/some/prefix/v1/chat/completions" in seen and all(p.startswith("/some/prefix/") for p in seen)
