"""A foreground stream next to four sub-agents and a batch; a simulated Mac, a virtual clock."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from math import inf

from bench_parts.simulated.virtual import Answer, Simulation
from bench_parts.tables import Row
from mlx_server.requests import Tier

PAIRS = ("m1-max:8b", "m4:8b", "m4-pro:30b-a3b", "m4-max:gpt-oss-20b")


@dataclass
class Client:
    """Asks, waits for the answer, pauses and asks again."""

    name: str
    tier: Tier
    prompt: int
    tokens: int
    pause: float
    next: float = 0.0
    answers: list[Answer] = field(default_factory=list)

    def may_ask(self, simulation: Simulation) -> None:
        if self.next is inf and self.answers[-1].ended:
            # no two pauses are alike, so that requests find the others at all stages
            self.next = simulation.now + self.pause * (0.5 + len(self.answers) * 0.618 % 1)
        if self.next <= simulation.now:
            asked = simulation.ask(self.prompt, self.tokens, self.name, tier=self.tier)
            self.answers.append(asked)
            self.next = inf

    def tokens_until(self, end: float) -> int:
        """Returns the tokens of prompts and answers that were computed."""
        return sum(each.computed + sum(t <= end for t in each.times) for each in self.answers)


def foreground(pause: float = 0.0) -> list[Client]:
    return [Client("person", Tier.DEFAULT, 2_000, 200, pause)]


def agents(pause: float) -> list[Client]:
    return [Client("person", Tier.FLEX, 1_500, 150, 6 * pause, pause * at) for at in range(4)]


def batch() -> list[Client]:
    return [Client("batch", Tier.BATCH, 400, 200, 0.0) for _ in range(12)]


def run(named: str, clients: list[Client], until: float = inf, asks: int = 0) -> float:
    """Runs until a time, or until the first client has had so many answers. Returns for how long
    there was work."""
    simulation = Simulation(named)
    simulation.ask(300, 20)
    simulation.run()
    for client in clients:
        client.next += simulation.now
    begin, busy = simulation.now, 0.0

    def goes_on() -> bool:
        if asks:
            return len(clients[0].answers) < asks or not clients[0].answers[-1].ended
        return simulation.now < begin + until

    while goes_on():
        for client in clients:
            client.may_ask(simulation)
        if simulation.batch:
            before = simulation.now
            simulation.step()
            busy += simulation.now - before
        else:
            simulation.now = min(client.next for client in clients)
    return busy


@dataclass(frozen=True)
class Kept:
    """What is left of a foreground stream's pace, and of the rest, next to all others."""

    pair: str
    first_token: float
    """The times to a first token over those alone, at the 95th percentile."""
    speed: float
    """The speeds of answers over those alone, at the 5th percentile."""
    batch: float
    """The batch's tokens over what it gets alone in the time that others leave."""


def kept(named: str, asks: int = 20) -> Kept:
    (alone,) = foreground()
    pause = run(named, [alone], asks=asks) / asks
    (person,), helpers, lines = foreground(pause), agents(pause), batch()
    run(named, [person, *helpers, *lines], asks=asks)
    end = person.answers[-1].times[-1]
    others = [*foreground(pause), *agents(pause)]
    seconds = end - person.answers[0].asked
    left = seconds - run(named, others, until=seconds)
    own = [replace(client, tier=Tier.DEFAULT) for client in batch()]
    run(named, own, until=seconds)
    ends = own[0].answers[0].asked + seconds
    rate = sum(each.tokens_until(ends) for each in own) / seconds
    got = sum(each.tokens_until(end) for each in lines)
    pairs = list(zip(person.answers, alone.answers, strict=False))
    firsts = sorted(a.first_token / b.first_token for a, b in pairs)
    speeds = sorted(_seconds(b) / _seconds(a) for a, b in pairs)
    at = int(0.95 * (len(pairs) - 1))
    return Kept(named, firsts[at], speeds[len(pairs) - 1 - at], got / (rate * left))


def _seconds(answer: Answer) -> float:
    return answer.times[-1] - answer.times[0]


COLUMNS = (
    "machine, model",
    "first token, times alone (p95)",
    "speed, share of alone (p5)",
    "batch, share of what is left",
)


def measurements() -> Iterator[Kept]:
    return map(kept, PAIRS)


def rows(found: Iterable[Kept]) -> Iterator[Row]:
    for each in found:
        yield (
            each.pair.replace(":", ", "),
            f"{each.first_token:.2f}",
            f"{each.speed:.2f}",
            f"{each.batch:.2f}",
        )
