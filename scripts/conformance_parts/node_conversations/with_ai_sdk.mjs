// Vercel's AI SDK, with each of its providers that can use this server.
import assert from "node:assert/strict"
import { createAnthropic } from "@ai-sdk/anthropic"
import { createOpenAI } from "@ai-sdk/openai"
import { createOpenAICompatible } from "@ai-sdk/openai-compatible"
import { APICallError, Output, generateText, jsonSchema, stepCountIs, streamText, tool } from "ai"
import { createOllama } from "ollama-ai-provider-v2"
import { DESCRIPTION, NAME, QUESTIONS, SCHEMA, Weather } from "./weather.mjs"

const server = process.env.SERVER
const key = { apiKey: "none" }
const openai = createOpenAI({ baseURL: `${server}/v1`, ...key })
const compatible = createOpenAICompatible({
  name: "local",
  baseURL: `${server}/v1`,
  supportsStructuredOutputs: true,
  ...key,
})
const anthropic = createAnthropic({ baseURL: `${server}/v1`, ...key })
const ollama = createOllama({ baseURL: `${server}/api` })

const PROVIDERS = {
  openai: (model) => openai(model),
  "openai chat": (model) => openai.chat(model),
  "openai-compatible": (model) => compatible(model),
  anthropic: (model) => anthropic(model),
  ollama: (model) => ollama(model),
}

const answered = async (asked, stream) => {
  if (!stream) return generateText(asked)
  const errors = []
  const made = streamText({ ...asked, onError: ({ error }) => errors.push(error) })
  const found = { text: await made.text, steps: await made.steps, response: await made.response }
  assert.deepEqual(errors, [])
  return found
}

const talk = (provider, stream, failing) => async (name) => {
  const weather = new Weather({ failing })
  const answers = []
  const thoughts = []
  const messages = []
  const inputSchema = jsonSchema(SCHEMA)
  const execute = (given) => weather.get(given)
  const tools = { [NAME]: tool({ description: DESCRIPTION, inputSchema, execute }) }
  for (const content of QUESTIONS) {
    messages.push({ role: "user", content })
    const asked = { model: PROVIDERS[provider](name), messages, tools, stopWhen: stepCountIs(5) }
    const found = await answered({ ...asked, maxRetries: 0, ...thinking(provider) }, stream)
    answers.push(found.text)
    thoughts.push(...found.steps.map((step) => step.reasoningText))
    messages.push(...found.response.messages)
  }
  weather.check(answers)
  if (provider !== "openai chat") assert(thoughts.includes("Now I know."), `${thoughts}`)
}

/** What has a provider ask for thoughts, or show them. */
const thinking = (provider) => {
  const openai = { reasoningSummary: "auto", forceReasoning: true }
  if (provider === "openai") return { providerOptions: { openai } }
  if (provider === "ollama") return { providerOptions: { ollama: { think: true } } }
  return {}
}

const parsed = (provider) => async () => {
  const properties = { city: { enum: ["Bern", "Chur"] } }
  const schema = jsonSchema({ type: "object", properties, required: ["city"] })
  const model = PROVIDERS[provider](process.env.DEMO)
  const output = Output.object({ schema })
  const asked = { model, prompt: "Where?", output, maxOutputTokens: 50, maxRetries: 0 }
  assert(["Bern", "Chur"].includes((await generateText(asked)).output.city))
}

const aborted = async () => {
  const abort = new AbortController()
  const model = PROVIDERS["openai-compatible"](process.env.DEMO)
  const made = streamText({ model, prompt: "Hello", abortSignal: abort.signal })
  for await (const _ of made.textStream) abort.abort()
}

const overflow = (provider, words) => async () => {
  const model = PROVIDERS[provider](process.env.DEMO)
  const asked = { model, prompt: "word ".repeat(20_000), maxRetries: 0 }
  await assert.rejects(generateText(asked), (error) => {
    assert(APICallError.isInstance(error))
    assert.match(error.message, words)
    return true
  })
}

const providers = Object.keys(PROVIDERS)
const named = (name, make) => Object.fromEntries(providers.map((p) => [`${p}${name}`, make(p)]))
export const packages = [
  "ai",
  "@ai-sdk/openai",
  "@ai-sdk/openai-compatible",
  "@ai-sdk/anthropic",
  "ollama-ai-provider-v2",
]
export const conversations = {
  ...named("", (provider) => talk(provider, false)),
  ...named(", streamed", (provider) => talk(provider, true)),
  ...named(", an error result", (provider) => talk(provider, true, "Bern")),
}
export const once = {
  ...named(", structured output", parsed),
  "an abort": aborted,
  "openai-compatible, an overflow": overflow("openai-compatible", /maximum context length is/),
  "anthropic, an overflow": overflow("anthropic", /prompt is too long/),
}
