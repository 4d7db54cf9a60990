// An answer while it is streamed and afterwards: text, thoughts, calls, usage and times. No DOM.

import { addResponsesEvent, responsesBody } from "./connectors.js";

const CHAT = "/v1/chat/completions", RESPONSES = "/v1/responses";

export class Answer {
  /** `request` is what it is asked with, but for the conversation; `connectors` those switched on. */
  constructor(request, system = "", connectors = []) {
    this.request = request;
    this.system = system;
    this.connectors = connectors;
    this.text = "";
    this.thought = "";
    this.calls = []; // {id, name, arguments}
    this.results = null; // by the ids of the calls, once they are there
    this.serverCalls = []; // {id, server, name, arguments, output}: those that the server has run
    this.usage = null;
    this.notes = []; // repairs and other remarks of the server, as sentences
    this.progress = null; // of the prompt
    this.finish = null;
    this.error = "";
    this.began = performance.now();
    this.first = null; // when the first token came
    this.ended = null;
    this.listeners = new Set();
  }

  get isRunning() {
    return this.ended === null;
  }

  /** Whether it waits for the results of its calls. */
  get isAsking() {
    return !this.isRunning && !this.results && this.finish === "tool_calls";
  }

  /** For the conversation's store, with times since its beginning. */
  stored() {
    const { request, system, connectors, text, thought, calls, results, serverCalls, usage, notes, error } = this;
    const since = (time) => (time === null ? null : time - this.began);
    const finish = this.isRunning ? "stopped" : this.finish;
    const times = [since(this.first), since(this.ended ?? performance.now())];
    return { request, system, connectors, text, thought, calls, results, serverCalls, usage, notes, finish, error, times };
  }

  /** What `stored` has returned, or a file says it has: only what has the right type is taken. */
  static read(stored) {
    const answer = new Answer({ model: "" });
    const { request, usage, times, results } = stored ?? {};
    for (const name of ["system", "text", "thought", "finish", "error"]) answer[name] = textOf(stored?.[name]);
    if (isObject(request)) answer.request = { ...request, model: textOf(request.model) };
    answer.connectors = listOf(stored?.connectors).map(textOf);
    answer.notes = listOf(stored?.notes).map(textOf);
    answer.calls = listOf(stored?.calls).map((call) => textsOf(call, ["id", "name", "arguments"]));
    answer.serverCalls = listOf(stored?.serverCalls)
      .map((call) => textsOf(call, ["id", "server", "name", "arguments", "output"]));
    if (isObject(results)) {
      answer.results = Object.fromEntries(answer.calls.map(({ id }) => [id, textOf(results[id])]));
    }
    if (Number.isFinite(usage?.prompt_tokens) && Number.isFinite(usage?.completion_tokens)) answer.usage = numbersOf(usage);
    const [first, ended] = listOf(times);
    [answer.began, answer.first, answer.ended] = [0, Number.isFinite(first) ? first : null, Number.isFinite(ended) ? ended : 0];
    return answer;
  }

  changed() {
    for (const listener of this.listeners) listener();
  }

  add(chunk) {
    if (chunk.error) throw new Error(chunk.error.message || "The server reports an error.");
    if (chunk.usage) this.usage = chunk.usage;
    if (chunk.prompt_progress) this.progress = chunk.prompt_progress;
    if (chunk.mlx_server) this.notes.push(...sentences(chunk.mlx_server));
    const choice = chunk.choices?.[0];
    if (!choice) return;
    const { content, reasoning_content, reasoning, tool_calls } = choice.delta;
    const thought = reasoning_content ?? reasoning;
    if (content || thought || tool_calls) this.first ??= performance.now();
    this.text += content ?? "";
    this.thought += thought ?? "";
    for (const piece of tool_calls ?? []) this.addCall(piece);
    this.finish = choice.finish_reason ?? this.finish;
  }

  addCall({ index, id, function: called }) {
    this.calls[index] ??= { id, name: called.name, arguments: "" };
    this.calls[index].arguments += called.arguments ?? "";
  }

