"""Makes the records of other packages from the settings: models, connectors and folders."""

from dataclasses import replace
from pathlib import Path
from typing import cast

from mlx_server.config.connectors import ConnectorSettings, LoginSettings, OAuthSettings
from mlx_server.config.distributed import rank_group
from mlx_server.config.models_yaml import load_settings
from mlx_server.config.settings import (
    ModelSettings,
    ServerSettings,
    Settings,
)
from mlx_server.config.upstream import upstream_spec
from mlx_server.engine.client import NO_DISK, PromptDisk
from mlx_server.engine.rank_group import FIRST_PORT
from mlx_server.errors import SettingsError
from mlx_server.mcp import ClientCredentials, Connector, StoredLogin
from mlx_server.pool.prepare import AdapterSource, ModelSpec
from mlx_server.repair.allowed import RepairPolicy
from mlx_server.requests import SamplingChoices


def spec_named(config: Path | None, name: str) -> ModelSpec:
    """The model of models.yaml with this id or alias; else `name` is a folder or a hub id."""
    settings = load_settings(config)
    folder = settings.server.adapters_dir
    listed = {id: model_spec(id, model, folder) for id, model in settings.models.items()}
    for spec in listed.values():
        if name in (spec.id, *spec.aliases):
            return spec
    ((id, model),) = load_settings(None, models=[name], environ={}).models.items()
    return model_spec(id, model)


def prompt_disk(settings: Settings) -> PromptDisk:
    folder = settings.prompt_folder
    return PromptDisk(folder, settings.server.prompt_cache.disk) if folder else NO_DISK


def adapter_dirs(server: ServerSettings) -> tuple[Path, ...]:
    own = (server.adapters_dir,) if server.adapters_dir else ()
    return (*own, *server.adapter_dirs)


def model_specs(settings: Settings) -> list[ModelSpec]:
    """All models. Groups of which the settings name no port listen on one port after the other."""
    folder, port, found = settings.server.adapters_dir, FIRST_PORT, []
    for id, model in settings.models.items():
        spec = model_spec(id, model, folder)
        if model.distributed:
            group = rank_group(model.distributed, port)
            port += 0 if model.distributed.port else group.ports
            spec = replace(spec, group=group)
        found.append(spec)
    return found


def model_spec(id: str, model: ModelSettings, adapters_dir: Path | None = None) -> ModelSpec:
    defaults = model.defaults.model_dump(exclude_none=True)
    max_tokens = defaults.pop("max_tokens", None)
    return ModelSpec(
        id=id,
        source=str(model.source),
        revision=model.revision,
        aliases=model.aliases,
        family=model.family,
        chat_template=_file_text(model.chat_template),
        context_length=model.context_length,
        max_tokens=max_tokens,
        choices=cast(SamplingChoices, defaults),
        template_kwargs=model.template_kwargs,
        force_answer=model.lead_on,
        constrain_calls=model.constrain_calls,
        include_raw=model.include_raw,
        tools_in_prompt=model.tools_in_prompt,
        schema_in_prompt=model.schema_in_prompt,
        json_whitespace=model.json_whitespace,
        compute_ahead=model.compute_ahead,
        kv_bits=None if model.kv_cache.bits == 16 else model.kv_cache.bits,
        images=model.images,
        volatile_lines=model.volatile_lines,
        misplaced_calls=model.misplaced_calls,
        reasoning_tags=model.reasoning_tags,
        repair=RepairPolicy(**model.repair.model_dump(by_alias=True)),
        task=model.task,
        matryoshka=model.matryoshka,
        preload=model.preload,
        pinned=model.pinned,
        ttl=model.ttl,
        tokenizer=str(model.tokenizer) if model.tokenizer else None,
        adapters={
            name: AdapterSource(a.path, a.pinned, a.allow_other_base, a.description)
            for name, a in model.adapters.items()
        },
        adapters_dir=adapters_dir,
        upstream=upstream_spec(id, model),
    )


def connector(name: str, found: ConnectorSettings, data_dir: Path | None) -> Connector:
    login = stored_login(data_dir, name) if found.login else None
    return Connector(
        url=found.url,
        command=(found.command, *found.args) if found.command else (),
        env={name: value.get_secret_value() for name, value in found.env.items()},
        headers={name: value.get_secret_value() for name, value in found.headers.items()},
        allow_private=found.allow_private,
        oauth=credentials(found.oauth) if found.oauth else login,
    )


def stored_login(data_dir: Path | None, name: str) -> StoredLogin:
    """Raises SettingsError if there is no folder that keeps it."""
    if data_dir is None:
        raise SettingsError(
            f"The connector {name!r} has a `login`, which is kept in the data directory: set "
            "`data_dir` under `store` in models.yaml."
        )
    return StoredLogin.in_folder(data_dir, name)


def credentials(settings: OAuthSettings | LoginSettings) -> ClientCredentials:
    secret = settings.client_secret
    return ClientCredentials(
        settings.issuer, settings.client_id or "", secret.get_secret_value() if secret else None
    )


def _file_text(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        raise SettingsError(f"The file {path.name!r} can't be read as UTF-8 text.") from None
