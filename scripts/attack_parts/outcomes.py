"""Classifies what each attack did to a server."""

from collections import Counter
from collections.abc import Iterator

import httpx

from attack_parts.servers import Server
from tests.hostile.corpus import Attack, Call
from tests.hostile.sending import Outcome, carry_out

CONTROL = {
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "temperature": 0,
    "max_tokens": 8,
}
ANSWERED, FAILED, SILENT, DIED, CHANGED = (
    "answered",
    "server error",
    "no answer",
    "died",
    "control changed",
)
OUTCOMES = (ANSWERED, FAILED, SILENT, DIED, CHANGED)
"""Each attack has one of the first three outcomes; the others may come in addition."""


def under_attack(server: Server, attacks: list[Attack]) -> Iterator[tuple[Attack, list[str]]]:
    """Sends the attacks one after another. A server that died, or answers the control request
    differently, is restarted."""
    server.start()
    try:
        before = control(server)
        if before is None:
            raise SystemExit(f"{server.name} does not answer the control request.")
        for attack in attacks:
            found = [outcome_of(server, attack), *effects_on(server, before)]
            yield attack, found
            if len(found) > 1:
                server.stop()
                server.start()
    finally:
        server.stop()


def outcome_of(server: Server, attack: Attack) -> str:
    try:
        with server.http() as http:
            outcome = carry_out(attack, http)
    except (OSError, httpx.HTTPError):
        return SILENT
    return judged(outcome, attack)


def judged(outcome: Outcome, attack: Attack) -> str:
    """Judges an outcome as for any good server: each request needs a refusal or a complete
    answer."""
    statuses = [step for step in outcome.steps if isinstance(step, int)]
    if not statuses:
        may_close = any("closes" in few for few in attack.expected.steps)
        return ANSWERED if may_close else SILENT
    if max(statuses) >= 500:
        return FAILED
    if isinstance(attack.sent, Call) and statuses == [200] and not _is_whole(outcome):
        return FAILED
    return ANSWERED


def _is_whole(outcome: Outcome) -> bool:
    try:
        return outcome.is_whole()
    except (ValueError, KeyError, TypeError, AttributeError):
        return False


def effects_on(server: Server, before: str) -> Iterator[str]:
    if server.has_died():
        yield DIED
    elif control(server) != before:
        yield CHANGED


def control(server: Server) -> str | None:
    """Returns the answer to the control request; None if there is none. It asks twice, since the
    first request may have to wait for an attack."""
    for _ in range(2):
        try:
            with server.http() as http:
                answer = http.post("/v1/chat/completions", json={**CONTROL, "model": server.model})
                text: str = answer.json()["choices"][0]["message"]["content"]
                return text
        except (httpx.HTTPError, ValueError, KeyError):
            continue
    return None


def table(found: list[tuple[Attack, list[str]]]) -> Iterator[tuple[str, ...]]:
    """Yields a row for each category, and one for all."""
    categories = list(dict.fromkeys(attack.category for attack, _ in found))
    for category in (*categories, "all"):
        outcomes = [each for attack, each in found if category in (attack.category, "all")]
        counted = Counter(name for each in outcomes for name in each)
        yield category, str(len(outcomes)), *(str(counted[name]) for name in OUTCOMES)
