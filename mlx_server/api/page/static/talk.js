// The view Talk: a playground for the models and adapters that are served.

import { Component, html, render } from "./vendor/htm-preact-3.1.1.js";
import { Answer, run } from "./talk-answer.js";
import { messages, requestBody } from "./talk-request.js";
import { DEFAULTS, Settings } from "./talk-settings.js";
import { AnswerView } from "./talk-shown.js";

export function mount(section, shell) {
  section.className = "talk";
  render(html`<${Talk} shell=${shell} />`, section);
}

class Talk extends Component {
  constructor() {
    super();
    this.state = {
      models: null, // as /v1/models lists them
      chosen: ["", ""], // the second is empty where there is nothing to compare
      settings: { ...DEFAULTS },
      turns: [], // {text, sides}: for each model a list of answers, of which all but the last call tools
      draft: "",
      edited: null, // the number of the turn whose text is changed
      problem: "",
      status: "",
    };
    this.stop = null; // ends what is running
  }

  componentDidMount() {
    const { shell } = this.props;
    shell.onView((view) => view === "talk" && this.load());
    addEventListener("keydown", (event) => {
      if (event.key === "Escape" && shell.state.view === "talk") this.stop?.abort();
    });
  }

  async load() {
    try {
      const listed = await (await this.props.shell.api("/v1/models")).json();
      const models = listed.data.filter(({ type }) => type === "llm");
      this.setState(({ chosen }) => ({
        models, problem: "", chosen: [chosen[0] || (models[0]?.id ?? ""), chosen[1]],
      }));
    } catch (error) {
      this.setState({ problem: error.message });
    }
  }

  /** Sends a text as the turn of this number; it and all later ones are replaced. */
  send(text, at = this.state.turns.length) {
    const { chosen } = this.state;
    const turns = this.state.turns.slice(0, at);
    const turn = { text, sides: chosen.filter(Boolean).map(() => []) };
    turns.push(turn);
    const begun = this.answers(turns, turn.sides.map((_, side) => side));
    if (begun) this.setState({ turns, draft: "", edited: null }, () => this.attend());
  }

  /** Adds an answer to the last turn for each of these sides and streams them at once. */
  answers(turns, sides) {
    const { settings, chosen } = this.state;
    const shown = turns.at(-1).sides;
    try {
      const bodies = sides.map((side) => (
        requestBody(chosen[side] || chosen[0], settings, messages(settings.system, turns, side))
      ));
      const answers = bodies.map((body) => new Answer(body));
      sides.forEach((side, i) => shown[side].push(answers[i]));
      this.stream(answers);
      return true;
    } catch (error) {
      this.setState({ problem: error.message });
      return false;
    }
  }

  async stream(answers) {
    this.stop ??= new AbortController();
    const { stop } = this;
    this.running = (this.running ?? 0) + 1;
    this.setState({ problem: "", status: "The model answers." });
    await Promise.all(answers.map((answer) => run(answer, this.props.shell, stop.signal)));
    this.running -= 1;
    if (!this.running) this.stop = null;
    this.setState({ status: answers.some(({ error }) => error) ? "An error." : "The answer is complete." });
  }

  /** Makes the last turn's answer of a side once more. */
  again(side) {
    const turns = this.state.turns.slice();
    const last = turns.at(-1);
    turns[turns.length - 1] = { ...last, sides: last.sides.with(side, []) };
    if (this.answers(turns, [side])) this.setState({ turns });
  }

  goOn(answer, results, side) {
    answer.results = results;
    if (!this.answers(this.state.turns, [side])) answer.results = null;
  }

  /** Shows the last turn, and has the focus where the next message is written. */
  attend() {
    this.base.querySelector("#draft").focus({ preventScroll: true });
    this.base.querySelector(".turn:last-of-type")?.scrollIntoView({ block: "start" });
  }

