// Code with its colours, by highlight.js. A language that it does not know stays plain.

import hljs from "./vendor/highlight-11.12.0.js";
import { sanitized } from "./sanitized.js";

// Characters of a block and of a line: a grammar's expressions may take a square of them.
const MAX_COLOURED = 10_000, MAX_LINE = 400;

/** The nodes of a text in the colours of a language. */
export function coloured(text, language) {
  if (text.length > MAX_COLOURED || !hljs.getLanguage(language)) return text;
  if (text.split("\n").some((line) => line.length > MAX_LINE)) return text;
  return sanitized(hljs.highlight(text, { language, ignoreIllegals: true }).value);
}
