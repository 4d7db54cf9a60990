"""What a model writes is text: no markup of its own, no scripts, no requests, in linear time."""

import json
import random
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.live.server import LiveServer
from tests.page.browser import NEEDS_BROWSER, Browser, Tab, foreign
from tests.page.conftest import opened
from tests.page.played import HOSTILE, LINE
from tests.page.test_talk import TOOLS, answered, ask

pytestmark = [NEEDS_BROWSER, pytest.mark.slow]


def link(url: str, text: str = "") -> str:
    rest = 'rel="noopener noreferrer" target="_blank" dir="auto"'
    return f'<a href="{url}" title="{url}" {rest}>{text or url}</a>'


def code_block(text: str, language: str = "") -> str:
    named = f' data-language="{language}"' if language else ""
    copy = '<button type="button" class="quiet small copy">Copy</button>'
    return f'<div class="code-block"{named}><pre><code>{text}</code></pre>{copy}</div>'


def maths(tex: str, nodes: str, name: str = "maths") -> str:
    return f'<span class="{name}" title="{tex}"><math>{nodes}</math></span>'


RENDERED = [
    ("one\n```two``` three", "<p>one<br><code>two</code> three</p>"),
    ("# Hi *a*\nText", "<h3>Hi <em>a</em></h3><p>Text</p>"),
    ("###### x ##", "<h6>x</h6>"),
    ("one\ntwo\n\n---", "<p>one<br>two</p><hr>"),
    ("**b *c* d** ***e***", "<strong>b <em>c</em> d</strong> <em><strong>e</strong></em>"),
    ("a_b_c __d__ _e_", "a_b_c <strong>d</strong> <em>e</em>"),
    ("2 * 3 * 4 and *open", "2 * 3 * 4 and *open"),
    ("~~gone~~ \\*kept\\*", "<s>gone</s> *kept*"),
    ("`<b>` and `` a`b ``", "<code>&lt;b&gt;</code> and <code>a`b</code>"),
    ("\\`` a `b", "`<code>a</code>b"),
    ('[a](https://x.test/b(c) "t")', link("https://x.test/b(c)", "a")),
    ("<mailto:a@x.test>", link("mailto:a@x.test")),
    ("(https://x.test/a).", f"({link('https://x.test/a')})."),
    ("![p](https://x.test/p.png)", link("https://x.test/p.png", "🖼 p")),
    ("[a](javascript:alert(1))", "[a](javascript:alert(1))"),
    ("[a](java\tscript:alert(1))", "[a](java\tscript:alert(1))"),
    ("[a](data:text/html,x) [b](/v1/models)", "[a](data:text/html,x) [b](/v1/models)"),
    ("<script>alert(1)</script>", "&lt;script&gt;alert(1)&lt;/script&gt;"),
    ("```py x\na < b\n", code_block("a &lt; b", "py")),
    ("```none\na < b", code_block("a &lt; b", "none")),
    ("```json\n1\n```", code_block('<span class="hljs-number">1</span>', "json")),
    ("~~~~\n~~~\n~~~~\nend", code_block("~~~") + "<p>end</p>"),
    ("> a\n> > b", "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote>"),
    ("- a\n  - b\n- c", "<ul><li>a<ul><li>b</li></ul></li><li>c</li></ul>"),
    ("3. a\n\n   b\n4. c", '<ol start="3"><li><p>a</p><p>b</p></li><li><p>c</p></li></ol>'),
    ("- [x] a\n- [ ] *b*", '<ul><li class="task">☑ a</li><li class="task">☐ <em>b</em></li></ul>'),
    (
        "a | b\n--|:-:\n1 | 2\\|3 | 4",
        '<div class="table"><table><thead><tr><th>a</th><th class="to-center">b</th></tr></thead>'
        '<tbody><tr><td>1</td><td class="to-center">2|3</td></tr></tbody></table></div>',
    ),
    ("a | b\nno table", "<p>a | b<br>no table</p>"),
    ("$5 and $6, or \\$7$", "$5 and $6, or $7$"),
    ("$x$", maths("x", "<mi>x</mi>")),
    ("\\[\nx\n\nno", "<p>[<br>x</p><p>no</p>"),
    ("$\\no$ $x", '<span class="maths mono">\\no</span> $x'),
    ("\\(x\\)", maths("x", "<mi>x</mi>")),
]
"""Without the attributes that all blocks have."""

SAMPLE = "\n".join(text for text, _ in RENDERED) + HOSTILE + "\r\n- a\r\n\r\n  b\r\nc\n1. x\n```\nz"

