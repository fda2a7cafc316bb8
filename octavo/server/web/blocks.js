// Markdown to a tree of plain objects: the part of the language that models write. Knows nothing of the page.
//
// A block is {type, …, raw}: raw is its source, and equal sources make equal blocks, so that a renderer can keep what it has.
//   paragraph, heading (level): inline[]   code: language, text   quote, item: blocks[]   list: ordered, start, items[]
//   table: align[], head[], rows[][] (cells are inline[])   rule
// An inline is {type: "text", text} | {type: "code", text} | {type: "strong" | "em" | "del", children} | {type: "link", href, children}
//   | {type: "break"}

// Lines have no \n, but may have other line breaks that . does not match without the flag s.
const FENCE = /^( {0,3})(`{3,}|~{3,})\s*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)(?:\s+#+)?\s*$/s;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?:( +)(.*)|\s*)$/s;
const QUOTE = /^ {0,3}> ?(.*)$/s;
const TABLE_RULE = /^ {0,3}\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?\s*$/;
// Last lines that may yet become something else; while more text is to come they are not shown.
const UNDECIDED = /^\s*(?:[-*+]|\d{1,9}[.)]?|#{1,6}|`{1,}|~{1,}|>|(?:[-*_]\s*){1,3})\s*$|^ {0,3}(?:`{3,}|~{3,})[^`\n]*$/;
const MAX_DEPTH = 12;

/** The blocks of ``text``. With ``open`` more text will come: marks without an end are closed at the end, an undecided line waits. */
export function parseBlocks(text, open = false, depth = 0) {
  const lines = text.split("\n");
  if (open && lines.length && UNDECIDED.test(lines.at(-1)) && !insideFence(lines)) lines.pop();
  const blocks = [];
  let i = 0;
  while (i < lines.length) {
    if (!lines[i].trim()) {
      i++;
      continue;
    }
    const start = i;
    const [block, next] = readBlock(lines, i, open, depth);
    i = next;
    block.raw = lines.slice(start, i).join("\n");
    block.line = start;
    blocks.push(block);
  }
  return blocks;
}

function insideFence(lines) {
  let fence = null;
  for (const line of lines.slice(0, -1)) {
    const match = FENCE.exec(line);
    if (!fence) fence = match?.[2] ?? null;
    else if (closes(line, fence)) fence = null;
  }
  return fence !== null;
}

const closes = (line, fence) => new RegExp(`^ {0,3}\\${fence[0]}{${fence.length},}\\s*$`).test(line);

function readBlock(lines, i, open, depth) {
  const line = lines[i];
  const last = (next) => open && next >= lines.length; // the block that is still being written
  let match;
  if ((match = FENCE.exec(line))) return readCode(lines, i, match, open);
  if ((match = HEADING.exec(line))) return [{ type: "heading", level: match[1].length, inline: parseInline(match[2], last(i + 1)) }, i + 1];
  if (RULE.test(line)) return [{ type: "rule" }, i + 1];
  if (QUOTE.test(line) && depth < MAX_DEPTH) return readQuote(lines, i, open, depth);
  if (ITEM.test(line) && depth < MAX_DEPTH) return readList(lines, i, open, depth);
  if (line.includes("|") && TABLE_RULE.test(lines[i + 1] ?? "") && lines[i + 1].includes("-")) {
    const head = cells(line);
    if (head.length === cells(lines[i + 1]).length) return readTable(lines, i, head, open);
  }
  return readParagraph(lines, i, open, depth);
}

function readCode(lines, i, [, indent, fence, info], open) {
  const strip = new RegExp(`^ {0,${indent.length}}`);
  const body = [];
  let next = i + 1;
  let closed = false;
  for (; next < lines.length && !closed; next++) {
    if (closes(lines[next], fence)) closed = true;
    else body.push(lines[next].replace(strip, ""));
  }
  // The last line of an open block may become the closing fence, and its newline be the one before that.
  if (!closed && open && body.length && new RegExp(`^ {0,3}\\${fence[0]}*\\s*$`).test(body.at(-1))) body.pop();
  return [{ type: "code", language: info.trim().split(/\s+/)[0] ?? "", text: body.join("\n"), closed }, next];
}

