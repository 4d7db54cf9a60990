// How an answer is shown. Its texts grow by what is new in each frame of the browser; the more a
// frame costs, the fewer there are, so that the page stays usable whatever comes.

import { Component, html } from "./vendor/htm-preact-3.1.1.js";
import { copied } from "./copy.js";
import { MarkdownStream } from "./markdown.js";
import { asCurl, asPython, wireRequest } from "./talk-request.js";

const SHARE = 4; // the page rests so many times as long as it drew

/** A text node that grows. */
class PlainStream {
  constructor(node) {
    node.dir = "auto";
    this.text = document.createTextNode("");
    this.waiting = "";
    node.append(this.text);
  }

  append(text) {
    this.waiting += text;
  }

  draw() {
    this.text.appendData(this.waiting);
    this.waiting = "";
  }
}

/** Shows `text` by a stream of the given kind, which owns the element's children. */
class Growing extends Component {
  componentDidMount() {
    this.stream = new this.props.kind(this.base);
    this.shown = 0;
    this.componentDidUpdate();
  }

  componentDidUpdate() {
    const { text } = this.props;
    if (text.length === this.shown) return;
    this.stream.append(text.slice(this.shown));
    this.shown = text.length;
    this.stream.draw();
  }

  render({ name }) {
    return html`<div class=${name}></div>`;
  }
}

export class AnswerView extends Component {
  componentDidMount() {
    this.pause = 0;
    this.listener = () => this.schedule();
    this.props.answer.listeners.add(this.listener);
  }

  componentWillUnmount() {
    this.props.answer.listeners.delete(this.listener);
  }

  schedule() {
    if (this.isScheduled) return;
    this.isScheduled = true;
    setTimeout(() => requestAnimationFrame(() => this.draw()), this.pause);
  }

  draw() {
    this.isScheduled = false;
    const began = performance.now();
    const page = document.scrollingElement;
    const isAtEnd = page.scrollHeight - page.scrollTop - page.clientHeight < 80;
    this.forceUpdate(() => {
      if (isAtEnd) page.scrollTop = page.scrollHeight;
      this.pause = SHARE * (performance.now() - began);
    });
  }

  render({ answer, shell, messages, goOn, again }) {
    const { thought, text, calls, serverCalls, approvals, error, notes, request } = answer;
    return html`
      <section class="answer" aria-busy=${answer.isRunning} aria-label=${`Answer of ${request.model}`}>
        <h3 class="by"><bdi>${request.model}</bdi></h3>
        ${thought && html`<${Thought} ...${{ thought }} isOpenEnded=${answer.isRunning && !text && !calls.length} />`}
        ${serverCalls.length > 0 && html`<${ServerCalls} calls=${serverCalls} />`}
        ${text && html`<${Growing} kind=${MarkdownStream} name="said" text=${text} />`}
        ${approvals.some(({ allowed }) => !allowed) && html`<${Approvals} ...${{ answer, goOn }} />`}
        ${calls.length > 0 && html`<${Calls} ...${{ answer, goOn }} />`}
        ${answer.isRunning && answer.first === null && html`<${Waiting} progress=${answer.progress} />`}
        ${error && html`<p class="error" role="alert" dir="auto">${error}</p>`}
        ${notes.length > 0 && html`<ul class="notes">
          ${notes.map((note) => html`<li dir="auto">${note}</li>`)}
        </ul>`}
        ${!answer.isRunning && html`<${Foot} ...${{ answer, shell, messages, again }} />`}
      </section>`;
  }
}

function Thought({ thought, isOpenEnded }) {
  return html`
    <details class="thought">
      <summary>${isOpenEnded ? "Thinking …" : "Thoughts"}</summary>
      <${Growing} kind=${PlainStream} name="thought-text" text=${thought} />
    </details>`;
}

function Waiting({ progress }) {
  if (!progress || progress.processed >= progress.total) {
    return html`<p class="waiting hint">Waiting for the first token …</p>`;
  }
  return html`
    <p class="waiting hint">
      <progress aria-label="The prompt" max=${progress.total} value=${progress.processed}></progress>
      Read ${progress.processed} of ${progress.total} tokens of the prompt
    </p>`;
}

