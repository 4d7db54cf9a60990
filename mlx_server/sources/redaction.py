"""Takes secrets out of what is recorded, since transcripts are committed with tests."""

import re
from collections.abc import Collection, Iterator
from typing import Any

REMOVED = "[removed]"

SECRET = re.compile(
    r"\b(?:sk|pk|rk)[-_][\w-]{16,}"  # OpenAI, Anthropic, OpenRouter, Stripe
    r"|\bgh[pousr]_\w{30,}|\bgithub_pat_\w{30,}"
    r"|\bhf_\w{20,}"
    r"|\bAKIA[0-9A-Z]{16}\b"
    r"|\bAIza[\w-]{30,}"
    r"|\bxox[abprs]-[\w-]{10,}"
    r"|(?<![\w-])eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]{8,}"  # JSON web tokens
    r"|(?i:\bbearer) +[\w.~+/-]{15,}[\w~+/-]=*"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----(?:(?!-----).)*-----END [A-Z ]*PRIVATE KEY-----",
    re.DOTALL,
)
"""Keys in the forms that their makers gave them so that they can be found."""


def without_secrets(found: Any, known: Collection[str] = ()) -> Any:
    """The data with each secret in its texts as `REMOVED`. known: secrets of any form."""
    match found:
        case str():
            return REMOVED.join(_around(found, known))
        case dict():
            return {
                without_secrets(name, known): without_secrets(value, known)
                for name, value in found.items()
            }
        case list() | tuple():
            return [without_secrets(item, known) for item in found]
    return found


def matching(text: str, known: Collection[str] = ()) -> str:
    """A transcript's `match` for this text, whatever stands in the places of its secrets. Each but
    the last ends where the text after it first occurs, so that many take no more time than one."""
    first, *middle = map(re.escape, _around(text, known))
    if not middle:
        return text
    skipped = "".join(f"(?>.+?{piece})" for piece in middle[:-1])
    return f"regex:(?s)^{first}{skipped}.+{middle[-1]}\\s*$"


def _around(text: str, known: Collection[str]) -> Iterator[str]:
    """The pieces of a text before, between and after its secrets."""
    own = [re.escape(secret) for secret in known if secret]
    at = 0
    for secret in re.finditer("|".join([*own, SECRET.pattern]), text, re.DOTALL):
        yield text[at : secret.start()]
        at = secret.end()
    yield text[at:]
