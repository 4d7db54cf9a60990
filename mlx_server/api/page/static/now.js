// The view Now: memory, answers under way and models, as they are at this moment.

import { html, render, useEffect, useState } from "./vendor/htm-preact-3.1.1.js";
import { bytes, duration, number, percent, seconds, several } from "./words.js";

const STATES = {
  unloaded: "not loaded", preparing: "reading its files", loading: "loading", ready: "ready",
  unloading: "unloading", unavailable: "not reachable", unasked: "not asked yet",
};
const BUSY = ["preparing", "loading", "unloading"];

export function mount(section, { api, live }) {
  render(html`<${Now} api=${api} live=${live} />`, section);
}

function Now({ api, live }) {
  const [{ now, problem }, setLatest] = useState({ now: null, problem: "" });
  useEffect(() => live.subscribe(setLatest), []);
  const facts = useFacts(api, now);
  return html`
    <p class="error notice" role="status">${problem && `${problem} Trying again…`}</p>
    ${now && html`
      <div class=${problem ? "stale" : ""}>
        <${Memory} memory=${now.memory} />
        <${Figures} now=${now} />
        <${Answers} answers=${now.answers} rows=${now.rows} />
        <h2>Models</h2>
        <ul class="panel models">
          ${now.models.map((model) => html`
            <${Model} key=${model.id} model=${model} facts=${facts[model.id] ?? {}} api=${api}
              managed=${now.runtime_models} />`)}
        </ul>
        <${Suggested} api=${api} fetches=${now.fetches} managed=${now.runtime_models} />
      </div>`}
    ${!now && !problem && html`<p class="dim">Asking the server…</p>`}`;
}

/** Models of the hub for this machine, once they are asked for. */
function Suggested({ api, fetches, managed }) {
  const [models, setModels] = useState(null);
  const [isOpen, setOpen] = useState(false);
  const [problem, setProblem] = useState("");
  const ended = fetches.filter(({ state }) => state === "fetched").length;
  const attempt = (work) => work.then(() => setProblem("")).catch((error) => setProblem(error.message));
  useEffect(() => {
    if (!isOpen) return;
    attempt(api("/page/suggested").then((response) => response.json()).then(({ models }) => setModels(models)));
  }, [isOpen, ended]);
  const post = (path) => (model) => attempt(api(path, { body: { model } }));
  return html`
    <details class="panel" onToggle=${(event) => setOpen(event.currentTarget.open)}>
      <summary>Models for this machine</summary>
      ${problem && html`<p class="error">${problem}</p>`}
      <ul class="suggested">
        ${models?.map((model) => html`
          <${SuggestedModel} key=${model.id} model=${model} managed=${managed}
            fetch=${fetches.find(({ id }) => id === model.id)}
            start=${post("/page/fetches")} cancel=${post("/page/fetches/cancel")} />`)}
      </ul>
    </details>`;
}

function SuggestedModel({ model, managed, fetch, start, cancel }) {
  const isRunning = ["running", "cancelling"].includes(fetch?.state);
  return html`
    <li>
      <div class="line">
        <b>${model.id}</b>
        ${managed && !model.is_here && !isRunning && html`
          <button class="quiet" aria-label=${`Fetch ${model.id}`} onClick=${() => start(model.id)}>
            ${fetch ? "Go on" : "Fetch"}</button>`}
        ${isRunning && html`
          <button class="quiet" disabled=${fetch.state === "cancelling"} aria-label=${`Cancel ${model.id}`}
            onClick=${() => cancel(model.id)}>Cancel</button>`}
      </div>
      <p class="dim facts">${bytes(model.bytes)} · context ${number(model.context)} tokens · ${model.good_at}</p>
      ${isRunning && html`<${Loading} progress=${{ ...fetch, what: fetch.total
        ? `${bytes(fetch.done)} of ${bytes(fetch.total)},` : "asking the hub" }} />`}
      ${!isRunning && fetch?.problem && html`<p class="error">${fetch.problem}</p>`}
      ${model.is_here
        ? html`<p class="dim">On this machine. To serve it, models.yaml needs <code>source: ${model.id}</code>
            under a name, and the server a restart.</p>`
        : html`<p class="dim"><code>${model.command}</code></p>`}
    </li>`;
}

