// The view Talk: conversations with the models and adapters that are served.

import { Component, html, render } from "./vendor/htm-preact-3.1.1.js";
import { Conversation } from "./conversation.js";
import { storeBy } from "./conversation-store.js";
import { Answer, run } from "./talk-answer.js";
import { Composer, Files } from "./talk-composer.js";
import { ConversationList } from "./talk-list.js";
import { DEFAULTS, messages, requestOf } from "./talk-request.js";
import { Settings } from "./talk-settings.js";
import { AnswerView } from "./talk-shown.js";

export function mount(section, shell) {
  section.className = "talk";
  render(html`<${Talk} shell=${shell} />`, section);
}

class Talk extends Component {
  constructor(props) {
    super(props);
    this.store = storeBy(props.shell.api);
    this.state = {
      models: null, // as /v1/models lists them
      connectors: [], // the names of the owner's MCP servers
      chosen: ["", ""], // the second is empty where there is nothing to compare
      settings: { ...DEFAULTS },
      conversation: new Conversation(),
      edited: null, // the number of the turn whose message is changed
      kept: 0, // how often a conversation was kept
      place: "", // where, in words
      problem: "",
      status: "",
    };
    this.stop = null; // ends what is running
  }

  componentDidMount() {
    const { shell } = this.props;
    shell.onView((view) => view === "talk" && this.load());
    shell.live.subscribe(({ now }) => {
      const connectors = now?.connectors ?? [];
      if (String(connectors) !== String(this.state.connectors)) this.setState({ connectors });
    });
    addEventListener("keydown", (event) => {
      if (event.key === "Escape" && shell.state.view === "talk") this.stop?.abort();
    });
  }

  async load() {
    try {
      const listed = await (await this.props.shell.api("/v1/models")).json();
      const models = listed.data.filter(({ type }) => type === "llm");
      const { place } = await this.store();
      this.setState(({ chosen }) => ({
        models, place, problem: "", chosen: [chosen[0] || (models[0]?.id ?? ""), chosen[1]],
      }));
    } catch (error) {
      this.setState({ problem: error.message });
    }
  }

  /** Sends a message after a turn. Returns whether it could be sent. */
  send(text, files, parent = this.state.conversation.leaf) {
    const { chosen } = this.state;
    const sides = chosen.filter(Boolean).map(() => []);
    return this.ask({ parent, text, files, sides }, [...sides.keys()]);
  }

  /** Answers a turn's message once more on a side, next to the answer that there is. */
  again(at, side) {
    const turn = this.state.conversation.turns[at];
    this.ask({ ...turn, sides: turn.sides.with(side, []) }, [side]);
  }

  ask(turn, sides) {
    const { conversation } = this.state;
    const { leaf } = conversation;
    conversation.add(turn);
    const isAsked = this.answers(sides);
    if (isAsked) this.setState({ edited: null }, () => this.attend());
    else conversation.takeBack(leaf);
    return isAsked;
  }

  /** Adds an answer to the last turn for each of these sides and streams them at once. */
  answers(sides) {
    const { settings, chosen, conversation } = this.state;
    const shown = conversation.turns[conversation.leaf].sides;
    try {
      const answers = sides.map((side) => new Answer(
        requestOf(chosen[side] || chosen[0], settings), settings.system, settings.connectors, settings.approval,
      ));
      sides.forEach((side, i) => shown[side].push(answers[i]));
      Object.assign(conversation, { models: chosen, settings });
      this.stream(answers, sides);
      return true;
    } catch (error) {
      this.setState({ problem: error.message });
      return false;
    }
  }

  async stream(answers, sides) {
    this.stop ??= new AbortController();
    const { stop } = this;
    const { conversation } = this.state;
    this.running = (this.running ?? 0) + 1;
    this.setState({ problem: "", status: "The model answers." });
    this.keep(conversation);
    await Promise.all(answers.map((answer, i) => (
      run(answer, this.messages(conversation.leaf, sides[i], answer), this.props.shell, stop.signal)
    )));
    this.running -= 1;
    if (!this.running) this.stop = null;
    const end = answers.some(({ isAsking }) => isAsking) ? "The model waits for you." : "The answer is complete.";
    this.setState({ status: answers.some(({ error }) => error) ? "An error." : end });
    await this.keep(conversation);
  }

  /** What an answer of a turn was asked, in all. */
  messages(at, side, answer) {
    const { conversation } = this.state;
    const turns = conversation.path(at).map((each) => conversation.turns[each]);
    return messages(answer.system, turns, side, turns.at(-1).sides[side].indexOf(answer));
  }

  async keep(conversation) {
    conversation.changed = Date.now();
    try {
      await (await this.store()).write(conversation);
      this.setState(({ kept }) => ({ kept: kept + 1 }));
    } catch (error) {
      this.setState({ problem: error.message });
    }
  }

  async open(id) {
    try {
      this.show(await (await this.store()).read(id));
    } catch (error) {
      this.setState({ problem: error.message });
    }
  }

