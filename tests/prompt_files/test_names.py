"""Files are named by what they hold."""

from mlx_server.prompt_files.names import block_file, links_of, parsed, state_file
from tests.prompt_files.named import BLOCK, GROUP, ids


def test_names_are_those_of_their_files_only() -> None:
    links = links_of(ids(*range(9)), BLOCK)
    for file in (block_file(GROUP, links, 1, BLOCK), state_file(GROUP, links, ids(*range(9)), 9)):
        assert parsed(file.name) == file
    for name in ("", "../x.safetensors", f"{GROUP}.{GROUP}.01.safetensors", f"{GROUP}.safetensors"):
        assert parsed(name) is None


def test_a_link_stands_for_all_tokens_before_it() -> None:
    one, other = links_of(ids(*range(12)), BLOCK), links_of(ids(9, *range(1, 12)), BLOCK)
    assert len(one) == 4
    assert one[0] == other[0]
    assert not set(one[1:]) & set(other[1:])
