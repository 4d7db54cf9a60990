"""Ids of calls for which the model wrote none."""

import re
from collections.abc import Callable

import pytest

from mlx_server.tool_parsers.calls import new_id, new_short_id


@pytest.mark.parametrize(
    ("make", "form"), [(new_id, r"call_[0-9a-f]{24}"), (new_short_id, r"[a-zA-Z0-9]{9}")]
)
def test_ids_have_the_form_that_templates_accept_and_none_comes_twice(
    make: Callable[[], str], form: str
) -> None:
    made = [make() for _ in range(300)]
    assert [id for id in made if not re.fullmatch(form, id, re.ASCII)] == []
    assert len(set(made)) == len(made)


def test_short_ids_use_all_letters_and_digits() -> None:
    assert len(set("".join(new_short_id() for _ in range(2000)))) == 62
