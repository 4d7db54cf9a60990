"""Makes the ids of calls for which a model wrote none."""

import secrets
import string


def new_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def new_short_id() -> str:
    """Makes an id of nine characters: the templates of many Mistral models refuse any other
    form."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