/** What /v1/models says of each model; asked again when the state of one has changed. */
function useFacts(api, now) {
  const [facts, setFacts] = useState({});
  const states = now?.models.map((model) => `${model.id} ${model.state}`).join("\n");
  useEffect(() => {
    if (states === undefined) return;
    api("/v1/models")
      .then((response) => response.json())
      .then(({ data }) => setFacts(Object.fromEntries(data.map((model) => [model.id, model]))))
      .catch(() => {}); // the stream reports that the server is gone
  }, [states]);
  return facts;
}

function Memory({ memory }) {
  const weights = memory.used - memory.kv_reserved - memory.prompt_cache;
  const parts = [
    ["weights", "models", weights],
    ["answers", "answers", memory.kv_reserved],
    ["cache", "prompt cache", memory.prompt_cache],
  ];
  const shown = `${bytes(memory.used)} of ${bytes(memory.budget)}`;
  return html`
    <section class="panel memory" aria-label="Memory">
      <div class="line"><h2>Memory</h2><span>${shown}</span></div>
      <div class="bar" role="img" aria-label=${`${shown} in use`}>
        ${parts.map(([name, , size]) => html`
          <span class=${name} style=${{ width: `${(100 * size) / memory.budget}%` }} />`)}
      </div>
      <ul class="legend">
        ${parts.map(([name, words, size]) => html`
          <li><i class=${name} />${words} <span class="dim">${bytes(size)}</span></li>`)}
        <li><i />free <span class="dim">${bytes(Math.max(0, memory.budget - memory.used))}</span></li>
      </ul>
      ${memory.other_servers > 0 && html`
        <p class="dim">Other servers take ${bytes(memory.other_servers)} more.</p>`}
      ${memory.lowered > 0 && html`
        <p class="warn">Memory ran out: the budget is ${bytes(memory.lowered)} lower until the next
          start.</p>`}
    </section>`;
}

function Figures({ now }) {
  const { prompt_tokens, cached_tokens, ended } = now.totals;
  const waiting = now.answers.filter((answer) => answer.state === "waiting").length;
  const doing = now.engine && !["generating", "idle"].includes(now.engine.doing) && now.engine.seconds > 1;
  const figures = [
    ["under way", number(now.rows - waiting < 0 ? 0 : now.rows - waiting)],
    ["waiting", number(waiting)],
    ["requests ended", number(ended)],
    ["of prompts cached", prompt_tokens ? percent(cached_tokens / prompt_tokens) : "–"],
    ["engine restarts", number(now.restarts)],
    ...(now.resumed ? [["requests resumed", number(now.resumed)]] : []),
    ...(now.training ? [[`of training ${now.training.adapter}${now.training.is_paused ? ", paused" : ""}`,
      percent(now.training.step / now.training.steps)]] : []),
    ...(now.disk_writes ? [["written to disk today", bytes(now.disk_writes.today)]] : []),
  ];
  return html`
    <dl class="gauges">
      ${figures.map(([name, value]) => html`<div><dd>${value}</dd><dt>${name}</dt></div>`)}
    </dl>
    ${!now.healthy && html`<p class="error">The engine is not running; it is being restarted.</p>`}
    ${doing && html`
      <p class="dim">The engine is ${now.engine.doing} (${duration(now.engine.seconds)}).</p>`}`;
}

function Answers({ answers, rows }) {
  if (!answers.length) return null;
  return html`
    <h2>Answers under way</h2>
    <ul class="panel answers">
      ${answers.map((answer) => html`
        <li key=${answer.at}>
          <span class="name">${answer.model || "…"}</span>
          <span class="what">${progressOf(answer)}</span>
          <span class="dim time">${seconds(answer.seconds)}</span>
          ${answer.state === "prompt" && html`
            <progress max=${answer.prompt_tokens} value=${answer.computed_tokens}
              aria-label="Prompt computed" />`}
        </li>`)}
    </ul>
    ${rows > answers.length && html`
      <p class="dim">${several(rows - answers.length, "more answer")} of these or other clients.</p>`}`;
}

