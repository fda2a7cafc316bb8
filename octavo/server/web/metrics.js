// From /metrics texts, one after another, to series: rates and percentiles are differences between two scrapes.

const LINE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)/;
const PREFIX = "vllm:";

/** {values: {name: sum over labels}, histograms: {name: {bounds, counts (cumulative), sum, count}}} of the text format. */
export function parse(text) {
  const values = {};
  const buckets = {};
  for (const line of text.split("\n")) {
    if (!line.startsWith(PREFIX)) continue;
    const match = LINE.exec(line);
    if (!match) continue;
    const name = match[1].slice(PREFIX.length);
    const value = Number(match[3]);
    if (name.endsWith("_bucket")) {
      const bound = /(?:^|,)le="([^"]*)"/.exec(match[2] ?? "")?.[1];
      if (bound === undefined) continue;
      const histogram = (buckets[name.slice(0, -7)] ??= new Map());
      const le = bound === "+Inf" ? Infinity : Number(bound);
      histogram.set(le, (histogram.get(le) ?? 0) + value);
    } else {
      values[name] = (values[name] ?? 0) + value;
    }
  }
  const histograms = {};
  for (const [name, map] of Object.entries(buckets)) {
    const bounds = [...map.keys()].sort((a, b) => a - b);
    histograms[name] = { bounds, counts: bounds.map((b) => map.get(b)) };
  }
  return { values, histograms };
}

/** The q-th quantile of what was observed between two scrapes, linear inside of a bucket; null when nothing was. */
export function percentile(newer, older, q) {
  if (!newer) return null;
  const counts = newer.counts.map((c, i) => c - (older?.counts[i] ?? 0));
  const total = counts.at(-1);
  if (!(total > 0)) return null;
  const target = q * total;
  for (let i = 0; i < counts.length; i++) {
    if (counts[i] < target) continue;
    const low = i ? newer.bounds[i - 1] : 0;
    const high = newer.bounds[i];
    if (!Number.isFinite(high)) return low;
    const below = i ? counts[i - 1] : 0;
    return low + ((high - low) * (target - below)) / Math.max(counts[i] - below, 1e-9);
  }
  return null;
}

const TTFT = "time_to_first_token_seconds";
const ITL = "inter_token_latency_seconds";
const COUNTERS = ["prompt_tokens_total", "generation_tokens_total", "prefix_cache_queries_total", "prefix_cache_hits_total", "engine_steps_total"];

/**
 * Keeps scrapes and what follows from them. ``points``: one a scrape, oldest first; a point with ``gap`` begins a new line
 * in the plots (the page slept, or the server did), and with ``restart`` its counters had begun anew.
 */
export class History {
  constructor({ keep = 1800, rateSpan = 3, percentileSpan = 15, gapAfter = 12 } = {}) {
    Object.assign(this, { keep, rateSpan, percentileSpan, gapAfter });
    this.points = [];
    this.scrapes = [];
  }

  get last() {
    return this.points.at(-1) ?? null;
  }

  /** ``t``: seconds on a clock that never goes back. */
  add(t, { values, histograms }) {
    const before = this.scrapes.at(-1);
    const restart = before !== undefined && COUNTERS.some((name) => (values[name] ?? 0) < (before.values[name] ?? 0));
    const gap = before !== undefined && (restart || t - before.t > this.gapAfter);
    if (gap) this.scrapes = [];
    this.scrapes.push({ t, values, histograms });
    while (this.scrapes.length > 2 && this.scrapes[1].t <= t - this.percentileSpan) this.scrapes.shift();
    const point = { t, gap, restart, ...this.gauges(values), ...this.rates(), ...this.percentiles() };
    this.points.push(point);
    if (this.points.length > this.keep) this.points.shift();
    return point;
  }

  gauges(values) {
    const hits = values.prefix_cache_hits_total ?? 0;
    const queries = values.prefix_cache_queries_total ?? 0;
    return {
      running: values.num_requests_running ?? null,
      waiting: values.num_requests_waiting ?? null,
      kv: values.kv_cache_usage_perc ?? null,
      hitRateEver: queries ? hits / queries : null,
      finished: values.request_success_total ?? 0,
      promptTokens: values.prompt_tokens_total ?? 0,
      generationTokens: values.generation_tokens_total ?? 0,
      preemptions: values.num_preemptions_total ?? 0,
    };
  }

  /** The scrape that is at least ``span`` seconds older than the last, or the oldest there is. */
  since(span) {
    const newest = this.scrapes.at(-1);
    for (let i = this.scrapes.length - 2; i >= 0; i--) if (newest.t - this.scrapes[i].t >= span - 0.05) return this.scrapes[i];
    return this.scrapes.length > 1 ? this.scrapes[0] : null;
  }

  rates() {
    const newer = this.scrapes.at(-1);
    const older = this.since(this.rateSpan);
    const difference = (name, from) => (newer.values[name] ?? 0) - (from.values[name] ?? 0);
    const perSecond = (name) => (older ? difference(name, older) / (newer.t - older.t) : null);
    const earlier = this.since(this.percentileSpan);
    const queries = earlier ? difference("prefix_cache_queries_total", earlier) : 0;
    return {
      generation: perSecond("generation_tokens_total"),
      prompt: perSecond("prompt_tokens_total"),
      hitRate: queries > 0 ? difference("prefix_cache_hits_total", earlier) / queries : null,
    };
  }

  percentiles() {
    const newer = this.scrapes.at(-1);
    const older = this.since(this.percentileSpan);
    const of = (name, q) => (older ? percentile(newer.histograms[name], older.histograms[name], q) : null);
    return {
      ttft50: of(TTFT, 0.5),
      ttft90: of(TTFT, 0.9),
      ttft99: of(TTFT, 0.99),
      itl50: of(ITL, 0.5),
      itl90: of(ITL, 0.9),
      itl99: of(ITL, 0.99),
    };
  }
}
