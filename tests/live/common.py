"""The server that most live tests of a process share, with the models that their files declare.

To start a server takes seconds of processor time, and so does a first answer of gpt-oss. A test
that kills, starves, fills or configures a server has one of its own, by `serving`.
"""

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.live.server import DEMO, DEMO_MODEL, SAMPLES, SHALLOW, TINY, LiveServer, serving

HOSTILE = str(Path(__file__).parents[1] / "mcp" / "hostile.py")
QUIET = "quiet"
"""A connector whose server of tools has one, `look`."""

Models = Mapping[str, Mapping[str, Any]]
Declared = Callable[[Path, Mapping[str, Path]], Models]
"""Writes what its models need into a folder; the second argument has the checkpoints of DEMO,
SHALLOW and TINY. A `source` that names a file of the folder is found there."""

WRONG = re.compile(r" ERROR (?!.* broken: )|^Traceback")
"""Lines of its log that no test may cause; a model `broken` is one on purpose."""

_declared: dict[str, Declared] = {}


def common_models(models: Declared) -> Declared:
    """The common server has these models of a test file too. Their names are in no other file."""
    _declared[models.__module__] = models
    return models


def transcript(path: Path, entries: Iterable[Mapping[str, Any]]) -> None:
    path.write_text("\n".join(map(json.dumps, entries)), "utf-8")


def folder_of(server: LiveServer, module: str) -> Path:
    """Where the models of a test file are."""
    return server.log_file.parent / module.rpartition(".")[2]


@contextmanager
def common_server(folder: Path, checkpoints: Mapping[str, Path]) -> Iterator[LiveServer]:
    models: dict[str, Mapping[str, Any]] = {
        DEMO: DEMO_MODEL,
        SHALLOW: {"source": str(checkpoints[SHALLOW])},
        TINY: {"source": str(checkpoints[TINY]), "aliases": ["small"]},
    }
    for module, declared in _declared.items():
        own = folder / module.rpartition(".")[2]
        own.mkdir()
        for name, settings in declared(own, checkpoints).items():
            assert name not in models, f"{module}: another file has a model {name}"
            # copied, as YAML would write what two models share as a reference
            copied = json.loads(json.dumps(settings))
            models[name] = {**copied, "source": _found(settings["source"], own)}
    config = {
        "server": {"adapter_dirs": [str(SAMPLES)]},
        "models": models,
        "connectors": {QUIET: {"command": sys.executable, "args": [HOSTILE, QUIET]}},
    }
    with serving(folder, config) as server:
        yield server
        wrong = [line for line in server.log.splitlines() if WRONG.search(line)]
        assert not wrong, "\n".join(wrong)


def _found(source: str, folder: Path) -> str:
    scheme, colon, path = source.rpartition(":")
    return f"{scheme}{colon}{folder / path}" if (folder / path).exists() else source
