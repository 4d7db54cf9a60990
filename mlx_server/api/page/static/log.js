// The server's log, the latest lines of it.

import { html, useEffect, useState } from "./vendor/htm-preact-3.1.1.js";
import { clock } from "./words.js";

export function Log({ api }) {
  const [lines, setLines] = useState(null);
  const [problem, setProblem] = useState("");
  const [isOpen, setOpen] = useState(false);
  const [words, setWords] = useState("");
  useEffect(() => {
    if (!isOpen) return undefined;
    const read = () => document.hidden || api("/page/log")
      .then((response) => response.json())
      .then((answer) => {
        setLines(answer.lines);
        setProblem("");
      })
      .catch((error) => setProblem(error.message));
    read();
    const timer = setInterval(read, 3000);
    return () => clearInterval(timer);
  }, [isOpen]);
  const wanted = words.toLowerCase();
  const shown = (lines ?? []).filter((line) => `${line.level} ${line.logger} ${line.message}`.toLowerCase().includes(wanted));
  return html`
    <details class="panel log" onToggle=${(event) => setOpen(event.currentTarget.open)}>
      <summary>Log</summary>
      <p class="error">${problem}</p>
      <input type="search" aria-label="Search the log" placeholder="Search the log" value=${words}
        onInput=${(event) => setWords(event.target.value)} />
      <ol tabindex="0">
        ${shown.toReversed().map((line) => html`
          <li class=${line.level}><span class="dim">${clock(line.at, true)}</span> ${line.level}${" "}
            <span class="dim">${line.logger}</span> ${line.message}</li>`)}
      </ol>
      ${lines && !shown.length && html`<p class="dim">No line.</p>`}
    </details>`;
}
