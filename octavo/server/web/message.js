// How one message looks. Texts that grow are drawn once a frame at most, and less often when drawing takes long.

import { copyText, count, el, icon, iconButton, seconds, setIcon, toast } from "./dom.js";
import { MarkdownView } from "./markdown.js";

const SHARE = 4; // drawing may take one part in so many of the time

export const versionOf = (message) => message.versions[message.at];

/** The view of a message: ``node`` in the page; ``update(run)`` after a change (run: the answer is being written). */
export function messageView(message, actions) {
  return message.role === "user" ? new UserView(message, actions) : new AnswerView(message, actions);
}

async function copyWithMark(button, text) {
  if (!(await copyText(text))) return;
  setIcon(button, "check");
  toast("Copied");
  setTimeout(() => setIcon(button, "copy"), 1600);
}

/** A textarea in a message's place. ``save(text)`` or ``cancel()``, each once. */
function editor(text, label, saveLabel, save, cancel) {
  const area = el("textarea", { "aria-label": label, rows: String(Math.min(12, text.split("\n").length + 1)) });
  area.value = text;
  const form = el(
    "form",
    { class: "editor", onsubmit: (event) => (event.preventDefault(), save(area.value)) },
    area,
    el("div", { class: "row" }, el("button", { type: "button", class: "button", onclick: cancel }, "Cancel"), el("button", { type: "submit", class: "button primary" }, saveLabel)),
  );
  form.addEventListener("keydown", (event) => {
    if (event.isComposing) return;
    if (event.key === "Escape") (event.stopPropagation(), cancel());
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) (event.preventDefault(), save(area.value));
  });
  return { form, area };
}

class UserView {
  constructor(message, actions) {
    Object.assign(this, { message, actions });
    this.body = el("div", { class: "bubble" });
    this.copy = iconButton("copy", "Copy message", () => copyWithMark(this.copy, message.text));
    this.edit = iconButton("edit", "Edit and send again", () => this.startEdit());
    this.tools = el("div", { class: "tools" }, this.copy, this.edit);
    this.node = el("article", { class: "message user", "aria-label": "You" }, this.body, this.tools);
    this.update();
  }

  update() {
    this.body.textContent = this.message.text;
  }

  startEdit() {
    const close = () => {
      form.replaceWith(this.body);
      this.tools.hidden = false;
      this.edit.focus();
    };
    const save = (text) => {
      if (!text.trim()) return;
      close();
      this.actions.edit(this.message, text);
    };
    const { form, area } = editor(this.message.text, "Edit message", "Send", save, close);
    this.body.replaceWith(form);
    this.tools.hidden = true;
    area.focus();
  }
}

class AnswerView {
  constructor(message, actions) {
    Object.assign(this, { message, actions });
    this.drawn = null; // the version on show
    this.frame = 0;
    this.cost = 0;
    this.text = el("div", { class: "prose" });
    this.markdown = new MarkdownView(this.text);
    this.thought = el("div", { class: "thought" });
    this.thoughtLabel = el("span", {}, "Thinking…");
    this.details = el("details", { class: "reasoning", hidden: true }, el("summary", {}, icon("right"), this.thoughtLabel), this.thought);
    this.details.addEventListener("toggle", () => this.drawThought());
    this.waiting = el("p", { class: "waiting", hidden: true }, el("span", { class: "pulse", "aria-hidden": "true" }), this.waitingText = el("span", {}, "Waiting for the first token"));
    this.error = el("div", { class: "problem", role: "alert", hidden: true });
    this.stats = el("span", { class: "stats" });
    this.copy = iconButton("copy", "Copy answer", () => copyWithMark(this.copy, versionOf(message).text));
    this.retry = iconButton("retry", "Write again", () => actions.regenerate(message));
    this.edit = iconButton("edit", "Edit answer", () => this.startEdit());
    this.more = iconButton("forward", "Continue this answer", () => actions.proceed(message));
    this.previous = iconButton("left", "Previous version", () => this.turn(-1));
    this.next = iconButton("right", "Next version", () => this.turn(1));
    this.place = el("span", { class: "place" });
    this.versions = el("span", { class: "versions" }, this.previous, this.place, this.next);
    this.tools = el("div", { class: "tools" }, this.copy, this.retry, this.edit, this.more, this.versions, this.stats);
    this.node = el("article", { class: "message answer", "aria-label": "Answer" }, this.details, this.waiting, this.text, this.error, this.tools);
    this.update();
  }

  turn(step) {
    this.message.at = Math.min(Math.max(this.message.at + step, 0), this.message.versions.length - 1);
    this.update();
    this.actions.changed();
  }

