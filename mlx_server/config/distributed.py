"""The setting `distributed` of a model that is split over several machines."""

from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, BeforeValidator, Field, ValidationInfo, model_validator

from mlx_server.config.frozen import FROZEN
from mlx_server.config.hostfile import Hostfile, load_hostfile, mistakes
from mlx_server.config.values import Bytes, absolute
from mlx_server.engine.rank_group import Backend, Mode, RankGroup, RankHost
from mlx_server.errors import SettingsError

AT_LEAST = 2


def _hosts(hosts: object, info: ValidationInfo) -> object:
    """The path of a hostfile is read; a list is as in the file."""
    if not isinstance(hosts, str):
        return {"hosts": hosts} if isinstance(hosts, list | tuple) else hosts
    try:
        return load_hostfile(Path(absolute(hosts, info)))
    except SettingsError as error:
        raise ValueError(str(error)) from None


class DistributedSettings(BaseModel):
    model_config = FROZEN

    hosts: Annotated[Hostfile, BeforeValidator(_hosts)]
    """The path of a hostfile of `mlx.launch`, or its list. This server runs on the first host."""
    mode: Mode = "tensor"
    """Whether each machine has a part of every layer, or some of the layers."""
    port: int | None = Field(default=None, ge=1024, le=65000)
    """The first port of the ranks' connections; None: from 32323 on, as `mlx.launch`."""
    memory: Bytes | None = None
    """The model's share of each machine's memory; None stands for an equal part of the budget."""
    python: str | None = Field(default=None, min_length=1, max_length=500, pattern=r"^/[ -~]*$")
    """Python on the other machines; None: the path that it has here."""

    @model_validator(mode="after")
    def _has_a_group(self) -> Self:
        found = self.hosts
        if problem := next(mistakes(found), None):
            raise ValueError(problem)
        if len(found.hosts) < AT_LEAST:
            raise ValueError(f"hosts: should list at least {AT_LEAST} hosts")
        if not all(host.ips for host in found.hosts):
            raise ValueError("hosts: each should have `ips`, the addresses of its link")
        return self


def rank_group(found: DistributedSettings, port: int) -> RankGroup:
    """port: the first one if the settings name none."""
    file = found.hosts
    backend: Backend = file.backend or "ring"
    return RankGroup(
        mode=found.mode,
        hosts=tuple(RankHost(h.ssh, h.ips, h.rdma, h.is_local) for h in file.hosts),
        port=found.port or port,
        backend=backend,
        python=found.python or "",
        variables=tuple((name, value) for name, _, value in (e.partition("=") for e in file.envs)),
        memory=found.memory,
    )
