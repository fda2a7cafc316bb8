// The server, relative to where this page is: the same files work at / and under any prefix.

const BASE = new URL("./", location.href.split(/[?#]/)[0]);
const KEY = "octavo.key";
const SILENCE_MS = 500;

let key = stored();

function stored() {
  try {
    return sessionStorage.getItem(KEY) ?? localStorage.getItem(KEY) ?? "";
  } catch {
    return "";
  }
}

export const hasKey = () => key !== "";

/** Use a key from now on: on this device, or (remember false) until the tab is closed. "" forgets it. */
export function setKey(value, remember) {
  key = value.trim();
  try {
    sessionStorage.removeItem(KEY);
    localStorage.removeItem(KEY);
    if (key) (remember ? localStorage : sessionStorage).setItem(KEY, key);
  } catch {
    // kept in memory only
  }
}

/** What went wrong, for people. status 0: no answer came at all. */
export class ApiError extends Error {
  constructor(message, status, { code = null, param = null, retryAfter = null } = {}) {
    super(message);
    Object.assign(this, { status, code, param, retryAfter });
  }
}

/** A fetch with the key. Throws ApiError for every answer that is not 2xx; AbortError goes through. */
export async function request(path, { json, signal, method } = {}) {
  const headers = {};
  if (key) headers.Authorization = `Bearer ${encodeHeader(key)}`;
  if (json !== undefined) headers["Content-Type"] = "application/json";
  const init = { method: method ?? (json === undefined ? "GET" : "POST"), headers, signal, cache: "no-store", credentials: "same-origin" };
  if (json !== undefined) init.body = JSON.stringify(json);
  let response;
  try {
    response = await fetch(new URL(path, BASE), init);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server can’t be reached. It may be stopped or starting.", 0, { code: "unreachable" });
  }
  if (!response.ok) throw await failure(response);
  return response;
}

export const getJson = async (path, options) => (await request(path, options)).json();

// Headers carry bytes; a key with other letters travels as its UTF-8 bytes.
const encodeHeader = (text) => String.fromCharCode(...new TextEncoder().encode(text));

async function failure(response) {
  const text = await response.text().catch(() => "");
  const retryAfter = response.headers.get("retry-after");
  try {
    return fromObject(JSON.parse(text).error, response.status, retryAfter);
  } catch {
    return new ApiError(`The server answered ${response.status} ${response.statusText}`.trim(), response.status, { retryAfter });
  }
}

function fromObject(error, status, retryAfter = null) {
  return new ApiError(error.message ?? String(error), status, { code: error.code, param: error.param, retryAfter });
}

/** The chunks of a streamed chat. Throws ApiError for an error event, and for an end without [DONE]. */
export async function* streamChat(body, signal) {
  const response = await request("v1/chat/completions", { json: { ...body, stream: true, stream_options: { include_usage: true } }, signal });
  for await (const data of serverEvents(response.body, signal)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw fromObject(chunk.error, 500);
    yield chunk;
  }
  throw new ApiError("The connection ended before the answer did.", 0, { code: "cut_off" });
}

/** The data of each server-sent event in a byte stream. */
export async function* serverEvents(stream, signal) {
  const reader = stream.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read().catch((error) => {
        if (error.name === "AbortError" || signal?.aborted) throw new DOMException("stopped", "AbortError");
        throw new ApiError("The connection was lost in the middle of the answer.", 0, { code: "cut_off" });
      });
      rest += done ? decoder.decode() : decoder.decode(value, { stream: true });
      // A lone \r at the end may be half of a \r\n: it waits for what follows.
      const text = done ? `${rest}\n\n` : rest;
      const events = text.split(/\r\n\r\n|\n\n|\r\r(?!$)/);
      rest = events.pop();
      for (const event of events) {
        const lines = event.split(/\r\n|\n|\r/).filter((line) => line.startsWith("data:"));
        if (lines.length) yield lines.map((line) => line.slice(line[5] === " " ? 6 : 5)).join("\n");
      }
      if (done) return;
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** How many tokens a text has; null when the server does not say in half a second. */
export async function countTokens(model, text) {
  try {
    const json = { model, prompt: text, add_special_tokens: false };
    const answer = await (await request("tokenize", { json, signal: AbortSignal.timeout(SILENCE_MS) })).json();
    return answer.count;
  } catch {
    return null;
  }
}