  /** Show the message as it is. ``run``: what writes it now, or null. */
  update(run = null) {
    this.run = run;
    this.node.classList.toggle("writing", run !== null);
    this.node.setAttribute("aria-busy", String(run !== null));
    if (!run) {
      cancelAnimationFrame(this.frame);
      clearTimeout(this.timer);
      this.frame = this.timer = 0;
      this.draw();
    } else if (!this.frame && !this.timer) {
      const rest = SHARE * this.cost;
      const ask = () => (this.frame = requestAnimationFrame(() => this.draw()));
      if (rest > 16) this.timer = setTimeout(ask, rest);
      else ask();
    }
  }

  draw() {
    this.frame = this.timer = 0;
    const begun = performance.now();
    const { run } = this;
    const version = versionOf(this.message);
    if (this.drawn !== version) this.markdown.clear();
    this.drawn = version;
    this.markdown.show(version.text, run !== null);
    this.drawThought();
    const empty = !version.text && !version.reasoning;
    this.waiting.hidden = !(run && empty);
    this.drawError(run ? null : version.error);
    this.drawTools(version, run);
    this.actions.drawn(this);
    this.cost = performance.now() - begun;
  }

  drawThought() {
    const version = versionOf(this.message);
    this.details.hidden = !version.reasoning;
    if (!version.reasoning) return;
    const thinking = this.run && !version.text;
    const took = version.stats?.thinking;
    this.thoughtLabel.textContent = thinking ? "Thinking…" : took ? `Thought for ${seconds(took)}` : "Thoughts";
    if (!this.details.open) return; // a closed one costs nothing
    const shown = this.thought.firstChild?.data ?? "";
    if (version.reasoning.startsWith(shown) && shown) this.thought.firstChild.appendData(version.reasoning.slice(shown.length));
    else this.thought.replaceChildren(document.createTextNode(version.reasoning));
  }

  drawError(error) {
    this.error.hidden = !error;
    if (!error) return void this.error.replaceChildren();
    const buttons = [el("button", { type: "button", class: "button", onclick: () => this.actions.regenerate(this.message, true) }, "Try again")];
    if (error.status === 401) buttons.unshift(el("button", { type: "button", class: "button primary", onclick: () => this.actions.askKey() }, "Enter the key"));
    const wait = error.retryAfter ? ` Try again in ${error.retryAfter} s.` : "";
    const title = error.status ? (error.status === 401 ? "The server did not accept the key" : "The server refused the request") : "No answer";
    const heading = error.status >= 500 ? "The server failed" : title;
    this.error.replaceChildren(el("strong", {}, heading), el("p", {}, `${error.message}${wait}`), el("div", { class: "row" }, buttons));
  }

  drawTools(version, run) {
    const several = this.message.versions.length > 1;
    for (const button of [this.copy, this.retry, this.edit]) button.hidden = run !== null;
    this.copy.hidden ||= !version.text;
    this.edit.hidden ||= !version.text;
    this.more.hidden = run !== null || !["length", "stopped"].includes(version.finish) || !version.text || version.reasoning !== "";
    this.versions.hidden = run !== null || !several;
    this.place.textContent = `${this.message.at + 1} / ${this.message.versions.length}`;
    this.previous.disabled = this.message.at === 0;
    this.next.disabled = this.message.at === this.message.versions.length - 1;
    this.stats.replaceChildren(...(run ? liveStats(run) : finalStats(version)));
  }

  startEdit() {
    const version = versionOf(this.message);
    const close = () => {
      form.replaceWith(this.text);
      this.tools.hidden = false;
      this.edit.focus();
    };
    const save = (text) => {
      version.text = text;
      close();
      this.update();
      this.actions.changed();
    };
    const { form, area } = editor(version.text, "Edit answer", "Save", save, close);
    this.text.replaceWith(form);
    this.tools.hidden = true;
    area.focus();
  }
}

function liveStats(run) {
  const parts = [];
  if (run.first !== null) parts.push(stat("first token", seconds((run.first - run.began) / 1000)));
  parts.push(stat("", seconds(Math.floor(run.elapsed * 10) / 10)));
  return parts;
}

function finalStats(version) {
  const { stats } = version;
  const parts = [];
  if (stats) {
    const about = stats.approximate ? "≈ " : "";
    if (stats.tokens !== null) parts.push(stat("", `${about}${count(stats.tokens)} tokens`, "Tokens of the answer"));
    if (stats.rate !== null) parts.push(stat("", `${about}${stats.rate.toFixed(stats.rate < 100 ? 1 : 0)} tokens/s`, "After the first token"));
    parts.push(stat("first token", seconds(stats.ttft), "From sending to the first token"));
    if (stats.prompt !== null) parts.push(stat("prompt", `${count(stats.prompt)}${stats.cached ? ` (${count(stats.cached)} cached)` : ""}`, "Tokens of the prompt"));
  }
  if (version.finish === "length") parts.push(stat("", "cut off at max tokens"));
  if (version.finish === "stopped") parts.push(stat("", "stopped"));
  if (version.model) parts.push(stat("", version.model, "Model"));
  return parts;
}

function stat(label, value, title = "") {
  return el("span", { class: "stat", title: title || null }, label ? `${label} ` : null, el("b", {}, value));
}
