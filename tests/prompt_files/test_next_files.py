"""Files after one block: which of them a prompt can use, found without reading them."""

import numpy as np

from mlx_server.prompt_files.folder import RECENT, NextFiles
from mlx_server.prompt_files.names import Ids, PromptFile, digest, group_of

GROUP, LINK = group_of("m"), digest(b"")


def ids(*tokens: int) -> Ids:
    return np.array(tokens, np.uint32)


def state(*tokens: int) -> PromptFile:
    return PromptFile(GROUP, LINK, len(tokens), digest(ids(*tokens).tobytes()))


def following(*tails: tuple[int, ...]) -> NextFiles:
    """Of prompts whose tokens are known."""
    found = NextFiles(0)
    for tail in tails:
        found.add(state(*tail))
        found.learn(state(*tail), ids(*tail))
    return found


def test_the_longest_state_of_the_prompt_comes_first() -> None:
    found = following((1,), (1, 2, 3), (1, 9), (1, 2))
    prompt = [1, 2, 3, 4]
    longest = found.states(len(prompt), lambda length: state(*prompt[:length]))
    assert list(longest) == [state(1, 2, 3), state(1, 2), state(1)]
    assert not list(found.states(0, lambda length: state(*prompt[:length])))


def test_the_state_with_most_of_the_prompt() -> None:
    found = following((1, 2, 3, 4), (1, 2, 9, 9), (5, 6))
    assert found.with_most(ids(1, 2, 9)) == (state(1, 2, 9, 9), 3)
    assert found.with_most(ids(1, 2, 3, 5)) == (state(1, 2, 3, 4), 3)
    assert found.with_most(ids(7, 7, 7)) == (None, 0), "no file is to be read for it"


def test_only_the_last_used_one_is_read_to_find_out_its_tokens() -> None:
    found = following()
    found.add(state(1, 2))
    found.add(state(3, 4))
    assert found.with_most(ids(1, 2)) == (state(3, 4), 2)
    found.learn(state(3, 4), ids(3, 4))
    assert found.with_most(ids(1, 2)) == (None, 0)
    found.used(state(1, 2))
    assert found.with_most(ids(1, 2)) == (state(1, 2), 2)


def test_what_was_used_long_ago_is_not_compared() -> None:
    found = following((1, 2), *((9, number) for number in range(RECENT)))
    assert found.with_most(ids(1, 2)) == (None, 0)
    found.used(state(1, 2))
    assert found.with_most(ids(1, 2)) == (state(1, 2), 2)


def test_removed_states_are_not_found() -> None:
    found = following((1, 2), (3, 4))
    found.remove(state(1, 2))
    found.learn(state(1, 2), ids(1, 2))
    assert found.with_most(ids(1, 2)) == (None, 0)
    assert len(found) == 1
    found.remove(state(3, 4))
    assert not found
    assert not list(found.states(2, lambda length: state(1, 2)))