HUGE = {
    "a line": "x" * 1_000_000,
    "brackets": "[" * 100_000,
    "brackets in lines": ("[" * 3_900 + "\n\n") * 50,
    "links without an end": ("[a](b" * 780 + "\n\n") * 50,
    "spaces in a link": ("[a](" + " " * 3_900 + "x\n\n") * 50,
    "quotes": ">" * 100_000,
    "deep quotes": (">" * 50 + " a\n") * 1_000,
    "deep lists": "".join("  " * min(i, 50) + "- x\n" for i in range(2_000)),
    "lists in a line": "- " * 95_000 + "x",
    "emphasis": ("*a" * 970 + "b*" * 970 + "\n\n") * 50,
    "mixed emphasis": ("*a**b_c__" * 430 + "\n\n") * 50,
    "backticks": " ".join("`" * (i % 190) for i in range(200)),
    "a fence's line": "``` " + " " * 190_000 + "`",
    "cells": "|a" * 90_000 + "\n|-|-|\n",
    "rules": ("| - " * 95 + "x\na|b\n") * 400,
    "addresses": ("http://" * 560 + "\n\n") * 50,
    "full stops": ("http://a" + "." * 1_900 + " ") * 90,
    "escapes": "\\" * 200_000,
}
SHOWN_WHOLE = ("a line", "brackets", "links without an end", "a fence's line")
"""Each of their characters."""

LOOK = """import("/page/markdown.js").then(({ markdown }) => {
  const node = markdown(%s);
  document.body.append(node);
  node.offsetHeight;
  let depth = 0;
  for (let each = node; each; each = each.lastElementChild) depth += 1;
  const elements = node.querySelectorAll("*").length;
  const found = { text: node.textContent.length, depth, elements };
  node.remove();
  return found;
})"""

PIECES = """import("/page/markdown.js").then(({ markdown, MarkdownStream }) => {
  const { text, cuts } = %s;
  return [markdown(text).innerHTML, ...cuts.map((places) => {
    const stream = new MarkdownStream(document.createElement("div"));
    places.forEach((place, i) => {
      stream.append(text.slice(place, places[i + 1]));
      stream.draw();
    });
    return stream.node.innerHTML;
  })];
})"""

DANGERS = """(() => {
  const all = [...document.querySelectorAll(".answer *")];
  return {
    pwned: window.pwned ?? null,
    elements: all.filter((e) => /^(script|img|svg|iframe|object|embed|base|link|meta|style)$/i
      .test(e.tagName)).length,
    attributes: all.flatMap((e) => [...e.attributes]).filter(({ name }) => /^on|^style$/.test(name))
      .map(({ name }) => name),
    links: [...new Set([...document.querySelectorAll(".answer a")].map((a) => a.protocol + a.rel))],
  };
})()"""
NONE = {"pwned": None, "elements": 0, "attributes": [], "links": ["https:noopener noreferrer"]}


MADE = """import("/page/markdown.js").then(({ markdown }) => {
  const node = markdown(%s);
  for (const each of node.querySelectorAll("*:not(a)")) {
    each.removeAttribute("dir");
    each.removeAttribute("tabindex");
  }
  return node.innerHTML.replaceAll(/\\s*\\n/g, "").replaceAll(/ xmlns="[^"]*"/g, "");
})"""


FORMULAS = [
    *(r"\label{draft} x", r"x \ref{draft}", r"\id{draft}{x}", r"\class{talk}{x}", r"\data{a=b}{x}"),
    *(r"\href{javascript:alert(1)}{x}", r"\url{javascript:alert(1)}", r"\style{color:red}{x}"),
    r"\includegraphics{http://evil.test/x.png}",
    r"\text{</mtext></math><img src=x onerror=alert(1)><script>alert(1)</script>}",
    *(r"\pmb{x} \sideset{_1^2}{_3^4}\sum", r"\rule{9999em}{9999em}", r"\kern{-9999em} x"),
    *(
        r"\def\a{\a\a}\a",
        r"\newcommand{\b}{\b}\b",
        r"\def\a#1{#1#1}" + r"\a{" * 40 + "x" + "}" * 40,
    ),
    *("{" * 900, "x^" * 900, r"\frac{" * 300, r"\sqrt" * 300 + "x", r"\left(" * 300),
    *(r"\begin{matrix}" * 140, "x" * 3_000, "&" * 1_900, r"\\" * 900),
]
SET = """import("/page/markdown.js").then(({ markdown }) => %s.flatMap((text) => {
  const node = markdown(text);
  document.body.append(node);
  const all = [...node.querySelectorAll("*")];
  const wrong = all.flatMap((each) => [...each.attributes])
    .filter(({ name, value }) => /^(id|href|src|on.*)$/.test(name) || value.includes("talk"));
  const tags = all.filter((each) => /^(a|img|script)$/i.test(each.tagName));
  const isWide = document.scrollingElement.scrollWidth > innerWidth || node.offsetHeight > 9000;
  node.remove();
  return wrong.length || tags.length || isWide ? [text] : [];
}))"""


@pytest.fixture(scope="module")
def one_tab(browser: Browser, server: LiveServer) -> Iterator[Tab]:
    """For scripts that leave the page as it was."""
    with opened(browser) as tab:
        tab.goto(f"{server.url}/#talk")
        yield tab
    assert foreign(tab.requests, server.url) == []


def test_markdown(talk: Tab) -> None:
    for text, expected in RENDERED:
        html = talk.evaluate(MADE % json.dumps(text))
        assert html in (expected, f"<p>{expected}</p>"), text


