// The sampling controls: made from one table, kept in this browser, and read when a message is sent.

import { $, el, iconButton, remembered } from "./dom.js";

// `rest`: where the slider stands while nothing is set. Names are the request's.
const FIELDS = [
  { name: "temperature", label: "Temperature", min: 0, max: 2, step: 0.05, rest: 1, hint: "0 takes the likeliest token; more is more varied." },
  { name: "top_p", label: "Top p", min: 0.01, max: 1, step: 0.01, rest: 1, hint: "The likeliest tokens that together have this share." },
  { name: "top_k", label: "Top k", min: 0, max: 200, limit: 1e9, step: 1, whole: true, rest: 0, hint: "So many likeliest tokens; 0 for all." },
  { name: "min_p", label: "Min p", min: 0, max: 1, step: 0.01, rest: 0, hint: "No token below this share of the likeliest one." },
  { name: "max_tokens", label: "Max tokens", min: 1, max: 8192, limit: 1e9, step: 1, whole: true, rest: 2048, initial: 2048, hint: "The longest answer; empty for what the context leaves." },
  { name: "seed", label: "Seed", min: 0, limit: 2 ** 53, step: 1, whole: true, hint: "Same seed and settings, same answer." },
  { name: "repetition_penalty", label: "Repetition penalty", min: 0.5, max: 2, limit: 100, low: 0.01, step: 0.05, rest: 1, hint: "Above 1: tokens of the prompt and the answer come up less." },
  { name: "presence_penalty", label: "Presence penalty", min: -2, max: 2, step: 0.1, rest: 0, hint: "Against tokens that were in the answer at all." },
  { name: "frequency_penalty", label: "Frequency penalty", min: -2, max: 2, step: 0.1, rest: 0, hint: "Against tokens, for each time they were in the answer." },
];

const saved = (() => {
  try {
    return JSON.parse(remembered.get("sampling")) ?? {};
  } catch {
    return {};
  }
})();

const inputs = new Map();
let onChange = () => {};

export function buildSettings(changed) {
  onChange = changed;
  const form = $("sampling");
  for (const field of FIELDS) form.append(numberField(field));
  form.append(stopField(), thinkingField());
  form.addEventListener("submit", (event) => event.preventDefault());
  $("reset-sampling").addEventListener("click", () => {
    for (const field of FIELDS) set(field.name, field.initial === undefined ? "" : String(field.initial));
    set("stop", "");
    set("thinking", "");
  });
}

function initial(field) {
  return saved[field.name] ?? (field.initial === undefined ? "" : String(field.initial));
}

function set(name, text) {
  const { input } = inputs.get(name);
  input.value = text;
  input.dispatchEvent(new Event("input", { bubbles: true }));
}

function remember(name, text) {
  saved[name] = text;
  remembered.set("sampling", JSON.stringify(saved));
  onChange();
}

function numberField(field) {
  const id = `s-${field.name}`;
  const input = el("input", { id, type: "text", inputmode: "decimal", placeholder: "default", autocomplete: "off", "aria-describedby": `${id}-hint ${id}-error` });
  const slider = field.max && el("input", { type: "range", min: field.min, max: field.max, step: field.step, "aria-label": `${field.label}, slider` });
  const clear = iconButton("close", `${field.label}: server’s default`, () => (set(field.name, ""), input.focus()), { class: "icon-button small" });
  const error = el("p", { class: "error", id: `${id}-error` });
  const box = el("div", { class: "field" }, el("div", { class: "field-head" }, el("label", { for: id }, field.label), input, clear), slider, el("p", { class: "note", id: `${id}-hint` }, field.hint), error);
  input.value = initial(field);
  const show = () => {
    const problem = check(field, input.value);
    error.textContent = problem ?? "";
    input.setAttribute("aria-invalid", String(problem !== null));
    const isSet = input.value.trim() !== "";
    box.classList.toggle("set", isSet);
    clear.disabled = !isSet;
    if (slider) slider.value = isSet && problem === null ? input.value : field.rest;
  };
  input.addEventListener("input", () => (show(), remember(field.name, input.value)));
  slider?.addEventListener("input", () => set(field.name, String(Number(slider.value))));
  inputs.set(field.name, { input, field });
  show();
  return box;
}

/** What is wrong with a value, or null. */
function check(field, text) {
  if (!text.trim()) return null;
  const value = Number(text);
  const low = field.low ?? field.min;
  const high = field.limit ?? field.max;
  if (!Number.isFinite(value)) return "Not a number.";
  if (field.whole && !Number.isInteger(value)) return "A whole number, please.";
  if (value < low || value > high) return high >= 1e9 ? `At least ${low}.` : `Between ${low} and ${high}.`;
  return null;
}

function stopField() {
  const input = el("textarea", { id: "s-stop", rows: 2, placeholder: "one a line", spellcheck: "false", "aria-describedby": "s-stop-hint" });
  input.value = saved.stop ?? "";
  input.addEventListener("input", () => remember("stop", input.value));
  inputs.set("stop", { input });
  return el("div", { class: "field" }, el("label", { for: "s-stop" }, "Stop"), input, el("p", { class: "note", id: "s-stop-hint" }, "The answer ends before one of these texts; \\n stands for a new line."));
}

function thinkingField() {
  const input = el("select", { id: "s-thinking" }, el("option", { value: "" }, "the model’s default"), el("option", { value: "on" }, "on"), el("option", { value: "off" }, "off"));
  input.value = saved.thinking ?? "";
  input.addEventListener("input", () => remember("thinking", input.value));
  inputs.set("thinking", { input });
  return el("div", { class: "field" }, el("label", { for: "s-thinking" }, "Thinking"), input, el("p", { class: "note" }, "For models whose template reads enable_thinking."));
}

/** {values: the request's fields} or {invalid: the input that is wrong}. */
export function samplingValues() {
  const values = {};
  for (const { input, field } of inputs.values()) {
    if (!field || !input.value.trim()) continue;
    if (check(field, input.value) !== null) return { invalid: input };
    values[field.name] = Number(input.value);
  }
  const stops = inputs.get("stop").input.value.split("\n").filter(Boolean).map(unescape);
  if (stops.length) values.stop = stops;
  const thinking = inputs.get("thinking").input.value;
  if (thinking) values.chat_template_kwargs = { enable_thinking: thinking === "on" };
  return { values };
}

const unescape = (text) => text.replace(/\\([nt\\])/g, (_, c) => ({ n: "\n", t: "\t", "\\": "\\" })[c]);
