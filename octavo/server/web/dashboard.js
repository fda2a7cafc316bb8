// The live dashboard: asks /metrics each second while it is on show, seldom while the chat is, and not at all in a hidden tab.

import { request } from "./api.js";
import { count, el, remembered, seconds } from "./dom.js";
import { History, parse } from "./metrics.js";
import { Plot } from "./plot.js";

const SHOWN_MS = 1000;
const BEHIND_MS = 5000;
const DOWN_MS = 2000;
const SILENCE_MS = 4000;
const DESCRIBE_EVERY = 15; // seconds between what screen readers may notice
const SPANS = [60, 300, 900, 1800];

const rate = (v) => (v >= 1000 ? `${(v / 1000).toFixed(v >= 10_000 ? 0 : 1)}k` : v >= 100 || Number.isInteger(v) ? v.toFixed(0) : v.toFixed(1));
const percent = (v) => `${(100 * v).toFixed(v > 0 && v < 0.1 ? 1 : 0)}%`;
const whole = (v) => (Number.isInteger(v) ? count(v) : v.toFixed(1));

export class Dashboard {
  /** ``app``: onState(up, text, cameBack). */
  constructor(root, app) {
    Object.assign(this, { root, app });
    this.history = new History();
    this.shown = false;
    this.running = false;
    this.up = null;
    this.timer = 0;
    this.described = 0;
    this.span = Number(remembered.get("span"));
    if (!SPANS.includes(this.span)) this.span = 60;
    this.build();
    document.addEventListener("visibilitychange", () => this.tick());
  }

  build() {
    const tile = (label, note) => {
      const value = el("dd", { class: "value" }, "–");
      const extra = el("dd", { class: "extra" }, note);
      return { node: el("div", { class: "tile" }, el("dt", {}, label), value, extra), value, extra };
    };
    this.tiles = {
      running: tile("Running", "0 waiting"),
      generation: tile("Generated", "tokens/s"),
      prompt: tile("Prompts", "tokens/s"),
      kv: tile("KV cache", "in use"),
      hits: tile("Prefix hits", "of prompt tokens"),
      ttft: tile("First token", "median"),
      itl: tile("Between tokens", "median"),
      finished: tile("Finished", "requests"),
    };
    const latency = (prefix) => ["50", "90", "99"].map((q, i) => ({ key: `${prefix}${q}`, label: `p${q}`, colour: ["--series-1", "--series-2", "--series-3"][i], fill: i === 0 }));
    this.plots = [
      new Plot(
        "Throughput, tokens/s",
        [
          { key: "generation", label: "generated", colour: "--series-1", fill: true },
          { key: "prompt", label: "prompts", colour: "--series-2" },
        ],
        { format: rate, top: 10 },
      ),
      new Plot(
        "Requests",
        [
          { key: "running", label: "running", colour: "--series-1", fill: true },
          { key: "waiting", label: "waiting", colour: "--series-3" },
        ],
        { format: whole, top: 4 },
      ),
      new Plot("Time to first token", latency("ttft"), { format: seconds, top: 0.01, note: "of the last 15 s" }),
      new Plot("Time between tokens", latency("itl"), { format: seconds, top: 0.01, note: "of the last 15 s" }),
      new Plot("KV cache in use", [{ key: "kv", label: "in use", colour: "--series-1", fill: true }], { format: percent, top: 1, fixed: true }),
      new Plot("Prefix cache", [{ key: "hitRate", label: "hits", colour: "--series-1", fill: true }], { format: percent, top: 1, fixed: true, note: "of the last 15 s" }),
    ];
    const choose = el("select", { id: "span", onchange: () => this.setSpan(Number(choose.value)) }, SPANS.map((s) => el("option", { value: String(s) }, `${s / 60} min`)));
    choose.value = String(this.span);
    this.notice = el("p", { class: "problem", role: "status", hidden: true });
    const head = el("div", { class: "dash-head" }, el("h2", {}, "Dashboard"), el("label", { for: "span" }, "Last"), choose);
    const tiles = el("dl", { class: "tiles" }, Object.values(this.tiles).map((t) => t.node));
    this.root.append(el("div", { class: "dash" }, head, this.notice, tiles, el("div", { class: "plots" }, this.plots.map((p) => p.node))));
  }

  setSpan(span) {
    this.span = span;
    remembered.set("span", String(span));
    this.draw();
  }

  start() {
    this.running = true;
    this.tick();
  }

  show(shown) {
    this.shown = shown;
    if (shown) this.draw();
    this.tick();
  }

  keyChanged() {
    this.tick();
  }

  recolour() {
    for (const plot of this.plots) {
      plot.recolour();
      plot.draw();
    }
  }

  /** Ask now, and then again and again; one timer, whoever calls. */
  async tick() {
    clearTimeout(this.timer);
    if (!this.running || document.hidden || this.asking) return;
    this.asking = true;
    const begun = performance.now();
    await this.ask();
    this.asking = false;
    const every = this.up === false ? DOWN_MS : this.shown ? SHOWN_MS : BEHIND_MS;
    this.timer = setTimeout(() => this.tick(), Math.max(every - (performance.now() - begun), 100));
  }

  async ask() {
    try {
      const text = await (await request("metrics", { signal: AbortSignal.timeout(SILENCE_MS) })).text();
      const point = this.history.add(performance.now() / 1000, parse(text));
      const cameBack = this.up === false || point.restart;
      this.up = true;
      this.notice.hidden = true;
      this.app.onState(true, point.running ? `${point.running} running` : "Ready", cameBack);
    } catch (error) {
      this.fail(error);
    }
    if (this.shown) this.draw();
  }

  fail(error) {
    const was = this.up;
    this.up = false;
    const closed = error.status === 401;
    const text = closed ? "The metrics need an API key." : error.status ? `The server answered: ${error.message}` : "The server can’t be reached. This page keeps trying.";
    if (was !== false || this.notice.textContent !== text) this.notice.textContent = text;
    this.notice.hidden = false;
    this.app.onState(false, closed ? "Needs an API key" : error.status ? "Server in trouble" : "Server can’t be reached", false);
  }

  draw() {
    const now = performance.now() / 1000;
    const { points, last } = this.history;
    for (const plot of this.plots) plot.show(points, now, this.span);
    if (now - this.described > DESCRIBE_EVERY) {
      this.described = now;
      for (const plot of this.plots) plot.describe();
    }
    if (!last) return;
    const { tiles } = this;
    const say = (tile, value, extra) => {
      if (tile.value.textContent !== value) tile.value.textContent = value;
      if (extra !== undefined && tile.extra.textContent !== extra) tile.extra.textContent = extra;
    };
    const or = (value, format) => (value === null ? "–" : format(value));
    say(tiles.running, or(last.running, whole), `${or(last.waiting, whole)} waiting`);
    say(tiles.generation, or(last.generation, rate), `tokens/s · ${count(last.generationTokens)} in all`);
    say(tiles.prompt, or(last.prompt, rate), `tokens/s · ${count(last.promptTokens)} in all`);
    say(tiles.kv, or(last.kv, percent), last.preemptions ? `in use · ${count(last.preemptions)} preemptions` : "in use");
    say(tiles.hits, or(last.hitRate ?? last.hitRateEver, percent), last.hitRate === null ? "of prompt tokens, ever" : "of prompt tokens, last 15 s");
    say(tiles.ttft, or(last.ttft50, seconds), `median · p99 ${or(last.ttft99, seconds)}`);
    say(tiles.itl, or(last.itl50, seconds), `median · p99 ${or(last.itl99, seconds)}`);
    say(tiles.finished, count(last.finished), "requests since the start");
  }
}
