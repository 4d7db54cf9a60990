"""Which family a checkpoint belongs to."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from mlx_server.errors import SettingsError
from mlx_server.families import FAMILIES, family_of
from mlx_server.families.base import ModelFamily
from mlx_server.families.checkpoint import Checkpoint, read_checkpoint
from mlx_server.families.plain import PLAIN
from mlx_server.families.smollm2 import SMOLLM2
from mlx_server.families.template import ChatTemplate
from mlx_server.parsers.text import TextParser
from tests.families import byte_level, checkpoint


@pytest.fixture(scope="module")
def demo(demo_path: Path) -> Checkpoint:
    return read_checkpoint(demo_path)


@pytest.fixture(scope="module")
def unknown(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return checkpoint(tmp_path_factory.mktemp("unknown"), byte_level(), "{{ messages }}")


def test_every_family_has_a_name_of_its_own() -> None:
    names = [family.name for family in FAMILIES]
    assert sorted(set(names)) == sorted(names)
    assert {"plain", "smollm2"} <= set(names)


def test_the_demo_model_is_known_by_type_and_template(demo: Checkpoint) -> None:
    assert family_of(demo) is SMOLLM2


@pytest.mark.parametrize("mark", SMOLLM2.template_marks)
def test_a_template_that_lacks_a_mark_is_of_another_family(demo: Checkpoint, mark: str) -> None:
    assert demo.template
    other = ChatTemplate(demo.template.source.replace(mark, "other"))
    assert family_of(replace(demo, template=other)) is PLAIN
    assert family_of(replace(demo, template=None)) is PLAIN


def test_the_template_alone_does_not_make_a_family(demo: Checkpoint) -> None:
    assert family_of(replace(demo, model_type="mamba")) is PLAIN


def test_the_checkpoints_name_does_not_make_a_family(demo: Checkpoint) -> None:
    assert family_of(replace(demo, path=Path("/models/gpt-oss-20b"))) is SMOLLM2


def test_a_type_alone_is_enough_where_no_mark_is_asked_for(unknown: Checkpoint) -> None:
    family = ModelFamily("tiny", TextParser, model_types=("other", "tiny"))
    assert family.recognises(unknown)
    assert not family.recognises(replace(unknown, model_type="tin"))
    assert not PLAIN.recognises(replace(unknown, model_type=""))


def test_an_unknown_type_is_plain_and_said_so(
    unknown: Checkpoint, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert family_of(unknown) is PLAIN
    assert "'tiny' belongs to no known family" in caplog.text


def test_a_known_type_needs_no_word(demo: Checkpoint, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        family_of(demo)
    assert caplog.text == ""


def test_the_owner_settles_it(demo: Checkpoint, unknown: Checkpoint) -> None:
    assert family_of(demo, "plain") is PLAIN
    assert family_of(unknown, "smollm2") is SMOLLM2


@pytest.mark.parametrize("name", ["", "Plain", "gpt"])
def test_a_family_that_there_is_not(demo: Checkpoint, name: str) -> None:
    with pytest.raises(SettingsError) as caught:
        family_of(demo, name)
    for family in FAMILIES:
        assert family.name in caught.value.message


def test_stop_tokens_are_the_checkpoints_and_the_familys(
    demo: Checkpoint, unknown: Checkpoint
) -> None:
    assert demo.end_tokens == {2}
    assert SMOLLM2.stops(demo) == {0, 2}
    assert PLAIN.stops(demo) == {2}
    assert SMOLLM2.stops(unknown) == {unknown.tokenizer.id_of("<|im_end|>")}
