"""The view Talk in a real browser, with a real server: streams, calls, formats, keys, keyboard."""

import contextlib
import io
import json
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from tests.live.server import LiveServer, eventually, serving
from tests.page.browser import NEEDS_BROWSER, SHIFT, Browser, Tab
from tests.page.played import CODE, LONG

pytestmark = [NEEDS_BROWSER, pytest.mark.slow]

TOOLS = [{"name": "get_weather", "parameters": {"type": "object"}}]
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green"]}},
    "required": ["colour"],
    "additionalProperties": False,
}
KEY = "sesame-open-1234"
KEPT = """Promise.all([import("/page/conversation-store.js"), import("/page/app.js")])
  .then(async ([{ storeBy }, { api }]) => {
    const store = await storeBy(api)();
    return Promise.all((await store.list()).map(({ id }) => store.read(id)));
  })"""
"""The conversations that are kept, as the page's scripts have them."""


def ask(tab: Tab, text: str) -> None:
    tab.fill("#draft", text)
    tab.press("Enter")


def answered(tab: Tab, count: int = 1) -> list[str]:
    """The texts of the answers, once so many are complete."""
    tab.until(f"document.querySelectorAll('.answer .foot').length >= {count}")
    tab.until("document.querySelector('#send')")
    found: list[str] = tab.evaluate(
        "[...document.querySelectorAll('.answer')].map(a => a.querySelector('.said')?.innerText)"
    )
    return found


def bodies(tab: Tab) -> list[dict[str, Any]]:
    """The requests of the answers, from the code that is offered for them."""
    tab.evaluate("document.querySelectorAll('.code').forEach(node => { node.open = true })")
    tab.until("document.querySelectorAll('.snippet').length")
    texts = tab.evaluate(
        "[...document.querySelectorAll('[data-language=curl]')].map(pre => pre.textContent)"
    )
    quoted = [text.partition("-d '")[2].removesuffix("'") for text in texts]
    return [json.loads(text.replace("'\\''", "'")) for text in quoted]


def is_idle(server: LiveServer) -> bool:
    with server.http() as http:
        views = http.get("/v1/pool").json()["models"]
    return server.idle() and not any(view["leases"] for view in views)


def test_an_answer_is_streamed_with_its_tokens_and_times(talk: Tab) -> None:
    ask(talk, "slow")
    first = talk.until("document.querySelector('.said')?.innerText")
    assert talk.count(".foot") == 0  # it is still under way
    talk.until(f"document.querySelector('.said').innerText.length > {len(first)}")
    assert LONG.startswith(talk.text(".said").removesuffix(" "))
    talk.click("#stop-answers")
    ask(talk, "Hi")
    assert answered(talk, 2)[1] == "Hello, you."
    assert talk.text(".turn:last-child em") == "you"
    figures = talk.text(".turn:last-child .costs")
    assert " tokens in" in figures
    assert "tokens/s" in figures


def test_stop_and_escape_end_the_row_on_the_server(talk: Tab, server: LiveServer) -> None:
    for number in (1, 2):
        ask(talk, "slow")
        talk.until(f"document.querySelectorAll('.said').length === {number}")
        assert not is_idle(server)
        talk.click("#stop-answers") if number == 1 else talk.press("Escape")
        texts = answered(talk, number)
        eventually(lambda: is_idle(server), "the row is gone")
        assert 0 < len(texts[-1]) < len(LONG)
    assert "stopped" in talk.text(".turn:last-child .costs")


def test_a_call_is_shown_and_its_result_typed_by_hand(talk: Tab) -> None:
    talk.fill("#tools", json.dumps(TOOLS))
    ask(talk, "What is the weather?")
    talk.until("document.querySelector('.go-on')")
    assert talk.text(".called bdi") == "get_weather"
    assert json.loads(talk.text(".arguments")) == {"city": "Paris"}
    # thoughts are folded
    assert not talk.evaluate("document.querySelector('.thought').open")
    assert talk.evaluate("document.querySelector('.thought-text').textContent") == (
        "I should look it up."
    )
    talk.click(".call textarea")
    talk.type("it rains")
    talk.click(".go-on")
    assert answered(talk, 2) == ["Let me see.", "It rains."]
    assert talk.text(".result") == "it rains"
    *_, assistant, result = bodies(talk)[1]["messages"]
    assert assistant["tool_calls"][0]["id"] == result["tool_call_id"]
    assert (assistant["content"], result["content"]) == ("Let me see.", "it rains")


