// What holds the page together: views by the address's #, models, the API key, colours, side panels.

import { ApiError, getJson, hasKey, setKey } from "./api.js";
import { Chat } from "./chat.js";
import { Dashboard } from "./dashboard.js";
import { $, el, remembered, setIcon, toast } from "./dom.js";
import { buildSettings } from "./settings.js";
import { exportJson, Sidebar } from "./sidebar.js";
import * as store from "./store.js";

const SETTLE_MS = 300; // after an answer, until the engine says that it is idle
const narrow = matchMedia("(max-width: 820px)");
let conversations = [];
let models = [];

const app = {
  model: () => $("model").value,
  contextLength: () => models.find((m) => m.id === $("model").value)?.max_model_len ?? null,
  askKey: () => askKey(""),
  openPanel(input) {
    showPanel(true);
    input.focus();
  },
  changed(conversation) {
    if (!conversation.messages.length || conversation.removed) return;
    if (!conversations.some((c) => c.id === conversation.id)) {
      conversations.unshift(conversation);
      if (conversation === chat.conversation) history.replaceState(null, "", `#chat/${conversation.id}`);
    }
    conversations.sort((a, b) => b.updated - a.updated);
    drawList();
  },
  ended(error) {
    drawList();
    setTimeout(() => dashboard.tick(), SETTLE_MS);
    if (error?.status === 401) askKey("The server did not accept this key.");
    if (error?.status === 0) setStatus("down", "Server can’t be reached");
  },
  notSaved: () => toast("This browser did not keep the conversation"),
  isRunning: (id) => chat.runs.has(id),
  rename(conversation, title) {
    conversation.title = title;
    store.save(conversation).catch(app.notSaved);
    drawList();
  },
  async remove(conversation) {
    if (!(await confirmed(`Delete “${conversation.title || "Untitled"}”?`))) return;
    conversation.removed = true;
    chat.runs.get(conversation.id)?.run.stop();
    conversations = conversations.filter((c) => c.id !== conversation.id);
    await store.remove(conversation.id);
    if (chat.conversation.id === conversation.id) location.hash = "#chat";
    drawList();
    toast("Deleted");
  },
};

const chat = new Chat(app);
const sidebar = new Sidebar(app);
const dashboard = new Dashboard($("dashboard"), {
  onState(up, text, cameBack) {
    setStatus(up ? "up" : "down", text);
    if (cameBack) loadModels();
  },
});

const drawList = () => sidebar.draw(conversations, chat.conversation?.messages.length ? chat.conversation.id : null);

function setStatus(state, text) {
  $("status").dataset.state = state;
  if ($("status-text").textContent !== text) $("status-text").textContent = text;
}

// -- views

function route() {
  const [view, id] = location.hash.slice(1).split("/");
  const onDashboard = view === "dashboard";
  $("chat").hidden = onDashboard;
  $("dashboard").hidden = !onDashboard;
  $("tab-chat").toggleAttribute("aria-current", !onDashboard);
  $("tab-dashboard").toggleAttribute("aria-current", onDashboard);
  if (!onDashboard) $("tab-chat").setAttribute("aria-current", "page");
  else $("tab-dashboard").setAttribute("aria-current", "page");
  $("toggle-panel").hidden = onDashboard;
  document.title = onDashboard ? "Dashboard · Octavo" : "Octavo";
  if (onDashboard) showPanel(false);
  if (!chat.conversation) chat.show(null);
  dashboard.show(onDashboard);
  if (!onDashboard) {
    const found = conversations.find((c) => c.id === id);
    if (found) {
      if (chat.conversation !== found) chat.show(found);
    } else if (chat.conversation.messages.length || id) {
      chat.show(null);
    }
    $("tab-chat").href = found ? `#chat/${found.id}` : "#chat";
  }
  showSidebar(false);
  drawList();
}

function newConversation() {
  if (location.hash === "#chat") route();
  else location.hash = "#chat";
  if (chat.conversation.messages.length) chat.show(null);
  showSidebar(false);
  $("prompt").focus();
}

// -- models and the key

async function loadModels() {
  try {
    models = (await getJson("v1/models")).data;
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    if (error.status === 401) askKey(hasKey() ? "The server did not accept this key." : "");
    else if ($("key-dialog").open) askKey(error.message);
    setStatus("down", error.status === 401 ? "Needs an API key" : error.message);
    return false;
  }
  const select = $("model");
  const wanted = select.value && !select.disabled ? select.value : remembered.get("model");
  select.replaceChildren(...models.map((m) => el("option", { value: m.id }, m.id)));
  if (models.some((m) => m.id === wanted)) select.value = wanted;
  select.disabled = models.length === 0;
  setStatus("up", "Ready");
  chat.drawComposer();
  loadVersion();
  return true;
}

async function loadVersion() {
  try {
    $("version").textContent = (await getJson("version")).version;
  } catch {
    // the page does without
  }
}

function askKey(problem) {
  const dialog = $("key-dialog");
  $("key-error").hidden = !problem;
  $("key-error").textContent = problem;
  $("key-forget").hidden = !hasKey();
  $("key-text").textContent = hasKey() ? "A key is in use. You can replace it." : "Sent with every request, to this server only.";
  if (!dialog.open) {
    $("key").value = "";
    dialog.showModal();
  }
  $("key").focus();
}

