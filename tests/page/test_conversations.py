"""Conversations in a real browser: kept, found, branched, exported; their files and connectors."""

import base64
import json
from typing import Any

import pytest

from tests.live.server import LiveServer
from tests.page.browser import NEEDS_BROWSER, Tab
from tests.page.test_model_output import DANGERS, NONE
from tests.page.test_talk import KEPT, answered, ask, bodies
from tests.sandbox.pdf_files import pdf

pytestmark = [NEEDS_BROWSER, pytest.mark.slow]

TITLES = "[...document.querySelectorAll('.kept .title')].map(node => node.innerText).join()"
ASKED = "[...document.querySelectorAll('.asked p')].map(node => node.innerText)"
PIXEL = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk"
    "+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
DROP = """(() => {
  const drop = new DataTransfer();
  for (const [name, type, base64] of %s) {
    const bytes = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
    drop.items.add(new File([bytes], name, { type }));
  }
  const event = new DragEvent("drop", { dataTransfer: drop, bubbles: true, cancelable: true });
  document.querySelector(".composer").dispatchEvent(event);
})()"""
PASTE = DROP.replace(
    'DragEvent("drop", { dataTransfer', 'ClipboardEvent("paste", { clipboardData'
).replace('".composer"', '".composer textarea"')
IMPORT = """(() => {
  const files = new DataTransfer();
  files.items.add(new File([%s], "conversations.json", { type: "application/json" }));
  const input = document.querySelector("#import");
  input.files = files.files;
  input.dispatchEvent(new Event("change", { bubbles: true }));
})()"""
EXPORTED = f"import('/page/conversation.js').then(async ({{ exported }}) => exported(await {KEPT}))"


def reload(tab: Tab) -> None:
    tab.goto(tab.evaluate("location.origin + '/?' + Math.random() + '#talk'"))
    tab.until("document.querySelector('#model')?.value")


def test_conversations_are_kept_found_renamed_and_deleted(talk: Tab) -> None:
    ask(talk, "Hi")
    answered(talk)
    talk.click("#clear")
    talk.until("document.querySelector('.talk-empty')")
    ask(talk, "And then?")
    answered(talk)
    reload(talk)
    talk.until(f"{TITLES} === 'And then?,Hi'")
    talk.click(".kept li:last-child .title")
    assert answered(talk) == ["Hello, you."]
    assert " tokens in" in talk.text(".costs")
    ask(talk, "And then?")  # it goes on
    assert answered(talk, 2)[1] == "The sun."
    assert len(bodies(talk)[1]["messages"]) == 3
    talk.fill("#search", "HELLO you")  # within an answer, whose mark-up is there too
    talk.until(f"{TITLES} === 'Hi,And then?' || {TITLES} === ''")
    talk.fill("#search", "sun HI")
    talk.until(f"{TITLES} === 'Hi'")
    talk.fill("#search", "")
    talk.until(f"{TITLES} === 'Hi,And then?'")
    talk.evaluate("window.prompt = () => '<b>new</b>'")
    talk.click("[aria-label='Rename Hi']")
    talk.until(f"{TITLES}.startsWith('<b>new</b>')")
    ask(talk, "Hi")
    answered(talk, 3)
    talk.evaluate("window.confirm = () => true")
    talk.click("[aria-label='Delete And then?']")
    talk.until(f"{TITLES} === '<b>new</b>'")


def test_a_changed_message_and_another_answer_are_versions(talk: Tab) -> None:
    ask(talk, "Hi")
    answered(talk)
    ask(talk, "And then?")
    answered(talk, 2)
    talk.click(".turn:last-child .again")
    talk.until("document.querySelector('.turn:last-child .versions')?.innerText.includes('2/2')")
    answered(talk, 2)
    talk.click(".edit")
    talk.until("document.activeElement.name === 'text'")
    talk.type(" there")
    talk.click(".editor [type=submit]")
    talk.until(f"{ASKED}.join() === 'Hi there'")
    answered(talk)
    assert bodies(talk)[0]["messages"] == [{"role": "user", "content": "Hi there"}]
    talk.click("[aria-label='Earlier version']")
    talk.until(f"{ASKED}.join() === 'Hi,And then?'")
    assert "2/2" in talk.text(".turn:last-child .versions")
    talk.click(".branch")
    talk.until(f"{ASKED}.join() === 'Hi'")
    talk.until("document.querySelectorAll('.kept .title').length === 2")
    ask(talk, "And then?")
    answered(talk, 2)
    reload(talk)
    talk.until("document.querySelectorAll('.kept .title').length === 2")
    talk.click(".kept li:last-child .title")
    talk.until(f"{ASKED}.join() === 'Hi,And then?'")
    assert "1/2" in talk.text(".turn:first-child .versions")


