// One answer being written: the request, what comes of it, and its figures. Knows nothing of the page.

import { ApiError, countTokens, streamChat } from "./api.js";

const SHORTEST_SPAN = 0.02; // seconds that tokens must have taken for their rate to mean anything

/** An empty version of an answer. */
export function newVersion(model) {
  return { model, text: "", reasoning: "", finish: null, error: null, stats: null, created: Date.now() };
}

export class Run {
  /**
   * Writes into ``version`` as the stream comes. ``onChange`` is called for every chunk, ``onEnd`` once, ``onMeasured`` when figures came later.
   * ``body``: the request without stream fields.
   */
  constructor(version, body, { onChange, onEnd, onMeasured }) {
    Object.assign(this, { version, body, onChange, onEnd, onMeasured });
    this.abort = new AbortController();
    this.stopped = false;
    this.first = null; // when the first text came
    this.last = null;
    this.thinkingEnd = null;
    this.usage = null;
    this.earlier = version.stats; // of the part that this one continues
    this.began = performance.now();
    this.done = this.read();
  }

  stop() {
    this.stopped = true;
    this.abort.abort();
  }

  /** Seconds since the request was sent. */
  get elapsed() {
    return (performance.now() - this.began) / 1000;
  }

  async read() {
    const { version } = this;
    const before = version.text.length + version.reasoning.length;
    version.finish = version.error = null;
    try {
      for await (const chunk of streamChat(this.body, this.abort.signal)) this.take(chunk);
    } catch (error) {
      if (!this.stopped) {
        const { message, status, code, param, retryAfter } = error;
        version.error = { message, status, code, param, retryAfter };
        if (!(error instanceof ApiError)) console.error(error);
      }
    }
    if (this.stopped) version.finish = "stopped";
    this.measure(this.usage?.completion_tokens ?? null, before);
    this.onEnd(this);
    if (this.first === null || this.usage) return;
    // A stopped answer comes without usage: its tokens are counted afterwards, and marked as about so many.
    const tokens = await countTokens(version.model, (version.reasoning + version.text).slice(before));
    if (tokens === null) return;
    this.measure(tokens, before, true);
    this.onMeasured();
  }

  take(chunk) {
    if (chunk.usage) this.usage = chunk.usage;
    const choice = chunk.choices?.[0];
    if (!choice) return;
    const { version } = this;
    const reasoning = choice.delta?.reasoning_content ?? choice.delta?.reasoning ?? "";
    const text = choice.delta?.content ?? "";
    if (reasoning || text) {
      this.last = performance.now();
      this.first ??= this.last;
      if (text && version.reasoning && this.thinkingEnd === null) this.thinkingEnd = this.last;
      version.reasoning += reasoning;
      version.text += text;
    }
    if (choice.finish_reason) version.finish = choice.finish_reason;
    this.onChange(this);
  }

  /** Write down the figures of this request, which made ``tokens`` after the first ``before`` characters. */
  measure(tokens, before, approximate = false) {
    const { version } = this;
    if (this.first === null) return;
    const stats = {
      ttft: (this.first - this.began) / 1000,
      seconds: (this.last - this.began) / 1000,
      thinking: version.reasoning ? ((this.thinkingEnd ?? this.last) - this.first) / 1000 : null,
      prompt: this.usage?.prompt_tokens ?? null,
      cached: this.usage?.prompt_tokens_details?.cached_tokens ?? null,
      tokens,
      approximate,
      rate: null,
    };
    stats.context = stats.prompt === null || tokens === null ? null : stats.prompt + tokens;
    // The first token came with the prompt's work, so the rate is that of the tokens after it.
    const span = (this.last - this.first) / 1000;
    if (tokens > 1 && span > SHORTEST_SPAN) stats.rate = (tokens - 1) / span;
    if (tokens !== null && before > 0 && this.earlier?.tokens) {
      stats.tokens += this.earlier.tokens;
      stats.approximate ||= this.earlier.approximate;
    }
    version.stats = stats;
  }
}
