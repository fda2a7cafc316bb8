// Shows markdown that is still being written. What is there stays: only nodes whose source has changed are touched, and text
// that has grown is appended, so a long answer costs no more per token than a short one, and a selection in it survives.

import { copyText, el, icon, setIcon } from "./dom.js";
import { parseBlocks } from "./blocks.js";

const CHUNK_LINES = 60; // of code; the browser lays out a chunk, not the whole block, when a line is added

export class MarkdownView {
  constructor(root) {
    this.root = root;
    this.clear();
  }

  /**
   * Show ``text``, which begins with what was shown before or not. ``open``: more is to come, and only what follows the last
   * settled block is read again. At the end the whole text is, for a line can mean something else once it is complete.
   */
  show(text, open = false) {
    if (!text.startsWith(this.text)) this.clear();
    this.text = text;
    if (!open) this.settled = this.kept = 0;
    const tail = text.slice(this.settled);
    const blocks = parseBlocks(tail, open);
    reconcile(this.root, this.kept, this.blocks.slice(this.kept), blocks);
    this.blocks.splice(this.kept, Infinity, ...blocks);
    if (blocks.length > 1 && open) {
      const start = blocks.at(-1).line;
      this.settled += tail.split("\n", start).reduce((sum, line) => sum + line.length + 1, 0);
      this.kept += blocks.length - 1;
    }
  }

  clear() {
    this.root.replaceChildren();
    this.text = "";
    this.blocks = []; // as they are shown
    this.kept = 0; // how many of them are settled
    this.settled = 0; // and how many characters those are
  }
}

/** Make ``parent``'s children after the first ``from`` show ``blocks``; they show ``old``. */
function reconcile(parent, from, old, blocks) {
  for (let i = 0; i < blocks.length; i++) {
    const node = parent.childNodes[from + i];
    if (i < old.length && update(node, old[i], blocks[i])) continue;
    const made = make(blocks[i]);
    if (node) node.replaceWith(made);
    else parent.append(made);
  }
  for (let extra = parent.childNodes.length - from - blocks.length; extra > 0; extra--) parent.lastChild.remove();
}

/** Change ``node`` from ``old`` to ``block`` in place; false when it has to be made anew. */
function update(node, old, block) {
  if (old.type !== block.type) return false;
  switch (block.type) {
    case "paragraph":
      updateInline(node, old.inline, block.inline);
      return true;
    case "heading":
      if (old.level !== block.level) return false;
      updateInline(node, old.inline, block.inline);
      return true;
    case "code":
      if (old.language !== block.language || !block.text.startsWith(old.text)) return false;
      appendCode(node.querySelector("code"), block.text.slice(old.text.length));
      return true;
    case "quote":
    case "item":
      if (old.raw !== block.raw || !sameEnd(old, block)) reconcile(node, 0, old.blocks, block.blocks);
      return true;
    case "list":
      if (old.ordered !== block.ordered || old.start !== block.start) return false;
      reconcile(node, 0, old.items, block.items);
      return true;
    case "table":
      return updateTable(node, old, block);
    default:
      return true;
  }
}

// Equal sources can show differently only where a mark was open at the end.
const sameEnd = (old, block) => JSON.stringify(old.blocks.at(-1)) === JSON.stringify(block.blocks.at(-1));

function updateTable(node, old, block) {
  if (old.head.length !== block.head.length || JSON.stringify([old.head, old.align]) !== JSON.stringify([block.head, block.align])) return false;
  const body = node.querySelector("tbody");
  block.rows.forEach((row, r) => {
    if (r >= old.rows.length) body.append(tableRow(row, block.align, "td"));
    else row.forEach((cell, c) => updateInline(body.rows[r].cells[c], old.rows[r][c], cell));
  });
  while (body.rows.length > block.rows.length) body.lastChild.remove();
  return true;
}

