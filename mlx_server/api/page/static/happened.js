// The view What happened: charts of the last hours, and the latest requests.

import { Chart } from "./chart.js";
import { html, render, useEffect, useRef, useState } from "./vendor/htm-preact-3.1.1.js";
import { Log } from "./log.js";
import { bytes, clock, number, seconds } from "./words.js";

const LEAST_SPAN = 600;
const FINISHED = {
  stop: "done", length: "token limit", tool_calls: "tool calls", cancelled: "cancelled",
};

export function mount(section, { api, state, onView, live }) {
  render(html`<${Happened} api=${api} state=${state} onView=${onView} live=${live} />`, section);
}

function Happened({ api, state, onView, live }) {
  const [history, setHistory] = useState(null);
  const [problem, setProblem] = useState("");
  const ended = useRef(null);
  useEffect(() => {
    const read = async () => {
      try {
        setHistory(await (await api("/page/history")).json());
        setProblem("");
      } catch (error) {
        setProblem(error.message);
      }
    };
    // Read while the view is shown: again after each request, and for the charts' next sample.
    const timer = setInterval(() => {
      if (state.view === "happened" && !document.hidden) read();
    }, 15000);
    const unsubscribe = live.subscribe(({ now }) => {
      if (state.view !== "happened" || !now || now.totals.ended === ended.current) return;
      ended.current = now.totals.ended;
      read();
    });
    onView((view) => view === "happened" && read());
    return () => {
      clearInterval(timer);
      unsubscribe();
    };
  }, []);
  return html`
    <p class="error notice" role="status">${problem}</p>
    ${history && html`
      <${Charts} samples=${history.samples} budget=${history.budget} />
      <${Speeds} requests=${history.requests} />
      <h2>Requests</h2>
      <${Requests} requests=${history.requests} />
      <${Log} api=${api} />`}`;
}

function Charts({ samples, budget }) {
  const { at, now, seconds: each } = samples;
  const from = Math.min(Math.max(samples.since, at[0] ?? now), now - LEAST_SPAN);
  const points = (values) =>
    at.map((time, place) => [time, values[place]]).filter(([, value]) => value !== null);
  const shared = { from, to: now, gap: 2 * each };
  return html`
    <div class="charts">
      <${Chart} ...${shared} title="Generation speed" points=${points(samples.tokens_per_second)}
        words=${(value) => `${value.toFixed(1)} tokens/s`} />
      <${Chart} ...${shared} title="Time to first token" words=${seconds}
        points=${points(samples.first_token_seconds)} />
      <${Chart} ...${shared} title="Memory" words=${bytes} gap=${Infinity} limit=${budget}
        points=${steps(points(samples.memory), [now, samples.memory_now])} />
    </div>`;
}

/** Memory stays as it is until the next sample. */
function steps(points, last) {
  return [...points, last].flatMap((point, place, all) =>
    place ? [[point[0], all[place - 1][1]], point] : [point]);
}

/** The medians of the listed requests, for each model. */
function Speeds({ requests }) {
  const models = Map.groupBy(requests.filter(({ completion_tokens }) => completion_tokens > 0), ({ model }) => model);
  if (!models.size) return null;
  const of = (all, name) => median(all.map((request) => request[name]).filter((value) => value !== null));
  return html`
    <h2>Speed by model</h2>
    <div class="panel speeds">
      <table>
        <thead><tr><th>Model</th><th class="number">Answers</th><th class="number">Tokens/s</th>
          <th class="number">Tokens/pass</th><th class="number">First token</th></tr></thead>
        <tbody>${[...models].map(([model, all]) => html`
          <tr key=${model}>
            <td class="name">${model}</td>
            <td class="number">${number(all.length)}</td>
            <td class="number">${of(all, "tokens_per_second")?.toFixed(1) ?? "–"}</td>
            <td class="number">${of(all, "tokens_per_pass")?.toFixed(2) ?? "–"}</td>
            <td class="number">${seconds(of(all, "first_token_seconds") ?? 0)}</td>
          </tr>`)}</tbody>
      </table>
    </div>
    <p class="hint">Medians of the requests below.</p>`;
}

const median = (values) => values.sort((a, b) => a - b)[Math.floor(values.length / 2)];

function Requests({ requests }) {
  if (!requests.length) return html`<p class="dim">No request has ended yet.</p>`;
  return html`
    <div class="panel requests">
      <table>
        <thead>
          <tr>
            <th>Ended</th><th>Model</th><th class="number">Prompt</th><th class="number">Cached</th>
            <th class="number">Answer</th><th class="number">First token</th>
            <th class="number">Tokens/s</th><th class="number">Time</th><th>Finish</th>
          </tr>
        </thead>
        <tbody>${requests.map((request) => html`
          <${Row} key=${request.at} request=${request} />`)}</tbody>
      </table>
    </div>
    <p class="hint">The latest ${number(requests.length)}, since the server started.
      ${requests.some((request) => request.texts)
        ? " A row opens what was asked and answered." : " Texts are not kept."}</p>`;
}

const TEXTS = { asked: "Asked", thoughts: "Thoughts", answer: "Answer", calls: "Calls" };
const COLUMNS = 9;

/** What was asked and answered, if the server's owner lets the page list it. */
function Texts({ texts }) {
  const parts = Object.entries(TEXTS).filter(([name]) => texts[name]);
  return html`
    <tr class="texts">
      <td colspan=${COLUMNS}>
        <dl>${parts.map(([name, title]) => html`<dt>${title}</dt><dd>${texts[name]}</dd>`)}</dl>
      </td>
    </tr>`;
}

function Row({ request }) {
  const [open, setOpen] = useState(false);
  const { finish, repairs, texts } = request;
  const first = request.first_token_seconds;
  return html`
    <tr>
      <td class="at">
        ${texts && html`
          <button class="quiet" aria-expanded=${open} aria-label="Texts" onClick=${() => setOpen(!open)}>
            ${open ? "▾" : "▸"}</button> `}${clock(request.at + request.seconds, true)}
      </td>
      <td class="name">${request.model || "–"}</td>
      <td class="number" data-label="prompt">${number(request.prompt_tokens)}</td>
      <td class="number" data-label="cached">${number(request.cached_tokens)}</td>
      <td class="number" data-label="answer">${number(request.completion_tokens)}</td>
      <td class="number" data-label="first">${first === null ? "–" : seconds(first)}</td>
      <td class="number" data-label="tokens/s">${request.tokens_per_second?.toFixed(1) ?? "–"}</td>
      <td class="number" data-label="time">${seconds(request.seconds)}</td>
      <td class=${`finish ${finish in FINISHED ? "" : "error"}`}>
        ${FINISHED[finish] ?? finish}${repairs > 0 && html` <span class="warn">${repairs} repaired</span>`}
      </td>
    </tr>
    ${open && texts && html`<${Texts} texts=${texts} />`}`;
}
