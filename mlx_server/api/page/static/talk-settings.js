// The settings of the view Talk: models, system prompt, sampling, tools and the schema.

import { html } from "./vendor/htm-preact-3.1.1.js";
import { EFFORTS, NUMBERS } from "./talk-request.js";

const TOOLS = `[{
  "name": "get_weather",
  "parameters": {
    "type": "object",
    "properties": {"city": {"type": "string"}}
  }
}]`;
const SCHEMA = `{
  "type": "object",
  "properties": {"city": {"type": "string"}},
  "required": ["city"]
}`;

export function Settings({ models, connectors, chosen, choose, settings, set }) {
  return html`
      <${Model} label="Model" id="model" value=${chosen[0]} models=${models}
        choose=${(id) => choose(0, id)} />
      <${Model} label="Side by side with" id="other-model" value=${chosen[1]} models=${models}
        none="no other" choose=${(id) => choose(1, id)} />
      <${Group} title="System prompt" isSet=${settings.system}>
        <${Text} name="system" label="System prompt" ...${{ settings, set }} rows="3" />
      <//>
      <${Group} title="Sampling and thinking" isSet=${isSet(settings)}>
        <div class="numbers">
          ${NUMBERS.map((field) => html`<${NumberField} ...${{ field, settings, set }} />`)}
          <label>reasoning_effort
            <select id="reasoning_effort" value=${settings.reasoning_effort}
              onChange=${(event) => set("reasoning_effort", event.target.value)}>
              <option value="">default</option>
              ${EFFORTS.map((effort) => html`<option value=${effort}>${effort}</option>`)}
            </select>
          </label>
        </div>
        <label for="stop">stop, one string a line</label>
        <${Text} name="stop" label="stop, one string a line" ...${{ settings, set }} rows="2" />
      <//>
      <${Group} title="Tools" isSet=${settings.tools}>
        <${Text} name="tools" label="Tools, as JSON" ...${{ settings, set }} rows="8" hint=${TOOLS} />
      <//>
      ${connectors.length > 0 && html`
        <${Group} title="Connectors" isSet=${settings.connectors.length > 0}>
          <p class="hint">MCP servers of this server's owner, whose tools the model may call.</p>
          ${connectors.map((name) => html`
            <label class="check"><input type="checkbox" name="connector" value=${name}
              checked=${settings.connectors.includes(name)}
              onChange=${(event) => set("connectors", event.target.checked
                ? [...settings.connectors, name] : settings.connectors.filter((each) => each !== name))} />
              <bdi>${name}</bdi></label>`)}
          <label class="check"><input type="checkbox" name="approval" checked=${settings.approval !== "never"}
            onChange=${(event) => set("approval", event.target.checked ? "always" : "never")} />
            Ask me before each call</label>
        <//>`}
      <${Group} title="JSON schema of the answer" isSet=${settings.schema}>
        <${Text} name="schema" label="JSON schema of the answer" ...${{ settings, set }} rows="6"
          hint=${SCHEMA} />
      <//>`;
}

const isSet = (settings) => (
  NUMBERS.some(({ name }) => settings[name] !== "") || settings.stop || settings.reasoning_effort
);

function Model({ label, id, value, models, none, choose }) {
  const bases = (models ?? []).filter(({ parent }) => !parent);
  const adapters = (base) => models.filter(({ parent }) => parent === base);
  return html`
    <div class="field">
      <label for=${id}>${label}</label>
      <select id=${id} value=${value} onChange=${(event) => choose(event.target.value)}>
        ${none && html`<option value="">${none}</option>`}
        ${bases.map((base) => html`
          <${Option} id=${base.id} />
          ${adapters(base.id).map(({ id }) => html`<${Option} id=${id} />`)}`)}
      </select>
    </div>`;
}

const Option = ({ id }) => html`<option value=${id}>${id}</option>`;

function Group({ title, isSet: marked, children }) {
  return html`
    <details class="group">
      <summary>${title}${marked && html` <span class="dot" title="is set"> •</span>`}</summary>
      ${children}
    </details>`;
}

function NumberField({ field: { name, ...range }, settings, set }) {
  return html`
    <label>${name}
      <input id=${name} type="number" inputmode="decimal" placeholder="default" ...${range}
        step="any" value=${settings[name]} onInput=${(event) => set(name, event.target.value)} />
    </label>`;
}

function Text({ name, label, settings, set, rows, hint = "" }) {
  return html`
    <textarea id=${name} aria-label=${label} rows=${rows} placeholder=${hint} spellcheck=${false}
      dir="auto" value=${settings[name]} onInput=${(event) => set(name, event.target.value)}></textarea>`;
}
