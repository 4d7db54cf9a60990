// Where a message is written, at first or again, with its files.

import { Component, html } from "./vendor/htm-preact-3.1.1.js";
import { isImage, taken } from "./files.js";

/** Files of a message; with `remove`, a button for each takes it away. */
export function Files({ files, remove }) {
  if (!files?.length) return null;
  return html`
    <ul class="files">
      ${files.map((file, at) => html`
        <li title=${file.name}>
          ${isImage(file) ? html`<img src=${file.data} alt=${file.name} />` : html`<bdi>${file.name}</bdi>`}
          ${remove && html`<button type="button" class="quiet small" aria-label=${`Remove ${file.name}`}
            onClick=${() => remove(at)}>✕</button>`}
        </li>`)}
    </ul>`;
}

export class Composer extends Component {
  constructor() {
    super();
    this.state = { text: "", files: [], problem: "", isOver: false };
  }

  componentDidMount() {
    const { text = "", files = [], cancel } = this.props;
    this.setState({ text, files });
    if (cancel) this.base.querySelector("textarea").focus();
  }

  async take(list) {
    try {
      this.setState({ files: await taken(list, this.state.files), problem: "" });
    } catch (error) {
      this.setState({ problem: error.message });
    }
  }

  send(event) {
    event.preventDefault();
    const { text, files } = this.state;
    if (this.props.isBusy || (!text.trim() && !files.length)) return;
    if (this.props.send(text, files)) this.setState({ text: "", files: [] });
  }

  render({ cancel, isBusy, stop, placeholder, canSend = true }, { text, files, problem, isOver }) {
    const drop = (event) => {
      event.preventDefault();
      this.setState({ isOver: false });
      this.take(event.dataTransfer.files);
    };
    const over = (event) => {
      event.preventDefault();
      this.setState({ isOver: true });
    };
    const paste = (event) => {
      if (event.clipboardData.files.length) this.take(event.clipboardData.files);
    };
    const isEmpty = !text.trim() && !files.length;
    return html`
      <form class=${`composer${cancel ? " editor" : ""}${isOver ? " over" : ""}`} onSubmit=${(event) => this.send(event)}
        onDrop=${drop} onDragOver=${over} onDragLeave=${() => this.setState({ isOver: false })}>
        <${Files} files=${files} remove=${(at) => this.setState({ files: files.toSpliced(at, 1) })} />
        <p class="error" role="alert">${problem}</p>
        <textarea id=${cancel ? null : "draft"} name="text" aria-label=${cancel ? "The message, changed" : "Message"}
          dir="auto" rows="2" value=${text} placeholder=${placeholder} onPaste=${paste}
          onInput=${(event) => this.setState({ text: event.target.value })} onKeyDown=${submitOnEnter}></textarea>
        <div class="buttons">
          ${cancel && html`<button type="button" class="quiet" onClick=${cancel}>Cancel</button>`}
          ${stop
            ? html`<button type="button" id="stop-answers" onClick=${stop}>Stop</button>`
            : html`<button type="submit" id=${cancel ? null : "send"} disabled=${isEmpty || !canSend}>
                ${cancel ? "Send from here" : "Send"}</button>`}
          <label class="quiet as-button" title="Text, PDF or images; they can be dropped here too">Files
            <input class="unseen" name="files" type="file" multiple onChange=${(event) => {
              this.take([...event.target.files]);
              event.target.value = "";
            }} /></label>
          ${!cancel && html`<span class="hint keys">Enter sends, Shift+Enter begins a line, Esc stops</span>`}
        </div>
      </form>`;
  }
}

function submitOnEnter(event) {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  event.target.form.requestSubmit();
}