function progressOf({ state, prompt_tokens, computed_tokens, completion_tokens, ...answer }) {
  if (state === "waiting") return "waits for its model or for memory";
  if (state === "prompt" && !prompt_tokens) return "waits for the first token";
  if (state === "prompt") {
    return `reads the prompt: ${number(computed_tokens)} of ${several(prompt_tokens, "token")}`;
  }
  const speed = answer.tokens_per_second;
  return several(completion_tokens, "token") + (speed ? ` · ${speed.toFixed(1)} tokens/s` : "");
}

function Model({ model, facts, api, managed }) {
  const [problem, setProblem] = useState("");
  const [asked, setAsked] = useState(false);
  // Ollama's way to load, unload and keep a model: a request without a prompt
  const ask = async (keepAlive) => {
    setProblem("");
    setAsked(true);
    const body = { model: model.id, stream: false, ...keepAlive };
    try {
      await api("/api/generate", { body });
    } catch (error) {
      setProblem(error.message);
    }
    setAsked(false);
  };
  const local = !/^(openai|watsonx):/.test(model.source);
  const busy = asked || BUSY.includes(model.state);
  const loaded = model.state === "ready";
  return html`
    <li>
      <div class="line">
        <h3>${model.id}</h3>
        <span class=${`state ${model.state}`}>${STATES[model.state] ?? model.state}</span>
        ${local && managed && html`
          <span class="actions">
            ${loaded && model.stale_at !== null && html`
              <button class="quiet" disabled=${busy} onClick=${() => ask({ keep_alive: -1 })}
                title="It stays until its memory is needed" aria-label=${`Keep ${model.id}`}>
                Keep</button>`}
            ${loaded && !model.pinned && html`
              <button class="quiet" disabled=${busy} onClick=${() => ask({ keep_alive: 0 })}
                aria-label=${`Unload ${model.id}`}>Unload</button>`}
            ${!loaded && html`
              <button class="quiet" disabled=${busy} onClick=${() => ask({})}
                aria-label=${`Load ${model.id}`}>Load</button>`}
          </span>`}
      </div>
      <p class="dim facts">${factsOf(model, facts, local).join(" · ")}</p>
      ${model.progress && html`<${Loading} progress=${model.progress} />`}
      <${Adapters} loaded=${model.adapters} known=${facts.adapters ?? []} />
      ${(problem || model.error) && html`<p class="error">${problem || model.error}</p>`}
    </li>`;
}

function factsOf(model, facts, local) {
  const left = model.stale_at && model.stale_at - Date.now() / 1000;
  const size = model.bytes || facts.size_bytes;
  const bits = facts.quantization?.bits;
  return [
    model.leases > 0 && several(model.leases, "user"),
    local ? size && bytes(size) : "on another server",
    facts.context_length && `${number(facts.context_length)} tokens of context`,
    model.family ?? facts.family,
    bits && `${bits} bits`,
    model.kv_bits && `KV cache of ${model.kv_bits} bits`,
    model.pinned && "pinned",
    left > 0 && `unloads in ${duration(left)} if unused`,
    model.batching === false && "one answer at a time",
    model.aliases.length > 0 && `also called ${model.aliases.join(", ")}`,
  ].filter(Boolean);
}

function Loading({ progress: { what, done, total } }) {
  return html`
    <label class="loading">
      <span class="dim">${what}${total > 0 && ` ${percent(done / total)}`}</span>
      ${total > 0 ? html`<progress max=${total} value=${done} />` : html`<progress />`}
    </label>`;
}

function Adapters({ loaded, known }) {
  const inMemory = Object.fromEntries(loaded.map((adapter) => [adapter.name, adapter]));
  const names = [...new Set([...loaded.map((adapter) => adapter.name), ...known])];
  if (!names.length) return null;
  return html`
    <ul class="adapters" aria-label="Adapters">
      ${names.map((name) => html`
        <li class=${name in inMemory ? "loaded" : ""}>${name}${name in inMemory &&
          html` <span class="dim">${bytes(inMemory[name].bytes)}</span>`}</li>`)}
    </ul>`;
}
