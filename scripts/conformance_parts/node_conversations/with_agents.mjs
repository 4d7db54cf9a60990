// OpenAI's Agents SDK for TypeScript.
import { Agent, OpenAIProvider, Runner, tool } from "@openai/agents"
import { DESCRIPTION, NAME, QUESTIONS, SCHEMA, Weather } from "./weather.mjs"

const talk = (useResponses, stream) => async (model) => {
  const weather = new Weather()
  const answers = []
  const execute = (given) => weather.get(given)
  const made = tool({ name: NAME, description: DESCRIPTION, parameters: SCHEMA, execute })
  const baseURL = `${process.env.SERVER}/v1`
  const modelProvider = new OpenAIProvider({ baseURL, apiKey: "none", useResponses })
  const runner = new Runner({ modelProvider, tracingDisabled: true })
  const agent = new Agent({ name: "weather", model, tools: [made] })
  let said = []
  for (const content of QUESTIONS) {
    const result = await runner.run(agent, [...said, { role: "user", content }], { stream })
    if (stream) await result.completed
    answers.push(result.finalOutput)
    said = result.history
  }
  weather.check(answers)
}

export const packages = ["@openai/agents"]
export const conversations = {
  responses: talk(true, false),
  "responses, streamed": talk(true, true),
  chat: talk(false, false),
  "chat, streamed": talk(false, true),
}
export const once = {}
