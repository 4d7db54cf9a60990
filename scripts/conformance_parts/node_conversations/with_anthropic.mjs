// Anthropic's client for TypeScript: its stream helpers, tool runner and structured outputs.
import assert from "node:assert/strict"
import Anthropic from "@anthropic-ai/sdk"
import { betaTool } from "@anthropic-ai/sdk/helpers/beta/json-schema"
import { jsonSchemaOutputFormat } from "@anthropic-ai/sdk/helpers/json-schema"
import { DESCRIPTION, NAME, QUESTIONS, SCHEMA, Weather } from "./weather.mjs"

const client = new Anthropic({ baseURL: process.env.SERVER, apiKey: "none", maxRetries: 0 })
const messages = [{ role: "user", content: "Hello" }]
const lastText = (message) => message.content.filter((block) => block.type === "text").at(-1).text

const talk = (stream, options = {}) => async (model) => {
  const weather = new Weather()
  const answers = []
  const said = []
  const tools = [{ name: NAME, description: DESCRIPTION, input_schema: SCHEMA }]
  const asked = { model, max_tokens: 1000, messages: said, tools, ...options }
  for (const content of QUESTIONS) {
    said.push({ role: "user", content })
    for (;;) {
      const message = stream
        ? await client.messages.stream(asked).finalMessage()
        : await client.messages.create(asked)
      said.push({ role: "assistant", content: message.content })
      if (message.stop_reason !== "tool_use") {
        answers.push(lastText(message))
        break
      }
      const calls = message.content.filter((block) => block.type === "tool_use")
      const results = calls.map((call) => ({
        type: "tool_result",
        tool_use_id: call.id,
        content: weather.get(call.input),
      }))
      said.push({ role: "user", content: results })
    }
  }
  weather.check(answers)
}

const runner = (stream, failing) => async (model) => {
  const weather = new Weather({ failing })
  const answers = []
  let said = []
  const run = (given) => weather.get(given)
  const tool = betaTool({ name: NAME, description: DESCRIPTION, inputSchema: SCHEMA, run })
  for (const content of QUESTIONS) {
    said.push({ role: "user", content })
    const asked = { model, max_tokens: 1000, messages: said, tools: [tool], stream }
    const made = client.beta.messages.toolRunner(asked)
    answers.push(lastText(await made.runUntilDone()))
    said = [...made.params.messages]
    if (said.at(-1).role !== "assistant") said.push({ role: "assistant", content: answers.at(-1) })
  }
  weather.check(answers)
}

const parsed = async () => {
  const properties = { city: { enum: ["Bern", "Chur"] } }
  const schema = { type: "object", properties, required: ["city"], additionalProperties: false }
  const format = jsonSchemaOutputFormat(schema)
  const asked = { model: process.env.DEMO, messages, max_tokens: 50, output_config: { format } }
  const message = await client.messages.parse(asked)
  assert(["Bern", "Chur"].includes(message.parsed_output.city))
}

const aborted = async () => {
  const stream = client.messages.stream({ model: process.env.DEMO, messages, max_tokens: 400 })
  stream.on("text", () => stream.abort())
  await assert.rejects(stream.done(), Anthropic.APIUserAbortError)
}

const overflow = async () => {
  const content = "word ".repeat(20_000)
  const asked = { model: process.env.DEMO, messages: [{ role: "user", content }], max_tokens: 9 }
  await assert.rejects(client.messages.create(asked), (error) => {
    assert(error instanceof Anthropic.BadRequestError)
    assert.match(error.message, /prompt is too long: \d+ tokens > \d+ maximum/)
    return true
  })
}

export const packages = ["@anthropic-ai/sdk"]
export const conversations = {
  messages: talk(false),
  "messages, streamed": talk(true),
  "adaptive thinking": talk(true, { thinking: { type: "adaptive" } }),
  "tool runner": runner(false),
  "tool runner, streamed": runner(true),
  "tool runner, an error result": runner(true, "Bern"),
}
export const once = { "structured output": parsed, "an abort": aborted, "an overflow": overflow }
