"""Headless Chromium for the tests of the page, driven through its DevTools pipe.

The protocol is JSON messages that end with a NUL byte, on two descriptors; a test needs a dozen of
its methods. A library for them would be a download of 40 MB and a second runtime in every CI run.
The browser ends when its pipe closes, so that a killed test leaves none.
"""

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

Json = dict[str, Any]

NAMES = (
    *("chromium-headless-shell", "chromium", "chromium-browser"),
    *("google-chrome", "google-chrome-stable"),
)
"""The first one has no windows, and takes half of the others' processor time."""
ON_A_MAC = Path("/Applications/Google Chrome.app/Contents/MacOS/Google Chrome")
FLAGS = (
    "--headless",
    "--remote-debugging-pipe",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--disable-sync",
    "--no-default-browser-check",
    "--no-first-run",
    "--hide-scrollbars",
    "--force-prefers-reduced-motion",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)
SECONDS = 20.0
KEYS = {
    "Enter": ("\r", 13),
    "Tab": ("", 9),
    "Escape": ("", 27),
    " ": (" ", 32),
    "ArrowLeft": ("", 37),
}
SHIFT = 8

START = """import os, sys
pipes = [os.dup(int(number)) for number in sys.argv[1:3] for _ in range(3)]
os.dup2(pipes[2], 3)
os.dup2(pipes[5], 4)
os.execv(sys.argv[3], sys.argv[3:])"""
"""Gives a program its pipes as the descriptors 3 and 4, where the protocol has them."""

UNTIL = """new Promise((resolve, reject) => {
  const last = performance.now() + %d;
  const look = () => {
    const found = (%s);
    if (found) resolve(found);
    else if (performance.now() > last) reject(new Error("not in time: " + %s));
    else setTimeout(look, 15);
  };
  look();
})"""


MIDDLE = """(() => {
  const node = document.querySelector(%s);
  if (!node?.checkVisibility()) return null;
  node.scrollIntoView({block: "nearest", behavior: "instant"});
  const box = node.getBoundingClientRect();
  const at = [box.x + box.width / 2, box.y + box.height / 2];
  const stays = String(at) === node.dataset.middle;
  node.dataset.middle = at;
  return stays && node.contains(document.elementFromPoint(...at)) && at;
})()"""


def executable() -> str | None:
    found = next(filter(None, map(shutil.which, NAMES)), None)
    return found or (str(ON_A_MAC) if ON_A_MAC.exists() else None)


NEEDS_BROWSER = pytest.mark.skipif(
    executable() is None, reason="no browser: the tests of the page want Chromium or Chrome"
)


class PageError(AssertionError):
    """A script that a test ran in the page failed, or the browser refused a command."""


@dataclass
class Tab:
    """One page in a profile of its own: it shares no storage with other tabs."""

    browser: "Browser"
    context: str
    session: str
    problems: list[str] = field(default_factory=list)
    """Console errors and warnings, exceptions and violations of the Content-Security-Policy."""
    requests: list[str] = field(default_factory=list)
    """The URLs that the page asked for."""
    answers: dict[str, str] = field(default_factory=dict)
    """Bodies that the test sends in place of the server, by path."""

    def call(self, method: str, **params: Any) -> Json:
        return self.browser.call(method, params, self.session)

    def goto(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def evaluate(self, expression: str) -> Any:
        """The value of an expression, or of the promise that it is."""
        found = self.call(
            "Runtime.evaluate",
            expression=expression,
            awaitPromise=True,
            returnByValue=True,
            userGesture=True,
        )
        if wrong := found.get("exceptionDetails"):
            raise PageError(wrong.get("exception", {}).get("description") or wrong["text"])
        return found["result"].get("value")

    def until(self, expression: str, seconds: float = SECONDS) -> Any:
        """Waits for an expression to be true and returns its value."""
        return self.evaluate(UNTIL % (1000 * seconds, expression, json.dumps(expression)))

    def text(self, selector: str) -> str:
        """The text of the first element that the selector finds, once it is there."""
        node = f"document.querySelector({json.dumps(selector)})"
        self.until(f"{node} !== null")
        found: str = self.evaluate(f"{node}.innerText")
        return found

    def count(self, selector: str) -> int:
        found: int = self.evaluate(f"document.querySelectorAll({json.dumps(selector)}).length")
        return found

    def click(self, selector: str) -> None:
        """A real click in the middle of the first element that the selector finds, once it is
        there, stays where it is, and nothing covers it."""
        x, y = self.until(MIDDLE % json.dumps(selector))
        for kind in ("mousePressed", "mouseReleased"):
            event = {"type": kind, "x": x, "y": y, "button": "left", "clickCount": 1}
            self.call("Input.dispatchMouseEvent", **event)

    def fill(self, selector: str, text: str) -> None:
        """Replaces the text of a field, or the choice of a select."""
        quoted = json.dumps(selector)
        self.until(f"document.querySelector({quoted})")
        self.evaluate(
            f"(() => {{ const node = document.querySelector({quoted}); node.focus();"
            f"node.value = {json.dumps(text)};"
            "for (const kind of ['input', 'change'])"
            " node.dispatchEvent(new Event(kind, {bubbles: true})) })()"
        )

    def type(self, text: str) -> None:
        """Into what has the focus."""
        self.call("Input.insertText", text=text)

    def press(self, key: str, modifiers: int = 0) -> None:
        text, code = KEYS[key]
        common = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": modifiers}
        down = {**common, "text": text} if text else common
        self.call("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", **down)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def resize(self, width: int, height: int = 900) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def colour_scheme(self, scheme: str) -> None:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def answer(self, path: str, stream: str) -> None:
        """Answers the page's requests to this path with these server-sent events."""
        self.answers[path] = base64.b64encode(stream.encode()).decode()
        self.call("Fetch.enable", patterns=[{"urlPattern": f"*{path}"}])

    def close(self) -> None:
        self.browser.call("Target.disposeBrowserContext", {"browserContextId": self.context})

    def note(self, method: str, params: Json) -> None:
        match method:
            case "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                self.problems.append(
                    details.get("exception", {}).get("description") or details["text"]
                )
            case "Runtime.consoleAPICalled" if params["type"] in {"error", "warning", "assert"}:
                self.problems.append(f"console.{params['type']}: {params['args']}")
            case "Log.entryAdded" if params["entry"]["level"] in {"error", "warning"}:
                entry = params["entry"]
                self.problems.append(f"{entry['source']}: {entry['text']} {entry.get('url', '')}")
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
            case "Fetch.requestPaused":
                path = urlsplit(params["request"]["url"]).path
                headers = [{"name": "content-type", "value": "text/event-stream"}]
                answer = {
                    "responseCode": 200,
                    "responseHeaders": headers,
                    "body": self.answers[path],
                }
                sent = {"requestId": params["requestId"], **answer}
                self.browser.post("Fetch.fulfillRequest", sent, self.session)
            case "Page.javascriptDialogOpening":
                self.problems.append(f"a dialogue: {params['message']}")
                self.browser.post("Page.handleJavaScriptDialog", {"accept": True}, self.session)