  show(conversation) {
    const { models, chosen } = this.state;
    const isServed = (id) => models?.some((model) => model.id === id);
    const [first, second] = conversation.models;
    this.setState({
      conversation,
      chosen: [isServed(first) ? first : chosen[0], isServed(second) ? second : ""],
      settings: { ...DEFAULTS, ...conversation.settings },
      edited: null,
      problem: "",
    });
  }

  /** Takes over results of calls, or a decision about one, and goes on if nothing more is asked. */
  goOn(answer, decided, side) {
    const { results, approvals } = answer;
    Object.assign(answer, decided);
    if (answer.isAsking) this.keep(this.state.conversation);
    else if (!this.answers([side])) Object.assign(answer, { results, approvals });
  }

  /** Shows the last turn, and has the focus where the next message is written. */
  attend() {
    this.base.querySelector("textarea#draft").focus({ preventScroll: true });
    this.base.querySelector(".turn:last-of-type")?.scrollIntoView({ block: "start" });
  }

  render(_, { models, connectors, chosen, settings, conversation, kept, place, problem, status }) {
    const choose = (side, id) => this.setState({ chosen: chosen.with(side, id) });
    const set = (name, value) => this.setState({ settings: { ...settings, [name]: value } });
    const rename = (id, title) => id === conversation.id && Object.assign(conversation, { title });
    return html`
      <div class="talk-layout">
        <div class="settings">
          <${ConversationList} ...${{ kept, rename }} store=${this.store} shown=${conversation.id}
            isBusy=${Boolean(this.stop)} open=${(id) => this.open(id)}
            renew=${() => this.setState({ conversation: new Conversation(), edited: null })} />
          <${Settings} ...${{ models, connectors, chosen, choose, settings, set }} />
        </div>
        <div class="conversation">
          <div class="turns" role="log" aria-label="Conversation" aria-live="off">
            ${conversation.leaf < 0 && place && html`<p class="talk-empty hint">
              Conversations are kept ${place}.
            </p>`}
            ${conversation.path().map((at) => this.turn(at))}
          </div>
          <p class="error" role="alert">${problem}</p>
          <${Composer} isBusy=${Boolean(this.stop)} stop=${this.stop && (() => this.stop.abort())}
            canSend=${Boolean(chosen[0])} send=${(text, files) => this.send(text, files)}
            placeholder=${chosen[0] ? `Ask ${chosen.filter(Boolean).join(" and ")}` : "Message"} />
          <p class="unseen" role="status">${status}</p>
        </div>
      </div>`;
  }

  turn(at) {
    const { conversation, edited } = this.state;
    const turn = conversation.turns[at];
    const isLast = at === conversation.leaf;
    return html`
      <article class="turn" key=${`${conversation.id}.${at}`}>
        ${edited !== at ? this.asked(turn, at) : html`<${Composer} text=${turn.text} files=${turn.files}
          send=${(text, files) => this.send(text, files, turn.parent)} isBusy=${Boolean(this.stop)}
          cancel=${() => this.setState({ edited: null })} />`}
        <div class="sides" data-count=${turn.sides.length}>
          ${turn.sides.map((answers, side) => html`
            <div class="side">
              ${answers.map((answer, i) => html`<${AnswerView} key=${`${side}.${i}`} answer=${answer}
                shell=${this.props.shell} messages=${() => this.messages(at, side, answer)}
                goOn=${isLast && ((decided) => this.goOn(answer, decided, side))}
                again=${!this.stop && i === answers.length - 1 && (() => this.again(at, side))}
              />`)}
            </div>`)}
        </div>
      </article>`;
  }

  asked(turn, at) {
    const { conversation } = this.state;
    const isBusy = Boolean(this.stop);
    return html`
      <div class="asked">
        <div class="message">
          <${Files} files=${turn.files} />
          ${turn.text && html`<p dir="auto">${turn.text}</p>`}
        </div>
        <div class="of-message">
          <${Versions} all=${conversation.versions(at)} at=${at} isBusy=${isBusy} show=${(other) => {
            conversation.show(other);
            this.setState({ edited: null });
            this.keep(conversation);
          }} />
          <button class="quiet small edit" disabled=${isBusy} onClick=${() => this.setState({ edited: at })}>Edit</button>
          <button class="quiet small branch" disabled=${isBusy} title="A conversation of its own up to here"
            onClick=${() => {
              const branch = conversation.branch(at);
              this.show(branch);
              this.keep(branch);
            }}>Branch</button>
        </div>
      </div>`;
  }
}

/** The versions of a message and its answers, if there are several. */
function Versions({ all, at, isBusy, show }) {
  const place = all.indexOf(at);
  if (all.length < 2) return null;
  const step = (by, label, sign) => html`
    <button type="button" class="quiet small" aria-label=${label} disabled=${isBusy || !(place + by in all)}
      onClick=${() => show(all[place + by])}>${sign}</button>`;
  return html`<span class="versions">${step(-1, "Earlier version", "‹")} ${place + 1}/${all.length}
    ${" "}${step(1, "Later version", "›")}</span>`;
}