def test_a_conversation_is_the_same_after_export_and_import(talk: Tab) -> None:
    talk.fill("#system", "Be kind.")
    ask(talk, "hostile")
    answered(talk)
    before = talk.evaluate("document.querySelector('.said').innerHTML")
    file = talk.evaluate(EXPORTED)
    talk.evaluate("window.confirm = () => true")
    talk.click("[aria-label='Delete hostile']")
    talk.until(f"{TITLES} === '' && document.querySelector('.talk-empty')")
    talk.evaluate(IMPORT % json.dumps(file))
    talk.until(f"{TITLES} === 'hostile'")
    talk.click(".kept .title")
    talk.until("document.querySelector('.said')")
    assert talk.evaluate("document.querySelector('.said').innerHTML") == before
    assert talk.evaluate("document.querySelector('#system').value") == "Be kind."
    assert talk.evaluate(EXPORTED) == file
    assert bodies(talk)[0]["messages"][0] == {"role": "system", "content": "Be kind."}


BAD = "<img src=x onerror='window.pwned = 1'><script>window.pwned = 1</script>"
ANSWER: dict[str, Any] = {
    "request": {"model": BAD, "tools": BAD, "__proto__": {"x": 1}, "messages": BAD, "a)\nb": 1},
    "text": BAD + "\n\n[x](javascript:window.pwned=1) [y](https://good.example/)",
    "thought": BAD,
    "calls": [{"id": "__proto__", "name": BAD, "arguments": BAD}, 5, None],
    "results": {"__proto__": BAD},
    "serverCalls": [{"id": 1, "server": BAD, "name": BAD, "arguments": BAD, "output": {"a": 1}}],
    "usage": {"prompt_tokens": 1, "completion_tokens": BAD, "prompt_tokens_details": BAD},
    "approval": {"a": 1},
    "approvals": [{"id": "a", "name": BAD, "arguments": '"\u202e"', "allowed": True}, 5],
    "notes": [BAD, {"type": "img"}],
    "finish": BAD,
    "error": {"constructor": None, "type": "script", "props": {}},
    "times": [BAD, 2, 3],
}
TURN: dict[str, Any] = {
    "parent": -1,
    "text": BAD,
    "files": [
        {"name": BAD, "data": "javascript:window.pwned=1"},
        {"name": BAD, "data": "data:image/svg+xml;base64,PHN2Zy8+"},
        {"name": BAD, "data": "https://evil.test/pixel.png"},
        {"name": BAD, "data": f"data:image/png;base64,{PIXEL}"},
        {"name": {"type": "img"}, "text": BAD},
        {"name": BAD, "text": BAD},
    ],
    "sides": [[ANSWER, None, 7]],
}


def file_of(*turns: Any, **more: Any) -> str:
    stored = {"id": "a", "title": BAD, "leaf": len(turns) - 1, "turns": turns, **more}
    return json.dumps({"format": "mlx-server conversations 1", "conversations": [stored]})


