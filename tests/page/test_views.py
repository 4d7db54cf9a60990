"""The views Now and What happened, and how all views look, in a real browser with a real server."""

import json
from collections.abc import Iterator

import pytest

from tests.live.server import LiveServer
from tests.page.browser import NEEDS_BROWSER, Tab, foreign
from tests.page.conftest import MARKUP
from tests.page.test_talk import answered, ask, bodies

pytestmark = [NEEDS_BROWSER, pytest.mark.slow]

TINY = "[...document.querySelectorAll('.models li')].find(li => li.innerText.startsWith('tiny'))"


@pytest.fixture
def now(new_tab: Tab, server: LiveServer) -> Iterator[Tab]:
    new_tab.goto(server.url)
    new_tab.until(f"{TINY}?.innerText.includes('tokens of context')")  # nothing moves any more
    yield new_tab
    assert foreign(new_tab.requests, server.url) == []


def press(tab: Tab, what: str) -> None:
    tab.click(f"button[aria-label='{what} tiny']")


def refuse(tab: Tab, path: str) -> None:
    """In place of the server, which would not know what is wrong with a body."""
    tab.evaluate(
        f"(() => {{ const real = fetch; window.fetch = (path, options) => path === '{path}'"
        "? Promise.resolve(new Response(JSON.stringify({error: {message: '<b>' + options.body}}),"
        "{status: 503})) : real(path, options) })()"
    )


def completion(server: LiveServer, model: str = "tiny") -> None:
    with server.http() as http:
        body = {"model": model, "prompt": "a", "max_tokens": 5, "temperature": 0}
        http.post("/v1/completions", json=body).raise_for_status()


def unload(server: LiveServer) -> None:
    with server.http() as http:
        http.post("/api/generate", json={"model": "tiny", "keep_alive": 0}).raise_for_status()


def test_models_are_loaded_kept_and_unloaded_in_the_page(now: Tab, server: LiveServer) -> None:
    unload(server)
    now.until(f"{TINY}.querySelector('.state').innerText === 'not loaded'")
    press(now, "Load")
    now.until(f"{TINY}.querySelector('.state.ready')")
    now.until(f"{TINY}.innerText.includes('unloads in')")
    press(now, "Keep")
    now.until(f"!{TINY}.innerText.includes('unloads in')")
    press(now, "Unload")
    now.until(f"{TINY}.querySelector('.state').innerText === 'not loaded'")


def test_numbers_follow_what_the_server_does(now: Tab, server: LiveServer) -> None:
    ended = "+[...document.querySelectorAll('.gauges div')][2].querySelector('dd').innerText"
    before = now.evaluate(ended)
    completion(server)
    now.until(f"{ended} === {before + 1}")
    now.until("parseFloat(document.querySelector('.bar .weights').style.width) > 0")
    now.until(f"{TINY}.innerText.includes('tokens of context')")
    assert "pirate" in now.text(".adapters")


def test_a_training_is_shown_while_it_runs(now: Tab, server: LiveServer) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    lines = 20 * (json.dumps({"messages": messages}).encode() + b"\n")
    shown = "document.querySelector('.gauges').innerText.includes('of training tiny:long')"
    with server.openai() as client:
        file = client.files.create(file=("ab.jsonl", lines), purpose="fine-tune").id
        job = client.fine_tuning.jobs.create(
            model="tiny", training_file=file, suffix="long", hyperparameters={"n_epochs": 1000}
        )
        now.until(shown)
        client.fine_tuning.jobs.cancel(job.id)
    now.until(f"!({shown})")


def test_models_are_suggested_with_the_commands_that_fetch_them(now: Tab) -> None:
    now.click("details.panel summary")
    now.until("document.querySelector('.suggested code')?.innerText.startsWith('mlx-server pull ')")
    refuse(now, "/page/fetches")
    now.click(".suggested button[aria-label^='Fetch ']")
    now.until("document.querySelector('details .error')?.innerText.includes('<b>{\"model\":')")


def test_a_name_with_markup_is_text(now: Tab) -> None:
    assert MARKUP in now.evaluate(f"{TINY}.innerText")
    assert now.count("main img") == 0


def test_what_is_refused_is_said_next_to_the_model(now: Tab) -> None:
    """An error that only the server can know of."""
    refuse(now, "/api/generate")
    now.click("button[aria-label$=' tiny']:not(:disabled)")
    now.until(f"{TINY}.querySelector('.error')?.innerText.startsWith('<b>')")


