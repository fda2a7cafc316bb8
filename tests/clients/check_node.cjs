// OpenAI's and Anthropic's clients for Node: the same checks as their Python clients', in short.
//     NODE_PATH=folder/node_modules node tests/clients/check_node.cjs BASE_URL MODEL
"use strict";
const assert = require("node:assert/strict");
const { OpenAI } = require("openai");
const Anthropic = require("@anthropic-ai/sdk").default;

const [url, model] = process.argv.slice(2);
const setting = (name, otherwise) => process.env["OCTAVO_CLIENTS_" + name] || otherwise;
const key = setting("KEY", "key");
const mockUrl = setting("MOCK_URL");
const limitedUrl = setting("LIMITED_URL");
const embedUrl = setting("EMBED_URL", url);
const embedModel = setting("EMBED_MODEL", model);
const MOCK = "mock-model";
const openai = (options = {}) => new OpenAI({ baseURL: url + "/v1", apiKey: key, maxRetries: 0, timeout: 60000, ...options });
const anthropic = (options = {}) => new Anthropic({ baseURL: url, apiKey: key, maxRetries: 0, timeout: 60000, ...options });
const messages = [{ role: "user", content: "What is the capital of France? Answer briefly." }];
const schema = { type: "object", properties: { city: { type: "string", maxLength: 30 } }, required: ["city"], additionalProperties: false };
const weather = { type: "function", function: { name: "get_weather", description: "The weather.", parameters: schema, strict: true } };
const time = { type: "function", function: { name: "get_time", parameters: { type: "object", properties: {} } } };
const forced = { type: "function", function: { name: "get_weather" } };

