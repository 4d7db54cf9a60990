// Emphasis, code and links within a block, as DOM nodes. One pass over the text finds its tokens and
// matches them, a second one makes the nodes.

const MAX_LENGTH = 20_000; // characters of a block; a longer one is text
const MAX_DEPTH = 16; // elements in one another; deeper marks are text
const SCHEMES = new Set(["http:", "https:", "mailto:"]);
const MAX_URL = 2_000;

const TOKEN = /\\[!-/:-@[-`{-~]|`+|\*+|_+|~~|!?\[|\]|<(?=[a-z])|https?:\/\//gi;
const TARGET =
  /\(\s{0,9}(?:<([^<>\n]{0,2000})>|([^\s<>()]{0,2000}(?:\([^\s<>()]{0,500}\)[^\s<>()]{0,500})?))(?:\s{1,9}"[^"]{0,500}")?\s{0,9}\)/y;
const BARE = /https?:\/\/[^\s<>"'`*\]|\\]{1,2000}/iy;
const ANGLED = /<((?:https?|mailto):[^\s<>]{1,2000})>/iy;
const ELEMENTS = { "*": "em", _: "em", "**": "strong", __: "strong", "~~": "del" };

// The URL that a link may have, or null. What the browser would make of it is judged, not its text.
export function safeUrl(text) {
  if (text.length > MAX_URL || !URL.canParse(text)) return null;
  const url = new URL(text);
  return SCHEMES.has(url.protocol) ? url.href : null;
}

function link(href) {
  const node = document.createElement("a");
  node.href = href;
  node.title = href;
  node.rel = "noopener noreferrer";
  node.target = "_blank";
  node.dir = "auto";
  return node;
}

// Tokens are strings, finished nodes, and {open}, {close} marks, of which those with `of` are
// matched: `of` makes the element that they enclose.
class Scanner {
  constructor(text) {
    this.text = text;
    this.tokens = [];
    this.from = 0; // what precedes is in tokens
    this.marks = []; // emphasis that may be closed
    this.waiting = new Map(); // how many of them, by what they are
    this.brackets = [];
    this.ticks = codeEnds(text);
  }

  scan() {
    const { text } = this;
    TOKEN.lastIndex = 0;
    for (let found; (found = TOKEN.exec(text)); ) {
      const { index: at, 0: token } = found;
      const end = this.take(token, at);
      if (end === null) continue; // it stays text
      this.from = end;
      TOKEN.lastIndex = end;
    }
    this.push(text.slice(this.from));
    return this.tokens;
  }

  push(token) {
    if (token !== "") this.tokens.push(token);
  }

  // What precedes the token at `at`, as text.
  before(at) {
    this.push(this.text.slice(this.from, at));
  }

  // Where the text goes on after a token that means something; null for one that does not.
  take(token, at) {
    switch (token[0]) {
      case "\\":
        this.before(at);
        this.push(token[1]);
        return at + 2;
      case "`":
        return this.code(token, at);
      case "<":
        return this.address(ANGLED, at);
      case "h":
      case "H":
        return this.address(BARE, at);
      case "[":
      case "!":
        this.before(at);
        this.brackets.push({ token: this.tokens.length, marks: this.marks.length });
        this.tokens.push({ open: token });
        return at + token.length;
      case "]":
        return this.brackets.length ? this.closeLink(at) : null;
      default:
        return this.emphasis(token, at);
    }
  }

  code(token, at) {
    const ends = this.ticks.get(token.length) ?? []; // none: a part of its run was escaped
    while (ends.length && ends.at(-1) <= at) ends.pop();
    if (!ends.length) {
      // the whole run is text, not a shorter one within it
      this.before(at);
      this.push(token);
      return at + token.length;
    }
    this.before(at);
    const node = document.createElement("code");
    const code = this.text.slice(at + token.length, ends.at(-1)).replaceAll("\n", " ");
    const isPadded = code.startsWith(" ") && code.endsWith(" ") && code.trim();
    node.textContent = isPadded ? code.slice(1, -1) : code;
    this.tokens.push(node);
    return ends.pop() + token.length;
  }

  // A URL that is its own text.
  address(pattern, at) {
    pattern.lastIndex = at;
    const found = pattern.exec(this.text);
    const url = pattern === BARE ? withoutPunctuation(found?.[0] ?? "") : found?.[1];
    const href = found && !this.brackets.length && safeUrl(url);
    if (!href) return null;
    this.before(at);
    const node = link(href);
    node.textContent = url;
    this.tokens.push(node);
    return at + (pattern === BARE ? url.length : found[0].length);
  }

  closeLink(at) {
    const { token, marks } = this.brackets.pop();
    TARGET.lastIndex = at + 1;
    const found = this.text[at + 1] === "(" ? TARGET.exec(this.text) : null;
    const href = found && safeUrl(found[1] ?? found[2]);
    if (!href) return null;
    this.before(at);
    this.drop(marks);
    this.brackets.length = 0; // links don't contain links
    this.tokens[token].of = () => link(href);
    this.tokens.push({ close: "", of: true });
    return at + 1 + found[0].length;
  }

  // Marks from this one on stay text.
  drop(from) {
    while (this.marks.length > from) {
      const { kind } = this.marks.pop();
      this.waiting.set(kind, this.waiting.get(kind) - 1);
    }
  }

  emphasis(run, at) {
    const kind = run.length > 2 ? run.slice(0, 2) : run;
    const before = this.text[at - 1] ?? " ";
    const after = this.text[at + run.length] ?? " ";
    const within = run[0] === "_" && /[\p{L}\p{N}]/u.test(before) && /[\p{L}\p{N}]/u.test(after);
    if (run.length > 3 || within) return null;
    const parts = run.length === 3 ? [kind, run[0]] : [run];
    const closes = /\S/.test(before) && parts.every((part) => this.waiting.get(part));
    if (!closes && !/\S/.test(after)) return null;
    this.before(at);
    for (const part of closes ? parts.reverse() : parts) {
      if (closes) this.closeEmphasis(part);
      else this.openEmphasis(part);
    }
    return at + run.length;
  }

  openEmphasis(kind) {
    this.marks.push({ kind, token: this.tokens.length });
    this.waiting.set(kind, (this.waiting.get(kind) ?? 0) + 1);
    this.tokens.push({ open: kind });
  }

  closeEmphasis(kind) {
    if (!this.waiting.get(kind)) {
      this.push(kind);
      return;
    }
    let last = this.marks.length - 1;
    while (this.marks[last].kind !== kind) last -= 1;
    const { token } = this.marks[last];
    this.drop(last);
    this.tokens[token].of = () => document.createElement(ELEMENTS[kind]);
    this.tokens.push({ close: kind, of: true });
  }
}

// Of a sentence that ends with a URL, or has it in parentheses.
function withoutPunctuation(url) {
  const shown = url.match(/^.*[^.,:;!?]/)?.[0] ?? "";
  return shown.endsWith(")") && !shown.includes("(") ? shown.slice(0, -1) : shown;
}

// The places of all runs of backticks by their length, the last first.
function codeEnds(text) {
  const ends = new Map();
  for (const { index, 0: run } of text.matchAll(/`+/g)) {
    if (!ends.has(run.length)) ends.set(run.length, []);
    ends.get(run.length).push(index);
  }
  for (const places of ends.values()) places.reverse();
  return ends;
}

function build(tokens) {
  const root = document.createDocumentFragment();
  const path = [root];
  let deeper = 0; // elements that are left out, as they are too deep
  for (const token of tokens) {
    const parent = path.at(-1);
    if (typeof token === "string" || token instanceof Node) {
      parent.append(token);
    } else if (!token.of) {
      parent.append(token.open);
    } else if (token.open === undefined) {
      if (deeper) deeper -= 1;
      else path.pop();
    } else if (path.length > MAX_DEPTH) {
      deeper += 1;
    } else {
      const node = token.of();
      if (token.open === "![") node.append("🖼 ");
      parent.append(node);
      path.push(node);
    }
  }
  return root;
}

export function inline(text) {
  return text.length > MAX_LENGTH ? text : build(new Scanner(text).scan());
}