def test_a_schema_is_held(talk: Tab) -> None:
    """By a model of random weights."""
    talk.fill("#model", "tiny")
    talk.fill("#schema", json.dumps(SCHEMA))
    talk.fill("#max_tokens", "60")
    ask(talk, "Hi")
    (text,) = answered(talk)
    assert json.loads(text)["colour"] in ("red", "green")


def test_settings_that_are_wrong_are_said_so(talk: Tab) -> None:
    talk.fill("#schema", "{no")
    ask(talk, "Hi")
    assert "schema is no valid JSON" in talk.until(
        "document.querySelector('.conversation > .error').textContent"
    )
    talk.fill("#schema", "")
    talk.fill("#temperature", "3")
    ask(talk, "Hi")
    answered(talk)
    assert "temperature" in talk.text(".answer .error")
    talk.problems.clear()  # the browser reports each 400


def test_two_answers_side_by_side(talk: Tab) -> None:
    talk.fill("#model", "qwen")
    talk.fill("#other-model", "glm")
    ask(talk, "Hi")
    assert answered(talk, 2) == ["Hello, you."] * 2
    names = "[...document.querySelectorAll('.by')].map(node => node.innerText)"
    assert talk.evaluate(names) == ["qwen", "glm"]
    left, right = talk.evaluate(
        "[...document.querySelectorAll('.side')].map(node => node.getBoundingClientRect().toJSON())"
    )
    assert left["y"] == right["y"]
    assert left["right"] < right["x"]


def test_with_and_without_an_adapter(talk: Tab) -> None:
    talk.fill("#model", "tiny")
    talk.fill("#other-model", "tiny:pirate")
    talk.fill("#max_tokens", "12")
    talk.fill("#temperature", "0")
    ask(talk, "Hi")
    answered(talk, 2)
    assert [body["model"] for body in bodies(talk)] == ["tiny", "tiny:pirate"]
    without, with_it = talk.evaluate(
        "[...document.querySelectorAll('.answer')].map(a => a.querySelector('.said')?.textContent)"
    )
    assert without != with_it


CLIPBOARD = ["clipboardReadWrite", "clipboardSanitizedWrite"]


def test_an_answer_and_its_code_are_copied(talk: Tab, server: LiveServer) -> None:
    grant = {"permissions": CLIPBOARD, "origin": server.url, "browserContextId": talk.context}
    talk.browser.call("Browser.grantPermissions", grant)
    ask(talk, "Show code")
    answered(talk)
    for button, text in ((".copy-answer", CODE), (".said .copy", "x = '<b>'\n\ty")):
        talk.click(button)
        talk.until(f"document.querySelector({json.dumps(button)}).textContent === 'Copied'")
        assert talk.evaluate("navigator.clipboard.readText()") == text
    ask(talk, "Show code")  # a server that is reached by its name and without TLS
    answered(talk, 2)
    talk.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    talk.click(".turn:last-child .said .copy")
    talk.until("document.querySelector('.turn:last-child .said .copy').textContent === 'Selected'")
    assert talk.evaluate("String(getSelection())").strip() == "x = '<b>'\n\ty"
    talk.click(".turn:last-child .copy-answer")
    assert "no clipboard without TLS" in talk.text(".turn:last-child .copy-answer")


def test_the_code_that_is_offered_asks_the_same(talk: Tab) -> None:
    text = "It's \"quoted\" \\ 'text'\n$HOME `x` é🙂"
    talk.fill("#top_k", "5")
    talk.fill("#stop", "one\ntwo")
    ask(talk, text)
    assert answered(talk) == ["As you say."]
    talk.evaluate("document.querySelector('.code').open = true")
    curl = talk.until("document.querySelector('[data-language=curl]')?.textContent")
    run = subprocess.run(["sh", "-c", f"{curl} -sS"], capture_output=True, check=True)
    assert json.loads(run.stdout)["choices"][0]["message"]["content"] == "As you say."
    python = talk.until("document.querySelector('[data-language=Python]')?.textContent")
    assert '"top_k": 5' in python
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(python, {})
    assert "As you say." in printed.getvalue()


