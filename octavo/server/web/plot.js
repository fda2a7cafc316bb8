// A plot of lines over time in a canvas: axes, gaps, a crosshair. Drawn anew for each point; nothing moves by itself.

import { el } from "./dom.js";

const HEIGHT = 168;
const PAD = { left: 52, right: 10, top: 10, bottom: 22 };

export class Plot {
  /**
   * ``series``: [{key, label, colour (a CSS variable's name), fill}]; ``format``: a value's text; ``top``: the least upper end of
   * the axis; ``fixed``: the axis always ends there.
   */
  constructor(title, series, { format, top = 1, fixed = false, note = "" }) {
    Object.assign(this, { title, series, format, top, fixed });
    this.canvas = el("canvas", { role: "img", tabindex: "0", "aria-label": title });
    this.tip = el("div", { class: "tip", hidden: true, "aria-hidden": "true" });
    this.values = new Map(series.map((s) => [s.key, el("b", {}, "–")]));
    const keys = series.map((s) => el("li", { class: s.colour.slice(2) }, el("span", { class: "swatch", "aria-hidden": "true" }), `${s.label} `, this.values.get(s.key)));
    this.node = el("figure", { class: "plot" }, el("figcaption", {}, el("h3", {}, title), note && el("p", { class: "note" }, note), el("ul", { class: "legend" }, keys)), el("div", { class: "canvas-box" }, this.canvas, this.tip));
    this.points = [];
    this.span = 300;
    this.now = 0;
    this.hover = null; // seconds before now
    this.width = 0;
    new ResizeObserver(([entry]) => {
      this.width = Math.floor(entry.contentRect.width);
      this.draw();
    }).observe(this.canvas.parentElement);
    this.canvas.addEventListener("pointermove", (event) => this.point(event.offsetX));
    this.canvas.addEventListener("pointerleave", () => this.point(null));
    this.canvas.addEventListener("blur", () => this.point(null));
    this.canvas.addEventListener("keydown", (event) => this.key(event));
  }

  recolour() {
    const style = getComputedStyle(this.node);
    const get = (name) => style.getPropertyValue(name).trim();
    this.colours = { line: get("--line"), ink: get("--ink-2"), mark: get("--ink-3"), series: this.series.map((s) => get(s.colour)) };
    this.font = `11px ${style.fontFamily}`;
  }

  /** Show ``points`` (with t in seconds) of the last ``span`` seconds before ``now``. */
  show(points, now, span) {
    Object.assign(this, { points, now, span });
    const last = points.at(-1);
    for (const s of this.series) {
      const text = last && last[s.key] !== null ? this.format(last[s.key]) : "–";
      const node = this.values.get(s.key);
      if (node.textContent !== text) node.textContent = text;
    }
    this.draw();
  }

  /** What a screen reader says of the plot; written seldom, so that it is not read all the time. */
  describe() {
    const parts = this.series.map((s) => `${s.label} ${this.values.get(s.key).textContent}`);
    this.canvas.setAttribute("aria-label", `${this.title}: ${parts.join(", ")}`);
  }

  draw() {
    if (!this.width) return;
    if (!this.colours) this.recolour();
    const scale = window.devicePixelRatio || 1;
    const [w, h] = [this.width, HEIGHT];
    if (this.canvas.width !== Math.round(w * scale) || this.canvas.height !== Math.round(h * scale)) {
      this.canvas.width = Math.round(w * scale);
      this.canvas.height = Math.round(h * scale);
    }
    const c = this.canvas.getContext("2d");
    c.setTransform(scale, 0, 0, scale, 0, 0);
    c.clearRect(0, 0, w, h);
    c.font = this.font;
    const begin = this.now - this.span;
    const first = this.points.findIndex((p) => p.t >= begin);
    const shown = first < 0 ? [] : this.points.slice(Math.max(first - 1, 0));
    const highest = Math.max(0, ...shown.flatMap((p) => this.series.map((s) => p[s.key] ?? 0)));
    const ticks = this.fixed ? [0, this.top / 2, this.top] : niceTicks(Math.max(highest * 1.08, this.top));
    const max = ticks.at(-1);
    const x = (t) => PAD.left + ((t - begin) / this.span) * (w - PAD.left - PAD.right);
    const y = (v) => h - PAD.bottom - (Math.min(v, max) / max) * (h - PAD.top - PAD.bottom);
    this.axes(c, w, h, ticks, y);
    c.save();
    c.beginPath();
    c.rect(PAD.left, 0, w - PAD.left - PAD.right + 3, h);
    c.clip();
    for (const p of shown) if (p.restart) this.restartMark(c, x(p.t), h);
    this.series.forEach((s, i) => this.line(c, shown, s, this.colours.series[i], x, y));
    c.restore();
    if (!shown.some((p) => this.series.some((s) => p[s.key] !== null))) this.nothing(c, w, h);
    this.crosshair(c, shown, x, y, w, h);
  }