class Calls extends Component {
  render({ answer, goOn }) {
    const { calls, results } = answer;
    const send = (event) => {
      event.preventDefault();
      const entered = new FormData(event.target);
      goOn({ results: Object.fromEntries(calls.map(({ id }, i) => [id, entered.get(`result-${i}`)])) });
    };
    const isAsking = answer.isAsking && !results && goOn;
    return html`
      <form class="calls" onSubmit=${send}>
        ${calls.map((call, i) => html`
          <div class="call">
            <p class="called"><span class="hint">calls</span> <bdi class="mono">${call.name}</bdi></p>
            <pre class="arguments" dir="auto" tabindex="0">${indented(call.arguments)}</pre>
            ${isAsking && html`
              <label>Result
                <textarea name=${`result-${i}`} rows="2" dir="auto" spellcheck=${false}></textarea>
              </label>`}
            ${results && html`<p class="hint">Result</p>
              <pre class="result" dir="auto" tabindex="0">${results[call.id]}</pre>`}
          </div>`)}
        ${isAsking && html`<button type="submit" class="go-on">Go on</button>`}
      </form>`;
  }
}

/** The calls that the server has made to MCP servers. */
function ServerCalls({ calls }) {
  return html`
    <div class="calls">
      ${calls.map((call) => html`
        <details class="call" key=${call.id}>
          <summary class="called"><span class="hint">called</span> <bdi class="mono">${call.server} ${call.name}</bdi></summary>
          <pre class="arguments" dir="auto" tabindex="0">${indented(call.arguments)}</pre>
          <p class="hint">Result</p>
          <pre class="result" dir="auto" tabindex="0">${call.output}</pre>
        </details>`)}
    </div>`;
}

/** The calls to MCP servers that the user is to allow, or has declined. An allowed one is shown where it was run. */
function Approvals({ answer, goOn }) {
  const { approvals } = answer;
  const isAsking = answer.isAsking && goOn;
  const decide = (id, allowed) => goOn({
    approvals: approvals.map((each) => (each.id === id ? { ...each, allowed } : each)),
  });
  return html`
    <div class="calls">
      ${approvals.filter(({ allowed }) => !allowed).map(({ id, server, name, arguments: text, allowed }) => html`
        <div class="call approval" key=${id}>
          <p class="called"><span class="hint">${allowed === null ? "asks to call" : "may not call"}</span>
            ${" "}<bdi class="mono">${server} ${name}</bdi></p>
          <pre class="arguments" dir="auto" tabindex="0">${indented(text)}</pre>
          ${isAsking && allowed === null && html`<div class="buttons">
            <button type="button" class="allow" onClick=${() => decide(id, true)}>Allow</button>
            <button type="button" class="quiet decline" onClick=${() => decide(id, false)}>Decline</button></div>`}
        </div>`)}
    </div>`;
}

/**
 * JSON with line breaks; as it came if it is incomplete, or would be another text but for its spaces.
 * Characters that are not seen, or reorder others, are escaped: what is allowed is what is read.
 */
function indented(text) {
  let shown = text;
  try {
    const found = text.length > 50_000 ? "" : JSON.stringify(JSON.parse(text), null, 2);
    if (found.replaceAll(/\s/g, "") === text.replaceAll(/\s/g, "")) shown = found;
  } catch { /* it stays as it is */ }
  return shown.replaceAll(/\p{Cf}/gu, (letter) => `\\u{${letter.codePointAt(0).toString(16)}}`);
}

class Foot extends Component {
  render({ answer, shell, messages, again }) {
    const wantsKey = Boolean(shell.state.key);
    const show = (event) => this.setState({ isOpen: event.target.open });
    const request = this.state.isOpen && wireRequest(answer, messages());
    return html`
      <footer class="foot">
        <p class="costs hint">${answer.figures().map((figure) => html`<span>${figure}</span>`)}</p>
        <details class="code" onToggle=${show}>
          <summary>As code</summary>
          ${request && html`
            <${Code} label="curl" text=${asCurl(request, location.origin, wantsKey)} />
            <${Code} label="Python" text=${asPython(request, location.origin, wantsKey)} />`}
        </details>
        ${answer.text && html`<${Copy} text=${answer.text} name="copy-answer" label="Copy" />`}
        ${again && html`<button type="button" class="quiet small again" onClick=${again}>Again</button>`}
      </footer>`;
  }
}

class Copy extends Component {
  render({ text, name, label, select }, { result }) {
    const copy = async () => {
      const isCopied = await copied(text);
      if (!isCopied) select?.(this.base);
      this.setState({ result: isCopied ? "Copied" : select ? "Selected" : "Not copied: no clipboard without TLS" });
    };
    return html`<button type="button" class=${`quiet small ${name}`} onClick=${copy}>${result ?? label}</button>`;
  }
}

function Code({ label, text }) {
  const select = (button) => getSelection().selectAllChildren(button.parentElement.querySelector("pre"));
  return html`
    <div class="snippet">
      <${Copy} text=${text} name="" label=${`Copy as ${label}`} select=${select} />
      <pre data-language=${label} tabindex="0">${text}</pre>
    </div>`;
}