function make(block) {
  switch (block.type) {
    case "paragraph":
      return el("p", {}, block.inline.map(makeInline));
    case "heading":
      // The page's own headings are h1 and h2.
      return el(`h${Math.min(block.level + 2, 6)}`, { class: `level-${block.level}` }, block.inline.map(makeInline));
    case "code":
      return makeCode(block);
    case "quote":
      return el("blockquote", {}, block.blocks.map(make));
    case "item":
      return el("li", {}, block.blocks.map(make));
    case "list":
      return el(block.ordered ? "ol" : "ul", block.ordered && block.start !== 1 ? { start: String(block.start) } : {}, block.items.map(make));
    case "table": {
      const table = el("table", {}, el("thead", {}, tableRow(block.head, block.align, "th")), el("tbody", {}, block.rows.map((r) => tableRow(r, block.align, "td"))));
      return el("div", { class: "table", tabindex: "0", role: "region", "aria-label": "Table" }, table);
    }
    default:
      return el("hr");
  }
}

function tableRow(row, align, tag) {
  const props = (i) => ({ class: `to-${align[i] ?? "left"}`, scope: tag === "th" ? "col" : null });
  return el("tr", {}, row.map((cell, i) => el(tag, props(i), cell.map(makeInline))));
}

function makeCode(block) {
  const code = el("code");
  const button = el("button", { type: "button", class: "copy-code", onclick: copy }, icon("copy"), el("span", {}, "Copy"));
  const label = block.language.slice(0, 24) || "text";
  const head = el("div", { class: "code-head" }, el("span", {}, label), button);
  const node = el("div", { class: "code" }, head, el("pre", { tabindex: "0", role: "region", "aria-label": `Code, ${label}` }, code));
  appendCode(code, block.text);
  return node;

  async function copy() {
    if (!(await copyText(code.textContent))) return;
    setIcon(button, "check");
    button.lastChild.textContent = "Copied";
    setTimeout(() => {
      setIcon(button, "copy");
      button.lastChild.textContent = "Copy";
    }, 1600);
  }
}

/** Code is a row of chunks of whole lines; only the last one grows. */
function appendCode(code, text) {
  let rest = text;
  while (rest) {
    let chunk = code.lastElementChild;
    let lines = chunk ? Number(chunk.dataset.lines) : CHUNK_LINES;
    if (lines >= CHUNK_LINES) {
      chunk = el("span", { "data-lines": "0" }, document.createTextNode(""));
      code.append(chunk);
      lines = 0;
    }
    let end = 0;
    while (end < rest.length && lines < CHUNK_LINES) {
      const at = rest.indexOf("\n", end);
      if (at < 0) end = rest.length;
      else {
        end = at + 1;
        lines++;
      }
    }
    chunk.firstChild.appendData(rest.slice(0, end));
    chunk.dataset.lines = String(lines);
    rest = rest.slice(end);
  }
}

function updateInline(parent, old, inlines) {
  for (let i = 0; i < inlines.length; i++) {
    const node = parent.childNodes[i];
    if (i < old.length && updateOne(node, old[i], inlines[i])) continue;
    const made = makeInline(inlines[i]);
    if (node) node.replaceWith(made);
    else parent.append(made);
  }
  while (parent.childNodes.length > inlines.length) parent.lastChild.remove();
}

function updateOne(node, old, now) {
  if (old.type !== now.type || old.href !== now.href) return false;
  if (now.type === "text" || now.type === "code") {
    const text = now.type === "text" ? node : node.firstChild;
    if (old.text === now.text) return true;
    if (!text || !now.text.startsWith(old.text)) return false;
    text.appendData(now.text.slice(old.text.length));
  } else if (now.children) updateInline(node, old.children, now.children);
  return true;
}

function makeInline(inline) {
  switch (inline.type) {
    case "text":
      return document.createTextNode(inline.text);
    case "code":
      return el("code", {}, document.createTextNode(inline.text));
    case "link":
      return el("a", { href: inline.href, target: "_blank", rel: "noopener noreferrer nofollow" }, inline.children.map(makeInline));
    case "break":
      return el("br");
    default:
      return el(inline.type, {}, inline.children.map(makeInline));
  }
}