  /** What a later request says of it. A call without a result is left out, as is an empty answer. */
  messages() {
    const calls = this.results ? this.calls : [];
    if (!this.text && !calls.length) return [];
    const message = { role: "assistant", content: this.text || null };
    if (this.thought) message.reasoning_content = this.thought;
    if (calls.length) message.tool_calls = calls.map(wireCall);
    const results = calls.map(({ id }) => (
      { role: "tool", tool_call_id: id, content: this.results[id] }
    ));
    return [message, ...results];
  }

  /** Tokens and seconds, as far as they are known. */
  figures() {
    const { usage, began, first, ended } = this;
    const found = [];
    if (usage) {
      const cached = usage.prompt_tokens_details?.cached_tokens;
      const thought = usage.completion_tokens_details?.reasoning_tokens;
      found.push(`${usage.prompt_tokens} tokens in${cached ? ` (${cached} cached)` : ""}`);
      found.push(`${usage.completion_tokens} out${thought ? ` (${thought} thought)` : ""}`);
    }
    if (first !== null) found.push(`first after ${seconds(first - began)}`);
    if (usage?.completion_tokens > 1 && ended > first) {
      found.push(`${rate((usage.completion_tokens - 1) / (ended - first))} tokens/s`);
    }
    if (ended !== null) found.push(`${seconds(ended - began)} in all`);
    if (this.finish && this.finish !== "stop") found.push(ENDS[this.finish] ?? this.finish);
    return found;
  }
}

const listOf = (value) => (Array.isArray(value) ? value : []);
const textOf = (value) => (typeof value === "string" ? value : "");
const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);
const textsOf = (value, names) => Object.fromEntries(names.map((name) => [name, textOf(value?.[name])]));
const numbersOf = (usage) => ({
  prompt_tokens: usage.prompt_tokens,
  completion_tokens: usage.completion_tokens,
  prompt_tokens_details: { cached_tokens: Number(usage.prompt_tokens_details?.cached_tokens) || 0 },
  completion_tokens_details: { reasoning_tokens: Number(usage.completion_tokens_details?.reasoning_tokens) || 0 },
});

const ENDS = { length: "cut off at its limit", tool_calls: "calls tools", stopped: "stopped" };

const seconds = (ms) => `${(ms / 1000).toFixed(ms < 9950 ? 2 : 1)} s`;
const rate = (perMs) => (1000 * perMs).toFixed(perMs < 0.1 ? 1 : 0);

const wireCall = ({ id, name, arguments: text }) => (
  { id, type: "function", function: { name, arguments: text } }
);

function sentences({ repairs = [], unmet = [], unenforced = [], normalized = [] }) {
  return [
    ...repairs.map(({ what, where }) => `Repaired in ${where}: ${what}`),
    ...unmet.map(({ what }) => `Not met: ${what}`),
    ...unenforced.map((what) => `Not enforced: ${what}`),
    ...normalized.map((what) => `Left out of the system prompt: ${what}`),
  ];
}

/**
 * Streams an answer to `messages` to its end, which `stop` may bring early. Errors become the answer's
 * own. With connectors the server runs the calls, which the API of Responses has.
 */
export async function run(answer, messages, { api, eventsOf }, stop) {
  const usesServers = answer.connectors.length > 0;
  try {
    const options = { include_usage: true, include_progress: true };
    const body = usesServers
      ? responsesBody(answer.request, messages, answer.connectors)
      : { ...answer.request, messages, stream: true, stream_options: options };
    const response = await api(usesServers ? RESPONSES : CHAT, {
      body, signal: stop, headers: { accept: "text/event-stream" },
    });
    const ignored = response.headers.get("x-mlx-server-ignored");
    if (ignored) answer.notes.push(`Ignored: ${ignored}`);
    for await (const { data } of eventsOf(response)) {
      if (data === "[DONE]") break;
      if (usesServers) addResponsesEvent(answer, JSON.parse(data));
      else answer.add(JSON.parse(data));
      answer.changed();
    }
    if (!answer.finish) throw new Error("The answer ended before it was complete.");
  } catch (error) {
    if (error.name === "AbortError") answer.finish = "stopped";
    else answer.error = error.message;
  } finally {
    answer.ended = performance.now();
    answer.changed();
  }
}
