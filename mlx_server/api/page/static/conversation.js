// A conversation: turns that branch where a message was changed or answered again. No DOM.

import { Answer } from "./talk-answer.js";
import { readFiles } from "./files.js";

const FORMAT = "mlx-server conversations 1";
const MAX_TURNS = 10_000, MAX_ANSWERS = 200, MAX_TITLE = 200;

export class Conversation {
  constructor() {
    const random = crypto.getRandomValues(new Uint32Array(3));
    this.id = [...random].map((number) => number.toString(36)).join("");
    this.title = "";
    this.changed = Date.now();
    this.models = [];
    this.settings = {};
    this.turns = []; // {parent, text, files, sides}: for each model a list of answers, of which all but the last call tools
    this.leaf = -1; // the number of the last turn that is shown
  }

  /** The numbers of the turns up to one, the first one first. */
  path(leaf = this.leaf) {
    const path = [];
    for (let at = leaf; at >= 0; at = this.turns[at].parent) path.unshift(at);
    return path;
  }

  /** Adds a turn after another one and shows it. */
  add(turn) {
    this.leaf = this.turns.push(turn) - 1;
    if (!this.title) this.title = turn.text.trim().split("\n")[0].slice(0, 60) || "Files";
    return this.leaf;
  }

  /** Takes back the turn that was added last. */
  takeBack(leaf) {
    this.turns.pop();
    this.leaf = leaf;
  }

  /** The turns in place of which this one is shown, itself included. */
  versions(at) {
    return this.children(this.turns[at].parent);
  }

  children(parent) {
    return [...this.turns.keys()].filter((at) => this.turns[at].parent === parent);
  }

  /** Shows a turn and what followed it last. */
  show(at) {
    this.leaf = at;
    for (let next = at; next !== undefined; next = this.children(next).at(-1)) this.leaf = next;
  }

  /** A conversation of its own that has the turns up to one. */
  branch(at) {
    const branch = new Conversation();
    Object.assign(branch, { title: this.title, models: this.models, settings: { ...this.settings } });
    for (const from of this.path(at)) branch.add({ ...this.turns[from], parent: branch.leaf });
    return branch;
  }

  stored() {
    const { id, title, changed, models, settings, leaf } = this;
    const turns = this.turns.map(({ sides, ...turn }) => (
      { ...turn, sides: sides.map((answers) => answers.map((answer) => answer.stored())) }
    ));
    return { id, title, changed, models, settings, leaf, turns };
  }

  /** What `stored` has returned, or a file says it has. Throws an Error that says what is wrong. */
  static read(stored) {
    const conversation = new Conversation();
    const { id, title, changed, models, settings, leaf, turns } = stored ?? {};
    if (!Array.isArray(turns) || turns.length > MAX_TURNS) throw new Error("it has no list of turns");
    if (/^[a-z0-9]{1,40}$/.test(id)) conversation.id = id;
    conversation.turns = turns.map(readTurn);
    conversation.title = textOf(title).slice(0, MAX_TITLE);
    conversation.changed = Number.isFinite(changed) ? changed : Date.now();
    conversation.models = listOf(models).slice(0, 2).map(textOf);
    conversation.settings = Object.fromEntries(Object.entries(settings ?? {}).filter(isSetting));
    conversation.leaf = Number.isInteger(leaf) && leaf < turns.length ? Math.max(leaf, -1) : turns.length - 1;
    return conversation;
  }
}

/** A file of these conversations. */
export function exported(conversations) {
  return JSON.stringify({ format: FORMAT, conversations: conversations.map((each) => each.stored()) });
}

/**
 * The conversations of a file, which may be somebody else's: calls to connectors need the user's approval.
 * Throws an Error if it can't be read as a whole.
 */
export function imported(text) {
  let file;
  try {
    file = JSON.parse(text);
  } catch (error) {
    throw new Error(`The file is no JSON: ${error.message}`);
  }
  if (file?.format !== FORMAT || !Array.isArray(file.conversations)) {
    throw new Error(`The file was not exported from this page: its "format" is not "${FORMAT}".`);
  }
  return file.conversations.map((stored, at) => {
    try {
      const conversation = Conversation.read(stored);
      conversation.settings.approval = "always";
      return conversation;
    } catch (error) {
      throw new Error(`Conversation ${at + 1} of the file can't be read: ${error.message}.`);
    }
  });
}

// A turn follows an earlier one, so that there is no circle.
function readTurn(turn, at) {
  const { parent, text, files, sides } = turn ?? {};
  if (!Number.isInteger(parent) || parent < -1 || parent >= at) throw new Error(`turn ${at + 1} follows no earlier one`);
  if (listOf(sides).length < 1 || sides.length > 2) throw new Error(`turn ${at + 1} has no list of answers`);
  const answers = sides.map((side) => listOf(side).slice(0, MAX_ANSWERS).map((answer) => Answer.read(answer)));
  return { parent, text: textOf(text), files: readFiles(files), sides: answers };
}

const listOf = (value) => (Array.isArray(value) ? value : []);
const textOf = (value) => (typeof value === "string" ? value : "");
const isSetting = ([name, value]) => /^[a-z_]{1,40}$/.test(name) && (
  typeof value === "string" || (name === "connectors" && Array.isArray(value) && value.every((each) => typeof each === "string"))
);