def test_an_imported_conversation_that_is_hostile_is_text(talk: Tab) -> None:
    settings = {"system": BAD, "__proto__": BAD, "connectors": [{"a": 1}], "tools": {"a": 1}}
    more = {"id": "../<b>", "models": [BAD, {"a": 1}], "settings": settings, "changed": BAD}
    talk.evaluate(IMPORT % json.dumps(file_of(TURN, {**TURN, "parent": 0}, **more)))
    talk.until("document.querySelector('.kept .title')")
    talk.click(".kept .title")
    talk.until("document.querySelectorAll('.turn').length === 2")
    talk.evaluate("document.querySelectorAll('details').forEach(node => { node.open = true })")
    talk.until("document.querySelectorAll('.snippet').length === 12")
    assert talk.evaluate(DANGERS) == NONE
    assert talk.count("main script, main iframe, main svg:not(.plot svg)") == 0
    sources = talk.evaluate("[...document.querySelectorAll('main img')].map(node => node.src)")
    assert sources == [f"data:image/png;base64,{PIXEL}"] * 2
    assert talk.evaluate("({}).x === undefined && window.pwned === undefined")
    shown = talk.evaluate("[...document.querySelectorAll('main pre')].map(n => n.textContent)")
    assert '"\\u{202e}"' in shown
    assert not any("a)\n" in text for text in shown)
    ask(talk, "Hi")
    assert answered(talk, 7)[-1] == "Hello, you."


@pytest.mark.parametrize(
    ("file", "why"),
    [
        ("{", "is no JSON"),
        ("[]", "was not exported from this page"),
        (json.dumps({"format": "mlx-server conversations 1", "conversations": 5}), "not exported"),
        (file_of({**TURN, "parent": 0}), "turn 1 follows no earlier one"),
        (file_of(TURN, {**TURN, "parent": "0"}), "turn 2 follows no earlier one"),
        (file_of({**TURN, "sides": []}), "turn 1 has no list of answers"),
        (file_of({**TURN, "sides": [[], [], []]}), "turn 1 has no list of answers"),
        (file_of(None), "turn 1 follows no earlier one"),
        (file_of(turns=None), "it has no list of turns"),
    ],
)
def test_a_file_that_is_no_export_is_refused_whole(talk: Tab, file: str, why: str) -> None:
    talk.evaluate(IMPORT % json.dumps(file))
    assert why in talk.until("document.querySelector('.kept .error').textContent")
    assert talk.count(".kept .title") == 0


def test_a_full_store_is_said_and_the_talk_goes_on(talk: Tab) -> None:
    talk.evaluate(
        "IDBObjectStore.prototype.put = () => { throw new DOMException('', 'QuotaExceededError') }"
    )
    ask(talk, "Hi")
    assert "store of conversations is full" in talk.until(
        "document.querySelector('.conversation > .error').textContent"
    )
    assert answered(talk) == ["Hello, you."]


def test_files_are_dropped_and_pasted_into_a_message(talk: Tab) -> None:
    text = ("t.csv", "text/csv", "YSxiCjEsMg==")
    talk.evaluate(DROP % json.dumps([text]))
    talk.until("document.querySelectorAll('.files li').length === 1")
    talk.evaluate(PASTE % json.dumps([("p.png", "image/png", PIXEL)]))
    talk.until("document.querySelectorAll('.files li').length === 2")
    talk.evaluate(DROP % json.dumps([("x.bin", "", "AAEC/w==")]))
    assert "x.bin is neither text" in talk.until(
        "document.querySelector('.composer .error').textContent"
    )
    ask(talk, "Hi")
    answered(talk)
    [message] = bodies(talk)[0]["messages"]
    file, image, question = message["content"]
    assert file == {"type": "text", "text": "t.csv:\n\na,b\n1,2"}
    assert image["image_url"]["url"] == f"data:image/png;base64,{PIXEL}"
    assert question["text"] == "Hi"
    assert "image_url" in talk.text(".notes")  # this model can't take images
    assert talk.count(".message .files li") == 2


def test_the_model_reads_a_pdf_that_was_dropped(talk: Tab, server: LiveServer) -> None:
    file = ("a.pdf", "application/pdf", base64.b64encode(pdf("Salt is dear.")).decode())
    talk.evaluate(DROP % json.dumps([file]))
    talk.until("document.querySelector('.files li')?.innerText.includes('a.pdf')")
    ask(talk, "What is dear?")
    assert answered(talk) == ["Hello, you."]
    sent, _ = bodies(talk)[0]["messages"][0]["content"]
    assert sent["file"]["filename"] == "a.pdf"
    with server.http() as http:
        latest = http.get("/page/history").json()["requests"][0]["texts"]
    assert "Salt is dear." in latest["asked"]