  render(_, { models, chosen, settings, turns, problem, status }) {
    const choose = (side, id) => this.setState({ chosen: chosen.with(side, id) });
    const set = (name, value) => this.setState({ settings: { ...settings, [name]: value } });
    return html`
      <div class="talk-layout">
        <${Settings} ...${{ models, chosen, choose, settings, set }} />
        <div class="conversation">
          <div class="turns" role="log" aria-label="Conversation" aria-live="off">
            ${turns.length === 0 && html`<p class="talk-empty hint">
              Nothing is stored: the conversation is gone when the page is reloaded.
            </p>`}
            ${turns.map((turn, at) => this.turn(turn, at))}
          </div>
          <p class="error" role="alert">${problem}</p>
          ${this.composer()}
          <p class="unseen" role="status">${status}</p>
        </div>
      </div>`;
  }

  turn(turn, at) {
    const isLast = at === this.state.turns.length - 1;
    return html`
      <article class="turn" key=${at}>
        ${this.state.edited !== at ? this.asked(turn, at) : html`<${Editor} text=${turn.text}
          send=${(text) => this.send(text, at)} cancel=${() => this.setState({ edited: null })} />`}
        <div class="sides" data-count=${turn.sides.length}>
          ${turn.sides.map((answers, side) => html`
            <div class="side">
              ${answers.map((answer, i) => html`<${AnswerView}
                key=${`${side}.${i}.${answer.began}`} answer=${answer} shell=${this.props.shell}
                goOn=${isLast && ((results) => this.goOn(answer, results, side))}
                again=${isLast && i === answers.length - 1 && (() => this.again(side))}
              />`)}
            </div>`)}
        </div>
      </article>`;
  }

  asked(turn, at) {
    return html`
      <div class="asked">
        <p dir="auto">${turn.text}</p>
        <button class="quiet small" disabled=${Boolean(this.stop)}
          onClick=${() => this.setState({ edited: at })}>Edit</button>
      </div>`;
  }

  composer() {
    const { draft, chosen } = this.state;
    const send = (event) => {
      event.preventDefault();
      if (draft.trim() && !this.stop) this.send(draft);
    };
    return html`
      <form class="composer" onSubmit=${send}>
        <textarea id="draft" aria-label="Message" dir="auto" rows="2" value=${draft}
          placeholder=${chosen[0] ? `Ask ${chosen.filter(Boolean).join(" and ")}` : "Message"}
          onInput=${(event) => this.setState({ draft: event.target.value })}
          onKeyDown=${submitOnEnter}></textarea>
        <div class="buttons">
          ${this.stop
            ? html`<button type="button" id="stop-answers" onClick=${() => this.stop.abort()}>Stop</button>`
            : html`<button type="submit" id="send" disabled=${!draft.trim() || !chosen[0]}>Send</button>`}
          ${this.state.turns.length > 0 && html`<button type="button" class="quiet" id="clear"
            disabled=${Boolean(this.stop)} onClick=${() => this.setState({ turns: [], edited: null })}
          >New conversation</button>`}
          <span class="hint keys">Enter sends, Shift+Enter begins a line, Esc stops</span>
        </div>
      </form>`;
  }
}

class Editor extends Component {
  componentDidMount() {
    const field = this.base.elements.text;
    field.value = this.props.text;
    field.focus();
  }

  render({ send, cancel }) {
    const submit = (event) => {
      event.preventDefault();
      send(event.target.elements.text.value);
    };
    return html`
      <form class="composer editor" onSubmit=${submit}>
        <textarea name="text" aria-label="The message, changed" dir="auto" rows="2" required
          onKeyDown=${submitOnEnter}></textarea>
        <div class="buttons">
          <button type="button" class="quiet" onClick=${cancel}>Cancel</button>
          <button type="submit">Send from here</button>
        </div>
      </form>`;
  }
}

function submitOnEnter(event) {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  event.target.form.requestSubmit();
}