function wireKey() {
  $("key-form").addEventListener("submit", async (event) => {
    event.preventDefault();
    setKey($("key").value, $("key-remember").checked);
    if (await loadModels()) {
      $("key-dialog").close();
      dashboard.keyChanged();
    }
  });
  $("key-cancel").addEventListener("click", () => $("key-dialog").close());
  $("key-forget").addEventListener("click", () => {
    setKey("", false);
    $("key-dialog").close();
    toast("The key is forgotten");
    loadModels();
  });
  $("change-key").addEventListener("click", () => askKey(""));
}

function confirmed(text) {
  const dialog = $("confirm");
  $("confirm-text").textContent = text;
  dialog.returnValue = "no";
  dialog.showModal();
  $("confirm-yes").focus();
  return new Promise((resolve) => dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true }));
}

// -- colours

const THEMES = ["", "light", "dark"];

function applyTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
  setIcon($("theme"), { "": "auto", light: "sun", dark: "moon" }[theme]);
  const label = `Colours: ${theme || "automatic"}`;
  $("theme").setAttribute("aria-label", label);
  $("theme").title = label;
  dashboard.recolour();
}

function wireTheme() {
  let theme = remembered.get("theme") ?? "";
  applyTheme(theme);
  $("theme").addEventListener("click", () => {
    theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
    remembered.set("theme", theme || null);
    applyTheme(theme);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => dashboard.recolour());
}

// -- side panels: beside the page where there is room, over it on narrow screens

function showSidebar(open) {
  const over = open && narrow.matches;
  document.body.classList.toggle("sidebar-open", over);
  $("open-sidebar").setAttribute("aria-expanded", String(over));
  $("sidebar").inert = narrow.matches && !over;
  cover();
  if (over) $("close-sidebar").focus();
}

function showPanel(open) {
  $("panel").hidden = !open;
  $("toggle-panel").setAttribute("aria-expanded", String(open));
  document.body.classList.toggle("panel-open", open);
  cover();
}

function cover() {
  const over = narrow.matches && (document.body.classList.contains("sidebar-open") || !$("panel").hidden);
  $("scrim").hidden = !over;
  $("page").inert = over;
}

function closeOver() {
  if (document.body.classList.contains("sidebar-open")) {
    showSidebar(false);
    $("open-sidebar").focus();
  } else if (!$("panel").hidden && (narrow.matches || $("panel").contains(document.activeElement))) {
    showPanel(false);
    $("toggle-panel").focus();
  } else return false;
  return true;
}

function wirePanels() {
  $("open-sidebar").addEventListener("click", () => showSidebar(true));
  $("close-sidebar").addEventListener("click", closeOver);
  $("toggle-panel").addEventListener("click", () => {
    showPanel($("panel").hidden);
    if (!$("panel").hidden) $("close-panel").focus();
  });
  $("close-panel").addEventListener("click", () => {
    showPanel(false);
    $("toggle-panel").focus();
  });
  $("scrim").addEventListener("click", closeOver);
  $("conversations").addEventListener("click", (event) => event.target.closest("a") && showSidebar(false));
  narrow.addEventListener("change", () => (showPanel(false), showSidebar(false)));
  showSidebar(false);
}

function wireKeys() {
  addEventListener("keydown", (event) => {
    if (event.isComposing || document.querySelector("dialog[open], :popover-open")) return;
    if (event.key === "Escape" && !closeOver() && chat.running) {
      chat.stop();
      $("prompt").focus();
    }
    if (event.key.toLowerCase() === "o" && event.shiftKey && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      newConversation();
    }
  });
  $("skip").addEventListener("click", (event) => {
    event.preventDefault();
    if ($("chat").hidden) $("main").querySelector("section:not([hidden]) button, section:not([hidden]) a")?.focus();
    else $("prompt").focus();
  });
}

async function start() {
  wirePanels();
  wireKeys();
  wireKey();
  wireTheme();
  buildSettings(() => {});
  $("new-chat").addEventListener("click", newConversation);
  $("export-all").addEventListener("click", () => exportJson(conversations, "octavo-conversations"));
  $("model").addEventListener("change", () => (remembered.set("model", $("model").value), chat.drawComposer()));
  conversations = await store.loadAll().catch(() => []);
  route();
  addEventListener("hashchange", route);
  store.onOtherTab(async (id) => {
    if (chat.runs.has(id)) return;
    const loaded = await store.loadAll().catch(() => conversations);
    // What this tab has open or is writing is newer here than in the store.
    const own = (c) => chat.runs.get(c.id)?.conversation ?? (c.id === chat.conversation.id && c.id !== id ? chat.conversation : c);
    conversations = loaded.map(own);
    const now = conversations.find((c) => c.id === id);
    if (chat.conversation.id === id) chat.show(now ?? null);
    drawList();
  });
  if (!narrow.matches && !$("chat").hidden) $("prompt").focus();
  await loadModels();
  dashboard.start();
  document.documentElement.dataset.ready = "true";
}

start();
