// The shell of the page: which view is shown, the API key, and requests to the server.

import * as now from "./now.js";
import * as talk from "./talk.js";
import * as happened from "./happened.js";
import { Live } from "./live.js";

const VIEWS = { now, talk, happened };

/** What all views share. The key is in this object only: never in storage, never in a URL. */
export const state = { key: "", view: "" };

/** An answer that is no success: `message` is for the user, `status` 0 if there was no answer. */
export class ApiError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

/**
 * Requests `path` of this server and returns the Response of a success; throws ApiError otherwise.
 * `body` is sent as JSON. A 401 asks the user for a key and tries again.
 */
export async function api(path, { method, body, headers = {}, signal } = {}) {
  for (;;) {
    const key = state.key;
    const sent = { accept: "application/json", ...headers };
    if (key) sent.authorization = `Bearer ${key}`;
    if (body !== undefined) sent["content-type"] = "application/json";
    let response;
    try {
      response = await fetch(path, {
        method: method ?? (body === undefined ? "GET" : "POST"),
        headers: sent,
        body: body === undefined ? undefined : JSON.stringify(body),
        signal,
        cache: "no-store",
        credentials: "omit",
        redirect: "error",
      });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError("The server does not answer.");
    }
    if (response.ok) return response;
    const message = await errorMessage(response);
    if (response.status !== 401) throw new ApiError(message, response.status);
    if (state.key === key) await askKey(key ? message : "", signal);
  }
}

/**
 * Yields the server-sent events of a request as {event, data}, with the data as text. Takes the
 * options of `api`. Ends with the stream; leaving the loop cancels the request.
 */
export async function* events(path, options = {}) {
  const accept = { accept: "text/event-stream", ...options.headers };
  yield* eventsOf(await api(path, { ...options, headers: accept }));
}

/** The same for a Response. */
export async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let event = "", data = [], rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split(/\r\n|\n/);
      rest = lines.pop();
      for (const line of lines) {
        if (line === "") {
          if (data.length) yield { event: event || "message", data: data.join("\n") };
          [event, data] = ["", []];
        } else if (line.startsWith("event:")) event = line.slice(6).trim();
        else if (line.startsWith("data:")) data.push(line.slice(line[5] === " " ? 6 : 5));
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** Calls `listener` with the name of the view whenever another one is shown. */
export function onView(listener) {
  listeners.push(listener);
}

const listeners = [];

async function errorMessage(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `The server answered ${response.status}.`;
  }
}

let asking = null;

/** Resolves when the user has entered a key. Requests that wait at the same time share a dialog. */
function askKey(problem, signal) {
  asking ??= new Promise((entered) => {
    const dialog = document.getElementById("ask-key");
    const input = document.getElementById("key");
    document.getElementById("ask-error").textContent = problem;
    input.value = "";
    dialog.oncancel = (event) => event.preventDefault();
    dialog.querySelector("form").onsubmit = (event) => {
      event.preventDefault();
      state.key = input.value.trim();
      input.value = "";
      document.getElementById("forget").hidden = false;
      dialog.close();
      asking = null;
      entered();
    };
    dialog.showModal();
  });
  const gone = new Promise((_, reject) => {
    signal?.addEventListener("abort", () => reject(signal.reason), { once: true });
  });
  return Promise.race([asking, gone]);
}

function show() {
  const name = location.hash.slice(1);
  // the hash of the skip link is no view, and leaves the present one
  const view = Object.hasOwn(VIEWS, name) ? name : (name && state.view) || "now";
  if (view === state.view) return;
  state.view = view;
  for (const section of document.querySelectorAll("main > section")) {
    section.hidden = section.id !== view;
  }
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#${view}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  for (const listener of listeners) listener(view);
}

// Without its key the page holds nothing that a reload would not fetch again.
document.getElementById("forget").onclick = () => location.reload();
const live = new Live(events);
for (const [name, view] of Object.entries(VIEWS)) {
  view.mount(document.getElementById(name), { api, events, eventsOf, state, onView, live });
}
addEventListener("hashchange", show);
show();
