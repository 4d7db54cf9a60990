"""Who waits for whom, by the clock of a simulated machine."""

from collections.abc import Callable

import pytest
from bench_parts.simulated.virtual import Answer, Simulation

from mlx_server.worker.prefill.schedule import Schedule

PAIR = "m4-max:gpt-oss-120b"
SHORT = 200

Scene = Callable[[Simulation], None]


def many_prompts(simulation: Simulation) -> None:
    """One of them is being computed."""
    for _ in range(64):
        simulation.ask(6000, 32, "greedy")
    while not simulation.answers[1].computed:
        simulation.step()
    simulation.step()


def many_short_prompts(simulation: Simulation) -> None:
    for _ in range(500):
        simulation.ask(300, 8, "greedy")
    while not simulation.answers[20].times:
        simulation.step()


def one_long_prompt(simulation: Simulation) -> None:
    simulation.ask(100_000, 32, "greedy")
    while simulation.answers[0].computed < 5000:
        simulation.step()


def every_place_taken(simulation: Simulation) -> None:
    """By rows that decode for a long time, and more wait."""
    for _ in range(64):
        simulation.ask(50, 10_000, "greedy")
    while not simulation.answers[-64 + 15].times:
        simulation.step()


def alone(prompt: int) -> float:
    simulation = Simulation(PAIR)
    simulation.ask(300, 2)
    simulation.run()
    answer = simulation.ask(prompt, 2)
    simulation.run()
    return answer.first_token


SCENES = [many_prompts, many_short_prompts, one_long_prompt, every_place_taken]


@pytest.mark.parametrize("prompt", [SHORT, 3000])
@pytest.mark.parametrize("scene", SCENES)
def test_a_newcomer_waits_three_pieces_and_its_own_prefill(scene: Scene, prompt: int) -> None:
    simulation = Simulation(PAIR)
    scene(simulation)
    newcomer = simulation.ask(prompt, 8, "newcomer")
    simulation.run(until=newcomer)
    # rows that decode have their share of the time meanwhile
    own = alone(prompt) / Schedule().prefill_share
    assert newcomer.first_token <= 3 * max(simulation.pieces) + own


def test_the_others_lose_nothing_but_that() -> None:
    """Neither what was computed of a prompt that was set aside, nor their order."""
    finished: list[list[float]] = []
    for is_disturbed in (False, True):
        simulation = Simulation(PAIR)
        for _ in range(12):
            simulation.ask(6000, 32, "greedy")
        while simulation.answers[0].computed < 2000:
            simulation.step()
        newcomer = simulation.ask(SHORT, 8, "newcomer") if is_disturbed else None
        simulation.run()
        times = [answer.times[0] for answer in simulation.answers if answer is not newcomer]
        assert times == sorted(times)
        finished.append(times)
    lost = [late - early for early, late in zip(*finished, strict=True)]
    assert max(lost) < 2 * alone(SHORT)


def test_newcomers_without_end_do_not_starve_a_long_prompt() -> None:
    simulation = Simulation(PAIR)
    long = simulation.ask(20_000, 2, "patient")
    own = alone(20_000)
    latest: Answer | None = None
    while not long.times and simulation.now < 600:
        if latest is None or latest.times:
            latest = simulation.ask(500, 2, f"client {len(simulation.answers)}")
        simulation.step()
    assert long.times
    assert long.first_token < 4 * own


def test_two_clients_with_many_prompts_get_the_same() -> None:
    simulation = Simulation(PAIR)
    for client, prompt, count in (("a", 6000, 20), ("b", 1500, 80)):
        for _ in range(count):
            simulation.ask(prompt, 2, client)
    while simulation.now < 60:
        simulation.step()
    computed = {
        client: sum(answer.computed for answer in simulation.answers if answer.client == client)
        for client in "ab"
    }
    assert computed["a"] == pytest.approx(computed["b"], rel=0.2)


def test_programs_of_one_address_get_together_what_another_client_gets() -> None:
    simulation = Simulation(PAIR)
    clients = ["192.0.2.7", *(f"127.0.0.1 {at}" for at in range(3))]
    for client in clients * 20:
        simulation.ask(3000, 2, client)
    while simulation.now < 60:
        simulation.step()
    computed = {
        client: sum(answer.computed for answer in simulation.answers if answer.client == client)
        for client in clients
    }
    other, *programs = computed.values()
    assert other == pytest.approx(sum(programs), rel=0.25)
    assert min(programs) > max(programs) / 2


def test_of_one_client_a_short_prompt_does_not_wait_for_long_ones() -> None:
    simulation = Simulation(PAIR)
    for _ in range(20):
        simulation.ask(6000, 32)
    while simulation.now < 40:
        simulation.step()
    short = simulation.ask(SHORT, 8)
    simulation.run(until=short)
    assert short.first_token < 3 * max(simulation.pieces) + alone(SHORT)


def test_of_one_client_short_prompts_do_not_starve_a_long_one() -> None:
    simulation = Simulation(PAIR)
    long = simulation.ask(20_000, 2)
    latest: list[Answer] = []
    while not long.times and simulation.now < 600:
        latest = [answer for answer in latest if not answer.times]
        latest += [simulation.ask(500, 2) for _ in range(8 - len(latest))]
        simulation.step()
    assert long.times
    assert long.first_token < 7 * alone(20_000)
