// OpenAI's client for TypeScript: its stream helpers, tool runner and structured outputs.
import assert from "node:assert/strict"
import OpenAI from "openai"
import { zodResponseFormat } from "openai/helpers/zod"
import { z } from "zod"
import { DESCRIPTION, NAME, QUESTIONS, SCHEMA, Weather } from "./weather.mjs"

const client = new OpenAI({ baseURL: `${process.env.SERVER}/v1`, apiKey: "none", maxRetries: 0 })
const FUNCTION = { name: NAME, description: DESCRIPTION, parameters: SCHEMA }
const messages = [{ role: "user", content: "Hello" }]

const chat = (stream) => async (model) => {
  const weather = new Weather()
  const answers = []
  const said = []
  const asked = { model, messages: said, tools: [{ type: "function", function: FUNCTION }] }
  for (const content of QUESTIONS) {
    said.push({ role: "user", content })
    for (;;) {
      const completion = stream
        ? await client.chat.completions.stream(asked).finalChatCompletion()
        : await client.chat.completions.create(asked)
      const message = completion.choices[0].message
      said.push(message)
      for (const call of message.tool_calls ?? []) {
        const result = weather.get(JSON.parse(call.function.arguments))
        said.push({ role: "tool", tool_call_id: call.id, content: result })
      }
      if (!message.tool_calls?.length) {
        answers.push(message.content)
        break
      }
    }
  }
  weather.check(answers)
}

const runner = (stream) => async (model) => {
  const weather = new Weather()
  const answers = []
  let said = []
  const tool = {
    type: "function",
    function: { ...FUNCTION, function: (given) => weather.get(given), parse: JSON.parse },
  }
  for (const content of QUESTIONS) {
    said.push({ role: "user", content })
    const run = client.chat.completions.runTools({ model, messages: said, tools: [tool], stream })
    answers.push(await run.finalContent())
    said = run.messages
  }
  weather.check(answers)
}

const responses = (stream) => async (model) => {
  const weather = new Weather()
  const answers = []
  let before
  for (const question of QUESTIONS) {
    let input = question
    for (;;) {
      const tools = [{ type: "function", strict: true, ...FUNCTION }]
      const asked = { model, input, tools, previous_response_id: before }
      const response = stream
        ? await client.responses.stream(asked).finalResponse()
        : await client.responses.create(asked)
      before = response.id
      const calls = response.output.filter((item) => item.type === "function_call")
      if (!calls.length) {
        answers.push(response.output.filter((i) => i.type === "message").at(-1).content[0].text)
        break
      }
      input = calls.map((call) => ({
        type: "function_call_output",
        call_id: call.call_id,
        output: weather.get(JSON.parse(call.arguments)),
      }))
    }
  }
  weather.check(answers)
}

const parsed = async () => {
  const format = zodResponseFormat(z.object({ city: z.enum(["Bern", "Chur"]) }), "place")
  const asked = { model: process.env.DEMO, messages, response_format: format, max_tokens: 50 }
  const completion = await client.chat.completions.parse(asked)
  assert(["Bern", "Chur"].includes(completion.choices[0].message.parsed.city))
}

const aborted = async () => {
  const stream = await client.chat.completions.create({
    model: process.env.DEMO,
    messages,
    stream: true,
  })
  for await (const _ of stream) stream.controller.abort()
}

const overflow = async () => {
  const content = "word ".repeat(20_000)
  const asked = { model: process.env.DEMO, messages: [{ role: "user", content }] }
  await assert.rejects(client.chat.completions.create(asked), (error) => {
    assert(error instanceof OpenAI.BadRequestError)
    assert.equal(error.code, "context_length_exceeded")
    return true
  })
}

export const packages = ["openai"]
export const conversations = {
  chat: chat(false),
  "chat, streamed": chat(true),
  "tool runner": runner(false),
  "tool runner, streamed": runner(true),
  responses: responses(false),
  "responses, streamed": responses(true),
}
export const once = { "structured output": parsed, "an abort": aborted, "an overflow": overflow }
