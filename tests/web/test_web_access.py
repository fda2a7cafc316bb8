"""Light and dark, phones, keyboards, screen readers: checks of every view."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.timeout(120)

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
        page.route("**/v1/chat/completions", lambda r: r.fulfill(status=429, headers={"Retry-After": "3"}, body='{"error":{"message":"Too many."}}'))
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


# Texts whose contrast with what is behind them is too low.
CONTRAST = """() => {
    const parse = (c) => { const m = c.match(/[\\d.]+/g).map(Number); return c.startsWith("color(") ? [...m.slice(0, 3).map((v) => v * 255), m[3] ?? 1] : [...m.slice(0, 3), m[3] ?? 1]; };
    const over = (top, under) => top.slice(0, 3).map((v, i) => v * top[3] + under[i] * (1 - top[3]));
    const light = (c) => { const [r, g, b] = c.map((v) => { v /= 255; return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; }); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
    const ground = (e) => { const layers = []; for (; e; e = e.parentElement) { const c = parse(getComputedStyle(e).backgroundColor); if (c[3]) layers.push(c); if (c[3] === 1) break; }
        return layers.reduceRight((under, c) => over(c, under), [255, 255, 255]); };
    const bad = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    const modal = document.querySelector("dialog[open]");
    const check = (e, colour, text) => {
        const style = getComputedStyle(e), behind = ground(e), front = over(parse(colour), behind);
        const [a, b] = [light(front), light(behind)].sort((x, y) => y - x);
        const size = parseFloat(style.fontSize), large = size >= 24 || (size >= 18.66 && style.fontWeight >= 600);
        const ratio = (a + 0.05) / (b + 0.05);
        if (ratio < (large ? 3 : 4.5)) bad.push([text.trim().slice(0, 40), ratio.toFixed(2), colour]);
    };
    let checked = 0;
    while (walker.nextNode()) {
        const e = walker.currentNode.parentElement;
        if (!walker.currentNode.data.trim() || !e.checkVisibility({ opacityProperty: true, visibilityProperty: true }) || e.closest(":disabled, .sr, [inert], #toast, #skip, noscript, option")) continue;
        if (modal && !modal.contains(e)) continue;
        checked++;
        check(e, getComputedStyle(e).color, walker.currentNode.data);
    }
    for (const e of document.querySelectorAll("input, textarea")) if (e.checkVisibility() && !e.closest("[inert]") && (!modal || modal.contains(e))) check(e, getComputedStyle(e, e.value ? null : "::placeholder").color, e.id);
    for (const e of document.querySelectorAll("button:not(:disabled) .icon, .icon")) {
        const host = e.closest("button, summary");
        if (!host || host.matches(":disabled") || !e.checkVisibility({ opacityProperty: true, visibilityProperty: true }) || e.closest("[inert]") || (modal && !modal.contains(e))) continue;
        const behind = ground(host), front = over(parse(getComputedStyle(e).color), behind), [a, b] = [light(front), light(behind)].sort((x, y) => y - x);
        if ((a + 0.05) / (b + 0.05) < 3) bad.push(["icon of " + (host.ariaLabel || host.textContent), ((a + 0.05) / (b + 0.05)).toFixed(2)]);
    }
    return [checked, bad];
}"""

# Controls without a name, names used twice by ids, references to nothing, headings, landmarks.
NAMES = """() => {
    const problems = [];
    const named = (e) => (e.getAttribute("aria-label") || (e.getAttribute("aria-labelledby") ?? "").split(" ").map((i) => document.getElementById(i)?.textContent ?? "").join("")
        || [...(e.labels ?? [])].map((l) => l.textContent).join("") || (e.matches("input, select, textarea, canvas") ? "" : e.textContent) || "").trim();
    for (const e of document.querySelectorAll("button, a[href], input, select, textarea, summary, canvas, [tabindex], [role=menu], dialog, aside, nav, section"))
        if (!named(e)) problems.push("no name: " + e.outerHTML.slice(0, 120));
    const ids = [...document.querySelectorAll("[id]")].map((e) => e.id);
    for (const id of new Set(ids)) if (ids.filter((i) => i === id).length > 1) problems.push("twice: " + id);
    for (const name of ["aria-controls", "aria-describedby", "aria-labelledby", "for"])
        for (const e of document.querySelectorAll(`[${name}]`)) for (const id of e.getAttribute(name).split(" ")) if (!document.getElementById(id)) problems.push(`${name} of nothing: ${id}`);
    for (const e of document.querySelectorAll("svg")) if (e.getAttribute("aria-hidden") !== "true") problems.push("svg is read");
    for (const e of document.querySelectorAll("[aria-hidden=true] :is(button, a[href], input)")) problems.push("hidden control " + e.outerHTML);
    for (const e of document.querySelectorAll("img")) if (!e.hasAttribute("alt")) problems.push("img without alt");
    if (document.querySelectorAll("h1").length !== 1 || document.querySelectorAll("main").length !== 1) problems.push("one h1, one main");
    let level = 0;
    for (const h of document.querySelectorAll("main :is(h2, h3, h4, h5, h6)")) { const l = Number(h.tagName[1]); if (h.checkVisibility() && !h.closest(".prose") && level && l > level + 1) problems.push("heading skips: " + h.textContent); level = l; }
    if (!document.documentElement.lang || !document.title) problems.push("lang, title");
    return problems;
}"""

# What sticks out of the page to the right, unless something around it scrolls; and targets too small to hit.
FITS = """() => {
    const out = [], width = document.documentElement.clientWidth;
    if (document.scrollingElement.scrollWidth > width || document.body.scrollWidth > width) out.push("the page scrolls sideways");
    for (const e of document.querySelectorAll("body *")) {
        if (!e.checkVisibility({ visibilityProperty: true }) || e.closest(".sr, .skip, #toast, svg, .sprite")) continue;
        const r = e.getBoundingClientRect();
        if (r.width && (r.right > width + 1 || r.left < -1)) {
            let around = e.parentElement;
            while (around && !/auto|scroll|hidden/.test(getComputedStyle(around).overflowX)) around = around.parentElement;
            if (!around || around === document.body) out.push(e.outerHTML.slice(0, 100) + ` ${r.left}…${r.right}`);
        }
        if (e.matches("button, select, .tabs a, summary, #conversations a") && r.width && (r.width < 24 || r.height < 22)) out.push(`small: ${e.outerHTML.slice(0, 80)} ${r.width}×${r.height}`);
    }
    for (const s of ["#scroller", "#dashboard", ".panel-body"]) { const e = document.querySelector(s); if (e.scrollWidth > e.clientWidth) out.push(`${s} scrolls sideways`); }
    return out;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 360])
