"""Light and dark, phones, keyboards, screen readers: checks of every view."""

from __future__ import annotations

import time
from typing import Any

import pytest

from octavo.server.mock import MockEngine

MARKDOWN = """# Title

Text with **bold**, `code` and a [link](https://example.org/).

- one
- two

> quoted

```python
print("a line of code that is much longer than a phone is wide, and then some more of it")
```

| a | b | c |
|---|---|---|
| averylongwordwithoutanybreakinit | averylongwordwithoutanybreakinit | averylongwordwithoutanybreakinit |

averyveryveryveryveryveryveryveryveryveryveryveryveryveryverylongwordwithoutanybreak
"""
VIEWS = ["empty", "error", "answer", "editing", "settings", "menu", "key", "dashboard"]


def show(tab: Any, view: str) -> None:
    """Go from the view before it (in ``VIEWS``) to ``view``."""
    page = tab.page
    narrow = page.viewport_size["width"] < 820
    if view == "answer":
        tab.answers(MARKDOWN, reasoning="Hm.", finish="length")
        tab.send("Show me everything, averyveryveryveryveryveryveryveryveryverylongword included")
        tab.finished()
        page.locator(".answer details:not([hidden]) summary").click()
    if view == "error":
        page.unroute_all()
        body = '{"error":{"message":"Too many."}}'
        page.route("**/v1/chat/completions", lambda r: r.fulfill(status=429, headers={"Retry-After": "3"}, body=body))
        tab.send("hello")
        page.wait_for_selector(".problem:not([hidden]) >> text=Try again in 3 s")
    if view == "editing":
        page.get_by_label("Edit and send again").last.click()
    if view == "settings":
        page.locator(".editor >> text=Cancel").click()
        page.click("#toggle-panel")
        page.fill("#s-temperature", "9")
    if view == "menu":
        page.click("#close-panel")
        if narrow:
            page.click("#open-sidebar")
        page.locator("#conversations .icon-button").first.click()
    if view == "key":
        page.keyboard.press("Escape")
        page.click("#change-key")
    if view == "dashboard":
        page.keyboard.press("Escape")
        if narrow:
            page.click("#close-sidebar")
        page.click("#tab-dashboard")
        tab.until("document.querySelector('.tile .value').textContent !== '–'")
    tab.until("document.getAnimations().every((a) => a.effect.getTiming().iterations === Infinity || a.playState === 'finished')")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 360])
def test_every_view(new_tab, mock, scheme, width):
    """Contrast, names, and nothing that sticks out, in every view."""
    tab = new_tab(mock.url, width, 740, color_scheme=scheme, has_touch=width == 360, allow=("429",))
    tab.open()
    for view in VIEWS:
        show(tab, view)
        checked, low = tab.check("contrast")
        assert checked > 5 and not low, (view, low)
        assert not tab.check("names"), view
        assert not tab.check("fits"), view


def test_the_contrast_check_can_fail(tab):
    tab.page.evaluate("document.querySelector('#empty p').style.color = '#bbb'")
    assert [b[0] for b in tab.check("contrast")[1]] == ["Conversations stay in this browser."]
    tab.page.evaluate("document.querySelector('#send').removeAttribute('aria-label')")
    tab.page.evaluate("document.querySelector('#empty').style.width = '2000px'")
    assert "no name" in tab.check("names")[0] and tab.check("fits")


def test_colours_follow_the_system_until_chosen(new_tab, mock):
    tab = new_tab(mock.url, color_scheme="dark")
    page = tab.open()
    ground = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(ground)
    page.emulate_media(color_scheme="light")
    light = page.evaluate(ground)
    assert dark != light
    page.click("#theme")  # light
    page.click("#theme")  # dark
    assert page.evaluate(ground) == dark and page.get_by_label("Colours: dark").is_visible()
    page.reload()
    assert page.evaluate(ground) == dark
    page.wait_for_selector("html[data-ready]")
    page.click("#theme")  # automatic
    assert page.evaluate(ground) == light and page.get_by_label("Colours: automatic").is_visible()


