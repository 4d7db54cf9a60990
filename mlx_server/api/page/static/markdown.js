// Markdown of a model's answer as DOM nodes. markdown-it finds the tokens; nothing here reads or
// writes HTML: what a model wrote becomes text nodes and the elements that are listed below.

import MarkdownIt from "./vendor/markdown-it-15.0.3.js";

const MAX_DEPTH = 16; // of blocks in one another; what is deeper is a paragraph
const MAX_MARKED_UP = 200_000; // characters; the rest of a longer answer is plain text
const MAX_INLINE = 4_000; // characters of a paragraph; a longer one is text, since links cost a square
const MAX_URL = 2_000;
const SCHEMES = new Set(["http:", "https:", "mailto:"]);
const ELEMENTS = new Set([
  ..."p blockquote ul ol li table thead tbody tr th td".split(" "),
  ..."em strong s".split(" "),
]);
const PROSE = new Set(["p", "li", "th", "td"]);

const parser = new MarkdownIt({ html: false, linkify: true, maxNesting: 100 });
parser.disable(["code", "reference", "entity", "lheading"]);
parser.linkify.set({ fuzzyLink: false, fuzzyEmail: false, fuzzyIP: false });
parser.validateLink = (url) => safeUrl(url) !== null;
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
    if (token.type === "inline" && token.content.length > MAX_INLINE) token.type = "text";
  }
});

// The URL that a link may have, or null. What the browser would make of it is judged, not its text.
function safeUrl(text) {
  if (text.length > MAX_URL || !URL.canParse(text)) return null;
  const url = new URL(text);
  return SCHEMES.has(url.protocol) ? url.href : null;
}

function element(name, ...children) {
  const node = document.createElement(name);
  node.append(...children);
  return node;
}

// Its title shows where it leads, whatever the model calls it.
function link(url) {
  const href = safeUrl(url);
  const attributes = { href, title: href, rel: "noopener noreferrer", target: "_blank", dir: "auto" };
  return Object.assign(element("a"), attributes);
}

// The innermost blocks find their own direction, so that text from right to left is in order. What
// has many blocks must not: the browser would look through all of them for each that is added.
function directed(node) {
  node.dir = "auto";
  return node;
}

function opened(token) {
  const { tag } = token;
  if (tag === "a") return link(token.attrGet("href"));
  if (/^h[1-6]$/.test(tag)) return directed(element(`h${Math.min(6, Number(tag[1]) + 2)}`));
  if (!ELEMENTS.has(tag)) return element("span");
  const node = element(tag);
  if (tag === "ol" && token.attrGet("start")) node.start = token.attrGet("start");
  return PROSE.has(tag) ? directed(node) : node;
}

function codeBlock({ content, info }) {
  const node = element("pre", element("code", content.replace(/\n$/, "")));
  node.tabIndex = 0; // a wide block is scrolled by keyboard
  if (info.trim()) node.dataset.language = info.trim().slice(0, 30);
  return node;
}

function image(token) {
  const node = link(token.attrGet("src"));
  node.append("🖼 ", token.content);
  return node;
}

function leaf(token) {
  switch (token.type) {
    case "inline":
      return built(token.children);
    case "code_inline":
      return element("code", token.content);
    case "fence":
      return codeBlock(token);
    case "hr":
      return element("hr");
    case "image":
      return image(token);
    case "softbreak":
      return "\n";
    case "hardbreak":
      return element("br");
    default:
      return token.content;
  }
}

function scrolled(table) {
  const node = element("div", table);
  node.className = "table";
  node.tabIndex = 0;
  return node;
}

function built(tokens) {
  const root = document.createDocumentFragment();
  const path = [root];
  for (const token of tokens) {
    if (token.nesting > 0) {
      path.push(token.hidden ? path.at(-1) : opened(token));
    } else if (token.nesting < 0) {
      const node = path.pop();
      if (node !== path.at(-1)) path.at(-1).append(token.tag === "table" ? scrolled(node) : node);
    } else {
      path.at(-1).append(leaf(token));
    }
  }
  return root;
}

// The blocks of a text, each with the number of its first line.
function located(text) {
  const found = [];
  let block = [];
  for (const token of parser.parse(text, {})) {
    block.push(token);
    if (token.level || token.nesting > 0) continue;
    found.push({ at: block[0].map[0], nodes: [...built(block).childNodes] });
    block = [];
  }
  return found;
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
      this.node.append(directed(element("p", this.plain)));
    }
    this.plain.appendData(this.beyond);
    this.beyond = "";
  }

  drawOpen() {
    const lines = this.open.replaceAll("\r\n", "\n").split("\n");
    const found = located(lines.join("\n"));
    // The first two lines of a block decide that it is one, once they are complete.
    const keep = Math.max(0, found.findLastIndex(({ at }) => at < lines.length - 2));
    for (const node of this.last) node.remove();
    this.node.append(...found.flatMap(({ nodes }) => nodes));
    this.last = found.slice(keep).flatMap(({ nodes }) => nodes);
    if (keep) this.open = lines.slice(found[keep].at).join("\n");
    this.isDrawn = true;
  }
}