const checks = {
  async chat() {
    const { data, response } = await openai().chat.completions.create({ model, messages, temperature: 0, max_tokens: 12 }).withResponse();
    assert.ok(data.choices[0].message.content && data.usage.completion_tokens <= 12 && response.headers.get("x-request-id"));
    let text = "";
    let usage;
    const options = { model, messages, temperature: 0, max_tokens: 12, stream: true, stream_options: { include_usage: true } };
    for await (const chunk of await openai().chat.completions.create(options)) {
      text += chunk.choices[0]?.delta?.content ?? "";
      usage = chunk.usage ?? usage;
    }
    assert.equal(text, data.choices[0].message.content);
    assert.equal(usage.completion_tokens, data.usage.completion_tokens);
    const runner = openai().chat.completions.stream({ model, messages, temperature: 0, max_tokens: 12 });
    assert.equal(await runner.finalContent(), text);
  },
  async abort() {
    const stream = await openai().chat.completions.create({ model, messages, max_tokens: 500, stream: true });
    for await (const chunk of stream) if (chunk) break; // leaving the loop closes the connection
    assert.ok((await openai().chat.completions.create({ model, messages, max_tokens: 2 })).choices.length);
  },
  async forcedTool() {
    const fields = { model, messages, tools: [weather], tool_choice: forced, temperature: 0, max_tokens: 60 };
    const message = (await openai().chat.completions.create(fields)).choices[0].message;
    const call = message.tool_calls[0];
    assert.deepEqual(Object.keys(JSON.parse(call.function.arguments)), ["city"]);
    const final = await openai().chat.completions.stream(fields).finalChatCompletion();
    assert.equal(final.choices[0].message.tool_calls[0].function.arguments, call.function.arguments);
    const history = [...messages, message, { role: "tool", tool_call_id: call.id, content: "sunny" }];
    assert.ok(await openai().chat.completions.create({ model, messages: history, tools: [weather], max_tokens: 4 }));
  },
  async structuredOutput() {
    const response_format = { type: "json_schema", json_schema: { name: "city", schema, strict: true } };
    const answer = await openai().chat.completions.parse({ model, messages, temperature: 0, max_tokens: 60, response_format });
    assert.deepEqual(Object.keys(JSON.parse(answer.choices[0].message.content)), ["city"]);
  },
  async responses() {
    const fields = { model, input: "What is the capital of France?", temperature: 0, max_output_tokens: 12 };
    const answer = await openai().responses.create(fields);
    assert.ok(answer.output_text);
    let text = "";
    for await (const event of await openai().responses.create({ ...fields, stream: true })) {
      if (event.type === "response.output_text.delta") text += event.delta;
    }
    assert.equal(text, answer.output_text);
    const format = { type: "json_schema", name: "city", schema, strict: true };
    const parsed = await openai().responses.parse({ ...fields, max_output_tokens: 60, text: { format } });
    assert.deepEqual(Object.keys(JSON.parse(parsed.output_text)), ["city"]);
  },
  async embeddings() {
    const fields = { model: embedModel, input: ["hello", "world"] };
    const client = openai({ baseURL: embedUrl + "/v1" });
    const [base64, plain] = [await client.embeddings.create(fields), await client.embeddings.create({ ...fields, encoding_format: "float" })];
    base64.data.forEach((entry, i) => entry.embedding.forEach((x, j) => assert.ok(Math.abs(x - plain.data[i].embedding[j]) < 1e-6)));
  },
  async models() {
    const names = [];
    for await (const one of openai().models.list()) names.push(one.id);
    assert.ok(names.includes(model));
  },
  async anthropicMessages() {
    const fields = { model, messages, max_tokens: 12 };
    const answer = await anthropic().messages.create({ ...fields, top_k: 1 });
    assert.ok(answer.content[0].text && answer._request_id);
    const final = await anthropic().messages.stream({ ...fields, top_k: 1 }).finalMessage();
    assert.equal(final.content[0].text, answer.content[0].text);
    assert.ok((await anthropic().messages.countTokens({ model, messages })).input_tokens > 5);
    const tools = [{ name: "get_weather", input_schema: schema }];
    const choice = { type: "tool", name: "get_weather" };
    const use = (await anthropic().messages.create({ ...fields, max_tokens: 60, top_k: 1, tools, tool_choice: choice })).content[0];
    assert.deepEqual([use.type, Object.keys(use.input)], ["tool_use", ["city"]]);
  },
  async errors() {
    const create = (fields, options) => openai(options).chat.completions.create({ model, messages, ...fields });
    await assert.rejects(create({}, { apiKey: "no" }), OpenAI.AuthenticationError);
    await assert.rejects(create({ model: "nope" }), OpenAI.NotFoundError);
    await assert.rejects(create({ temperature: -1 }), (e) => e instanceof OpenAI.BadRequestError && e.param === "temperature" && !!e.requestID);
    await assert.rejects(create({ nonsense: 1, stream: true }), (e) => e instanceof OpenAI.BadRequestError && e.code === "unknown_field");
    await assert.rejects(anthropic({ apiKey: "no" }).messages.create({ model, messages, max_tokens: 1 }), Anthropic.AuthenticationError);
    await assert.rejects(anthropic().messages.create({ model: "nope", messages, max_tokens: 1 }), Anthropic.NotFoundError);
  },
};
if (mockUrl) {
  checks.severalTools = async () => {
    const client = openai({ baseURL: mockUrl + "/v1" });
    const fields = { model: MOCK, messages, tools: [weather, time] };
    const final = await client.chat.completions.stream(fields).finalChatCompletion();
    const calls = final.choices[0].message.tool_calls;
    assert.deepEqual(calls.map((c) => [c.function.name, JSON.parse(c.function.arguments)]), [["get_weather", { city: "Oslo" }], ["get_time", {}]]);
    const results = calls.map((c) => ({ role: "tool", tool_call_id: c.id, content: "21" }));
    const after = await client.chat.completions.create({ ...fields, messages: [...messages, final.choices[0].message, ...results] });
    assert.equal(after.choices[0].message.content, "It is sunny.");
  };
}
if (limitedUrl) {
  checks.retries = async () => {
    const fields = { model: MOCK, messages, max_tokens: 2000 };
    const [hasty, patient] = [openai({ baseURL: limitedUrl + "/v1" }), openai({ baseURL: limitedUrl + "/v1", maxRetries: 10 })];
    const stream = await hasty.chat.completions.create({ ...fields, stream: true });
    await assert.rejects(hasty.chat.completions.create(fields), (e) => e instanceof OpenAI.RateLimitError && e.headers.get("retry-after") >= 1);
    setTimeout(() => stream.controller.abort(), 500);
    assert.ok((await patient.chat.completions.create({ ...fields, max_tokens: 2 })).choices.length);
  };
}

(async () => {
  for (const name of ["openai", "@anthropic-ai/sdk"]) {
    const entry = require.resolve(name);
    const folder = entry.slice(0, entry.lastIndexOf(name) + name.length);
    console.log(name, require(folder + "/package.json").version);
  }
  let failed = 0;
  for (const [name, run] of Object.entries(checks)) {
    try {
      await run();
      console.log("ok       ", name);
    } catch (error) {
      failed += 1;
      console.log("FAILED   ", name, error);
    }
  }
  console.log(`${Object.keys(checks).length} checks, ${failed} failed`);
  process.exit(failed ? 1 : 0);
})();
