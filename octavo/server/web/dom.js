// Small helpers for making elements. Text goes in as text nodes only: nothing in this page turns a string into markup.

const SVG = "http://www.w3.org/2000/svg";

export const $ = (id) => document.getElementById(id);

/** el("button", {class: "a", "aria-label": "b", onclick: f}, child, "text") → an element. null and false children are left out. */
export function el(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "class") node.className = value;
    else if (name in node && typeof value !== "string") node[name] = value;
    else node.setAttribute(name, value);
  }
  for (const child of children.flat()) if (child !== null && child !== undefined && child !== false) node.append(child);
  return node;
}

/** An icon of the sprite in index.html. */
export function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("class", "icon");
  svg.setAttribute("aria-hidden", "true");
  const use = document.createElementNS(SVG, "use");
  use.setAttribute("href", `#i-${name}`);
  svg.append(use);
  return svg;
}

export function setIcon(button, name) {
  button.querySelector("use").setAttribute("href", `#i-${name}`);
}

export function iconButton(name, label, onclick, props = {}) {
  return el("button", { type: "button", class: "icon-button", "aria-label": label, title: label, onclick, ...props }, icon(name));
}

let toastTimer = 0;

/** A short note at the bottom, which screen readers hear too. */
export function toast(text) {
  const node = $("toast");
  node.textContent = text;
  node.classList.add("shown");
  clearTimeout(toastTimer);
  toastTimer = setTimeout(() => node.classList.remove("shown"), 2600);
}

export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // Pages over plain HTTP have no clipboard interface, except on localhost.
    const area = el("textarea", { class: "sr", readonly: "", "aria-hidden": "true", tabindex: "-1" });
    area.value = text;
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    if (!done) {
      toast("The browser did not let the page copy");
      return false;
    }
  }
  return true;
}

export function download(name, text, type) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  el("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

/** localStorage that never throws (private windows, blocked storage, a full disk). */
export const remembered = {
  get(name) {
    try {
      return localStorage.getItem(`octavo.${name}`);
    } catch {
      return null;
    }
  },
  set(name, value) {
    try {
      if (value === null) localStorage.removeItem(`octavo.${name}`);
      else localStorage.setItem(`octavo.${name}`, value);
    } catch {
      // it is only not remembered
    }
  },
};

export const newId = () => Array.from(crypto.getRandomValues(new Uint8Array(12)), (b) => b.toString(16).padStart(2, "0")).join("");

const number = new Intl.NumberFormat("en");
export const count = (n) => number.format(n);

export function seconds(s) {
  if (s === null || s === undefined || !Number.isFinite(s)) return "–";
  if (s === 0) return "0";
  if (s < 0.001) return "<1 ms";
  if (s < 1) return `${(s * 1000).toFixed(s < 0.01 ? 1 : 0)} ms`;
  if (s < 100) return `${s.toFixed(s < 10 ? 2 : 1)} s`;
  return `${Math.floor(s / 60)} min ${Math.round(s % 60)} s`;
}
