// What is sent to a model: the body of a request, made from the settings and the conversation, and
// the same request as code.

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
export const EFFORTS = ["none", "minimal", "low", "medium", "high", "xhigh", "max"];

/** The conversation as a model is sent it. A turn has a list of answers for each of the sides. */
export function messages(system, turns, side) {
  const found = system.trim() ? [{ role: "system", content: system }] : [];
  for (const { text, sides } of turns) {
    found.push({ role: "user", content: text });
    for (const answer of sides[side] ?? sides[0]) found.push(...answer.messages());
  }
  return found;
}

/** The request's body; throws an Error that says which setting is wrong. */
export function requestBody(model, settings, conversation) {
  const body = { model, messages: conversation };
  for (const { name } of NUMBERS) {
    if (settings[name] !== "") body[name] = Number(settings[name]);
  }
  if (settings.reasoning_effort) body.reasoning_effort = settings.reasoning_effort;
  if (settings.stop) body.stop = settings.stop.split("\n").filter(Boolean);
  const tools = parsed(settings.tools, "The tools");
  if (tools) body.tools = toolList(tools);
  const schema = parsed(settings.schema, "The schema");
  if (schema) {
    body.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  }
  return body;
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

const KEY = "MLX_SERVER_KEY"; // the variable that the code reads, where the server wants a key

export function asCurl(body, origin, wantsKey) {
  const lines = [`curl ${origin}/v1/chat/completions`, "-H 'Content-Type: application/json'"];
  if (wantsKey) lines.push(`-H "Authorization: Bearer $${KEY}"`);
  lines.push(`-d '${JSON.stringify(body, null, 2).replaceAll("'", "'\\''")}'`);
  return lines.join(" \\\n  ");
}

const FURTHER = ["top_k", "min_p", "repetition_penalty", "thinking_budget"]; // not in OpenAI's SDK

export function asPython(body, origin, wantsKey) {
  const known = Object.entries(body).filter(([name]) => !FURTHER.includes(name));
  const further = Object.fromEntries(Object.entries(body).filter(([name]) => FURTHER.includes(name)));
  if (Object.keys(further).length) known.push(["extra_body", further]);
  const given = known.map(([name, value]) => `    ${name}=${literal(value, "    ")},\n`).join("");
  return `${wantsKey ? "import os\n\n" : ""}from openai import OpenAI

client = OpenAI(base_url="${origin}/v1", api_key=${wantsKey ? `os.environ["${KEY}"]` : '"none"'})
answer = client.chat.completions.create(
${given})
print(answer.choices[0].message)
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