  axes(c, w, h, ticks, y) {
    c.lineWidth = 1;
    c.textBaseline = "middle";
    c.textAlign = "right";
    for (const tick of ticks) {
      const at = Math.round(y(tick)) + 0.5;
      c.strokeStyle = this.colours.line;
      c.beginPath();
      c.moveTo(PAD.left, at);
      c.lineTo(w - PAD.right, at);
      c.stroke();
      c.fillStyle = this.colours.ink;
      c.fillText(this.format(tick), PAD.left - 8, at);
    }
    c.textBaseline = "alphabetic";
    const steps = w < 420 ? 2 : 4;
    for (let i = 0; i <= steps; i++) {
      c.textAlign = i === 0 ? "left" : i === steps ? "right" : "center";
      const ago = this.span * (1 - i / steps);
      c.fillText(i === steps ? "now" : `−${span(ago)}`, PAD.left + (i / steps) * (w - PAD.left - PAD.right), h - 5);
    }
  }

  line(c, points, s, colour, x, y) {
    c.strokeStyle = c.fillStyle = colour;
    c.lineWidth = 1.75;
    c.lineJoin = "round";
    let piece = [];
    const finish = () => {
      if (piece.length === 1) {
        c.beginPath();
        c.arc(piece[0][0], piece[0][1], 1.75, 0, 7);
        c.fill();
      } else if (piece.length) {
        c.beginPath();
        piece.forEach(([px, py], i) => (i ? c.lineTo(px, py) : c.moveTo(px, py)));
        c.stroke();
        if (s.fill) {
          c.lineTo(piece.at(-1)[0], y(0));
          c.lineTo(piece[0][0], y(0));
          c.globalAlpha = 0.1;
          c.fill();
          c.globalAlpha = 1;
        }
      }
      piece = [];
    };
    for (const p of points) {
      if (p.gap || p[s.key] === null) finish();
      if (p[s.key] !== null) piece.push([x(p.t), y(p[s.key])]);
    }
    finish();
  }

  restartMark(c, at, h) {
    c.strokeStyle = this.colours.mark;
    c.setLineDash([3, 3]);
    c.beginPath();
    c.moveTo(at, PAD.top);
    c.lineTo(at, h - PAD.bottom);
    c.stroke();
    c.setLineDash([]);
    c.fillStyle = this.colours.ink;
    c.textAlign = "left";
    c.fillText("restart", at + 4, PAD.top + 10);
  }

  nothing(c, w, h) {
    c.fillStyle = this.colours.ink;
    c.textAlign = "center";
    c.fillText("no requests in this time", (w + PAD.left) / 2, h / 2);
  }

  // -- the crosshair

  point(offset) {
    const inside = offset !== null && offset >= PAD.left;
    this.hover = inside ? this.span * (1 - (offset - PAD.left) / (this.width - PAD.left - PAD.right)) : null;
    this.draw();
  }

  key(event) {
    const step = { ArrowLeft: 1, ArrowRight: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    this.hover = Math.min(Math.max((this.hover ?? 0) + (step * this.span) / 60, 0), this.span);
    this.draw();
    this.canvas.setAttribute("aria-label", `${this.title}, ${this.tip.textContent || "nothing there"}`);
  }

  crosshair(c, points, x, y, w, h) {
    const t = this.now - (this.hover ?? 0);
    const near = this.hover === null ? null : points.reduce((best, p) => (best && Math.abs(best.t - t) <= Math.abs(p.t - t) ? best : p), null);
    this.tip.hidden = near === null;
    if (!near) return;
    const at = x(near.t);
    c.strokeStyle = this.colours.mark;
    c.beginPath();
    c.moveTo(Math.round(at) + 0.5, PAD.top);
    c.lineTo(Math.round(at) + 0.5, h - PAD.bottom);
    c.stroke();
    this.series.forEach((s, i) => {
      if (near[s.key] === null) return;
      c.fillStyle = this.colours.series[i];
      c.beginPath();
      c.arc(at, y(near[s.key]), 3, 0, 7);
      c.fill();
    });
    const rows = this.series.map((s) => el("div", {}, `${s.label} `, el("b", {}, near[s.key] === null ? "–" : this.format(near[s.key]))));
    this.tip.replaceChildren(el("div", { class: "when" }, `${span(Math.max(this.now - near.t, 0))} ago `), ...rows);
    const left = at + 12 + this.tip.offsetWidth > w ? at - 12 - this.tip.offsetWidth : at + 12;
    this.tip.style.left = `${Math.max(0, left)}px`;
  }
}

/** Seconds as "40 s", "2 min", "2:30". */
function span(s) {
  const whole = Math.round(s);
  if (whole < 60) return `${whole} s`;
  if (whole % 60 === 0) return `${whole / 60} min`;
  return `${Math.floor(whole / 60)}:${String(whole % 60).padStart(2, "0")}`;
}

/** Three to six round numbers from 0 to at least ``max``. */
export function niceTicks(max) {
  const power = 10 ** Math.floor(Math.log10(max));
  const step = [0.2, 0.25, 0.5, 1, 2, 2.5, 5].map((m) => m * power).find((s) => max / s <= 4.0001) ?? 5 * power;
  const ticks = [];
  for (let i = 0; i <= Math.ceil(max / step - 1e-9); i++) ticks.push(i * step);
  return ticks;
}
