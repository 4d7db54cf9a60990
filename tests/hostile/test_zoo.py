"""Loading runs no code and opens nothing outside of the model's folder."""

import os
import pickle
import re
import resource
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mlx_server import limits
from mlx_server.engine.messages import CommandFailed, LoadModel, ModelLoaded, Report, UnloadModel
from mlx_server.errors import BadRequest, ModelUnusable
from mlx_server.messages import Conversation, Message
from mlx_server.pool.prepare import ModelSpec, PreparedModel, prepare
from mlx_server.system.sandbox.chat_template import PROCESSES
from mlx_server.worker.engine import Engine
from tests.hostile import zoo
from tests.hostile.watch import watching
from tests.worker.engine_runs import ask, drain, failures, run, tokens_of

SECONDS = 30.0
KIBIBYTES = 1 << 20
"""That a single one may take, with much slack: a bomb takes what there is."""

HELLO = Conversation((Message("user", "Hello"),))


@pytest.fixture
def cage(tiny_path: Path, tmp_path: Path) -> Path:
    """A good checkpoint of its own, with nothing else near it."""
    return Path(shutil.copytree(tiny_path, tmp_path / "cage"))


@pytest.fixture(scope="module")
def engine(tiny_path: Path) -> Engine:
    """One for all of them, which serves a good model all the time."""
    engine = Engine(concurrency=2)
    load(engine, tiny_path, "tiny")
    return engine


@pytest.fixture(scope="module")
def answer(engine: Engine) -> list[int]:
    return said(engine)


def said(engine: Engine) -> list[int]:
    return [token.id for token in tokens_of(0, run(engine, ask(0)))]


def load(engine: Engine, path: Path, model: str) -> Report:
    engine.handle(LoadModel(model, str(path)))
    return drain(engine)[-1]


def prepared(folder: Path) -> PreparedModel:
    return prepare(ModelSpec("zoo", str(folder)), lambda what, done, total: None, upcast=True)


@contextmanager
def bounded(folder: Path) -> Iterator[None]:
    began, most = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with watching(folder):
        yield
    assert time.monotonic() - began < SECONDS
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - most < KIBIBYTES
    assert not (folder.parent / zoo.MARK).exists()


def test_the_watch_hears_of_everything(tmp_path: Path) -> None:
    cage = tmp_path / "cage"
    cage.mkdir()
    zoo.text("evil.py", zoo.EVIL)(cage)
    zoo.text("config.json", "{}")(cage)
    (cage / "out").symlink_to("/etc/passwd")
    crimes: tuple[Callable[[], object], ...] = (
        lambda: pickle.loads(pickle.dumps(zoo.Pickled(cage))),
        lambda: (cage / "out").read_text(),
        lambda: (cage / "../../x").is_file() or os.listdir(tmp_path),
        lambda: (cage / "config.json").write_text(""),
        lambda: exec(compile("1", str(cage / "evil.py"), "exec")),
        lambda: socket.socket().close(),
    )
    for crime in crimes:
        with pytest.raises(AssertionError), watching(cage):
            crime()
    with watching(cage) as watch:
        (cage / "config.json").read_text()
    assert watch.seen == {"config.json"}


@pytest.mark.parametrize("beast", zoo.REFUSED)
def test_what_the_server_refuses(cage: Path, beast: str) -> None:
    tease, message = zoo.REFUSED[beast]
    tease(cage)
    with bounded(cage), pytest.raises(ModelUnusable, match=message):
        prepared(cage)


@pytest.mark.parametrize("beast", zoo.UNLOADABLE)
def test_what_the_engine_refuses(cage: Path, engine: Engine, answer: list[int], beast: str) -> None:
    tease, message = zoo.UNLOADABLE[beast]
    tease(cage)
    with bounded(cage):
        path = prepared(cage).path
        report = load(engine, path, "zoo")
    assert isinstance(report, CommandFailed)
    assert re.search(message, report.message)
    assert said(engine) == answer


@pytest.mark.parametrize("beast", zoo.UNANSWERING)
def test_what_loads_and_cannot_answer(
    cage: Path, engine: Engine, answer: list[int], beast: str
) -> None:
    tease, message = zoo.UNANSWERING[beast]
    tease(cage)
    with bounded(cage):
        assert isinstance(load(engine, prepared(cage).path, "zoo"), ModelLoaded)
        reports = run(engine, ask(0), ask(1, model="zoo"))
    assert re.search(message, failures(reports)[1])
    assert [token.id for token in tokens_of(0, reports)] == answer
    engine.handle(UnloadModel("zoo"))


@pytest.mark.parametrize("beast", zoo.HARMLESS)
def test_what_is_never_looked_at(cage: Path, engine: Engine, answer: list[int], beast: str) -> None:
    zoo.HARMLESS[beast](cage)
    with bounded(cage):
        model = prepared(cage)
        model.family.render(model.checkpoint, HELLO)
        assert isinstance(load(engine, model.path, "zoo"), ModelLoaded)
        reports = run(engine, ask(1, model="zoo"))
    assert [token.id for token in tokens_of(1, reports)] == answer
    engine.handle(UnloadModel("zoo"))


LOOP = "{% for i in R %}{% for j in R %}{% endfor %}{% endfor %}"
ENDLESS = {
    "a loop": LOOP,
    "a long conversation only": "{% if messages | length > 8 %}" + LOOP + "{% endif %}"
    "{{ messages[0].content }}",
}
START = 0.3
"""Seconds of processor time that a process of templates takes to start, with some slack."""


@pytest.mark.parametrize("name", ENDLESS)
def test_a_template_without_end_is_stopped_once(
    cage: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """And not tried again in other words, for as long each time."""
    monkeypatch.setattr(limits, "TEMPLATE_SECONDS", 0.3)
    zoo.text("chat_template.jinja", ENDLESS[name].replace("R", "range(99999)"))(cage)
    with bounded(cage):
        model = prepared(cage)
        PROCESSES.close()
        before = seconds_of_children()
        with pytest.raises(BadRequest, match=r"takes more than 0\.3 s"):
            model.family.render(model.checkpoint, Conversation(9 * HELLO.messages))
        assert 0.25 <= seconds_of_children() - before < 0.3 + START + 0.2


def seconds_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
