// The conversations that are kept: by this browser, in an IndexedDB of the page's origin, or by the
// server, where its owner says so. Both stores have the same methods.

import { Conversation } from "./conversation.js";

const ROUTE = "/page/conversations";
const NAME = "mlx-server";
const MAX_BYTES = 200e6, MAX_COUNT = 2_000;
const FULL = "This browser's store of conversations is full: what is new is not kept. Export and delete some.";
const NONE = "This browser keeps no conversations for this page (it may be a private window): export what you want to keep.";

// A request of IndexedDB, or a transaction, as a promise.
const done = (request) => new Promise((resolve, reject) => {
  request.onsuccess = request.oncomplete = () => resolve(request.result);
  request.onerror = request.onabort = () => reject(request.error ?? new Error("it was aborted"));
});

/** Returns a function that returns the store, once the server has said which one it is. */
export function storeBy(api) {
  let store = null;
  const choose = async () => {
    const { stored } = await (await api(ROUTE)).json();
    return stored ? new ServerStore(api) : new BrowserStore();
  };
  return () => (store ??= choose().catch((error) => {
    store = null; // to be asked again
    throw error;
  }));
}

class ServerStore {
  place = "by the server, for everybody with the same key";
  #written = Promise.resolve();

  constructor(api) {
    this.api = api;
  }

  async list() {
    return (await (await this.api(ROUTE)).json()).data;
  }

  async #stored(id) {
    return JSON.parse((await (await this.api(`${ROUTE}/${id}`)).json()).text);
  }

  async read(id) {
    return Conversation.read(await this.#stored(id));
  }

  /** One after the other, so that the last one stays. */
  write(conversation) {
    const put = () => {
      const { id, title, changed } = conversation;
      const body = { title: title.toWellFormed(), changed, text: JSON.stringify(conversation.stored()) };
      return this.api(`${ROUTE}/${id}`, { body });
    };
    return this.#written = this.#written.then(put, put);
  }

  async remove(id) {
    await this.api(`${ROUTE}/${id}`, { method: "DELETE" });
  }

  async search(words) {
    const found = new Set();
    for (const { id } of await this.list()) {
      if (hasWords(await this.#stored(id), words)) found.add(id);
    }
    return found;
  }
}

/** Whether a stored conversation has all of these words, whatever their case. */
function hasWords({ title, turns }, words) {
  const texts = turns.flatMap(({ text, sides }) => [text, ...sides.flat().map((answer) => answer.text)]);
  const all = [title, ...texts].join("\n").toLowerCase();
  return words.toLowerCase().split(/\s+/).every((word) => all.includes(word));
}

export class BrowserStore {
  place = "in this browser only";
  #database = null;

  async #open() {
    this.#database ??= (async () => {
      const request = indexedDB.open(NAME, 1);
      request.onupgradeneeded = () => {
        // what is listed, and what is read only when it is opened
        request.result.createObjectStore("listed", { keyPath: "id" });
        request.result.createObjectStore("texts", { keyPath: "id" });
      };
      const database = await done(request);
      database.onversionchange = () => database.close();
      return database;
    })();
    try {
      return await this.#database;
    } catch {
      this.#database = null;
      throw new Error(NONE);
    }
  }

  async #store(name, mode = "readonly") {
    return (await this.#open()).transaction(name, mode).objectStore(name);
  }

  /** {id, title, changed, bytes} of each, the latest first. */
  async list() {
    const listed = await done((await this.#store("listed")).getAll());
    return listed.sort((a, b) => b.changed - a.changed);
  }

  async read(id) {
    const { text } = await done((await this.#store("texts")).get(id)) ?? {};
    if (!text) throw new Error("The conversation is not there any more: another tab has deleted it.");
    return Conversation.read(JSON.parse(text));
  }

  /** Keeps a conversation in place of the one of its id. */
  async write(conversation) {
    const text = JSON.stringify(conversation.stored());
    const { id, title, changed } = conversation;
    const others = (await this.list()).filter((each) => each.id !== id);
    const bytes = others.reduce((sum, each) => sum + each.bytes, 2 * text.length);
    if (bytes > MAX_BYTES || others.length >= MAX_COUNT) throw new Error(FULL);
    try {
      const transaction = (await this.#open()).transaction(["listed", "texts"], "readwrite");
      transaction.objectStore("listed").put({ id, title, changed, bytes: 2 * text.length });
      transaction.objectStore("texts").put({ id, text });
      await done(transaction);
    } catch (error) {
      throw new Error(error?.name === "QuotaExceededError" ? FULL : NONE);
    }
  }

  async remove(id) {
    const transaction = (await this.#open()).transaction(["listed", "texts"], "readwrite");
    for (const name of ["listed", "texts"]) transaction.objectStore(name).delete(id);
    await done(transaction);
  }

  /** The ids of those that have all of these words. */
  async search(words) {
    const found = new Set();
    const cursor = (await this.#store("texts")).openCursor();
    await new Promise((resolve, reject) => {
      cursor.onerror = () => reject(new Error(NONE));
      cursor.onsuccess = () => {
        const { result } = cursor;
        if (!result) return resolve();
        if (hasWords(JSON.parse(result.value.text), words)) found.add(result.value.id);
        result.continue();
      };
    });
    return found;
  }
}