def test_by_keyboard_alone(tab):
    """Tab reaches every control in the order of the page, and shows where it is."""
    page = tab.page
    tab.answers(MARKDOWN)
    tab.send("hello")
    tab.finished()
    page.evaluate("document.activeElement.blur()")
    seen = []
    for _ in range(60):
        page.keyboard.press("Tab")
        where, outline = tab.check("focused")
        assert outline, where
        seen.append(where)
        if where == "prompt":
            break
    order = ["skip", "new-chat", "export-all", "change-key", "theme", "tab-chat", "tab-dashboard", "model", "toggle-panel", "scroller"]
    assert [s for s in seen if s in order] == order, seen
    for name in ("hello", "Copy message", "Copy answer", "Write again", "Edit answer", "Table", "Code, python", "Copy", "link"):
        assert name in seen, (name, seen)
    page.focus("#skip")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "prompt"
    page.focus("#toggle-panel")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "close-panel"
    page.keyboard.press("Escape")
    assert page.evaluate("[document.activeElement.id, document.querySelector('#panel').hidden]") == ["toggle-panel", True]
    page.get_by_label("Actions for hello").focus()
    page.keyboard.press("Enter")
    page.keyboard.press("ArrowDown")
    assert page.evaluate("document.activeElement.textContent") == "Export as JSON"
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "Actions for hello"


def test_a_phones_side_panels(new_tab, mock):
    tab = new_tab(mock.url, 360, 740, has_touch=True)
    page = tab.open()
    assert not page.locator("#new-chat").is_visible() and page.evaluate("document.querySelector('#sidebar').inert")
    page.tap("#open-sidebar")
    state = "[document.querySelector('#page').inert, document.activeElement.id]"
    assert page.locator("#new-chat").is_visible() and page.evaluate(state) == [True, "close-sidebar"]
    page.keyboard.press("Escape")
    page.wait_for_selector("#new-chat", state="hidden")
    assert page.evaluate(state) == [False, "open-sidebar"]
    page.tap("#open-sidebar")
    page.touchscreen.tap(350, 400)  # beside it
    page.wait_for_selector("#new-chat", state="hidden")
    page.tap("#toggle-panel")
    assert page.locator("#s-temperature").is_visible()
    page.touchscreen.tap(5, 400)
    page.wait_for_selector("#panel", state="hidden")
    tab.send("hello")
    tab.finished()
    page.tap("#open-sidebar")
    page.tap("#conversations a")
    page.wait_for_selector("#new-chat", state="hidden")


def test_what_screen_readers_hear(tab):
    """Not each token: the answer in whole sentences, seldom, and how it ended."""
    page = tab.page
    assert page.locator("#scroller").get_attribute("aria-live") == "off" and page.locator("#live").get_attribute("aria-live") == "polite"
    page.evaluate("""() => {
        const live = document.querySelector("#live");
        window.heard = [];
        new MutationObserver(() => heard.push(live.textContent)).observe(live, { childList: true });
    }""")
    begun = time.monotonic()
    tab.send("hello")  # 300 tokens in 1.5 seconds, on a quiet machine
    tab.finished()
    seconds = time.monotonic() - begun
    heard = [h for h in page.evaluate("heard") if h]
    assert 1 <= len(heard) <= 2 + seconds / 4 and "Answer complete, 301 tokens" in heard[-1] and "octopus" in " ".join(heard)


def test_reduced_motion(new_tab, start_mock):
    tab = new_tab(start_mock(MockEngine(tick_s=0.03, length=2000)).url, reduced_motion="reduce")
    page = tab.open()
    tab.send("hello")
    page.wait_for_selector(".pulse")
    assert page.evaluate("getComputedStyle(document.querySelector('.pulse')).animationName") == "none"
    page.keyboard.press("Escape")
    tab.finished()
