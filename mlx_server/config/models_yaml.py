"""models.yaml, environment and flags -> settings. Every mistake is reported with its line."""

import difflib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args, get_origin, get_type_hints

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from mlx_server.config.hostfile import load_hostfile
from mlx_server.config.settings import (
    DistributedSettings,
    ModelSettings,
    ServerSettings,
    Settings,
    StoreSettings,
    absolute,
    fitting,
    is_a_group,
    located,
    model_spec,
    validated,
    values,
)
from mlx_server.config.yaml_lines import InvalidYaml, Loc, YamlProblem, compose, short, where
from mlx_server.errors import SettingsError
from mlx_server.pool.prepare import ModelSpec
from mlx_server.system.listening_sockets import is_loopback
from mlx_server.wrong_values import sentence

DEFAULT_FILE = Path("models.yaml")
ADAPTERS_DIR = "adapters"
"""The default of `adapters_dir`: a folder next to models.yaml."""

ENVIRONMENT = {
    "host": "MLX_SERVER_HOST",
    "port": "MLX_SERVER_PORT",
    "api_keys": "MLX_SERVER_API_KEYS",
}
"""Fields of `ServerSettings` and the variables that set them; MLX_SERVER_CONFIG names the file."""

DATA_VARIABLE = "MLX_SERVER_DATA"
VARIABLES = (*ENVIRONMENT.values(), "MLX_SERVER_CONFIG", DATA_VARIABLE)
DATA_DIR = "~/.local/share/mlx-server"
Data = Mapping[str, object]


DEMO = {"smollm2-135m": ModelSettings(source="demo:smollm2", preload=True)}


def _read_file(path: Path) -> tuple[Data, list[YamlProblem]]:
    try:
        document, data = compose(path)
    except InvalidYaml as error:
        return {}, [error.problem]
    if not isinstance(data, dict):
        keys = "`server`, `store` and `models`"
        return {}, [YamlProblem(1, "", f"should be a mapping with the keys {keys}")]
    mistakes = _mistakes(data, path.parent)
    found = [YamlProblem(document.line(loc), where(loc), message) for loc, message in mistakes]
    return data, sorted(document.problems + found, key=lambda problem: problem.line)


def check_file(path: Path) -> list[YamlProblem]:
    """All problems of the file, in the order of its lines."""
    return _read_file(path)[1]


def _mistakes(data: Data, folder: Path) -> Iterator[tuple[Loc, str]]:
    try:
        _checked(data, folder)
    except ValidationError as error:
        for details in error.errors(include_url=False):
            yield tuple(part for part in details["loc"] if part != "[key]"), _message_of(details)
    yield from _clashes(data.get("models"))
    yield from _unknown_fallbacks(data.get("models"))


def _message_of(error: ErrorDetails) -> str:
    kind = error["type"]
    if kind == "unexpected_keyword_argument":
        loc = error["loc"]
        known = [each.name for each in fields(_record_at(loc[:-1])) if not each.metadata]
        nearest = difflib.get_close_matches(str(loc[-1]), known, n=1)
        if nearest:
            return f"unknown key: did you mean `{nearest[0]}`?"
        return f"unknown key: known here are {', '.join(known)}"
    if kind != "missing" and error["input"] is None:
        return "has no value: give it one or remove the line"
    if error["loc"][:-1] == ("models",) and isinstance(error["input"], str):
        return "should be a mapping: put `source:` and its value on a line of its own below"
    return sentence(error)


def _record_at(loc: Loc) -> Any:
    """The dataclass of the mapping at this place of the file."""
    record, is_name = Settings, False
    for part in loc:
        if is_name:  # of a model, a connector or an adapter
            is_name = False
            continue
        hint = get_type_hints(record)[str(part)]
        record, is_name = _record_in(hint), get_origin(hint) is dict
    return record


def _record_in(hint: Any) -> Any:
    if is_dataclass(hint):
        return hint
    return next(filter(None, map(_record_in, get_args(hint))), None)


def _clashes(models: object) -> Iterator[tuple[Loc, str]]:
    """Aliases that another model has. Equal ids are reported as duplicate keys."""
    owners = {name: name for name in models} if isinstance(models, Mapping) else {}
    for loc, alias in _aliases(models):
        if alias in owners:
            yield loc, f"the name is taken by `models.{short(owners[alias])}`"
        owners.setdefault(alias, str(loc[1]))


