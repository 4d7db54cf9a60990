"""Sources that can't be are told apart from those that may be."""

import pytest

from mlx_server.sources.kinds import why_impossible

POSSIBLE = (
    *("org/name", "hf:org/name", "demo:smollm2", "/models/m", "./m", "../m", "~/m", "m"),
    *("C:\\models\\m", "/models/a:b", "org/name-4bit.v2"),
)
IMPOSSIBLE = (
    *("", "demo:", "demo:smollm3", "hf:", "hf:name", "hf:a/b/c", "http://h", "https://h/v1"),
    *("file:///m", "ftp://h/m", "gguf:m", "opnai+http://h", "HTTP://h", "s3:b"),
)


@pytest.mark.parametrize("source", POSSIBLE)
def test_one_that_may_be(source: str) -> None:
    assert why_impossible(source) is None


@pytest.mark.parametrize("source", IMPOSSIBLE)
def test_one_that_can_not_be(source: str) -> None:
    assert (why_impossible(source) or "").endswith((".", "..."))


def test_a_password_is_not_repeated() -> None:
    for kind in ("http", "https", "opnai+https", "ftp", "file"):
        assert "secret" not in (why_impossible(f"{kind}://me:secret@h/v1") or "")
