// Formulas: markdown-it's rules that find them, and Temml, which makes MathML of them.

const { temml } = globalThis;

const MAX_TEX = 2_000; // characters of a formula; a longer one is text
const OPTIONS = { throwOnError: true, trust: false, maxExpand: 200, maxSize: [20, 200] };
const REFUSED = /^(?:id|href|src|style|on.*|xlink.*)$/i;

const DISPLAY = "maths display";
const ENDS = { "$$": "$$", "\\[": "\\]", "\\(": "\\)", "$": "$" };

/** Adds the rules to a parser. A formula becomes a token `maths` or `maths_block`. */
export function addMaths(parser) {
  parser.inline.ruler.before("escape", "maths", inline);
  parser.block.ruler.before("fence", "maths_block", block, { alt: ["paragraph", "list", "blockquote"] });
  const { escapeHtml } = parser.utils;
  const element = (name) => (tokens, at) => (
    `<${name} class="${tokens[at].info}">${escapeHtml(tokens[at].content)}</${name}>`
  );
  Object.assign(parser.renderer.rules, { maths: element("span"), maths_block: element("div") });
}

function inline(state, isSilent) {
  const { src, pos } = state;
  const open = Object.keys(ENDS).find((mark) => src.startsWith(mark, pos));
  if (!open) return false;
  const from = pos + open.length;
  const to = src.indexOf(ENDS[open], from);
  const tex = to < 0 ? "" : src.slice(from, to);
  // as in Pandoc, since dollars are also money: "$5 and $6" is no formula
  const isMoney = open === "$" && (/^\s|\s$|\\$/.test(tex) || /\d/.test(src[to + 1] ?? ""));
  if (!tex.trim() || tex.length > MAX_TEX || isMoney) return false;
  if (!isSilent) {
    const info = open === "$$" || open === "\\[" ? DISPLAY : "maths";
    Object.assign(state.push("maths", "", 0), { content: tex, info });
  }
  state.pos = to + ENDS[open].length;
  return true;
}

// A formula on lines of its own. Without an end before the next empty line it is a paragraph, whatever
// its lines look like: how far the block goes must not depend on a line that comes later.
function block(state, begin, end, isSilent) {
  const first = line(state, begin);
  const open = first.slice(0, 2), rest = first.slice(2);
  let isClosed = closes(rest, open);
  if (!/^(?:\$\$(?!\$)|\\\[)/.test(first)) return false;
  if (rest.includes(ENDS[open]) && rest.indexOf(ENDS[open]) < rest.trimEnd().length - 2) return false;
  if (isSilent) return true;
  let last = begin;
  const goesOn = (at) => at < end && !state.isEmpty(at) && state.sCount[at] >= state.blkIndent;
  while (!isClosed && goesOn(last + 1)) {
    last += 1;
    isClosed = closes(line(state, last), open);
  }
  const map = [begin, last + 1];
  const text = state.getLines(begin, last + 1, state.blkIndent, false).trim();
  if (isClosed && text.length <= MAX_TEX) {
    Object.assign(state.push("maths_block", "", 0), { content: text.slice(2, -2), map, info: DISPLAY });
  } else {
    Object.assign(state.push("paragraph_open", "p", 1), { map });
    Object.assign(state.push("inline", "", 0), { content: text, map, children: [] });
    state.push("paragraph_close", "p", -1);
  }
  state.line = last + 1;
  return true;
}

const line = (state, at) => state.src.slice(state.bMarks[at] + state.tShift[at], state.eMarks[at]);
const closes = (text, open) => text.trimEnd().endsWith(ENDS[open]);

/** Sets the formula that is a node's text. What Temml does not understand stays text. */
export function setMaths(node) {
  const tex = node.textContent;
  const set = document.createElement("span");
  try {
    const options = { ...OPTIONS, displayMode: node.classList.contains("display") };
    const tree = temml.__renderToMathMLTree(tex, options); // `render` would add it to the page as it is
    strip(tree);
    set.append(tree.toNode());
  } catch { // not TeX, or nested too deeply
    node.classList.add("mono");
    return;
  }
  for (const link of set.querySelectorAll("a")) link.remove(); // to a label
  node.title = tex;
  node.replaceChildren(...set.childNodes);
}

// A label's id could be one of the page's own, and the page's policy refuses styles as attributes.
function strip({ attributes = {}, children = [] }) {
  for (const name of Object.keys(attributes)) if (REFUSED.test(name)) delete attributes[name];
  children.forEach(strip);
}
