"""Where a text's characters stand among its tokens."""

from mlx_server.prompts.control_token_guard import TokenPlaces


def letters(text: str) -> list[int]:
    """A tokenizer that joins equal neighbours: its last token depends on the next character."""
    tokens: list[int] = []
    for character in text:
        if not tokens or tokens[-1] % 1000 != ord(character):
            tokens.append(ord(character))
        else:
            tokens[-1] += 1000
    return tokens


def test_tokens_that_depend_on_what_follows_are_left_out() -> None:
    text = "|abbx"
    tokens = letters(text)
    places = TokenPlaces(text, tokens, [1], [0], letters)
    assert [places.before(n) for n in range(6)] == [0, 1, 2, 2, 3, 3]


def test_nothing_is_known_where_control_tokens_do_not_match() -> None:
    assert TokenPlaces("|a|", letters("|a|"), [1, 3], [0], letters).before(3) == 0
