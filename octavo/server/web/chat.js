// The chat view: a conversation, its messages, and the answers being written (one a conversation; they go on while another is shown).

import { $, count, el, newId, seconds } from "./dom.js";
import { messageView, versionOf } from "./message.js";
import { newVersion, Run } from "./run.js";
import { samplingValues } from "./settings.js";
import * as store from "./store.js";

const NEAR_END = 8; // pixels
const SAVE_MS = 1500;
const SPEAK_MS = 4000;
const SPEAK_CHARS = 400;

export class Chat {
  /** ``app``: model(), contextLength(), askKey(), changed(conversation), openPanel(input). */
  constructor(app) {
    this.app = app;
    this.conversation = null;
    this.runs = new Map(); // conversation id → {run, conversation, message}
    this.views = [];
    this.atEnd = true;
    this.wire();
  }

  wire() {
    const prompt = $("prompt");
    $("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.running) this.stop();
      else this.send();
    });
    prompt.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      if (!this.running) this.send();
    });
    prompt.addEventListener("input", () => this.drawComposer());
    const scroller = $("scroller");
    // Only the reader leaves the end: by scrolling up. Growing text does not.
    scroller.addEventListener("wheel", (event) => event.deltaY < 0 && this.leaveEnd(), { passive: true });
    scroller.addEventListener("touchmove", () => this.leaveEnd(), { passive: true });
    scroller.addEventListener("keydown", (event) => ["ArrowUp", "PageUp", "Home"].includes(event.key) && this.leaveEnd());
    let top = 0;
    scroller.addEventListener("scroll", () => {
      const left = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight;
      if (left <= NEAR_END) this.atEnd = true;
      else if (scroller.scrollTop < top - 1) this.atEnd = false;
      top = scroller.scrollTop;
      $("to-bottom").hidden = left < 120;
    });
    $("to-bottom").addEventListener("click", () => this.toEnd());
    new ResizeObserver(() => this.follow()).observe(scroller);
    $("system").addEventListener("input", () => {
      this.conversation.system = $("system").value;
      if (this.conversation.messages.length) this.changed();
    });
    addEventListener("pagehide", () => this.runs.forEach(({ conversation }) => store.save(conversation)));
  }

  leaveEnd() {
    const scroller = $("scroller");
    if (scroller.scrollHeight > scroller.clientHeight) this.atEnd = false;
  }

  toEnd() {
    this.atEnd = true;
    this.follow();
    $("to-bottom").hidden = true;
  }

  follow() {
    const scroller = $("scroller");
    if (this.atEnd) scroller.scrollTop = scroller.scrollHeight;
    else $("to-bottom").hidden = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 120;
  }

  get running() {
    return this.conversation ? this.runs.get(this.conversation.id) ?? null : null;
  }

  blank() {
    const now = Date.now();
    return { id: newId(), title: "", system: "", created: now, updated: now, messages: [] };
  }

  /** Show a conversation; null: a new, empty one, which is kept only when something is said in it. */
  show(conversation) {
    this.conversation = this.runs.get(conversation?.id)?.conversation ?? conversation ?? this.blank();
    $("system").value = this.conversation.system ?? "";
    const actions = {
      edit: (message, text) => this.edit(message, text),
      regenerate: (message, replace) => this.regenerate(message, replace),
      proceed: (message) => this.proceed(message),
      changed: () => this.changed(),
      askKey: () => this.app.askKey(),
      drawn: () => this.follow(),
    };
    this.actions = actions;
    this.views = this.conversation.messages.map((message) => messageView(message, actions));
    this.atEnd = true;
    $("thread").replaceChildren(...this.views.map((view) => view.node));
    const { running } = this;
    if (running) this.views.at(-1).update(running.run);
    this.drawEmpty();
    this.drawComposer();
    this.toEnd();
  }

  drawEmpty() {
    $("empty")?.remove();
    if (this.conversation.messages.length) return;
    const ideas = ["Explain how a lighthouse lens works.", "Write a haiku about old books.", "What should I see in Lisbon in one day?"];
    const use = (text) => {
      $("prompt").value = text;
      this.drawComposer();
      $("prompt").focus();
    };
    const buttons = ideas.map((text) => el("button", { type: "button", class: "idea", onclick: () => use(text) }, text));
    $("thread").append(el("div", { id: "empty" }, el("h2", {}, "What shall we write?"), el("p", {}, "Conversations stay in this browser."), el("div", { class: "ideas" }, buttons)));
  }

  drawComposer() {
    const prompt = $("prompt");
    prompt.style.height = "auto";
    prompt.style.height = `${Math.min(prompt.scrollHeight, 0.4 * innerHeight)}px`;
    const running = this.running !== null;
    const send = $("send");
    const name = running ? "stop" : "send";
    if (send.dataset.does !== name) {
      send.dataset.does = name;
      send.setAttribute("aria-label", running ? "Stop" : "Send");
      send.querySelector("use").setAttribute("href", `#i-${name}`);
    }
    send.disabled = !running && !prompt.value.trim();
    this.drawContext();
  }

  drawContext() {
    const answers = this.conversation.messages.filter((m) => m.role === "assistant");
    const stats = answers.length ? versionOf(answers.at(-1)).stats : null;
    const used = stats?.context ?? null;
    const length = this.app.contextLength();
    $("context").textContent = used === null || !length ? "" : `${count(used)} of ${count(length)} tokens of context`;
  }

  // -- what the reader does

  send() {
    const text = $("prompt").value;
    if (!text.trim()) return;
    const values = this.values();
    if (!values) return;
    $("prompt").value = "";
    const { conversation } = this;
    this.add({ id: newId(), role: "user", text, created: Date.now() });
    if (!conversation.title) conversation.title = title(text);
    this.answer(values);
  }

  edit(message, text) {
    const values = this.values();
    if (!values) return;
    this.stop();
    this.cutAfter(message);
    message.text = text;
    this.views.at(-1).update();
    this.answer(values);
  }

  /** Another version of an answer. ``replace``: instead of the one that is shown (it failed). */
  regenerate(message, replace = false) {
    const values = this.values();
    if (!values || this.running) return;
    this.cutAfter(message);
    const version = newVersion(this.app.model());
    if (replace && !versionOf(message).text) message.versions[message.at] = version;
    else message.versions.push(version);
    if (!replace || versionOf(message) !== version) message.at = message.versions.length - 1;
    this.start(message, version, values);
  }

  /** Go on writing an answer that was stopped or cut off. */
  proceed(message) {
    const values = this.values();
    if (!values || this.running) return;
    this.cutAfter(message);
    const version = versionOf(message);
    const said = { role: "assistant", content: version.text };
    this.start(message, version, { ...values, continue_final_message: true, add_generation_prompt: false }, [said]);
  }

  stop() {
    this.running?.run.stop();
  }

  /** Settings for a request; null (and the panel opens) when one of them is wrong. */
  values() {
    const { values, invalid } = samplingValues();
    if (!invalid) return values;
    this.app.openPanel(invalid);
    return null;
  }

  // -- answers

  add(message) {
    this.conversation.messages.push(message);
    const view = messageView(message, this.actions);
    this.views.push(view);
    $("empty")?.remove();
    $("thread").append(view.node);
    return view;
  }

  cutAfter(message) {
    const index = this.conversation.messages.indexOf(message);
    this.conversation.messages.length = index + 1;
    for (const view of this.views.splice(index + 1)) view.node.remove();
  }

  answer(values) {
    const version = newVersion(this.app.model());
    const message = { id: newId(), role: "assistant", versions: [version], at: 0, created: Date.now() };
    this.add(message);
    this.start(message, version, values);
  }

  /** The messages for the model: all before ``message``, without thoughts and failed answers. */
  history(message) {
    const { conversation } = this;
    const messages = conversation.system?.trim() ? [{ role: "system", content: conversation.system }] : [];
    for (const m of conversation.messages) {
      if (m === message) break;
      if (m.role === "user") messages.push({ role: "user", content: m.text });
      else if (versionOf(m).text) messages.push({ role: "assistant", content: versionOf(m).text });
    }
    return messages;
  }

  start(message, version, values, more = []) {
    const { conversation } = this;
    const body = { model: version.model, messages: [...this.history(message), ...more], ...values };
    const speaker = new Speaker(version);
    let savedAt = performance.now();
    const view = () => (this.conversation === conversation ? this.views[conversation.messages.indexOf(message)] : null);
    const run = new Run(version, body, {
      onChange: () => {
        view()?.update(run);
        if (this.conversation === conversation) speaker.look();
        if (performance.now() - savedAt > SAVE_MS) {
          savedAt = performance.now();
          store.save(conversation).catch(() => {});
        }
      },
      onEnd: () => {
        clearInterval(clock);
        if (this.runs.get(conversation.id)?.run === run) this.runs.delete(conversation.id);
        this.changed(conversation);
        view()?.update();
        if (this.conversation === conversation) {
          speaker.end();
          this.drawComposer();
        }
        this.app.ended(version.error);
      },
      onMeasured: () => {
        this.changed(conversation);
        if (!this.runs.has(conversation.id)) view()?.update();
      },
    });
    const clock = setInterval(() => view()?.update(run), 500); // the seconds go on while no token comes
    this.runs.set(conversation.id, { run, conversation, message });
    this.changed();
    view()?.update(run);
    this.drawComposer();
    this.toEnd();
  }

  changed(conversation = this.conversation) {
    conversation.updated = Date.now();
    if (!conversation.removed) store.save(conversation).catch((error) => this.app.notSaved(error));
    this.app.changed(conversation);
  }
}