def test_a_talk_by_keyboard_alone(talk: Tab) -> None:
    def tab_to(selector: str, modifiers: int = 0) -> None:
        for _ in range(60):
            if talk.evaluate(f"document.activeElement.matches({json.dumps(selector)})"):
                return
            talk.press("Tab", modifiers)
        raise AssertionError(f"no way to {selector}")

    talk.evaluate("document.activeElement.blur()")
    tab_to("nav a[href='#talk']")
    tab_to("#model")
    tab_to("#draft")
    talk.type("slow")
    talk.press("Enter")
    talk.until("document.querySelector('.said')")
    talk.press("Escape")
    answered(talk)
    tab_to(".asked .edit", SHIFT)
    talk.press("Enter")
    talk.until("document.activeElement.name === 'text'")
    talk.type("er and slower")
    talk.press("Enter")
    assert answered(talk) == ["Hello, you."]
    assert talk.text(".asked p") == "slower and slower"
    assert talk.evaluate("document.activeElement !== document.body")


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("locked")
    (folder / "said.yaml").write_text("- {match: Hi, output: You may.}", "utf-8")
    models = {"fake": {"source": "replay:said.yaml", "family": "plain"}}
    settings = {"api_keys": [KEY], "page": "conversations"}
    with serving(folder, {"models": models, "server": settings}) as server:
        yield server


def sign_in(tab: Tab, server: LiveServer) -> None:
    tab.goto(f"{server.url}/#talk")
    tab.until("document.querySelector('#ask-key').open")
    for key in ("wrong", KEY):
        tab.fill("#key", key)
        tab.click("#ask-key [type=submit]")
        if key != KEY:
            tab.until("document.querySelector('#ask-error').textContent")
    tab.until("document.querySelector('#model')?.value")


def test_conversations_are_kept_by_the_server_if_its_owner_says_so(
    browser: Browser, locked: LiveServer
) -> None:
    titles = "[...document.querySelectorAll('.kept .title')].map(node => node.innerText).join()"
    for profile in ("first", "second"):
        tab = browser.open()
        sign_in(tab, locked)
        if profile == "first":
            assert "by the server" in tab.text(".talk-empty")
            ask(tab, "Hi")
            assert answered(tab) == ["You may."]
            tab.evaluate("window.prompt = () => 'new 🙂'.slice(0, 5)")  # with half of a pair
            tab.click("[aria-label='Rename Hi']")
            tab.until(f"{titles}.startsWith('new ')")
        else:
            tab.until(f"{titles}.startsWith('new ')")
            tab.click(".kept .title")
            assert answered(tab) == ["You may."]
            tab.fill("#search", "may NEW")
            tab.until(f"{titles}.startsWith('new ')")
            tab.fill("#search", "nothing like it")
            tab.until(f"{titles} === ''")
            tab.fill("#search", "")
            tab.evaluate("window.confirm = () => true")
            tab.click("[aria-label^='Delete new']")
            tab.until(f"{titles} === '' && document.querySelector('.talk-empty')")
        assert tab.evaluate("indexedDB.databases()") == []
        assert {each.partition(" http")[0] for each in tab.problems} == {UNAUTHORIZED}
        tab.close()


UNAUTHORIZED = (
    "network: Failed to load resource: the server responded with a status of 401 (Unauthorized)"
)


def test_a_key_is_asked_for_and_kept_in_memory_only(new_tab: Tab, locked: LiveServer) -> None:
    tab = new_tab
    sign_in(tab, locked)
    ask(tab, "Hi")
    assert answered(tab) == ["You may."]
    tab.evaluate("document.querySelector('.code').open = true")
    assert "Bearer $MLX_SERVER_KEY" in tab.text("[data-language=curl]")
    kept = tab.evaluate(
        f"{KEPT}.then((kept) => JSON.stringify([{{...localStorage}}, {{...sessionStorage}},"
        " document.cookie, location.href, history.state, kept.map((each) => each.stored()),"
        " document.documentElement.outerHTML]))"
    )
    assert "You may." in kept
    assert KEY not in kept + json.dumps(tab.requests)
    assert KEY not in locked.log
    tab.goto(f"{locked.url}/?again#talk")
    tab.until("document.querySelector('#ask-key').open")
    assert {problem.partition(" http")[0] for problem in tab.problems} == {UNAUTHORIZED}
    tab.problems.clear()
