// What the tests look at in a page; evaluated in it as one script whose last line is a call.

const seen = (e) => e.checkVisibility({ opacityProperty: true, visibilityProperty: true });
const modal = document.querySelector("dialog[open]");
const reachable = (e) => seen(e) && !e.closest("[inert]") && (!modal || modal.contains(e));

// -- colours

function colour(text) {
  const numbers = text.match(/[\d.]+/g).map(Number);
  const rgb = text.startsWith("color(") ? numbers.slice(0, 3).map((v) => v * 255) : numbers.slice(0, 3);
  return [...rgb, numbers[3] ?? 1];
}

const over = (top, under) => top.slice(0, 3).map((v, i) => v * top[3] + under[i] * (1 - top[3]));

function luminance(rgb) {
  const linear = (v) => (v / 255 <= 0.03928 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4);
  return 0.2126 * linear(rgb[0]) + 0.7152 * linear(rgb[1]) + 0.0722 * linear(rgb[2]);
}

/** The colour behind an element: grounds on top of each other, down to one that hides the rest. */
function ground(element) {
  const layers = [];
  for (let e = element; e; e = e.parentElement) {
    const c = colour(getComputedStyle(e).backgroundColor);
    if (c[3]) layers.push(c);
    if (c[3] === 1) break;
  }
  return layers.reduceRight((under, c) => over(c, under), [255, 255, 255]);
}

function ratio(element, text) {
  const behind = ground(element);
  const [a, b] = [over(colour(text), behind), behind].map(luminance).sort((x, y) => y - x);
  return (a + 0.05) / (b + 0.05);
}

/** [how many texts were looked at, those whose contrast is too low]. */
function contrast() {
  const low = [];
  let checked = 0;
  const check = (e, text, what, least = null) => {
    const style = getComputedStyle(e);
    const size = parseFloat(style.fontSize);
    const large = size >= 24 || (size >= 18.66 && style.fontWeight >= 600);
    const found = ratio(e, text);
    checked++;
    if (found < (least ?? (large ? 3 : 4.5))) low.push([what.trim().slice(0, 40), found.toFixed(2), text]);
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const e = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !reachable(e) || e.closest(":disabled, .sr, #toast, #skip, noscript, option")) continue;
    check(e, getComputedStyle(e).color, walker.currentNode.data);
  }
  for (const e of document.querySelectorAll("input, textarea")) {
    if (reachable(e)) check(e, getComputedStyle(e, e.value ? null : "::placeholder").color, e.id);
  }
  for (const e of document.querySelectorAll(":is(button:not(:disabled), summary) .icon")) {
    const host = e.closest("button, summary");
    if (reachable(e)) check(host, getComputedStyle(e).color, `icon of ${host.ariaLabel ?? host.textContent}`, 3);
  }
  return [checked, low];
}

// -- names

const textOf = (ids) => ids.split(" ").map((id) => document.getElementById(id)?.textContent ?? "").join("");

function nameOf(e) {
  const labels = [...(e.labels ?? [])].map((l) => l.textContent).join("");
  const content = e.matches("input, select, textarea, canvas") ? "" : e.textContent;
  return (e.getAttribute("aria-label") || textOf(e.getAttribute("aria-labelledby") ?? "") || labels || content).trim();
}

/** Controls without a name, ids used twice, references to nothing, headings and landmarks out of order. */
function names() {
  const problems = [];
  const each = (selector, f) => document.querySelectorAll(selector).forEach(f);
  const named = "button, a[href], input, select, textarea, summary, canvas, [tabindex], [role=menu], dialog, aside, nav, section";
  each(named, (e) => nameOf(e) || problems.push(`no name: ${e.outerHTML.slice(0, 120)}`));
  const ids = [...document.querySelectorAll("[id]")].map((e) => e.id);
  for (const id of new Set(ids)) if (ids.filter((i) => i === id).length > 1) problems.push(`twice: ${id}`);
  for (const attribute of ["aria-controls", "aria-describedby", "aria-labelledby", "for"]) {
    each(`[${attribute}]`, (e) => {
      for (const id of e.getAttribute(attribute).split(" ")) if (!ids.includes(id)) problems.push(`${attribute} of nothing: ${id}`);
    });
  }
  each("svg:not([aria-hidden=true])", () => problems.push("an svg is read"));
  each("[aria-hidden=true] :is(button, a[href], input)", (e) => problems.push(`hidden control ${e.outerHTML}`));
  each("img:not([alt])", () => problems.push("img without alt"));
  if (document.querySelectorAll("h1").length !== 1 || document.querySelectorAll("main").length !== 1) problems.push("one h1, one main");
  let level = 0;
  each("main :is(h2, h3, h4, h5, h6)", (h) => {
    if (!seen(h) || h.closest(".prose")) return; // the model's headings are the model's
    if (level && Number(h.tagName[1]) > level + 1) problems.push(`heading skips: ${h.textContent}`);
    level = Number(h.tagName[1]);
  });
  if (!document.documentElement.lang || !document.title) problems.push("lang, title");
  return problems;
}

