// The conversations that this browser keeps, in an IndexedDB of the page's origin.

import { Conversation } from "./conversation.js";

const NAME = "mlx-server";
const MAX_BYTES = 200e6, MAX_COUNT = 2_000;
const FULL = "This browser's store of conversations is full: what is new is not kept. Export and delete some.";
const NONE = "This browser keeps no conversations for this page (it may be a private window): export what you want to keep.";

// A request of IndexedDB, or a transaction, as a promise.
const done = (request) => new Promise((resolve, reject) => {
  request.onsuccess = request.oncomplete = () => resolve(request.result);
  request.onerror = request.onabort = () => reject(request.error ?? new Error("it was aborted"));
});

export class ConversationStore {
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

  /** The ids of those that have all of these words, whatever their case. */
  async search(words) {
    const wanted = words.toLowerCase().split(/\s+/).filter(Boolean);
    const found = new Set();
    const cursor = (await this.#store("texts")).openCursor();
    await new Promise((resolve, reject) => {
      cursor.onerror = () => reject(new Error(NONE));
      cursor.onsuccess = () => {
        const { result } = cursor;
        if (!result) return resolve();
        const { title, turns } = JSON.parse(result.value.text);
        const texts = turns.flatMap(({ text, sides }) => [text, ...sides.flat().map((answer) => answer.text)]);
        const all = [title, ...texts].join("\n").toLowerCase();
        if (wanted.every((word) => all.includes(word))) found.add(result.value.id);
        result.continue();
      };
    });
    return found;
  }
}