function readQuote(lines, i, open, depth) {
  const inner = [];
  let next = i;
  for (; next < lines.length; next++) {
    const match = QUOTE.exec(lines[next]);
    if (match) inner.push(match[1]);
    else if (lines[next].trim() && !interrupts(lines, next, depth)) inner.push(lines[next]); // a lazy line
    else break;
  }
  return [{ type: "quote", blocks: parseBlocks(inner.join("\n"), open && next >= lines.length, depth + 1) }, next];
}

function readList(lines, i, open, depth) {
  const [, , marker] = ITEM.exec(lines[i]);
  const ordered = /\d/.test(marker);
  const sign = marker.at(-1);
  const items = [];
  let next = i;
  let match;
  while (next < lines.length && (match = ITEM.exec(lines[next])) && match[2].at(-1) === sign && /\d/.test(match[2]) === ordered && !RULE.test(lines[next])) {
    const [item, after] = readItem(lines, next, match, open, depth);
    items.push(item);
    next = after;
    const resume = skipBlank(lines, next);
    if (ITEM.test(lines[resume] ?? "")) next = resume;
    else break;
  }
  return [{ type: "list", ordered, start: ordered ? parseInt(marker, 10) : 1, items }, next];
}

function readItem(lines, i, [, indent, marker, gap = " ", first = ""], open, depth) {
  const width = indent.length + marker.length + Math.min(gap.length, 4);
  const inner = [first];
  let next = i + 1;
  for (; next < lines.length; next++) {
    const line = lines[next];
    const deep = line.length - line.trimStart().length;
    if (!line.trim()) {
      const resume = skipBlank(lines, next);
      const follows = lines[resume];
      if (follows === undefined || follows.length - follows.trimStart().length < Math.min(width, indent.length + 2)) break;
      inner.push("");
    } else if (deep >= width) inner.push(line.slice(width));
    else if (deep > indent.length && (ITEM.test(line) || FENCE.test(line.trimStart()))) inner.push(line.slice(Math.min(deep, width)));
    else if (!ITEM.test(line) && !interrupts(lines, next, depth) && inner.at(-1) !== "") inner.push(line.trimStart()); // a lazy line
    else if (deep >= indent.length + 2) inner.push(line.slice(deep));
    else break;
  }
  const blocks = parseBlocks(inner.join("\n"), open && next >= lines.length, depth + 1);
  return [{ type: "item", blocks, raw: lines.slice(i, next).join("\n") }, next];
}

function skipBlank(lines, i) {
  while (i < lines.length && !lines[i].trim()) i++;
  return i;
}

function cells(line) {
  const parts = line.trim().replace(/^\|/, "").replace(/(?<!\\)\|\s*$/, "").split(/(?<!\\)\|/);
  return parts.map((part) => part.trim().replaceAll("\\|", "|"));
}

function readTable(lines, i, head, open) {
  const align = cells(lines[i + 1]).map((c) => (c.endsWith(":") ? (c.startsWith(":") ? "center" : "right") : "left"));
  const rows = [];
  let next = i + 2;
  for (; next < lines.length && lines[next].trim() && lines[next].includes("|"); next++) {
    const row = cells(lines[next]).slice(0, head.length);
    while (row.length < head.length) row.push("");
    const last = open && next === lines.length - 1;
    rows.push(row.map((cell) => parseInline(cell, last)));
  }
  if (open && next === lines.length - 1 && lines[next].trim()) next++; // it may get its | yet: it waits
  return [{ type: "table", align, head: head.map((cell) => parseInline(cell)), rows }, next];
}

