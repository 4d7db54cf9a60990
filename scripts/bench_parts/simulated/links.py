"""One Mac or several for one model: how long a pass takes over a link, by a formula, and no Mac.

Tensor: each Mac reads its share of every layer, and the Macs add up their results twice a layer
(after attention and after the MLP, as mlx-lm's `shard()` does it for llama, qwen3, qwen3_moe and
gpt_oss). Every Mac reads the whole output head. Pipeline: each Mac has some of the layers, so that
a token passes through one Mac after the other, which gains memory and no time.

A ring's all-reduce takes 2 (n - 1) messages one after the other, each with 1/n of the bytes;
JACCL's mesh takes one, in which each Mac sends all bytes to each of the others. What is left out: a
link that is busy with something else, and that several Macs may share a cable.

Links. A message takes its latency, and its bytes over the bandwidth:

- 10 GbE: 10 Gb/s less the headers of TCP over Ethernet (1448 of each 1538 bytes), 9.4 Gb/s. Latency
  as for Thunderbolt's TCP, as no figure for two Macs was found.
- Thunderbolt 5, TCP: 55 Gb/s by iperf3 (52.6 to 56.1) and half of ping's mean round trip of
  0.575 ms, between two Macs (exo-explore/exo, pull request 2063). Others report round trips of 0.38
  to 0.95 ms (exo, issue 2295), and 300 us for TCP (jeffgeerling.com, "1.5 TB of VRAM on Mac
  Studio").
- Thunderbolt 5, JACCL: below 50 us (the same article), taken as 50; single messages take 4.6 us
  without MLX (hellas-ai/thunderbolt-ibverbs, pull request 27). 60 Gb/s: reports of Apple's WWDC
  2026 have 50 to 60, and 75 are measured without MLX (that pull request).

As a check: mlx-lm's pull request 698 reports GLM on four M3 Ultra with JACCL at 1.5 times the speed
of one; exo publishes 1.8 times for two and 3.2 times for four.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from bench_parts.simulated.roofline import MACHINES, MODELS, Machine, Model, seconds
from bench_parts.tables import Row

NOTE = (
    "Simulated: a formula gives the time of each pass (see scripts/bench_parts/simulated/links.py)."
    " No Mac was measured."
)

Mode = Literal["tensor", "pipeline"]

LINKED = {name: MACHINES[name] for name in ("m4", "m4-pro", "m4-max", "m3-ultra", "m5", "m5-max")}
"""The machines that the table of least bytes has."""

CONTEXT, PROMPT = 2_000, 2_048
"""Tokens: those before the one that is decoded, and those of a piece of a prompt."""

USABLE = 0.75
"""The share of a Mac's memory that Metal recommends at most for weights and caches."""


@dataclass(frozen=True)
class Link:
    latency: float
    """Seconds of a message."""
    bandwidth: float
    """Bytes a second in each direction."""
    mesh: bool = False

    def message(self, nbytes: float) -> float:
        return self.latency + nbytes / self.bandwidth

    def all_reduce(self, macs: int, nbytes: float) -> float:
        if self.mesh:
            return self.message(nbytes * (macs - 1))
        return 2 * (macs - 1) * self.message(nbytes / macs)


LINKS = {
    "10 GbE": Link(290e-6, 1.18e9),
    "Thunderbolt 5, TCP": Link(290e-6, 6.9e9),
    "Thunderbolt 5, JACCL": Link(50e-6, 7.5e9, mesh=True),
}

PAIRS = (
    ("m4-pro", "8b"),
    ("m4-pro", "32b"),
    ("m4-pro", "30b-a3b"),
    ("m4-pro", "gpt-oss-120b"),
    ("m4-max", "8b"),
    ("m4-max", "32b"),
    ("m4-max", "70b"),
    ("m4-max", "gpt-oss-120b"),
    ("m3-ultra", "8b"),
    ("m3-ultra", "70b"),
    ("m3-ultra", "gpt-oss-120b"),
)


