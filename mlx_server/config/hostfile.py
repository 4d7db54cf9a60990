"""Reads the hostfile of `mlx.launch`: the machines that hold one model together.

Both of its forms are read, which `mlx.distributed_config` writes: a list of hosts, and an object
with `hosts`, `backend` and `envs`.
"""

import ipaddress
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from mlx_server.config.yaml_lines import MAX_FILE_BYTES, Loc, where
from mlx_server.errors import SettingsError
from mlx_server.system.files import read_regular
from mlx_server.wrong_values import sentence

FROZEN = ConfigDict(
    frozen=True, extra="forbid", strict=True, allow_inf_nan=False, hide_input_in_errors=True
)


def matching(pattern: re.Pattern[str], otherwise: str) -> AfterValidator:
    """Refuses a text that the whole pattern does not describe. otherwise: the message."""

    def checked(text: str) -> str:
        if pattern.fullmatch(text):
            return text
        raise ValueError(otherwise)

    return AfterValidator(checked)


MAX_HOSTS = 64
MAX_ADDRESSES = 16
MAX_VARIABLES = 64

Backend = Literal["", "ring", "jaccl", "jaccl-ring"]
"""Empty, as `mlx.distributed_config` writes it for Ethernet, is the ring too."""

SSH_NAME = re.compile(r"([A-Za-z0-9_][\w.-]{0,63}@)?[A-Za-z0-9][\w.:-]{0,252}", re.ASCII)
"""It must not begin with a hyphen, since ssh would read it as an option."""

DEVICE = re.compile(r"[A-Za-z0-9][\w.-]{0,63}", re.ASCII)
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}=[^\0\r\n]{0,4096}")
Variable = Annotated[str, matching(VARIABLE, "should be `NAME=value`")]


def _address(text: str) -> str:
    """MLX's ring can't parse IPv6 addresses."""
    try:
        address = ipaddress.IPv4Address(text)
    except ValueError:
        raise ValueError("should be an IPv4 address such as 192.168.1.2") from None
    if (
        address.is_unspecified
        or address.is_multicast
        or address == ipaddress.IPv4Address(2**32 - 1)
    ):
        raise ValueError("should be the address of one host; ranks listen on it")
    return text


RDMA = "should be the name of an RDMA device such as rdma_en2"
SSH = "should be a host name, an address or `user@host`, as ssh takes it"
Device = Annotated[str, matching(DEVICE, RDMA)]


class Host(BaseModel):
    """One machine, whose rank is its place in the list."""

    model_config = FROZEN

    ssh: Annotated[str, matching(SSH_NAME, SSH)]
    ips: tuple[Annotated[str, AfterValidator(_address)], ...] = Field(
        default=(), max_length=MAX_ADDRESSES
    )
    """The addresses of this host on which its rank listens."""
    rdma: tuple[Device | tuple[Device, ...] | None, ...] = Field(default=(), max_length=MAX_HOSTS)
    """The devices that lead to each rank; null for the host itself. Only JACCL uses them."""

    @property
    def is_local(self) -> bool:
        """Whether no ssh is needed. `mlx.launch` makes an exception for 127.0.0.1 only."""
        return self.ssh in ("localhost", "127.0.0.1")


Hosts = Annotated[tuple[Host, ...], Field(max_length=MAX_HOSTS)]


class Hostfile(BaseModel):
    model_config = FROZEN

    hosts: Hosts
    backend: Backend = ""
    envs: tuple[Variable, ...] = Field(default=(), max_length=MAX_VARIABLES)
    """Variables that every rank gets."""


def load_hostfile(path: Path) -> Hostfile:
    """The file, its hosts in the order of their ranks. Raises SettingsError with all problems, one
    a line."""
    raw = _raw(path)
    try:
        found = _parsed(raw)
    except ValidationError as error:
        details = error.errors(include_url=False)
        problems = list(dict.fromkeys(map(_problem, details)))
    else:
        problems = list(mistakes(found))
    if problems:
        raise SettingsError("\n".join(f"{path.name}: {problem}" for problem in problems))
    return found


def _raw(path: Path) -> bytes:
    try:
        return read_regular(path, MAX_FILE_BYTES)
    except OSError as error:
        raise SettingsError(
            f"{path.name}: can't be read: {error.strerror}. Give the path of a hostfile, which "
            "`mlx.distributed_config` can write."
        ) from error


def _parsed(raw: bytes) -> Hostfile:
    if raw.lstrip()[:1] == b"[":
        return Hostfile(hosts=TypeAdapter(Hosts).validate_json(raw))
    return Hostfile.model_validate_json(raw)


UNION_MEMBERS = ("tuple[", "function-after[")
"""The prefixes of pydantic's names for the members of a union; they are no part of the file."""


def _problem(details: ErrorDetails) -> str:
    loc: Loc = tuple(part for part in details["loc"] if not str(part).startswith(UNION_MEMBERS))
    if loc and isinstance(loc[0], int):  # the file is a list
        loc = ("hosts", *loc)
    message = sentence(details)
    return f"{where(loc)}: {message}" if loc else message


def mistakes(file: Hostfile) -> Iterator[str]:
    """The mistakes that concern several hosts."""
    if not file.hosts:
        yield "has no hosts: list at least one"
    owners: dict[str, int] = {}
    for rank, host in enumerate(file.hosts):
        for i, address in enumerate(host.ips):
            place = f"hosts[{rank}].ips[{i}]"
            owner = owners.setdefault(address, rank)
            loopback = ipaddress.ip_address(address).is_loopback
            if (owner != rank and not loopback) or address in host.ips[:i]:
                yield f"{place}: {address} is listed twice, first in hosts[{owner}]"
            if loopback and not all(other.is_local for other in file.hosts):
                yield f"{place}: other hosts can't reach {address}: give the address of its link"
        yield from _wrong_devices(file, rank)


def _wrong_devices(file: Hostfile, rank: int) -> Iterator[str]:
    devices, place = file.hosts[rank].rdma, f"hosts[{rank}].rdma"
    if devices and len(devices) != len(file.hosts):
        yield f"{place}: should have one entry for each of the {len(file.hosts)} hosts"
    elif devices and devices[rank] is not None:
        yield f"{place}[{rank}]: should be null, since it is the host itself"
    elif not devices and file.backend.startswith("jaccl"):
        yield f"{place}: is missing, but the backend {file.backend} needs it"