class Browser:
    def __init__(self, program: str, profile: Path) -> None:
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        flags = [*FLAGS, *(["--no-sandbox"] if os.geteuid() == 0 else [])]
        command = [program, *flags, f"--user-data-dir={profile}"]
        self._process = subprocess.Popen(
            [sys.executable, "-ISc", START, str(theirs_in), str(theirs_out), *command],
            env={name: value for name, value in os.environ.items() if name != "LD_PRELOAD"},
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._ids = itertools.count(1)
        self._parts: list[bytes] = []
        self._messages: list[Json] = []
        self._tabs: dict[str, Tab] = {}

    def post(self, method: str, params: Json, session: str = "") -> int:
        """Sends a command and leaves its result unread."""
        id = next(self._ids)
        message = {"id": id, "method": method, "params": params}
        data = json.dumps({**message, "sessionId": session} if session else message).encode()
        view = memoryview(data + b"\0")
        while view:
            view = view[os.write(self._out, view) :]
        return id

    def call(self, method: str, params: Json, session: str = "") -> Json:
        id = self.post(method, params, session)
        deadline = time.monotonic() + 2 * SECONDS
        while (message := self._receive(deadline)).get("id") != id:
            tab = self._tabs.get(message.get("sessionId", ""))
            if tab and "method" in message:
                tab.note(message["method"], message["params"])
        if "error" in message:
            raise PageError(f"{method}: {message['error']['message']}")
        found: Json = message["result"]
        return found

    def _receive(self, deadline: float) -> Json:
        while not self._messages:
            ready, _, _ = select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))
            data = os.read(self._in, 1 << 20) if ready else b""
            if not data:
                raise PageError("the browser ended" if ready else "the browser does not answer")
            *ended, rest = data.split(b"\0")
            for part in ended:
                self._messages.append(json.loads(b"".join([*self._parts, part])))
                self._parts.clear()
            self._parts.append(rest)
        return self._messages.pop(0)

    def open(self) -> Tab:
        context = self.call("Target.createBrowserContext", {})["browserContextId"]
        target = self.call(
            "Target.createTarget", {"url": "about:blank", "browserContextId": context}
        )
        attached = {"targetId": target["targetId"], "flatten": True}
        session = self.call("Target.attachToTarget", attached)["sessionId"]
        tab = self._tabs[session] = Tab(self, context, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            tab.call(f"{domain}.enable")
        tab.resize(1200)
        return tab

    def close(self) -> None:
        os.close(self._out)
        os.close(self._in)
        try:
            self._process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextmanager
def browsing(program: str, profile: Path) -> Iterator[Browser]:
    browser = Browser(program, profile)
    try:
        yield browser
    finally:
        browser.close()


def foreign(urls: Sequence[str], own: str) -> list[str]:
    """Those of another origin than the server's, inline data excepted."""
    return [url for url in urls if not url.startswith((own + "/", "data:"))]
