"""The settings of a model that another server has."""

import re
from typing import Annotated, Any, Self, cast, get_type_hints

from pydantic import BaseModel, Field, create_model, model_validator

from mlx_server import limits
from mlx_server.config.frozen import FROZEN
from mlx_server.upstream.spec import (
    DEFAULTS,
    UpstreamCapabilities,
    UpstreamPolicy,
    UpstreamSpec,
    is_upstream,
    kind_and_url,
)

Seconds = Annotated[float, Field(gt=0, le=86400)]
Text = Annotated[str, Field(min_length=1, max_length=500, pattern=r"^[!-~]+$")]
Variable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,127}$")]

URL = re.compile(r"https?://(\[[0-9a-fA-F:.]+\]|[\w.-]+)(:\d{1,5})?(/[\w./~%-]*)?", re.ASCII)


def located_upstream(source: str) -> str:
    kind, url = kind_and_url(source)
    if URL.fullmatch(url):
        return source
    if "@" in url or "?" in url:  # the message must not show it
        raise ValueError(
            "the URL of another server should have no user, password or query; name the variable "
            "that has the key as `api_key_env`"
        )
    prefix = "openai+" if kind == "openai" else "watsonx:"
    raise ValueError(f"should be `{prefix}` followed by an http or https URL")


_FIELDS: dict[str, Any] = {
    name: (wanted | None, None) for name, wanted in get_type_hints(UpstreamCapabilities).items()
}

CapabilitySettings = create_model("CapabilitySettings", __config__=FROZEN, **_FIELDS)
"""The fields of UpstreamCapabilities; what is None has the default of its kind."""


class UpstreamSettings(BaseModel):
    """See mlx_server.upstream.spec.UpstreamPolicy."""

    model_config = FROZEN

    connect_seconds: Seconds = float(limits.UPSTREAM_CONNECT_SECONDS)
    first_seconds: Seconds = float(limits.UPSTREAM_FIRST_SECONDS)
    idle_seconds: Seconds = float(limits.UPSTREAM_IDLE_SECONDS)
    answer_seconds: Seconds = float(limits.UPSTREAM_ANSWER_SECONDS)
    retries: int = Field(default=limits.UPSTREAM_RETRIES, ge=0, le=10)
    empty_retries: int = Field(default=1, ge=0, le=4)


class UpstreamFields(BaseModel):
    """The settings that only a model of another server has."""

    model_config = FROZEN

    source: str
    upstream_model: Text | None = None
    """The model's name on the other server; None: its name here."""
    api_key_env: Variable | None = None
    """The environment variable that has the other server's key."""
    project_id: Text | None = None
    space_id: Text | None = None
    iam_url: Annotated[str, Field(pattern=URL.pattern + "$")] | None = None
    """The source of watsonx's tokens, if it is not IBM's public cloud."""
    capabilities: CapabilitySettings = CapabilitySettings()  # type: ignore[valid-type]
    upstream: UpstreamSettings = UpstreamSettings()
    fallback: tuple[Text, ...] = ()
    """Models that are asked if the other server can't answer."""

    @model_validator(mode="after")
    def _fits_source(self) -> Self:
        own = UpstreamFields.model_fields.keys() - {"source"}
        if not is_upstream(self.source):
            for name in sorted(own & self.model_fields_set):
                raise ValueError(f"`{name}` needs a `source` that is another server's URL")
            return self
        kind, _ = kind_and_url(self.source)
        if kind == "watsonx" and (self.project_id is None) == (self.space_id is None):
            raise ValueError("a watsonx model should have either a `project_id` or a `space_id`")
        if kind == "watsonx" and self.api_key_env is None:
            raise ValueError("a watsonx model should have an `api_key_env`")
        return self


def upstream_spec(id: str, model: UpstreamFields) -> UpstreamSpec | None:
    if not is_upstream(model.source):
        return None
    kind, url = kind_and_url(model.source)
    known = DEFAULTS[kind]
    chosen = cast(BaseModel, model.capabilities).model_dump(exclude_none=True)
    fields = {name: getattr(known, name) for name in UpstreamCapabilities.__slots__}
    iam = {"iam_url": model.iam_url} if model.iam_url else {}
    return UpstreamSpec(
        kind=kind,
        url=url,
        model=model.upstream_model or id,
        api_key_env=model.api_key_env,
        project_id=model.project_id,
        space_id=model.space_id,
        capabilities=UpstreamCapabilities(**{**fields, **chosen}),
        stated=frozenset(chosen),
        policy=UpstreamPolicy(**model.upstream.model_dump()),
        fallback=model.fallback,
        **iam,
    )
