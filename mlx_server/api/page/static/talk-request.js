// What is sent to a model: the body of a request, made from the settings and the conversation, and
// the same request as code.

import { responsesBody } from "./connectors.js";
import { contentOf } from "./files.js";

export const CHAT = "/v1/chat/completions";
const RESPONSES = "/v1/responses"; // which has the calls that the server runs

export const NUMBERS = [
  { name: "temperature", min: 0, max: 2 },
  { name: "top_p", min: 0.01, max: 1 },
  { name: "top_k", min: 0 },
  { name: "min_p", min: 0, max: 1 },
  { name: "repetition_penalty", min: 0.1, max: 10 },
  { name: "presence_penalty", min: -2, max: 2 },
  { name: "frequency_penalty", min: -2, max: 2 },
  { name: "max_tokens", min: 1 },
  { name: "thinking_budget", min: 0 },
  { name: "seed" },
];
export const DEFAULTS = {
  ...Object.fromEntries(NUMBERS.map(({ name }) => [name, ""])),
  system: "", stop: "", tools: "", schema: "", reasoning_effort: "", connectors: [], approval: "always",
};
export const EFFORTS = ["none", "minimal", "low", "medium", "high", "xhigh", "max"];

/**
 * The conversation as a model is sent it, up to an answer of the last of these turns: messages, and
 * between them {mcp_call} and {approval}, which have no role.
 */
export function messages(system, turns, side, answer) {
  const found = system.trim() ? [{ role: "system", content: system }] : [];
  turns.forEach(({ text, files, sides }, at) => {
    found.push({ role: "user", content: contentOf(text, files) });
    const answers = sides[side] ?? sides[0];
    const before = at === turns.length - 1 ? answers.slice(0, answer) : answers;
    for (const each of before) found.push(...each.messages());
  });
  const last = turns.at(-1).sides[side]?.[answer - 1]; // which this answer goes on with
  return [...found, ...(last?.allowed() ?? [])];
}

/**
 * What an answer is asked with, but for the conversation; throws an Error that says which setting is
 * wrong. It is kept with the answer: settings change.
 */
export function requestOf(model, settings) {
  const request = { model };
  for (const { name } of NUMBERS) {
    if (settings[name]) request[name] = Number(settings[name]);
  }
  if (settings.reasoning_effort) request.reasoning_effort = settings.reasoning_effort;
  if (settings.stop) request.stop = settings.stop.split("\n").filter(Boolean);
  const tools = parsed(settings.tools, "The tools");
  if (tools) request.tools = toolList(tools);
  const schema = parsed(settings.schema, "The schema");
  if (schema) {
    request.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  }
  return request;
}

/** The request for an answer, not streamed. */
export function wireRequest(answer, messages) {
  const usesServers = answer.connectors.length > 0 || messages.some(({ role }) => !role);
  return usesServers
    ? { path: RESPONSES, body: responsesBody(answer, messages) }
    : { path: CHAT, body: { ...answer.request, messages } };
}

function parsed(text, what) {
  if (!text.trim()) return null;
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${what} are no valid JSON: ${error.message}`.replace("schema are", "schema is"));
  }
}

// A list of tools, one tool, or functions without their wrapping.
function toolList(given) {
  const tools = Array.isArray(given) ? given : [given];
  return tools.map((tool) => (tool?.type ? tool : { type: "function", function: tool }));
}

// A request as code leaves out the data of files, which no command line takes.
const shortened = (body) => JSON.parse(JSON.stringify(body), (_, value) => (
  typeof value === "string" && value.length > 10_000 && value.startsWith("data:")
    ? `${value.slice(0, value.indexOf(",") + 1)}...` : value
));

const KEY = "MLX_SERVER_KEY"; // the variable that the code reads, where the server wants a key

export function asCurl({ path, body }, origin, wantsKey) {
  const lines = [`curl ${origin}${path}`, "-H 'Content-Type: application/json'"];
  if (wantsKey) lines.push(`-H "Authorization: Bearer $${KEY}"`);
  lines.push(`-d '${JSON.stringify(shortened(body), null, 2).replaceAll("'", "'\\''")}'`);
  return lines.join(" \\\n  ");
}

// What OpenAI's SDK has no arguments for, in any request and in one for /v1/responses.
const FURTHER = ["top_k", "min_p", "repetition_penalty", "thinking_budget"];
const OF_CHAT = ["presence_penalty", "frequency_penalty", "seed", "stop"];

export function asPython({ path, body }, origin, wantsKey) {
  const isChat = path === CHAT;
  const isFurther = ([name]) => FURTHER.includes(name) || (!isChat && OF_CHAT.includes(name));
  const shown = Object.entries(shortened(body));
  const known = shown.filter((each) => !isFurther(each));
  const further = Object.fromEntries(shown.filter(isFurther));
  if (Object.keys(further).length) known.push(["extra_body", further]);
  const given = known.map(([name, value]) => `    ${name}=${literal(value, "    ")},\n`).join("");
  return `${wantsKey ? "import os\n\n" : ""}from openai import OpenAI

client = OpenAI(base_url="${origin}/v1", api_key=${wantsKey ? `os.environ["${KEY}"]` : '"none"'})
answer = client.${isChat ? "chat.completions" : "responses"}.create(
${given})
print(${isChat ? "answer.choices[0].message" : "answer.output"})
`;
}

// A value of JSON as Python writes it. JSON's strings are Python's, once half pairs are escaped.
function literal(value, indent) {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const isList = Array.isArray(value);
  const [open, close] = isList ? "[]" : "{}";
  const within = `${indent}    `;
  const items = Object.entries(value).map(([name, item]) => (
    `${within}${isList ? "" : `${JSON.stringify(name)}: `}${literal(item, within)},\n`
  ));
  return items.length ? `${open}\n${items.join("")}${indent}${close}` : open + close;
}
