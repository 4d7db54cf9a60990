// The conversations that the browser keeps: listed, searched, renamed, deleted, exported and imported.

import { Component, html } from "./vendor/htm-preact-3.1.1.js";
import { exported, imported } from "./conversation.js";

const LISTED = 100;

/** `store` returns what keeps them; `open`, `renew` and `rename` change the one that is shown. */
export class ConversationList extends Component {
  constructor() {
    super();
    this.state = { listed: [], words: "", ids: null, problem: "" };
  }

  componentDidMount() {
    this.refresh();
  }

  componentDidUpdate({ kept }) {
    if (kept !== this.props.kept) this.refresh();
  }

  /** Does something with the store and says what went wrong. */
  async attempt(action) {
    this.setState({ problem: "" });
    try {
      await action(await this.props.store());
    } catch (error) {
      this.setState({ problem: error.message });
    }
  }

  refresh() {
    return this.attempt(async (store) => this.setState({ listed: await store.list() }));
  }

  search(words) {
    this.setState({ words });
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.attempt(async (store) => {
      this.setState({ ids: words.trim() ? await store.search(words) : null });
    }), 150);
  }

  async remove({ id, title }) {
    if (!confirm(`Delete "${title}"?`)) return;
    await this.attempt((store) => store.remove(id));
    if (id === this.props.shown) this.props.renew();
    await this.refresh();
  }

  async rename({ id, title }) {
    const name = prompt("The conversation's name", title)?.trim().slice(0, 200);
    if (!name) return;
    await this.attempt(async (store) => {
      const conversation = await store.read(id);
      conversation.title = name;
      await store.write(conversation);
    });
    this.props.rename(id, name);
    await this.refresh();
  }

  /** Exports these conversations as one file. */
  export(listed) {
    return this.attempt(async (store) => {
      const all = await Promise.all(listed.map(({ id }) => store.read(id)));
      const url = URL.createObjectURL(new Blob([exported(all)], { type: "application/json" }));
      Object.assign(document.createElement("a"), { href: url, download: "conversations.json" }).click();
      setTimeout(() => URL.revokeObjectURL(url), 60_000);
    });
  }

  import(event) {
    const [file] = event.target.files;
    event.target.value = "";
    return file && this.attempt(async (store) => {
      for (const conversation of imported(await file.text())) await store.write(conversation);
      await this.refresh();
    });
  }

  render({ shown, open, renew, isBusy }, { listed, words, ids, problem }) {
    const found = listed.filter(({ id }) => !ids || ids.has(id));
    return html`
      <details class="group kept" open=${innerWidth > 832}>
        <summary>Conversations</summary>
        <div class="line-of-buttons">
          <button type="button" class="quiet small" id="clear" disabled=${isBusy} onClick=${renew}>New</button>
          <button type="button" class="quiet small" id="export" disabled=${!listed.length}
            onClick=${() => this.export(found)}>Export</button>
          <label class="quiet small as-button">Import
            <input id="import" class="unseen" type="file" accept=".json,application/json"
              onChange=${(event) => this.import(event)} /></label>
        </div>
        <input id="search" type="search" placeholder="Search" aria-label="Search conversations"
          value=${words} onInput=${(event) => this.search(event.target.value)} />
        <p class="error" role="alert">${problem}</p>
        <ul>
          ${found.slice(0, LISTED).map((each) => html`
            <li key=${each.id} class=${each.id === shown ? "shown" : ""}>
              <button type="button" class="title" disabled=${isBusy} aria-current=${each.id === shown}
                onClick=${() => open(each.id)}><bdi>${each.title}</bdi></button>
              <button type="button" class="quiet small" aria-label=${`Rename ${each.title}`} title="Rename"
                disabled=${isBusy} onClick=${() => this.rename(each)}>✎</button>
              <button type="button" class="quiet small" aria-label=${`Delete ${each.title}`} title="Delete"
                disabled=${isBusy} onClick=${() => this.remove(each)}>✕</button>
            </li>`)}
        </ul>
        ${found.length > LISTED && html`<p class="hint">${found.length - LISTED} older ones: search for them.</p>`}
        ${ids && !found.length && html`<p class="hint">None has these words.</p>`}
      </details>`;
  }
}
