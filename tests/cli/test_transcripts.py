"""Mistakes in a transcript are reported before a request meets them."""

from pathlib import Path

import pytest

from mlx_server.cli.transcripts import check_transcripts
from mlx_server.config.settings import ModelSettings, Settings
from mlx_server.errors import SettingsError

SAID = "- answer: {text: Yes.}\n- answer: {calls: [{name: f}]}\n"


def settings(folder: Path, family: str) -> Settings:
    (folder / "said.yaml").write_text(SAID)
    source = f"replay:{folder / 'said.yaml'}"
    return Settings(models={"fake": ModelSettings(source=source, family=family)})


def test_an_answer_that_the_family_can_not_write_is_named_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"fake: said\.yaml:2: entry 2: The family gemma3"):
        check_transcripts(settings(tmp_path, "gemma3"))


def test_answers_in_words_are_for_any_family(tmp_path: Path) -> None:
    check_transcripts(settings(tmp_path, "mistral"))
