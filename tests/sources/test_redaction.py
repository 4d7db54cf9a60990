"""Secrets are removed from recordings, and nothing else."""

import re

import pytest

from mlx_server.sources.given_answers import matching, without_secrets

SECRETS = [
    "sk-proj-abcdefghijklmnop1234",
    "ghp_abcdefghijklmnopqrstuvwxyz0123456789",
    "hf_abcdefghijklmnopqrstuvwx",
    "AKIAABCDEFGHIJKLMNOP",
    "eyJhbGciOiJI.eyJzdWIiOiIx.c2lnbmF0dXJl",
    "Bearer abcdefghijklmnop.qrst",
    "-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----",
]


@pytest.mark.parametrize("secret", SECRETS)
def test_a_secret_is_removed_wherever_it_stands(secret: str) -> None:
    found = {"text": f"It is {secret}.", "calls": [{"arguments": {"a": [secret, 5, None]}}]}
    assert secret not in str(without_secrets(found))
    assert without_secrets(found)["text"] == "It is [removed]."


def test_a_text_with_many_secrets_is_matched_in_linear_time() -> None:
    """The pieces between the secrets occur many times in the other text."""
    asked = " and ".join([SECRETS[0]] * 30) + " end"
    pattern = re.compile(matching(asked).removeprefix("regex:"))
    assert pattern.search(asked.replace("1234", "9999"))
    assert pattern.search(" and ".join("other key" for _ in range(30)) + " end")
    assert not pattern.search(" and ".join("other key" for _ in range(29)) + " end")
    assert not pattern.search("x and " * 300)


def test_other_text_stays() -> None:
    text = "An sk-1 cable, a risk-averse_bearer of news, and a task-oriented-approach."
    assert without_secrets(text) == text
    assert matching(text) == text
