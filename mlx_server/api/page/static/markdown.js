// Markdown of a model's answer as DOM nodes. markdown-it reads it without any HTML of the model's own,
// and what it writes is sanitized before the page looks at it.

import { coloured } from "./code.js";
import { copyButton } from "./copy.js";
import { addMaths, setMaths } from "./maths.js";
import { sanitized } from "./sanitized.js";

const { markdownit } = globalThis;

const MAX_DEPTH = 16; // of blocks in one another; what is deeper is a paragraph
const MAX_MARKED_UP = 200_000; // characters; the rest of a longer answer is plain text
const MAX_INLINE = 4_000; // characters of a paragraph; a longer one is text, since links cost a square
const MAX_URL = 2_000;
const SCHEMES = new Set(["http:", "https:", "mailto:"]);

const parser = markdownit({ html: false, linkify: true, maxNesting: 100 });
const { escapeHtml } = parser.utils;
parser.disable(["code", "reference", "entity", "lheading"]);
parser.linkify.set({ fuzzyLink: false, fuzzyEmail: false, fuzzyIP: false });
parser.validateLink = (url) => safeUrl(url) !== null;
addMaths(parser);
parser.block.ruler.before("table", "deep", (state, start, end, isSilent) => {
  if (state.level < MAX_DEPTH || isSilent) return false;
  const map = [start, end];
  const content = state.getLines(start, end, state.blkIndent, false).trim();
  Object.assign(state.push("paragraph_open", "p", 1), { map });
  Object.assign(state.push("inline", "", 0), { content, map, children: [] });
  state.push("paragraph_close", "p", -1);
  state.line = end;
  return true;
});
parser.core.ruler.before("inline", "long", ({ tokens }) => {
  for (const token of tokens) {
    if (token.type !== "inline" || token.content.length <= MAX_INLINE) continue;
    token.meta = token.content;
    token.content = "";
  }
});
parser.core.ruler.push("page", ({ tokens, Token }) => {
  tokens.forEach((token, at) => {
    if (token.meta) token.children = [Object.assign(new Token("text", "", 0), { content: token.meta })];
    if (token.type.startsWith("heading")) token.tag = `h${Math.min(6, Number(token.tag[1]) + 2)}`;
    const side = /left|right|center/.exec(token.attrGet("style") ?? "");
    if (side) token.attrs = [["class", `to-${side[0]}`]];
    const box = tokens[at - 2]?.type === "list_item_open" && /^\[([ xX])\]\s/.exec(token.content);
    if (!box || !token.children?.length) return;
    tokens[at - 2].attrs = [["class", "task"]];
    token.children[0].content = `${box[1] === " " ? "☐" : "☑"} ${token.children[0].content.slice(4)}`;
  });
});
parser.renderer.rules.image = (tokens, at) => (
  `<a href="${escapeHtml(tokens[at].attrGet("src"))}">🖼 ${escapeHtml(tokens[at].content)}</a>`
);
parser.renderer.rules.softbreak = () => "<br>";
parser.renderer.rules.hardbreak = () => "<br>";

// The URL that a link may have, or null. What the browser would make of it is judged, not its text.
function safeUrl(text) {
  if (text.length > MAX_URL || !URL.canParse(text)) return null;
  const url = new URL(text);
  return SCHEMES.has(url.protocol) ? url.href : null;
}

// The blocks of a text, each with the number of its first line.
function located(text) {
  const blocks = [];
  let begin = 0;
  const tokens = parser.parse(text, {});
  tokens.forEach((token, at) => {
    if (token.level || token.nesting > 0) return;
    blocks.push({ at: tokens[begin].map[0], html: rendered(tokens.slice(begin, at + 1)) });
    begin = at + 1;
  });
  const { children } = sanitized(blocks.map(({ html }) => `<div>${html}</div>`).join(""));
  return blocks.map(({ at }, place) => ({ at, nodes: finished(children[place]) }));
}

const rendered = (tokens) => parser.renderer.render(tokens, parser.options, {});

// What HTML does not say. The innermost blocks find their own direction, so that text from right to left
// is in order. What has many blocks must not: the browser would look through all of them for each.
function finished(block) {
  for (const link of block.querySelectorAll("a")) {
    // its title shows where it leads, whatever the model calls it
    const attributes = { title: link.href, rel: "noopener noreferrer", target: "_blank", dir: "auto" };
    Object.assign(link, attributes);
  }
  for (const node of block.querySelectorAll("p, h3, h4, h5, h6, li, th, td")) node.dir = "auto";
  for (const node of block.querySelectorAll(".maths")) setMaths(node);
  for (const pre of block.querySelectorAll("pre")) codeBlock(pre);
  for (const table of block.querySelectorAll("table")) table.replaceWith(scrolled(table.cloneNode(true)));
  return [...block.childNodes].filter((node) => node.nodeType === Node.ELEMENT_NODE || node.data.trim());
}

function codeBlock(pre) {
  const [code] = pre.children;
  const language = /^language-(\S{1,30})/.exec(code.className)?.[1] ?? "";
  const text = code.textContent.replace(/\n$/, "");
  code.removeAttribute("class");
  code.replaceChildren(coloured(text, language));
  pre.tabIndex = 0; // a wide block is scrolled by keyboard
  const frame = document.createElement("div");
  frame.className = "code-block";
  if (language) frame.dataset.language = language;
  pre.replaceWith(frame);
  frame.append(pre, copyButton(() => text));
}

function scrolled(table) {
  const frame = document.createElement("div");
  Object.assign(frame, { className: "table", tabIndex: 0 });
  frame.append(table);
  return frame;
}

export function markdown(text) {
  const shown = new MarkdownStream(document.createElement("div"));
  shown.append(text);
  shown.draw();
  return shown.node;
}

// An answer that grows. Blocks that can't change any more stay as they are; only what follows the
// last of them is read again. The same text gives the same nodes, however it was cut.
export class MarkdownStream {
  constructor(node) {
    this.node = node;
    this.node.classList.add("markdown");
    this.room = MAX_MARKED_UP;
    this.open = ""; // the text from the last block on
    this.last = []; // its nodes
    this.isDrawn = true; // whether they show all of it
    this.beyond = ""; // what there was no room for, as far as it is not in `plain`
    this.plain = null; // a text node
  }

  append(text) {
    const within = text.slice(0, this.room);
    this.room -= within.length;
    this.open += within;
    this.beyond += text.slice(within.length);
    this.isDrawn &&= !within;
  }

  draw() {
    if (!this.isDrawn) this.drawOpen();
    if (!this.beyond) return;
    if (!this.plain) {
      this.plain = document.createTextNode("");
      const paragraph = Object.assign(document.createElement("p"), { dir: "auto" });
      paragraph.append(this.plain);
      this.node.append(paragraph);
    }
    this.plain.appendData(this.beyond);
    this.beyond = "";
  }

  drawOpen() {
    const lines = this.open.replaceAll("\r\n", "\n").split("\n");
    const blocks = located(lines.join("\n"));
    // The first two lines of a block decide that it is one, once they are complete.
    const keep = Math.max(0, blocks.findLastIndex(({ at }) => at < lines.length - 2));
    for (const node of this.last) node.remove();
    this.node.append(...blocks.flatMap(({ nodes }) => nodes));
    this.last = blocks.slice(keep).flatMap(({ nodes }) => nodes);
    if (keep) this.open = lines.slice(blocks[keep].at).join("\n");
    this.isDrawn = true;
  }
}
