"""What a hostile chat template can try: it holds up neither the server nor another template."""

import os
import threading

import pytest

from mlx_server import limits
from mlx_server.errors import BadRequest
from mlx_server.system.sandbox.chat_template import ChatTemplate
from tests.live.fork_server import call_in_child
from tests.sandbox.attacked import attacked, refusal, says_hello
from tests.slowness import slowness

SECONDS = 0.25
"""Of processor time, for one rendering."""
TRIES = 3
"""A processor that others use takes longer now and then; an attack that succeeds does each time."""

DOUBLE = "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = STEP %}{% endfor %}"
SHARED = (
    "{% set a = namespace(v=[1]) %}{% set b = namespace(v=[1]) %}{% for i in range(40) %}"
    "{% set a.v = [a.v, a.v] %}{% set b.v = [b.v, b.v] %}{% endfor %}"
)
DEEP = "{% set a = namespace(v=[]) %}{% for i in range(20000) %}{% set a.v = [a.v] %}{% endfor %}"

ATTACKS = {
    "a regular expression of braces": "{{ ('{' ~ (':' * 200000)).format() }}",
    "shared lists compared": SHARED + "{{ a.v == b.v }}",
    "lists summed": "{{ (range(99999) | batch(1) | list) | sum(start=[]) | length }}"
    "{{ ([range(999) | list] * 9999) | sum(start=[]) | length }}",
    "a division of big integers": "{{ (7 ** 3000000) // (3 ** 1500000) }}",
    "a wide date of no end": "{% for i in range(9999) %}{{ strftime_now('%9999d' * 999) }}"
    "{% endfor %}",
    "a selection that finds nothing": "{% for i in range(9999) %}"
    "{% set x = range(99999) | select('eq', -1) | list %}{% endfor %}",
    "JSON of shared lists": SHARED + "{{ a.v | tojson }}",
    "the hash of a shared tuple": "{% set a = namespace(v=(1,)) %}{% for i in range(40) %}"
    "{% set a.v = (a.v, a.v) %}{% endfor %}{{ {a.v: 1} | length }}",
    "colliding keys": "{% set ns = namespace(d={}) %}{% for i in range(9999) %}"
    "{% set ns.d = dict(ns.d, **{'k' ~ i: i * (2 ** 61 - 1)}) %}{% endfor %}{{ ns.d | length }}",
    "a loop of itself": "{% for x in [[]] recursive %}{{ loop([[], []]) }}{% endfor %}",
    "two macros of themselves": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}"
    "{% endmacro %}{{ f(60) }}",
    "loops in loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}"
    "{% endfor %}",
    "a generator of no end": "{{ (range(99999) | map('string') | join) * 9999999 }}",
    "a power": "{{ 9 ** (9 ** 9) }}",
    "a big number written": "{{ (9 ** 99999999) | string | length }}",
    "a format's own width": "{{ '%*d' % (10 ** 9, 1) }}",
    "tabs": "{{ ('\\t' * 99999).expandtabs(99999) | length }}",
    "a translation": "{{ ('a' * 999999).translate({97: 'b' * 99999}) | length }}",
    "a text doubled": DOUBLE.replace("STEP", "ns.x ~ ns.x"),
    "a list doubled": DOUBLE.replace("STEP", "[ns.x] * 2 ** 30"),
    "many small objects": "{% set a = namespace(x=[]) %}{% for i in range(9999) %}"
    "{% set a.x = [a.x, range(99999) | map('string') | list] %}{% endfor %}",
    "an output of no end": "{% for i in range(99999) %}{{ 'x' * 999999 }}{% endfor %}",
    "a deep list written": DEEP + "{{ a.v }}",
    "generators of generators": DEEP.replace("[a.v]", "a.v | map('string')") + "{{ a.v | list }}",
    "a namespace in itself": "{% set a = namespace() %}{% set a.a = a %}{{ a }}{{ [a] | tojson }}",
    "digits of a float": "{{ '%.100000000f' % 1.5 }}{{ '{:.1000000000f}'.format(1.5) }}",
    "letters that grow": "{{ ('ΐ' * 9999999) | upper }}{{ ('ﷺ' * 9999999) | urlencode }}",
    "a text of brackets": "{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}",
}


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_takes_no_more_than_its_limits(name: str) -> None:
    """And none of it is the server's own time. No other template is held up."""
    assert any(takes_little(ATTACKS[name]) for _ in range(TRIES))


def takes_little(source: str) -> bool:
    taken = call_in_child(attacked, source, SECONDS, environment=os.environ)
    assert taken.largest_child <= limits.TEMPLATE_MEMORY + (128 << 20)

    def is_little(factor: float) -> bool:
        return (
            taken.children_seconds < 2 * SECONDS + 0.5 * factor and taken.own_seconds < 0.2 * factor
        )

    return is_little(1.0) or is_little(slowness())


@pytest.mark.slow
@pytest.mark.alone
def test_what_is_refused_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "TEMPLATE_SECONDS", SECONDS)
    assert f"takes more than {SECONDS} s" in refusal(ATTACKS["loops in loops"])
    monkeypatch.setattr(limits, "TEMPLATE_SECONDS", 2)
    assert "needs more than 512 MiB of memory" in refusal(ATTACKS["a text doubled"])
    assert "a prompt of more than" in refusal("{{ 'x' * 40000000 }}")
    assert "refuses these messages: nothing here" in refusal(
        "{{ raise_exception('nothing here') }}"
    )


@pytest.mark.slow
@pytest.mark.alone
def test_an_endless_template_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "TEMPLATE_SECONDS", 1)
    hostile = ChatTemplate(ATTACKS["loops in loops"])
    reported: list[BaseException] = []

    def attack() -> None:
        try:
            hostile.render({})
        except BadRequest as error:
            reported.append(error)

    threads = [threading.Thread(target=attack) for _ in range(3)]
    for thread in threads:
        thread.start()
    says_hello()
    assert not reported  # all three are still under way
    for thread in threads:
        thread.join()
    assert len(reported) == 3