function readParagraph(lines, i, open, depth) {
  const text = [lines[i].trimStart()];
  let next = i + 1;
  while (next < lines.length && lines[next].trim() && !interrupts(lines, next, depth)) text.push(lines[next++].trimStart());
  return [{ type: "paragraph", inline: parseInline(text.join("\n"), open && next >= lines.length) }, next];
}

/** Does a line end a paragraph by what it begins? */
function interrupts(lines, i, depth) {
  const line = lines[i];
  if (FENCE.test(line) || HEADING.test(line) || RULE.test(line)) return true;
  if (depth < MAX_DEPTH && (QUOTE.test(line) || (ITEM.test(line) && ITEM.exec(line)[4] && /[-*+]|^1[.)]$/.test(ITEM.exec(line)[2])))) return true;
  return line.includes("|") && TABLE_RULE.test(lines[i + 1] ?? "") && lines[i + 1].includes("|");
}

const SPECIAL = /[\\`*_~[!<h\n]/g;
const URL_TEXT = /^https?:\/\/[^\s<>"'`*]+/;
const PUNCTUATION = /[!-/:-@[-`{-~]/;
const word = (c) => c !== undefined && /[\p{L}\p{N}]/u.test(c);

/** The inlines of a text. Linear in its length but for nested marks, which MAX_DEPTH bounds. */
export function parseInline(text, open = false, depth = 0) {
  const out = [];
  let plain = "";
  let at = 0;
  const missing = new Set(); // marks that have no end in this text: looked for once
  const flush = () => {
    if (plain) out.push({ type: "text", text: plain });
    plain = "";
  };
  const add = (node, next) => {
    flush();
    out.push(node);
    at = next;
  };
  while (at < text.length) {
    SPECIAL.lastIndex = at;
    const hit = SPECIAL.exec(text);
    const stop = hit ? hit.index : text.length;
    plain += text.slice(at, stop);
    at = stop;
    if (!hit) break;
    const c = text[at];
    if (c === "\\" && PUNCTUATION.test(text[at + 1] ?? "")) {
      plain += text[at + 1];
      at += 2;
    } else if (c === "\n") {
      const hard = / {2,}$/.test(plain);
      plain = plain.replace(/ +$/, "");
      if (hard) add({ type: "break" }, at + 1);
      else {
        plain += "\n";
        at++;
      }
    } else if (!special(c)) {
      plain += c;
      at++;
    }
  }
  flush();
  return out;

  function special(c) {
    if (c === "`") return code();
    if (c === "*" || c === "_" || c === "~") return emphasis(c);
    if (c === "[" || (c === "!" && text[at + 1] === "[")) return link();
    if (c === "h" || c === "<") return bareLink(c === "<");
    return false;
  }

  function code() {
    const ticks = /^`+/.exec(text.slice(at, at + 32))[0];
    const from = at + ticks.length;
    let end = missing.has(ticks) ? -1 : text.indexOf(ticks, from);
    while (end >= 0 && text[end + ticks.length] === "`") {
      let run = end;
      while (text[run] === "`") run++;
      end = text.indexOf(ticks, run);
    }
    if (end < 0) {
      missing.add(ticks);
      if (open && from >= text.length) return drop();
      if (open && ticks.length < 3) return add({ type: "code", text: text.slice(from) }, text.length), true;
      plain += ticks;
      at = from;
      return true;
    }
    const body = text.slice(from, end).replaceAll("\n", " ");
    add({ type: "code", text: /^ .*[^ ].* $/s.test(body) ? body.slice(1, -1) : body }, end + ticks.length);
    return true;
  }

  function drop() {
    at = text.length; // a mark at the very end, of which nobody knows yet what it is
    return true;
  }

  function emphasis(c) {
    let size = 1;
    while (size < 3 && text[at + size] === c) size++;
    if (c === "~" && size !== 2) return false;
    const mark = c.repeat(size);
    const from = at + size;
    if (from >= text.length) return open ? drop() : false;
    if (/\s/.test(text[from]) || depth >= MAX_DEPTH || (c === "_" && word(text[at - 1]))) return skip(mark, from);
    let end = missing.has(mark) ? -1 : closing(mark, from);
    if (end < 0) missing.add(mark);
    let next = end + size;
    if (end < 0 && open && size < 3 && !word(text[at - 1])) end = next = text.length;
    if (end < 0) return skip(mark, from);
    const body = text.slice(from, end).replace(next === end ? new RegExp(`\\${c}{1,${size}}$`) : /$^/, "");
    const children = parseInline(body, next === end, depth + 1);
    const kinds = c === "~" ? ["del"] : [["em"], ["strong"], ["strong", "em"]][size - 1];
    add(kinds.reduceRight((inner, type) => [{ type, children: inner }], children)[0], next);
    return true;
  }

  function skip(mark, from) {
    plain += mark;
    at = from;
    return true;
  }

  /** Where a mark ends that began before ``from``: not after a space, not in code; -1 when nowhere. */
  function closing(mark, from) {
    const c = mark[0];
    for (let i = from; i < text.length; i++) {
      if (text[i] === "\\") i++;
      else if (text[i] === "`") {
        const end = text.indexOf("`", i + 1);
        if (end > 0) i = end;
      } else if (text[i] === c) {
        let run = 1;
        while (text[i + run] === c) run++;
        const fits = run === mark.length || (run > mark.length && mark.length < 3 && run === 3);
        if (fits && !/\s/.test(text[i - 1]) && i > from && !(c === "_" && word(text[i + run]))) return i + run - mark.length;
        i += run - 1;
      }
    }
    return -1;
  }

  function link() {
    const image = text[at] === "!";
    const from = at + (image ? 2 : 1);
    const middle = missing.has("](") ? -1 : text.indexOf("](", from);
    if (middle < 0 || middle - from > 1000) {
      if (middle < 0) missing.add("](");
      return false;
    }
    const label = text.slice(from, middle);
    if (label.includes("[") || label.includes("\n\n")) return false;
    let end = middle + 2;
    for (let deep = 0; end < text.length && !(text[end] === ")" && deep === 0) && text[end] !== "\n"; end++) {
      if (text[end] === "(") deep++;
      else if (text[end] === ")") deep--;
    }
    if (text[end] !== ")") return open && end >= text.length ? (add({ type: "text", text: label }, text.length), true) : false;
    const href = safeUrl(text.slice(middle + 2, end).trim().replace(/\s+["'(].*$/s, "").replace(/^<(.*)>$/s, "$1"));
    const children = depth < MAX_DEPTH ? parseInline(label || href || "", false, depth + 1).flatMap(unlinked) : [{ type: "text", text: label }];
    // An image is only a link to it: the page asks no other host for anything.
    if (href) add({ type: "link", href, children }, end + 1);
    else skip(text.slice(at, end + 1), end + 1);
    return true;
  }

  function bareLink(bracketed) {
    if (word(text[at - 1]) || !text.startsWith("http", bracketed ? at + 1 : at)) return false;
    const match = URL_TEXT.exec(text.slice(bracketed ? at + 1 : at, at + 2048));
    if (!match) return false;
    if (bracketed && text[at + 1 + match[0].length] !== ">") return false;
    let shown = bracketed ? match[0] : match[0].replace(/[.,;:!?\]]+$/, "");
    if (!bracketed && shown.endsWith(")") && !shown.includes("(")) shown = shown.slice(0, -1);
    const href = safeUrl(shown);
    if (!href) return false;
    add({ type: "link", href, children: [{ type: "text", text: shown }] }, at + shown.length + (bracketed ? 2 : 0));
    return true;
  }
}

const unlinked = (node) => (node.type === "link" ? node.children : [node]);

/** A URL that may be followed, or null: only the web and mail, and only in full. */
export function safeUrl(text) {
  try {
    const url = new URL(text);
    return ["http:", "https:", "mailto:"].includes(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}
