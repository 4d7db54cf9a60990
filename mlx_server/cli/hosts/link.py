"""Measures the link between the hosts of a hostfile: all of them run an all-reduce together."""

import asyncio
from collections.abc import Sequence

import msgspec

from mlx_server.cli.hosts.command import Answer, run_on
from mlx_server.cli.machine_checks import Check
from mlx_server.engine.rank_group import RankGroup
from mlx_server.engine.worker_arguments import RankArguments, WorkerArguments, encode_arguments

MODULE = ("-m", "mlx_server.worker.link_speed")

SECONDS = 50.0

SLOW_SECONDS = 2e-3
"""A small all-reduce that takes longer is reported as slow. Wi-Fi takes longer; two TCP messages
over a cable take 0.6 ms."""

SLOW_BYTES = 200e6
"""Fewer bytes per second are reported as slow: 1 Gb Ethernet has 120e6."""


class Measured(msgspec.Struct):
    """The measurements that `mlx_server.worker.link_speed` prints."""

    small_bytes: int
    small_seconds: float
    large_bytes: int
    large_seconds: float
    right: bool


async def link_check(group: RankGroup) -> Check:
    hosts = group.hosts
    if len(hosts) < 2:
        return Check("ok", "link", "one host has no link")
    if lacking := [host.ssh for host in hosts if not host.ips]:
        fix = "give `ips` of each host in the hostfile; `mlx.distributed_config` finds them"
        return Check("fail", "link", f"{', '.join(lacking)}: no addresses", fix)
    answers = await _ranks(group)
    found = [_measured(answer) if answer else None for answer in answers]
    for rank, (answer, measured) in enumerate(zip(answers, found, strict=True)):
        if answer and not measured:
            return Check("fail", "link", f"rank {rank}, {hosts[rank].ssh}: {_why(answer)}", FIX)
    return judged([each for each in found if each], loopback=all(host.is_local for host in hosts))


FIX = (
    "ping each address from the other hosts, and let Python in (System Settings, Network, Firewall)"
)


def _why(answer: Answer) -> str:
    match answer.cut, answer.status:
        case "slow", _:
            return f"no ring within {SECONDS:.0f} s"
        case "large" | "no ssh", _:
            return "what it answers is not the doctor's"
        case _, 0:
            return "its figures can't be read"
        case _, status:
            return answer.last_line or f"it ended with status {status}"


def _measured(answer: Answer) -> Measured | None:
    try:
        lines = answer.out.strip().rsplit(b"\n", 1)
        return msgspec.json.decode(lines[-1], type=Measured) if answer.status == 0 else None
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def judged(measured: Sequence[Measured], *, loopback: bool) -> Check:
    """The slowest rank's figures decide. On loopback they depend on what else the machine does."""
    if not all(each.right for each in measured):
        return Check("fail", "link", "the sum of all ranks is wrong", "report it to MLX")
    small = max(each.small_seconds for each in measured)
    large = max(each.large_seconds for each in measured)
    first = measured[0]
    speed = first.large_bytes / large
    found = (
        f"an all-reduce over {len(measured)} ranks takes {small * 1e3:.2f} ms for "
        f"{first.small_bytes >> 10} KiB and {large * 1e3:.0f} ms for "
        f"{first.large_bytes >> 20} MiB ({speed / 1e9:.2f} GB/s)"
    )
    if not loopback and (small > SLOW_SECONDS or speed < SLOW_BYTES):
        fix = "give the addresses of a Thunderbolt or 10 Gb Ethernet cable, not those of Wi-Fi"
        return Check("warn", "link", found, fix)
    return Check("ok", "link", found)


async def _ranks(group: RankGroup) -> list[Answer | None]:
    """The answers of all ranks. If one fails, those that wait for it are ended: None."""
    ranks = [RankArguments(rank, group, WorkerArguments()) for rank in range(len(group.hosts))]
    tasks = [
        asyncio.create_task(run_on(group, each.rank, MODULE, encode_arguments(each), SECONDS))
        for each in ranks
    ]
    for done in asyncio.as_completed(tasks):
        if (await done).status != 0:
            break
    ended = {task for task in tasks if task.done()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return [task.result() if task in ended else None for task in tasks]
