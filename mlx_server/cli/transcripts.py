"""Checks the transcripts of replay models before a request meets their mistakes."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mlx_server.config.settings import REPLAY, ModelSettings, Settings
from mlx_server.errors import AnswerUnwritable, ServerError, SettingsError
from mlx_server.families import family_named
from mlx_server.pool.prepare import ModelSpec, PreparedModel, prepare
from mlx_server.sources.transcript import TranscriptEntry, TranscriptFile, read_file


@dataclass(frozen=True)
class TranscriptCheck:
    """The check of one replay model."""

    model: str
    file: str
    entries: int
    problems: list[str]


def check_transcripts(settings: Settings) -> None:
    """Raises SettingsError with every mistake, each with the file and its line."""
    problems: dict[str, str] = {}
    for check in transcript_checks(settings):
        for problem in check.problems:
            problems.setdefault(problem, check.model)  # models may share a file
    if problems:
        raise SettingsError("\n".join(f"{id}: {problem}" for problem, id in problems.items()))


def transcript_checks(settings: Settings) -> Iterator[TranscriptCheck]:
    for id, model in settings.models.items():
        if model.source.startswith(REPLAY):
            path = Path(model.source.removeprefix(REPLAY))
            file = read_file(path)
            problems = file.problems or list(_problems_of_model(id, model, file))
            yield TranscriptCheck(id, path.name, len(file.entries), problems)


def _problems_of_model(id: str, model: ModelSettings, file: TranscriptFile) -> Iterator[str]:
    try:
        if model.family is None:
            raise SettingsError("a replay model needs a `family:` in models.yaml.")
        family_named(model.family)
        if any(_depends_on_vocabulary(placed.entry) for placed in file.entries):
            spec = ModelSpec(id, model.source, family=model.family, tokenizer=model.tokenizer)
            prepared = prepare(spec, lambda *progress: None, upcast=False)
            yield from _unwritable(prepared, Path(model.source).name, file)
    except ServerError as error:
        yield error.message


def _depends_on_vocabulary(entry: TranscriptEntry) -> bool:
    return bool(entry.output_token_ids or entry.answer)


def _unwritable(prepared: PreparedModel, name: str, file: TranscriptFile) -> Iterator[str]:
    for placed in file.entries:
        try:
            placed.entry.tokens(prepared.checkpoint.tokenizer, prepared.family)
        except AnswerUnwritable as error:
            yield f"{name}:{placed.line}: entry {placed.number}: {error.message}"
