// An answer while it is streamed and afterwards: text, thoughts, calls, usage and times. No DOM.

const PATH = "/v1/chat/completions";

export class Answer {
  /** `body` is the request without what makes it a stream. */
  constructor(body) {
    this.body = body;
    this.text = "";
    this.thought = "";
    this.calls = []; // {id, name, arguments}
    this.results = null; // by the ids of the calls, once they are there
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

/** Streams an answer to its end, which `stop` may bring early. Errors become the answer's own. */
export async function run(answer, { api, eventsOf }, stop) {
  try {
    const options = { include_usage: true, include_progress: true };
    const body = { ...answer.body, stream: true, stream_options: options };
    const response = await api(PATH, {
      body, signal: stop, headers: { accept: "text/event-stream" },
    });
    const ignored = response.headers.get("x-mlx-server-ignored");
    if (ignored) answer.notes.push(`Ignored: ${ignored}`);
    for await (const { data } of eventsOf(response)) {
      if (data === "[DONE]") break;
      answer.add(JSON.parse(data));
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