const title = (text) => {
  const line = text.trim().split("\n")[0].replace(/\s+/g, " ");
  return line.length > 60 ? `${line.slice(0, 57)}…` : line;
};

/** Reads an answer to screen readers: whole sentences, not more often than every few seconds, and what came of it at the end. */
class Speaker {
  constructor(version) {
    this.version = version;
    this.spoken = version.text.length;
    this.at = performance.now();
    say("");
  }

  look() {
    if (performance.now() - this.at < SPEAK_MS) return;
    const text = this.version.text.slice(this.spoken, this.spoken + SPEAK_CHARS);
    const end = Math.max(text.lastIndexOf(". "), text.lastIndexOf("\n"), text.lastIndexOf("? "), text.lastIndexOf("! "));
    if (end < 0) return;
    this.at = performance.now();
    this.spoken += end + 1;
    say(text.slice(0, end + 1));
  }

  end() {
    const { text, error, stats, finish } = this.version;
    if (error) return; // it is an alert of its own
    const rest = text.slice(this.spoken, this.spoken + SPEAK_CHARS);
    const note = finish === "stopped" ? "Stopped." : `Answer complete${stats?.tokens ? `, ${stats.tokens} tokens in ${seconds(stats.seconds)}` : ""}.`;
    say(`${rest} ${note}`);
  }
}

function say(text) {
  $("live").textContent = text;
}