def _unknown_fallbacks(models: object) -> Iterator[tuple[Loc, str]]:
    """Fallbacks that are no other listed model."""
    listed = models if isinstance(models, Mapping) else {}
    known = {*listed, *(alias for _, alias in _aliases(models))}
    for model_id, model in listed.items():
        names = model.get("fallback") if isinstance(model, Mapping) else ()
        for i, name in enumerate(names if isinstance(names, tuple) else ()):
            if name == model_id or (isinstance(name, str) and name not in known):
                yield ("models", model_id, "fallback", i), "should be the name of another model"


def _aliases(models: object) -> Iterator[tuple[Loc, str]]:
    for model_id, model in models.items() if isinstance(models, Mapping) else ():
        aliases = model.get("aliases") if isinstance(model, Mapping) else ()
        for i, alias in enumerate(aliases if isinstance(aliases, tuple) else ()):
            if isinstance(alias, str):
                yield ("models", model_id, "aliases", i), alias


def find_file(path: Path | None, environ: Mapping[str, str] = os.environ) -> Path | None:
    """The file named, else MLX_SERVER_CONFIG's, else ./models.yaml if there is one. Raises
    SettingsError if models.yml is there instead."""
    if named := _named_file(path, environ):
        return named
    if DEFAULT_FILE.exists():
        return DEFAULT_FILE
    if (other := DEFAULT_FILE.with_suffix(".yml")).exists():
        raise SettingsError(f"{other} is not read: rename it to {DEFAULT_FILE}.")
    return None


def _named_file(path: Path | None, environ: Mapping[str, str]) -> Path | None:
    variable = environ.get("MLX_SERVER_CONFIG")
    return path or (Path(variable) if variable else None)


def misspelt_variables(environ: Mapping[str, str] = os.environ) -> Iterator[str]:
    """Says of a variable that is set, but not read here, which unset one was probably meant."""
    for name in environ.keys() - set(VARIABLES):
        for meant in difflib.get_close_matches(name, VARIABLES, n=1, cutoff=0.9):
            if meant not in environ:
                yield f"{name} is set, and a server does not read it: did you mean {meant}?"


def load_settings(
    path: Path | None,
    *,
    models: Sequence[str] = (),
    overrides: Mapping[str, object] = MappingProxyType({}),
    environ: Mapping[str, str] = os.environ,
    hostfile: Path | None = None,
) -> Settings:
    """Flags override the environment, which overrides the file; lists are replaced, not extended.

    `models` are paths and ids from the command line. They replace the models of ./models.yaml, but
    add to those of a file given by `path` or MLX_SERVER_CONFIG. `overrides` are fields of
    `ServerSettings`; None means not given. hostfile: the machines over which models are split that
    the command line names, or all if it names none. Raises SettingsError with all problems, one a
    line.
    """
    file = find_file(path, environ)
    data, problems = _read_file(file) if file else ({}, [])
    flags = {name: value for name, value in overrides.items() if value is not None}
    environment = _from_environment(environ)
    wrong = [f"{file.name}:{problem.line or 1}: {problem}" for problem in problems if file]
    for name, value in environment.items():
        wrong += _problems_with(ENVIRONMENT[name], {"server": {name: value}})
    for name, value in flags.items():
        wrong += _problems_with(_flag(name), {"server": {name: value}})
    for argument in models:
        wrong += _problems_with(repr(_without_folders(argument)), {"models": _ad_hoc(argument)})
    if wrong:
        raise SettingsError("\n".join(wrong))

    listed = _checked(data, file.parent if file else Path())
    keep = listed.models if _named_file(path, environ) or not models else {}
    server = {**values(listed.server), **environment, **flags}
    server["adapters_dir"] = listed.server.adapters_dir or _adapters_folder_of(file)
    store = {**values(listed.store), "data_dir": _data_dir_of(listed.store, environ)}
    served = _served(keep, models) or DEMO
    if hostfile:
        served = _split(served, ids_of(models), hostfile)
    everything = {
        "server": server,
        "store": store,
        "models": served,
        "connectors": listed.connectors,
    }
    settings = _checked(everything, Path())
    _refuse_open_door(settings.server)
    return settings


def _data_dir_of(store: StoreSettings, environ: Mapping[str, str]) -> Path:
    variable = environ.get(DATA_VARIABLE)
    named = Path(absolute(variable, None)) if variable else store.data_dir
    return named or Path(absolute(DATA_DIR, None))


def _adapters_folder_of(file: Path | None) -> Path | None:
    folder = Path(absolute(str((file or DEFAULT_FILE).parent / ADAPTERS_DIR), None))
    return folder if folder.is_dir() else None


def _checked(data: Data, folder: Path) -> Settings:
    return validated(Settings, data, folder)


def _problems_with(place: str, data: Data) -> list[str]:
    return [f"{place}: {message}" for _, message in _mistakes(data, Path())]


