"""The dashboard: numbers that move, percentiles that are right, servers that go and come back, tabs that are hidden."""

from __future__ import annotations

import bisect
import random
import re
import threading

import httpx

from octavo.metrics.prometheus import Histogram, Metrics
from octavo.types import EngineStats

PLOTS = ["Throughput, tokens/s", "Requests", "Time to first token", "Time between tokens", "KV cache in use", "Prefix cache"]


def number(tab, name: str) -> float:
    """The number that a tile begins with; -1 for none."""
    found = re.match(r"[\d.]+", tab.check("tiles")[name])
    return float(found.group()) if found else -1.0


def test_numbers_move_under_load(demo, new_tab):
    tab = new_tab(demo.url)
    page = tab.open("#dashboard")
    assert page.locator("#dashboard h2").is_visible() and not page.locator("#chat").is_visible()
    stop = threading.Event()

    def load(i: int) -> None:
        body = {"messages": [{"role": "user", "content": "Tell me about whales. " * 12}], "max_tokens": 40, "ignore_eos": True}
        while not stop.is_set():
            httpx.post(demo.url + "/v1/chat/completions", json=body, timeout=60).raise_for_status()

    threads = [threading.Thread(target=load, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    try:
        for name in ("Running", "Generated", "Prompts", "KV cache", "Prefix hits", "First token", "Between tokens"):
            tab.until(lambda name=name: number(tab, name) > 0)
        finished = number(tab, "Finished")
        tab.until(lambda: number(tab, "Finished") > finished)
        tab.until("document.querySelector('#status-text').textContent.endsWith('running')")
        for title in PLOTS:
            assert tab.check("pixels", title) > 3, title
        page.locator(".plot canvas").first.hover()
        tab.until(lambda: "generated" in page.locator(".plot .tip").first.inner_text())
        page.locator(".plot canvas").nth(1).focus()
        page.keyboard.press("ArrowLeft")
        tab.until(lambda: "running" in (page.locator(".plot canvas").nth(1).get_attribute("aria-label") or ""))
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    page.click("#tab-chat")
    page.wait_for_selector("#prompt")
    assert not page.locator("#dashboard").is_visible()


def test_without_traffic_it_says_so(new_tab, start_mock):
    tab = new_tab(start_mock().url)
    tab.open("#dashboard")
    tab.until(lambda: tab.check("tiles")["Running"] == "0")
    shown = tab.check("tiles")
    assert (shown["KV cache"], shown["Finished"]) == ("0%", "0") and shown["Generated"] in ("–", "0")
    assert {shown[name] for name in ("Prefix hits", "First token", "Between tokens")} == {"–"}
    assert tab.check("pixels", "Time to first token") == 0


def scrape(generated: int, running: int = 1) -> str:
    metrics = Metrics("m")
    metrics.observe_stats(EngineStats(num_running=running, generation_tokens=generated, prompt_tokens=generated))
    return metrics.render()[0].decode()


def test_a_restart_and_an_outage(tab):
    """The server goes away: said, and tried again. It comes back with counters from 0: marked, and no rate is negative."""
    page = tab.page
    state = {"generated": 1000, "up": True}
    asked = []

    def answer(route):
        asked.append(1)
        if not state["up"]:
            return route.abort()
        state["generated"] += 100
        route.fulfill(status=200, content_type="text/plain", body=scrape(state["generated"]))

    page.route("**/metrics", answer)
    page.goto(tab.url + "/#dashboard")
    tab.until(lambda: number(tab, "Generated") > 50)
    state["up"] = False
    page.wait_for_selector('#status[data-state="down"]')
    tab.until(lambda: "keeps trying" in page.locator("#dashboard .problem").inner_text())
    state.update(up=True, generated=0)
    page.wait_for_selector('#status[data-state="up"]')
    tab.until(lambda: not page.locator("#dashboard .problem").is_visible())
    tab.until(lambda: number(tab, "Generated") > 50)
    tab.complaints[:] = [c for c in tab.complaints if "ERR_FAILED" not in c]


def test_a_hidden_tab_asks_for_nothing(tab):
    page = tab.page
    asked: list[str] = []
    page.on("request", lambda r: asked.append(r.url) if r.url.endswith("/metrics") else None)
    page.goto(tab.url + "/#dashboard")
    tab.until(lambda: len(asked) >= 3)
    hide = """(hidden) => {
        Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
        document.dispatchEvent(new Event("visibilitychange"));
    }"""
    page.evaluate(hide, True)
    page.wait_for_timeout(500)
    asked.clear()
    page.wait_for_timeout(1500)
    assert not asked
    page.evaluate(hide, False)
    tab.until(lambda: asked)


def test_percentiles_against_the_values_themselves(tab):
    rng = random.Random(0)
    bounds = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0)
    cases = []
    for _ in range(200):
        histogram = Histogram(bounds)
        for _ in range(rng.randint(0, 30)):
            histogram.observe(rng.expovariate(5))
        older = [c for _, c in histogram.read()[0]]
        values = sorted(rng.expovariate(rng.choice((5, 100))) for _ in range(rng.randint(0, 60)))
        for value in values:
            histogram.observe(value)
        cases.append((older, [c for _, c in histogram.read()[0]], rng.choice((0.5, 0.9, 0.99)), values))
    results = tab.page.evaluate(
        """async ([bounds, cases]) => {
            const { percentile } = await import("./web/metrics.js");
            const all = [...bounds, Infinity];
            return cases.map(([older, newer, q]) => percentile({ bounds: all, counts: newer }, { bounds: all, counts: older }, q));
        }""",
        [bounds, cases],
    )
    for (_, _, q, values), result in zip(cases, results):
        if not values:
            assert result is None
            continue
        # The value that has so many below it lies in the same bucket as the answer.
        exact = values[min(int(max(q * len(values) - 1e-9, 0)), len(values) - 1)]
        bucket = bisect.bisect_left(bounds, exact)
        low = bounds[bucket - 1] if bucket else 0
        high = bounds[bucket] if bucket < len(bounds) else bounds[-1]
        assert low - 1e-12 <= result <= high + 1e-12, (values, q, result)


def test_it_reads_the_servers_own_text_and_makes_rates(tab):
    metrics = Metrics("m")
    metrics.observe_stats(EngineStats(num_running=3, num_waiting=2, kv_cache_usage=0.25, prefix_cache_queries=10, prefix_cache_hits=5))
    metrics.observe_first_token(0.02)
    texts = [metrics.render()[0].decode()]
    metrics.observe_stats(EngineStats(num_running=1, generation_tokens=80, prompt_tokens=40, prefix_cache_queries=50, prefix_cache_hits=15))
    for _ in range(9):
        metrics.observe_first_token(0.3)
    metrics.observe_inter_token(0.03, 5)
    texts.append(metrics.render()[0].decode())
    texts.append(scrape(7))  # a new server
    texts.append(scrape(27))
    points = tab.page.evaluate(
        """async (texts) => {
            const { History, parse } = await import("./web/metrics.js");
            const history = new History();
            return texts.map((text, i) => history.add(100 + 4 * i, parse(text)));
        }""",
        texts,
    )
    first, second, third, fourth = points
    assert (first["running"], first["waiting"], first["kv"], first["hitRateEver"]) == (3, 2, 0.25, 0.5) and first["generation"] is None
    assert (second["generation"], second["prompt"], second["hitRate"], second["hitRateEver"]) == (20, 10, 0.25, 0.3)
    assert 0.25 < second["ttft50"] <= 0.5 and 0.025 < second["itl50"] <= 0.05 and not second["restart"]
    assert third["restart"] and third["gap"] and third["generation"] is None and third["ttft50"] is None
    assert fourth["generation"] == 5 and not fourth["restart"] and fourth["hitRate"] is None


def test_axes_have_round_ends(tab):
    maxima = [1e-4 * 1.37**i for i in range(80)]
    ticks = tab.page.evaluate("async (all) => { const { niceTicks } = await import('./web/plot.js'); return all.map(niceTicks); }", maxima)
    for top, marks in zip(maxima, ticks):
        assert marks[0] == 0 and marks[-1] >= top * (1 - 1e-9) and 3 <= len(marks) <= 6 and marks[-1] < 2 * top