def test_requests_and_charts_of_what_happened(now: Tab, server: LiveServer) -> None:
    completion(server)
    now.click("nav a[href='#happened']")
    now.until("document.querySelectorAll('.requests tbody tr').length")
    count = now.count(".requests tbody tr")
    assert now.count(".chart") == 3
    completion(server, "tiny:pirate")
    now.until(f"document.querySelectorAll('.requests tbody tr').length === {count + 1}")
    assert "tiny:pirate" in now.text(".requests tbody tr")
    assert "token limit" in now.text(".requests tbody tr")
    now.until("document.querySelector('.chart:last-child .series').getAttribute('d')")
    assert "tiny:pirate" in now.text(".speeds")
    now.click(".log summary")
    now.until(
        "[...document.querySelectorAll('.log li')]"
        ".some((line) => line.innerText.includes('POST /v1/completions'))"
    )
    now.fill(".log input", "nothing like this")
    now.until("!document.querySelector('.log li')")


def test_a_row_opens_what_was_asked_and_answered_as_text(now: Tab, server: LiveServer) -> None:
    with server.http() as http:
        body = {"model": "qwen", "messages": [{"role": "user", "content": f"hostile {MARKUP}"}]}
        http.post("/v1/chat/completions", json=body).raise_for_status()
    now.click("nav a[href='#happened']")
    first = ".requests tbody tr:first-child"
    now.until(f"document.querySelector('{first} .name')?.innerText === 'qwen'")
    assert now.count(".requests .texts") == 0
    now.click(f"{first} button[aria-label='Texts']")
    now.until("document.querySelector('.requests .texts')")
    assert MARKUP in now.text(".requests .texts")
    assert now.count(".requests .texts img") == now.count(".requests .texts script") == 0
    now.click(f"{first} button[aria-label='Texts']")
    now.until("!document.querySelector('.requests .texts')")


def test_a_chart_is_read_by_keyboard(now: Tab, server: LiveServer) -> None:
    completion(server)
    now.click("nav a[href='#happened']")
    now.until("document.querySelector('.chart:last-child .series')?.getAttribute('d')")
    now.evaluate("document.querySelector('.chart:last-child .plot').focus()")
    now.press("ArrowLeft")
    now.until("document.querySelector('.chart:last-child .cursor')")
    said = now.evaluate(
        "document.querySelector('.chart:last-child .plot').getAttribute('aria-valuetext')"
    )
    assert " at " in said


def test_views_are_changed_by_keyboard_and_by_address(now: Tab, server: LiveServer) -> None:
    shown = "[...document.querySelectorAll('main > section')].filter(s => !s.hidden).map(s => s.id)"
    assert now.evaluate(shown) == ["now"]
    now.evaluate("document.querySelector(\"nav a[href='#happened']\").focus()")
    now.press("Enter")
    now.until(f"{shown}[0] === 'happened'")
    now.evaluate("history.back()")
    now.until(f"{shown}[0] === 'now'")
    now.evaluate("location.hash = '#nothing'")
    assert now.evaluate(shown) == ["now"]
    assert now.evaluate("document.querySelectorAll('nav [aria-current]').length") == 1


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_wider_than_a_phone_and_texts_can_be_read(
    now: Tab, server: LiveServer, scheme: str
) -> None:
    completion(server)
    now.resize(390, 600)
    now.colour_scheme(scheme)
    for view in ("now", "happened", "talk"):
        now.evaluate(f"location.hash = '#{view}'")
        now.until(f"document.querySelector('#{view} :is(.panel, #draft)')?.checkVisibility()")
        if view == "talk":
            talk_of_everything(now)
        assert now.evaluate("document.documentElement.scrollWidth") <= 390
        assert json.loads(now.evaluate(CONTRASTS)) == []
    now.evaluate("scrollTo(0, 9999)")
    assert now.evaluate("document.querySelector('header').getBoundingClientRect().top") == 0
    assert now.evaluate("scrollY > 0")


def talk_of_everything(tab: Tab) -> None:
    tab.until("document.querySelector('#model')?.value")
    tab.fill("#other-model", "glm")
    for number, text in enumerate(("hostile", "line"), 1):
        ask(tab, text)
        answered(tab, 2 * number)
    tab.evaluate("document.querySelectorAll('details').forEach(node => { node.open = true })")
    bodies(tab)


CONTRASTS = """(() => {
  const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = (colour) => rgb(colour).slice(0, 3).map((part) => part / 255)
    .map((part) => part <= .03928 ? part / 12.92 : ((part + .055) / 1.055) ** 2.4)
    .reduce((sum, part, place) => sum + part * [.2126, .7152, .0722][place], 0);
  const ground = (node) => {
    const colour = node ? getComputedStyle(node).backgroundColor : "rgb(255, 255, 255)";
    return rgb(colour)[3] === 0 ? ground(node.parentElement) : colour;
  };
  const poor = [];
  for (const node of document.querySelectorAll("body *")) {
    const text = [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim());
    if (!text || !node.checkVisibility() || node.disabled) continue;
    const [a, b] = [light(getComputedStyle(node).color), light(ground(node))];
    const contrast = (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
    if (contrast < 4.5) poor.push([node.innerText, contrast]);
  }
  return JSON.stringify(poor);
})()"""
"""The texts whose colour is too near to that of their ground (WCAG's 4.5 to 1)."""