def test_every_view(new_tab, mock, scheme, width):
    """Contrast, names, and nothing that sticks out, in every view."""
    tab = new_tab(mock.url, width, 740, color_scheme=scheme, has_touch=width == 360, allow=("429",))
    page = tab.open()
    for view in VIEWS:
        show(tab, view)
        checked, low = page.evaluate(CONTRAST)
        assert checked > 5 and not low, (view, low)
        assert not page.evaluate(NAMES), view
        assert not page.evaluate(FITS), view


def test_the_contrast_check_can_fail(tab):
    tab.page.evaluate("document.querySelector('#empty p').style.color = '#bbb'")
    assert [b[0] for b in tab.page.evaluate(CONTRAST)[1]] == ["Conversations stay in this browser."]
    tab.page.evaluate("document.querySelector('#send').removeAttribute('aria-label'); document.querySelector('#empty').style.width = '2000px'")
    assert "no name" in tab.page.evaluate(NAMES)[0] and tab.page.evaluate(FITS)


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
        where, outline = page.evaluate("""() => { const e = document.activeElement, s = getComputedStyle(e), c = getComputedStyle(e.closest("#composer") ?? e);
            return [e.id || e.getAttribute("aria-label") || e.textContent.trim().slice(0, 20), e === document.body || s.outlineStyle !== "none" || c.boxShadow !== "none"]; }""")
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
    assert page.locator("#new-chat").is_visible() and page.evaluate("[document.querySelector('#page').inert, document.activeElement.id]") == [True, "close-sidebar"]
    page.keyboard.press("Escape")
    page.wait_for_selector("#new-chat", state="hidden")
    assert page.evaluate("[document.querySelector('#page').inert, document.activeElement.id]") == [False, "open-sidebar"]
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
    page.evaluate("window.heard = []; new MutationObserver(() => heard.push(document.querySelector('#live').textContent)).observe(document.querySelector('#live'), {childList: true})")
    tab.send("hello")  # 300 tokens in 1.5 seconds
    tab.finished()
    heard = [h for h in page.evaluate("heard") if h]
    assert 1 <= len(heard) <= 2 and "Answer complete, 301 tokens" in heard[-1] and "octopus" in " ".join(heard)


def test_reduced_motion(new_tab, mock):
    tab = new_tab(mock.url, reduced_motion="reduce")
    page = tab.open()
    tab.send("hello")
    assert page.evaluate("getComputedStyle(document.querySelector('.pulse')).animationName") == "none"
    tab.finished()