def _from_environment(environ: Mapping[str, str]) -> dict[str, object]:
    texts = {name: environ.get(variable) for name, variable in ENVIRONMENT.items()}
    return {name: _value(name, text) for name, text in texts.items() if text}


def _value(name: str, text: str) -> object:
    if name == "api_keys":
        return tuple(key.strip() for key in text.split(","))
    return int(text) if name == "port" and re.fullmatch(r"-?[0-9]{1,9}", text) else text


def _flag(name: str) -> str:
    return "--api-key" if name == "api_keys" else f"--{name.replace('_', '-')}"


def ids_of(arguments: Sequence[str]) -> list[str]:
    """The model ids of paths and ids from the command line."""
    return [id for argument in arguments for id in _ad_hoc(argument)]


def _ad_hoc(argument: str) -> Data:
    """The settings of a model from the command line. The id of a folder is the folder's name."""
    path = located(argument, None)
    model_id = Path(path).name if os.path.isabs(path) else argument
    return {model_id: {"source": argument, "preload": True}}


def _without_folders(argument: str) -> str:
    """The last part of a path: its parent folders must not get into the log."""
    is_path = os.path.isabs(os.path.expanduser(argument))
    return Path(argument).name if is_path else argument


def _served(
    listed: Mapping[str, ModelSettings], arguments: Sequence[str]
) -> dict[str, ModelSettings]:
    served = dict(listed)
    taken = {*listed, *(alias for model in listed.values() for alias in model.aliases)}
    for argument in arguments:
        ((model_id, model),) = _checked({"models": _ad_hoc(argument)}, Path()).models.items()
        if model_id in taken:
            raise SettingsError(
                f"{_without_folders(argument)!r}: another model is called {model_id!r} already"
            )
        taken.add(model_id)
        served[model_id] = model
    return served


def _split(
    served: Mapping[str, ModelSettings], named: Sequence[str], hostfile: Path
) -> dict[str, ModelSettings]:
    over = validated(DistributedSettings, {"hosts": load_hostfile(hostfile)})
    wanted = named or [id for id, model in served.items() if model.has_weights]
    alone = {id: served[id] for id in wanted if not served[id].distributed}
    return {**served, **{id: _split_over(over, id, model) for id, model in alone.items()}}


def _split_over(over: DistributedSettings, id: str, model: ModelSettings) -> ModelSettings:
    try:
        return fitting(replace(model, distributed=is_a_group(over)))
    except ValueError as error:
        raise SettingsError(f"--hostfile: {id}: {error}") from None


def _refuse_open_door(server: ServerSettings) -> None:
    if is_loopback(server.host) or server.api_keys or server.allow_insecure:
        return
    raise SettingsError(
        f"With host {server.host!r} other machines can use this server without a key. Set a key "
        "(MLX_SERVER_API_KEYS, --api-key or `api_keys` under `server` in models.yaml) or, if "
        "everyone who can reach it may use it, `allow_insecure: true` under `server`."
    )


UPSTREAM_OPTIONS = {
    "source": "--upstream",
    "upstream_model": "MODEL",
    "api_key_env": "--api-key-env",
}


def upstream_model(model: str, upstream: str, api_key_env: str | None) -> ModelSettings:
    """A model on another server, as the command line names it. Raises SettingsError."""
    given = {
        "source": f"openai+{upstream.rstrip('/')}",
        "upstream_model": model,
        "api_key_env": api_key_env,
    }
    try:
        return fitting(validated(ModelSettings, given))
    except ValidationError as error:
        details = error.errors(include_url=False)[0]
        option = UPSTREAM_OPTIONS.get(str(next(iter(details["loc"]), "")), "--upstream")
        message = sentence(details).replace("`openai+` followed by ", "")
        raise SettingsError(f"{option}: {message}.") from None


def spec_named(config: Path | None, name: str) -> ModelSpec:
    """The model of models.yaml with this id or alias; else `name` is a folder or a hub id."""
    settings = load_settings(config)
    folder = settings.server.adapters_dir
    listed = {id: model_spec(id, model, folder) for id, model in settings.models.items()}
    for spec in listed.values():
        if name in (spec.id, *spec.aliases):
            return spec
    if not ({"/", ":"} & set(name) or Path(name).exists()):
        raise SettingsError(
            f"There is no model {name!r} in {DEFAULT_FILE}, and no folder of that name. "
            f"Name one of {', '.join(listed)}, a folder or a hub id."
        )
    ((id, model),) = load_settings(None, models=[name], environ={}).models.items()
    return model_spec(id, model)
