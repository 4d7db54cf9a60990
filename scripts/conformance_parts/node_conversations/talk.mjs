// node talk.mjs CLIENT FAMILY...: a line of JSON for each conversation, as the Python clients' have it.
//
// SERVER says where the server is, and DEMO what its real model is called. Each conversation has a
// replay model to itself.
import { readFileSync } from "node:fs"

const [client, ...families] = process.argv.slice(2)
const { conversations, once, packages } = await import(`./with_${client}.mjs`)
const versions = packages.map((name) => {
  const { version } = JSON.parse(readFileSync(`node_modules/${name}/package.json`, "utf-8"))
  return `npm:${name}@${version}`
})

async function tell(name, family, talk, model) {
  let error = ""
  try {
    await talk(model)
  } catch (thrown) {
    console.error(`\n== ${model}`, thrown)
    error = `${thrown.name}: ${thrown.message}`
  }
  const told = family ? `${name}, ${family}` : name
  console.log(JSON.stringify({ client: versions.join(" "), name: told, error }))
}

for (const [number, [name, talk]] of Object.entries(conversations).entries())
  for (const family of families) await tell(name, family, talk, `${family}-node_${client}-${number}`)
for (const [name, talk] of Object.entries(once)) await tell(name, "", talk, "")
