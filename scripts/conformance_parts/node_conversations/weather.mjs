// The conversation that every client has: what is asked, the tool, and what should come of it.
import assert from "node:assert/strict"

export const QUESTIONS = ["What is the weather in Zürich and in Bern?", "And in Chur?"]
const ANSWERS = ["Zürich has 18 degrees, Bern has 16.", "Chur has 21 degrees."]
const CITIES = ["Zürich", "Bern", "Chur"]
const DEGREES = { Zürich: 18, Bern: 16, Chur: 21 }
export const NAME = "get_weather"
export const DESCRIPTION = "The weather in a city"
export const SCHEMA = {
  type: "object",
  properties: { city: { type: "string" } },
  required: ["city"],
  additionalProperties: false,
}

/** The tool, which remembers what it was asked, and fails for one city. */
export class Weather {
  constructor({ failing } = {}) {
    this.asked = []
    this.failing = failing
  }

  get({ city }) {
    this.asked.push(city)
    assert(this.asked.length <= CITIES.length, `The tool was asked again and again: ${this.asked}.`)
    if (city === this.failing) throw new Error(`There is no weather in ${city}.`)
    return `${DEGREES[city]} degrees`
  }

  check(answers) {
    assert.deepEqual(this.asked, CITIES)
    assert.deepEqual(answers, ANSWERS)
  }
}