def test_markdown_is_the_same_however_it_is_cut(talk: Tab) -> None:
    drawn = random.Random(0)
    cuts = [sorted({0, *drawn.choices(range(len(SAMPLE)), k=count)}) for count in (5, 40, 200)]
    cuts.append(list(range(len(SAMPLE))))
    whole, *pieces = talk.evaluate(PIECES % json.dumps({"text": SAMPLE, "cuts": cuts}))
    assert pieces == [whole] * len(cuts)


@pytest.mark.parametrize("name", HUGE)
def test_markdown_without_end_takes_linear_time(one_tab: Tab, name: str) -> None:
    """Quadratic time would be minutes, which the browser is not given."""
    text = HUGE[name]
    found = one_tab.evaluate(LOOK % json.dumps(text))
    assert found["depth"] < 60
    assert found["elements"] < 100_000
    if name in SHOWN_WHOLE:
        assert found["text"] in (len(text), len(text.replace("\n", "")))


def test_formulas_make_no_links_and_no_ids(one_tab: Tab) -> None:
    texts = [mark % tex for tex in FORMULAS for mark in ("a $%s$ b", "\\[\n%s\n\\]\n")]
    assert one_tab.evaluate(SET % json.dumps(texts)) == []


def test_hostile_answers_do_nothing(talk: Tab) -> None:
    for number, text in enumerate(("hostile", "line"), 1):
        ask(talk, text)
        answered(talk, number)
    talk.fill("#tools", json.dumps(TOOLS))
    ask(talk, "hostile call")
    talk.until("document.querySelector('.go-on')")
    assert talk.evaluate(DANGERS) == NONE
    shown = talk.evaluate("document.querySelector('.arguments').textContent")
    assert json.loads(re.sub(r"\\u\{(\w{4})\}", r"\\u\1", shown))
    thought = talk.evaluate("document.querySelector('.thought-text').textContent")
    assert thought.strip() == HOSTILE.strip()
    line = talk.evaluate("document.querySelectorAll('.said')[1].textContent")
    assert line == LINE.replace("*", "")
    # marks of right-to-left text end with their block
    assert set(
        talk.evaluate(
            "[...document.querySelectorAll('.said, .said > *, .thought-text, .arguments')]"
            ".map(node => getComputedStyle(node).unicodeBidi)"
        )
    ) <= {"isolate", "plaintext", "isolate-override"}


def test_the_policy_stops_what_gets_through(talk: Tab) -> None:
    """And the tests would notice it."""
    for sink in (
        "document.body.innerHTML = '<p>'",
        "document.createElement('iframe').srcdoc = '<p>'",
        "document.createElement('script').textContent = 'window.pwned = 1'",
        "document.createElement('script').src = '/page/app.js'",
    ):
        attempt = f"(() => {{ try {{ {sink} }} catch (error) {{ return error.name }} }})()"
        assert talk.evaluate(attempt) == "TypeError", sink
    talk.evaluate("document.body.append(Object.assign(new Image, {src: 'http://evil.test/x.png'}))")
    talk.evaluate("new Promise(requestAnimationFrame)")
    assert talk.evaluate("window.pwned === undefined")
    assert any("Content Security Policy" in problem for problem in talk.problems)
    talk.problems.clear()
    talk.requests.clear()


def chunk(**delta: Any) -> str:
    return "data: " + json.dumps({"choices": [{"index": 0, "delta": delta}]}) + "\n\n"


END = 'data: {"choices": [{"delta": {}, "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n'


@pytest.mark.parametrize(
    ("stream", "shown"),
    [
        (chunk(content="x" * 1_000_000), 1_000_000),
        ("".join(chunk(content=f"*{i}*\n\n") for i in range(20_000)), 88_890),
        (chunk(reasoning="y" * 1_000_000) + chunk(content="z"), 1),
        (chunk(content="a" * 150_000) + chunk(content="b" * 150_000), 300_000),
    ],
    ids=["a line", "tokens", "a thought", "more than is marked up"],
)
def test_long_answers_are_shown_whole(talk: Tab, stream: str, shown: int) -> None:
    """In place of the server, which would need minutes to play them."""
    talk.answer("/v1/chat/completions", stream + END)
    ask(talk, "Hi")
    answered(talk)
    assert talk.evaluate("document.querySelector('.said').textContent.trim().length") == shown
    talk.fill("#draft", "still here")
    assert talk.evaluate("document.scrollingElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize(
    "stream",
    ["data: {\n\n", "data: []\n\n", 'data: {"choices": 5}\n\n', 'data: {"error": {}}\n\n', "",
     'data: {"choices": [{"delta": {"tool_calls": [{"index": 0}]}}]}\n\n'],
)  # fmt: skip
def test_a_broken_stream_is_an_error_of_that_answer(talk: Tab, stream: str) -> None:
    talk.answer("/v1/chat/completions", stream)
    ask(talk, "Hi")
    answered(talk)
    assert talk.text(".answer .error")
    ask(talk, "Hi")
    answered(talk, 2)