def share(model: Model, macs: int) -> Model:
    """Returns the part of a model that each of several Macs has if the layers are split."""
    return replace(
        model,
        dense_bytes=model.head_bytes + (model.dense_bytes - model.head_bytes) / macs,
        active=model.active / macs,
        heads=model.heads // macs,
        kv_heads=max(1, model.kv_heads // macs),
        hidden=model.width,
        expert_bytes=model.expert_bytes / macs,
    )


def step(machine: Machine, model: Model, link: Link, macs: int, mode: Mode, tokens: int) -> float:
    """Returns the seconds of a pass of one row: a piece of a prompt, or one token after CONTEXT
    others."""
    contexts = [tokens if tokens > 1 else CONTEXT]
    nbytes = 2.0 * model.width * tokens
    if mode == "tensor":
        alone = seconds(machine, share(model, macs), tokens, contexts)
        return alone + 2 * model.layers * link.all_reduce(macs, nbytes)
    # each Mac sends to the next, and the last one sends its result to all
    hops = (macs - 1) * (link.message(nbytes) + link.message(nbytes))
    return seconds(machine, model, tokens, contexts) + (macs - 1) * machine.launch + hops


def gain(machine: Machine, model: Model, link: Link, macs: int, mode: Mode, tokens: int) -> float:
    """Returns the speed as a factor on that of one Mac which has the memory."""
    contexts = [tokens if tokens > 1 else CONTEXT]
    one = seconds(machine, model, tokens, contexts)
    return one / step(machine, model, link, macs, mode, tokens)


def least_bytes(machine: Machine, link: Link, layers: int, width: int, macs: int = 2) -> float:
    """Returns the bytes that a token has to read for several Macs to decode faster than one: what
    each Mac saves has to outweigh the all-reduces."""
    added = 2 * layers * link.all_reduce(macs, 2.0 * width)
    return added * machine.bandwidth * macs / (macs - 1)


def fits(machine: Machine, model: Model, macs: int = 1) -> bool:
    return share(model, macs).weights + CONTEXT * model.kv_bytes / macs <= USABLE * machine.memory


@dataclass(frozen=True)
class LinkSpeeds:
    machine: str
    model: str
    fits_one: bool
    one: float
    """Tokens a second that one Mac decodes, as if it had the memory for the model."""
    tensor: dict[str, float]
    """The speed of two Macs at decoding as a factor on that of one, by link."""
    prompt: dict[str, float]
    """The speed of two Macs at computing a prompt as a factor on that of one, by link."""
    pipeline: dict[str, float]


def link_speeds() -> Iterator[LinkSpeeds]:
    for machine_name, model_name in PAIRS:
        machine, model = MACHINES[machine_name], MODELS[model_name]
        gains = [
            {name: gain(machine, model, link, 2, mode, tokens) for name, link in LINKS.items()}
            for mode, tokens in MEASURES
        ]
        one = 1 / seconds(machine, model, 1, [CONTEXT])
        yield LinkSpeeds(machine_name, model_name, fits(machine, model), one, *gains)


MEASURES: tuple[tuple[Mode, int], ...] = (("tensor", 1), ("tensor", PROMPT), ("pipeline", 1))

COLUMNS = (
    "machine, model",
    "fits one",
    "one Mac, tokens/s",
    *(f"two, {name}: decode / prompt" for name in LINKS),
    "pipeline, 10 GbE: decode",
)


def rows(found: list[LinkSpeeds]) -> Iterator[Row]:
    for speeds in found:
        yield (
            f"{speeds.machine}, {speeds.model}",
            "yes" if speeds.fits_one else "no",
            f"{speeds.one:.0f}",
            *(f"{speeds.tensor[name]:.2f} / {speeds.prompt[name]:.2f}" for name in LINKS),
            f"{speeds.pipeline['10 GbE']:.2f}",
        )


LEAST_COLUMNS = ("two decode quicker than one from", *LINKED)
SIZES = {"32 layers": (32, 4096), "80 layers": (80, 8192)}
"""The numbers of layers and the widths, which are those of Llama's 8b and 70b."""


def least_rows() -> Iterator[Row]:
    """Yields the rows of least_bytes, in GB without the output head."""
    for name, link in LINKS.items():
        for size, (layers, width) in SIZES.items():
            least = [least_bytes(machine, link, layers, width) for machine in LINKED.values()]
            yield f"{name}, {size}", *(f"{nbytes / 1e9:.1f} GB" for nbytes in least)
