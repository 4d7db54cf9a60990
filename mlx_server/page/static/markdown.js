// Markdown of a model's answer as DOM nodes. Nothing here reads or writes HTML: what a model wrote
// becomes text nodes and the elements below, in time linear in its length.

import { inline } from "./markdown-inline.js";

const MAX_DEPTH = 8; // of quotes and lists in one another; what is deeper is text
const MAX_MARKED_UP = 200_000; // characters; the rest of a longer answer is plain text
const MAX_CELLS = 64; // of a table's row

const FENCE = /^ {0,3}(`{3,}|~{3,}) *([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6}) +(.*)$/;
const RULE = /^ {0,3}(?:(?:\* *){3,}|(?:- *){3,}|(?:_ *){3,})$/;
const QUOTE = /^ {0,3}>/;
const ITEM = /^( {0,3})([-*+]|[0-9]{1,9}[.)])( +|$)/;
const TABLE_RULE = /^ {0,3}\|? *:?-+:? *(?:\| *:?-+:? *)*\|?$/;
const BLANK = /^\s*$/;
const LONGEST_MARK = 400; // characters of a line that is a heading, a rule or opens a fence

function element(name, ...children) {
  const node = document.createElement(name);
  node.append(...children);
  return node;
}

// The innermost blocks find their own direction, so that text from right to left is in order. What
// has many blocks must not: the browser would look through all of them for each that is added.
function prose(name, text) {
  const node = element(name, inline(text));
  node.dir = "auto";
  return node;
}

const isMark = (pattern, line) => line.length <= LONGEST_MARK && pattern.test(line.trimEnd());

function startsTable(lines, at) {
  return lines[at].includes("|") && at + 1 < lines.length && isMark(TABLE_RULE, lines[at + 1]);
}

// A line that ends a paragraph although no empty line does.
function interrupts(lines, at) {
  const line = lines[at];
  return (
    isMark(FENCE, line) || isMark(HEADING, line) || isMark(RULE, line) || QUOTE.test(line) ||
    ITEM.test(line) || startsTable(lines, at)
  );
}

// Each reader takes the lines and the number of its first, and returns its node and the number of
// the first line after it.

function readFence(lines, at) {
  const [, fence, language] = FENCE.exec(lines[at]);
  const end = new RegExp(`^ {0,3}${fence[0]}{${fence.length},} *$`);
  let last = at + 1;
  while (last < lines.length && !end.test(lines[last])) last += 1;
  const code = element("code", lines.slice(at + 1, last).join("\n"));
  const node = element("pre", code);
  node.tabIndex = 0; // a wide block is scrolled by keyboard
  if (language) node.dataset.language = language.trim().slice(0, 30);
  return [node, last + 1];
}

function readHeading(lines, at) {
  const [, marks, text] = HEADING.exec(lines[at].trimEnd());
  return [prose(`h${Math.min(6, marks.length + 2)}`, text.replace(/ #+$/, "")), at + 1];
}

function readQuote(lines, at, depth) {
  const within = [];
  while (at < lines.length && QUOTE.test(lines[at])) {
    within.push(lines[at].replace(/^ {0,3}> ?/, ""));
    at += 1;
  }
  return [element("blockquote", ...blocks(within, depth + 1)), at];
}

function readList(lines, at, depth) {
  const [, , marker] = ITEM.exec(lines[at]);
  const isOrdered = /[0-9]/.test(marker);
  const node = document.createElement(isOrdered ? "ol" : "ul");
  if (isOrdered) node.start = parseInt(marker, 10);
  while (at < lines.length && continuesList(lines[at], isOrdered)) {
    const [item, next] = readItem(lines, at, depth);
    node.append(item);
    at = next;
  }
  return [node, at];
}

function continuesList(line, isOrdered) {
  const found = ITEM.exec(line);
  return found && !isMark(RULE, line) && /[0-9]/.test(found[2]) === isOrdered;
}

function readItem(lines, at, depth) {
  const [whole, indent, marker] = ITEM.exec(lines[at]);
  const width = indent.length + marker.length + 1;
  const within = [lines[at].slice(whole.length)];
  for (at += 1; at < lines.length; at += 1) {
    const line = lines[at];
    const isWithin = /\S/.exec(line)?.index >= Math.min(width, 2 + indent.length);
    if (BLANK.test(line)) {
      within.push("");
    } else if (isWithin) {
      within.push(line.slice(Math.min(width, /\S/.exec(line).index)));
    } else if (within.at(-1) === "" || interrupts(lines, at)) {
      break;
    } else {
      within.push(line);
    }
  }
  const nodes = [...blocks(within, depth + 1)];
  const isTight = nodes[0]?.tagName === "P";
  const item = element("li", ...(isTight ? [...nodes[0].childNodes, ...nodes.slice(1)] : nodes));
  item.dir = "auto";
  return [item, at];
}

function cells(line) {
  const inner = line.trim().replace(/^\|/, "").replace(/(^|[^\\])\|$/, "$1");
  return inner.split(/(?<!\\)\|/, MAX_CELLS).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function readTable(lines, at) {
  const head = cells(lines[at]);
  const row = (name, texts) => element("tr", ...texts.map((text) => prose(name, text)));
  const body = document.createElement("tbody");
  const table = element("table", element("thead", row("th", head)), body);
  at += 2;
  while (at < lines.length && lines[at].includes("|") && !BLANK.test(lines[at])) {
    body.append(row("td", cells(lines[at]).slice(0, head.length)));
    at += 1;
  }
  const node = element("div", table);
  node.className = "table";
  node.tabIndex = 0;
  return [node, at];
}

function readParagraph(lines, at) {
  const first = at;
  do at += 1;
  while (at < lines.length && !BLANK.test(lines[at]) && !interrupts(lines, at));
  return [prose("p", lines.slice(first, at).join("\n")), at];
}

function reader(lines, at, depth) {
  const line = lines[at];
  if (isMark(FENCE, line)) return readFence;
  if (isMark(HEADING, line)) return readHeading;
  if (isMark(RULE, line)) return () => [document.createElement("hr"), at + 1];
  if (depth < MAX_DEPTH && QUOTE.test(line)) return readQuote;
  if (depth < MAX_DEPTH && ITEM.test(line)) return readList;
  if (startsTable(lines, at)) return readTable;
  return readParagraph;
}

function* located(lines, depth) {
  for (let at = 0; at < lines.length; ) {
    if (BLANK.test(lines[at])) {
      at += 1;
      continue;
    }
    const [node, next] = reader(lines, at, depth)(lines, at, depth);
    yield { node, at };
    at = next;
  }
}

function* blocks(lines, depth = 0) {
  for (const { node } of located(lines, depth)) yield node;
}

const lines = (text) => text.replaceAll("\r\n", "\n").split("\n");

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
      const node = element("p", this.plain);
      node.dir = "auto";
      this.node.append(node);
    }
    this.plain.appendData(this.beyond);
    this.beyond = "";
  }

  drawOpen() {
    const text = lines(this.open);
    const found = [...located(text, 0)];
    // The first line of a block decides that it is one, once the line is complete.
    const keep = Math.max(0, found.findLastIndex(({ at }) => at < text.length - 1));
    for (const node of this.last) node.remove();
    this.node.append(...found.map(({ node }) => node));
    this.last = found.slice(keep).map(({ node }) => node);
    if (keep) this.open = text.slice(found[keep].at).join("\n");
    this.isDrawn = true;
  }
}
