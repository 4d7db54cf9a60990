// The one stream of the server's present state, shared by the views.

const FIRST_PAUSE = 1000, LONGEST_PAUSE = 15000;

/** Listeners are called with {now, problem}: the latest state, and why there is no newer one. */
export class Live {
  #events;
  #listeners = new Set();
  #latest = { now: null, problem: "" };
  #abort = null;

  constructor(events) {
    this.#events = events;
    document.addEventListener("visibilitychange", () => this.#onlyWhileVisible());
    this.#onlyWhileVisible();
  }

  subscribe(listener) {
    this.#listeners.add(listener);
    listener(this.#latest);
    return () => this.#listeners.delete(listener);
  }

  #onlyWhileVisible() {
    if (document.hidden) {
      this.#abort?.abort();
      this.#abort = null;
    } else if (!this.#abort) {
      this.#abort = new AbortController();
      this.#follow(this.#abort.signal);
    }
  }

  async #follow(signal) {
    let pause = FIRST_PAUSE;
    while (!signal.aborted) {
      let problem = "The server has ended the connection.";
      try {
        for await (const { event, data } of this.#events("/page/events", { signal })) {
          if (event !== "now") continue;
          pause = FIRST_PAUSE;
          this.#publish({ now: JSON.parse(data), problem: "" });
        }
      } catch (error) {
        problem = error.message;
      }
      if (signal.aborted) return;
      this.#publish({ now: this.#latest.now, problem });
      await new Promise((resolve) => setTimeout(resolve, pause));
      pause = Math.min(2 * pause, LONGEST_PAUSE);
    }
  }

  #publish(latest) {
    this.#latest = latest;
    for (const listener of this.#listeners) listener(latest);
  }
}
