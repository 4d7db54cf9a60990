// An answer while it is streamed and afterwards: text, thoughts, calls, usage and times. No DOM.

import { addResponsesEvent } from "./connectors.js";
import { CHAT, wireRequest } from "./talk-request.js";

export class Answer {
  /**
   * `request` is what it is asked with, but for the conversation; `connectors` those switched on, of
   * which `approval` says whether each call needs the user's: "always" or "never".
   */
  constructor(request, system = "", connectors = [], approval = "always") {
    Object.assign(this, { request, system, connectors, approval });
    this.text = "";
    this.thought = "";
    this.calls = []; // {id, name, arguments}
    this.results = null; // by the ids of the calls, once they are there
    this.serverCalls = []; // {id, server, name, arguments, output, after}: those that the server has run
    this.approvals = []; // {id, server, name, arguments, allowed}: those it asks for; null if not decided
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

  /** Whether it waits for the results of its calls, or for the user's approval. */
  get isAsking() {
    const isUndecided = this.approvals.some(({ allowed }) => allowed === null);
    return !this.isRunning && this.finish === "tool_calls" && (isUndecided || (this.calls.length > 0 && !this.results));
  }

  /** For the conversation's store, with times since its beginning. */
  stored() {
    const {
      request, system, connectors, approval, text, thought, calls, results, serverCalls, usage, notes, error,
    } = this;
    // an allowed call is run once: what has come of it is among the next answer's calls
    const approvals = this.approvals.filter(({ allowed }) => !allowed);
    const since = (time) => (time === null ? null : time - this.began);
    const finish = this.isRunning ? "stopped" : this.finish;
    const times = [since(this.first), since(this.ended ?? performance.now())];
    return {
      request, system, connectors, approval, text, thought, calls, results, serverCalls, approvals, usage, notes, finish,
      error, times,
    };
  }

  /** What `stored` has returned, or a file says it has: only what has the right type is taken. */
  static read(stored) {
    const answer = new Answer({ model: "" });
    const { request, usage, times, results } = stored ?? {};
    for (const name of ["system", "text", "thought", "finish", "error"]) answer[name] = textOf(stored?.[name]);
    if (isObject(request)) {
      const named = Object.fromEntries(Object.entries(request).filter(([name]) => /^[a-z_]{1,40}$/.test(name))); // shown as code
      answer.request = { ...named, model: textOf(request.model), tools: listOf(request.tools).filter(isObject) };
      if (!answer.request.tools.length) delete answer.request.tools;
    }
    answer.connectors = listOf(stored?.connectors).map(textOf);
    if (stored?.approval === "never") answer.approval = "never";
    answer.notes = listOf(stored?.notes).map(textOf);
    answer.calls = listOf(stored?.calls).map((call) => textsOf(call, ["id", "name", "arguments"]));
    answer.serverCalls = listOf(stored?.serverCalls)
      .map((call) => ({ ...textsOf(call, ["id", "server", "name", "arguments", "output"]), after: lengthsOf(call?.after) }));
    answer.approvals = listOf(stored?.approvals).map((call) => (
      { ...textsOf(call, ["id", "server", "name", "arguments"]), allowed: call?.allowed === false ? false : null }
    ));
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
    const results = calls.map(({ id }) => (
      { role: "tool", tool_call_id: id, content: this.results[id] }
    ));
    const denied = this.approvals.filter(({ allowed }) => allowed === false);
    const found = [];
    let [text, thought] = [0, 0];
    for (const { after, ...call } of this.serverCalls) {
      const before = [this.text.slice(text, after[0]), this.thought.slice(thought, after[1])];
      if (before.some(Boolean)) found.push(said(...before));
      found.push({ mcp_call: call });
      [text, thought] = after;
    }
    const last = [this.text.slice(text), this.thought.slice(thought)];
    if (last[0] || calls.length || (last[1] && denied.length)) found.push(said(...last, calls));
    return [...found, ...results, ...denied.map((approval) => ({ approval }))];
  }

  /** The calls that the user has allowed, for the request that runs them. */
  allowed() {
    return this.approvals.filter(({ allowed }) => allowed).map((approval) => ({ approval }));
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
const lengthsOf = (value) => [0, 1].map((i) => (Number.isInteger(value?.[i]) ? Math.max(value[i], 0) : 0));
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

function said(text, thought, calls = []) {
  const message = { role: "assistant", content: text || null };
  if (thought) message.reasoning_content = thought;
  if (calls.length) message.tool_calls = calls.map(wireCall);
  return message;
}

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
 * own.
 */
export async function run(answer, messages, { api, eventsOf }, stop) {
  try {
    const { path, body } = wireRequest(answer, messages);
    const isChat = path === CHAT;
    if (isChat) body.stream_options = { include_usage: true, include_progress: true };
    const response = await api(path, {
      body: { ...body, stream: true }, signal: stop, headers: { accept: "text/event-stream" },
    });
    const ignored = response.headers.get("x-mlx-server-ignored");
    if (ignored) answer.notes.push(`Ignored: ${ignored}`);
    for await (const { data } of eventsOf(response)) {
      if (data === "[DONE]") break;
      if (isChat) answer.add(JSON.parse(data));
      else addResponsesEvent(answer, JSON.parse(data));
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