// -- sizes

/** What sticks out of the page to the side, unless something around it scrolls; and targets too small to hit. */
function fits() {
  const problems = [];
  const width = document.documentElement.clientWidth;
  if (document.scrollingElement.scrollWidth > width || document.body.scrollWidth > width) problems.push("the page scrolls sideways");
  for (const e of document.querySelectorAll("body *")) {
    if (!e.checkVisibility({ visibilityProperty: true }) || e.closest(".sr, .skip, #toast, svg, .sprite")) continue;
    const box = e.getBoundingClientRect();
    if (!box.width) continue;
    if (box.right > width + 1 || box.left < -1) {
      let around = e.parentElement;
      while (around && !/auto|scroll|hidden/.test(getComputedStyle(around).overflowX)) around = around.parentElement;
      if (!around || around === document.body) problems.push(`sticks out: ${e.outerHTML.slice(0, 100)}`);
    }
    const target = e.matches("button, select, .tabs a, summary, #conversations a");
    if (target && (box.width < 24 || box.height < 22)) problems.push(`small: ${e.outerHTML.slice(0, 80)} ${box.width}×${box.height}`);
  }
  for (const selector of ["#scroller", "#dashboard", ".panel-body"]) {
    const e = document.querySelector(selector);
    if (e.scrollWidth > e.clientWidth) problems.push(`${selector} scrolls sideways`);
  }
  return problems;
}

/** [the focused element's name, whether one sees that it has the focus]. */
function focused() {
  const e = document.activeElement;
  const ring = getComputedStyle(e.closest("#composer") ?? e).boxShadow;
  const shown = e === document.body || getComputedStyle(e).outlineStyle !== "none" || ring !== "none";
  return [e.id || e.getAttribute("aria-label") || e.textContent.trim().slice(0, 20), shown];
}

// -- streams

/** From now on: the times between frames, and how much of what was read has moved. */
function measure() {
  window.gaps = [];
  window.moved = [];
  window.shift = 0;
  let last = performance.now();
  const beat = () => {
    const now = performance.now();
    gaps.push(now - last);
    last = now;
    requestAnimationFrame(beat);
  };
  requestAnimationFrame(beat);
  // What is below a growing text moves down; what was read may not move.
  const read = (node) => (node?.nodeType === 3 ? node.parentElement : node)?.closest?.(".prose, .bubble, #composer, #bar, #sidebar");
  new PerformanceObserver((list) => {
    for (const entry of list.getEntries()) {
      for (const source of entry.sources.filter((s) => read(s.node))) {
        shift += entry.value;
        moved.push([entry.value, source.node.nodeName, source.node.textContent.slice(-50)]);
      }
    }
  }).observe({ type: "layout-shift", buffered: true });
}

/** Answer chat requests in the page: four characters a chunk, ``many`` chunks each 10 ms. */
function feed(text, many) {
  const real = window.fetch;
  const encoder = new TextEncoder();
  const frame = (data) => encoder.encode(`data: ${typeof data === "string" ? data : JSON.stringify(data)}\n\n`);
  const delta = (part, finish = null) => frame({ choices: [{ delta: part, finish_reason: finish }] });
  const start = (controller) => {
    let at = 0;
    const timer = setInterval(() => {
      for (let i = 0; i < many && at < text.length; i++, at += 4) controller.enqueue(delta({ content: text.slice(at, at + 4) }));
      if (at < text.length) return;
      clearInterval(timer);
      controller.enqueue(delta({}, "stop"));
      controller.enqueue(frame("[DONE]"));
      controller.close();
    }, 10);
  };
  window.fetch = (url, init) =>
    String(url).endsWith("completions") ? Promise.resolve(new Response(new ReadableStream({ start }), { status: 200 })) : real(url, init);
}

/** How many pixels of the plot with this title have the colour of its first series. */
function pixels(title) {
  const figure = [...document.querySelectorAll(".plot")].find((f) => f.querySelector("h3").textContent === title);
  const canvas = figure.querySelector("canvas");
  const wanted = colour(getComputedStyle(figure.querySelector(".swatch")).backgroundColor);
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  let count = 0;
  for (let i = 0; i < data.length; i += 4) {
    const off = Math.abs(data[i] - wanted[0]) + Math.abs(data[i + 1] - wanted[1]) + Math.abs(data[i + 2] - wanted[2]);
    if (data[i + 3] > 200 && off < 30) count++;
  }
  return count;
}

/** What the dashboard's tiles say: {label: value}. */
function tiles() {
  const entries = [...document.querySelectorAll(".tile")];
  return Object.fromEntries(entries.map((t) => [t.querySelector("dt").textContent, t.querySelector(".value").textContent]));
}