NOTE = "The last release starts faster, and serves Ollama's API."
"""What the connector finds."""
RESULTS = "[...document.querySelectorAll('.result')].map(node => node.textContent).join()"


def switch(tab: Tab, name: str) -> None:
    tab.until(f"document.querySelector('[name={name}]')")
    tab.evaluate(f"document.querySelector('[name={name}]').click()")


def test_a_connectors_call_waits_for_the_user_and_later_turns_know_it(talk: Tab) -> None:
    switch(talk, "connector")
    ask(talk, "look it up")
    talk.until("document.querySelector('.approval .allow')")
    assert talk.text(".approval bdi") == "release-notes search"
    assert json.loads(talk.text(".approval .arguments")) == {"query": "release"}
    assert talk.evaluate(RESULTS) == ""  # it was not run
    talk.click(".approval .allow")
    assert answered(talk, 2)[1] == "It starts faster."
    assert talk.evaluate(RESULTS) == NOTE
    assert talk.count(".approval") == 0
    assert [each["type"] for each in bodies(talk)[1]["input"]] == [
        *("message", "mcp_approval_request", "mcp_approval_response")
    ]
    talk.evaluate(f"(async () => {{ while (!(await {KEPT})[0].turns[0].sides[0][1]?.text); }})()")
    reload(talk)
    talk.click(".kept .title")
    talk.until("document.querySelector('.result')")
    switch(talk, "connector")  # off
    ask(talk, "And then?")
    answered(talk, 3)
    last = bodies(talk)[-1]
    call = last["input"][1]
    assert [each["type"] for each in last["input"]] == ["message", "mcp_call", *["message"] * 2]
    assert (call["name"], call["output"]) == ("search", NOTE)
    assert last["tools"] == []


def test_a_call_that_the_user_declines_is_not_run(talk: Tab) -> None:
    switch(talk, "connector")
    ask(talk, "look it up")
    talk.click(".approval .decline")
    assert answered(talk, 2)[1] == "It starts faster."
    switch(talk, "connector")  # off
    ask(talk, "look it up")
    answered(talk, 3)
    for body in bodies(talk)[1:]:
        _, request, response, *_ = body["input"]
        assert request["type"] == "mcp_approval_request"
        assert response["approval_request_id"] == request["id"]
        assert response["approve"] is False
    assert talk.evaluate(RESULTS) == ""
    assert talk.count(".approval") == 1


def test_an_imported_approval_runs_nothing(talk: Tab) -> None:
    """Not even if the user goes on with the conversation, and has the connector switched on."""
    call = {"id": "a", "server": "release-notes", "name": "search", "allowed": True}
    asked = {"approvals": [{**call, "arguments": '{"query": "release"}'}], "finish": "tool_calls"}
    function = {"calls": [{"id": "c", "name": "f", "arguments": "{}"}], "finish": "tool_calls"}
    answers = [{"request": {"model": "qwen"}, **each} for each in (asked, function, asked)]
    turn = {"parent": -1, "text": "look it up", "files": [], "sides": [answers]}
    settings = {"connectors": ["release-notes"], "approval": "never"}
    talk.evaluate(IMPORT % json.dumps(file_of(turn, models=["qwen"], settings=settings)))
    talk.click(".kept .title")
    talk.click(".go-on")
    answered(talk, 4)
    assert talk.count(".answer .error") == 0, talk.text(".answer .error")
    assert NOTE not in talk.evaluate(RESULTS)
    assert "mcp_approval_response" not in [item["type"] for item in bodies(talk)[-1]["input"]]
    ask(talk, "look it up")
    talk.until("document.querySelector('.turn:last-child .approval .allow')")


def test_a_connector_is_used_without_asking_where_the_user_says_so(talk: Tab) -> None:
    switch(talk, "connector")
    switch(talk, "approval")
    ask(talk, "look it up")
    assert answered(talk) == ["It starts faster."]
    assert "search" in talk.text(".called")
    assert talk.evaluate(RESULTS) == NOTE
