// The list of conversations: open, rename, delete, export.

import { $, download, el, iconButton } from "./dom.js";
import { versionOf } from "./message.js";

const nameOf = (conversation) => conversation.title || "Untitled";

export class Sidebar {
  /** ``app``: open(id), rename(conversation, title), remove(conversation), isRunning(id). */
  constructor(app) {
    this.app = app;
    this.items = [];
    $("menu").addEventListener("keydown", (event) => this.menuKey(event));
  }

  draw(conversations, current) {
    this.items = conversations;
    const list = $("conversations");
    const focused = document.activeElement?.closest?.("li")?.dataset.id;
    if (list.querySelector("input")) return; // a title is being typed
    list.replaceChildren(...conversations.map((c) => this.item(c, current)));
    if (focused) list.querySelector(`li[data-id="${focused}"] a`)?.focus();
    $("export-all").disabled = conversations.length === 0;
    if (!conversations.length) list.append(el("li", { class: "none" }, "Nothing here yet"));
  }

  item(conversation, current) {
    const link = el("a", { href: `#chat/${conversation.id}`, title: nameOf(conversation), "aria-current": conversation.id === current ? "true" : null }, nameOf(conversation));
    const running = this.app.isRunning(conversation.id) ? el("span", { class: "pulse", role: "img", "aria-label": "is being answered" }) : null;
    const more = iconButton("more", `Actions for ${nameOf(conversation)}`, () => this.openMenu(more, conversation), { "aria-haspopup": "menu", class: "icon-button small" });
    return el("li", { "data-id": conversation.id, class: conversation.id === current ? "current" : null }, link, running, more);
  }

  openMenu(button, conversation) {
    const menu = $("menu");
    const entry = (label, action, kind = null) => {
      const run = () => {
        menu.hidePopover();
        action();
      };
      return el("button", { type: "button", role: "menuitem", class: kind, onclick: run }, label);
    };
    menu.replaceChildren(
      entry("Rename", () => this.rename(conversation)),
      entry("Export as JSON", () => exportJson([conversation], fileName(conversation))),
      entry("Export as Markdown", () => download(`${fileName(conversation)}.md`, toMarkdown(conversation), "text/markdown")),
      entry("Delete", () => this.app.remove(conversation), "danger"),
    );
    menu.showPopover();
    const box = button.getBoundingClientRect();
    menu.style.left = `${Math.max(8, Math.min(box.left, innerWidth - menu.offsetWidth - 8))}px`;
    menu.style.top = `${Math.min(box.bottom + 4, innerHeight - menu.offsetHeight - 8)}px`;
    menu.firstChild.focus();
    menu.addEventListener("toggle", (event) => event.newState === "closed" && menu.contains(document.activeElement) && button.focus(), { once: true });
  }

  menuKey(event) {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const entries = [...$("menu").children];
    entries[(entries.indexOf(document.activeElement) + step + entries.length) % entries.length].focus();
  }

  rename(conversation) {
    const item = $("conversations").querySelector(`li[data-id="${conversation.id}"]`);
    if (!item) return;
    const input = el("input", { type: "text", "aria-label": "New title", maxlength: "120" });
    input.value = conversation.title;
    let over = false;
    const close = (keep) => {
      if (over) return;
      over = true;
      const title = input.value.trim();
      input.remove();
      this.app.rename(conversation, keep && title ? title : conversation.title);
      $("conversations").querySelector(`li[data-id="${conversation.id}"] a`)?.focus();
    };
    input.addEventListener("keydown", (event) => {
      if (event.isComposing) return;
      if (event.key === "Enter") close(true);
      if (event.key === "Escape") (event.stopPropagation(), close(false));
    });
    input.addEventListener("blur", () => close(true));
    item.replaceChildren(input);
    input.select();
  }
}

const fileName = (conversation) => nameOf(conversation).replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 40).replace(/^-|-$/g, "") || "conversation";

export function exportJson(conversations, name) {
  const plain = conversations.map(({ id, title, system, created, updated, messages }) => ({ id, title, system, created, updated, messages }));
  download(`${name}.json`, JSON.stringify({ format: "octavo-conversations", version: 1, conversations: plain }, null, 2), "application/json");
}

export function toMarkdown(conversation) {
  const parts = [`# ${nameOf(conversation)}`];
  if (conversation.system?.trim()) parts.push(`## System\n\n${conversation.system}`);
  for (const message of conversation.messages) {
    if (message.role === "user") parts.push(`## You\n\n${message.text}`);
    else parts.push(`## ${versionOf(message).model || "Answer"}\n\n${versionOf(message).text}`);
  }
  return `${parts.join("\n\n")}\n`;
}
