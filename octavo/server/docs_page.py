"""The page /docs: reads /openapi.json and shows it. One file without a build step; nothing is loaded from elsewhere."""

from __future__ import annotations

import base64
import hashlib

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8881; --accent: #3a6ea5; }
@media (prefers-color-scheme: dark) { :root { --accent: #8ab8e6; } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
details { border: 1px solid var(--line); border-radius: .4rem; margin: .4rem 0; }
summary { cursor: pointer; padding: .45rem .7rem; display: flex; gap: .7rem; flex-wrap: wrap; align-items: baseline; }
summary:focus-visible { outline: 2px solid var(--accent); }
.inside { padding: .2rem .9rem .8rem; border-top: 1px solid var(--line); }
.method { font: 600 .8rem ui-monospace, monospace; color: var(--accent); min-width: 3rem; }
code, pre { font: .85rem ui-monospace, monospace; } code { overflow-wrap: anywhere; }
table { border-collapse: collapse; width: 100%; } td, th { text-align: left; vertical-align: top; padding: .25rem .5rem .25rem 0;
  border-bottom: 1px solid var(--line); } td:first-child { white-space: nowrap; }
.wide { overflow-x: auto; } .quiet { opacity: .75; } h3 { font-size: .95rem; margin: .8rem 0 .2rem; }
@media (max-width: 35rem) { td:first-child { white-space: normal; } }
"""

_SCRIPT = """
"use strict";
const make = (name, text, ...children) => {
  const element = document.createElement(name);
  if (text) element.textContent = text;
  element.append(...children);
  return element;
};
const nameOf = (ref) => ref.split("/").pop();
const typeOf = (schema) => {
  if (!schema || !Object.keys(schema).length) return "anything";
  if (schema.$ref) return nameOf(schema.$ref);
  if (schema.anyOf) return schema.anyOf.map(typeOf).filter((t) => t !== "null").join(" | ");
  if (schema.enum) return schema.enum.map((v) => JSON.stringify(v)).join(" | ");
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.type === "array") return "list of " + typeOf(schema.items);
  if (schema.type === "object" && schema.additionalProperties) return "object of " + typeOf(schema.additionalProperties);
  return schema.type || "anything";
};
const linked = (text, schemas) => {
  const cell = make("td");
  for (const part of text.split(/([A-Za-z]+)/)) {
    if (schemas[part]) { const link = make("a", part); link.href = "#" + part; cell.append(link); } else cell.append(part);
  }
  return cell;
};
const fieldTable = (schema, schemas) => {
  const table = make("table");
  const required = new Set(schema.required || []);
  for (const [name, field] of Object.entries(schema.properties || {})) {
    const first = make("td", "", make("code", name));
    if (required.has(name)) first.append(" *");
    table.append(make("tr", "", first, linked(typeOf(field), schemas), make("td", field.description || "")));
  }
  return make("div", "", table);
};
const wide = (box) => { box.className = "wide"; return box; };
const section = (id, head, inside) => {
  const box = make("details", "", head, inside);
  if (id) box.id = id;
  inside.className = "inside";
  return box;
};
const bodyOf = (title, content, schemas) => {
  const parts = [make("h3", title)];
  for (const [media, described] of Object.entries(content || {})) {
    const line = make("div", "", make("code", media), " ");
    const event = described.itemSchema?.properties.data.contentSchema;
    line.append(...linked(typeOf(event || described.schema), schemas).childNodes);
    parts.push(line);
  }
  return parts;
};
const show = (api) => {
  const schemas = api.components.schemas;
  const page = document.getElementById("page");
  page.replaceChildren(make("p", api.info.description));
  const groups = {};
  for (const [path, methods] of Object.entries(api.paths))
    for (const [method, operation] of Object.entries(methods)) (groups[operation.tags[0]] ||= []).push([path, method, operation]);
  for (const [tag, operations] of Object.entries(groups).sort()) {
    page.append(make("h2", tag));
    for (const [path, method, operation] of operations) {
      const tagElement = make("span", method.toUpperCase());
      tagElement.className = "method";
      const quiet = make("span", operation.summary);
      quiet.className = "quiet";
      const inside = make("div");
      if (operation.requestBody) {
        const content = operation.requestBody.content;
        inside.append(...bodyOf("Request", content, schemas));
        const schema = content["application/json"].schema;
        if (schema.$ref) inside.append(wide(fieldTable(schemas[nameOf(schema.$ref)], schemas)));
      }
      inside.append(...bodyOf("Answer", operation.responses["200"].content, schemas));
      inside.append(...bodyOf("Errors (4XX, 5XX)", operation.responses["4XX"].content, schemas));
      page.append(section("", make("summary", "", tagElement, make("code", path), quiet), inside));
    }
  }
  page.append(make("h2", "Schemas"));
  for (const [name, schema] of Object.entries(schemas)) {
    const table = fieldTable(schema, schemas);
    if (schema.description) table.prepend(make("p", schema.description));
    page.append(section(name, make("summary", "", make("code", name)), table));
  }
  const open = () => { const box = document.getElementById(location.hash.slice(1)); if (box) { box.open = true; box.scrollIntoView(); } };
  addEventListener("hashchange", open);
  open();
};
const read = async (key) => {
  const answer = await fetch("openapi.json", key ? { headers: { Authorization: "Bearer " + key } } : {});
  if (answer.status === 401) return askForKey(key);
  if (!answer.ok) throw new Error("HTTP " + answer.status);
  show(await answer.json());
};
const load = (key) => read(key).catch((error) => {
  document.getElementById("page").textContent = "openapi.json cannot be read: " + error.message;
});
const askForKey = (before) => {
  const field = make("input");
  field.type = "password";
  field.autocomplete = "off";
  const label = make("label", before ? "That key is not right. API key: " : "This server wants an API key: ", field);
  const button = make("button", "Show");
  button.onclick = () => load(field.value);
  field.onkeydown = (event) => { if (event.key === "Enter") load(field.value); };
  document.getElementById("page").replaceChildren(label, " ", button);
  field.focus();
};
load("");
"""

PAGE = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Octavo's API</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>Octavo's API</h1>
<p><a href="openapi.json">openapi.json</a></p>
<main id="page">Reading openapi.json …</main>
<script>{_SCRIPT}</script>
</body>
</html>
"""


def _hash(text: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"


CONTENT_SECURITY_POLICY = (
    f"default-src 'none'; script-src {_hash(_SCRIPT)}; style-src {_hash(_STYLE)}; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
