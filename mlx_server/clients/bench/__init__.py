"""A load generator for servers of the OpenAI API: N clients send requests at once.

During a run the received bytes are only kept with their times, and parsed when the run is over: the
client must take next to no CPU time from the server that it measures.
"""

import asyncio
import secrets
from collections.abc import Iterable, Iterator, Sequence
from time import perf_counter

from mlx_server.clients.bench.exchange import Api, Exchange, Target
from mlx_server.clients.bench.result import Result, Workload
from mlx_server.clients.chat import client_of, served_models
from mlx_server.errors import BadRequest, GenerationFailed, SettingsError


def measure(
    target: Target,
    clients: Sequence[int],
    prompt_tokens: Sequence[int],
    max_tokens: int,
    requests: int | None = None,
    *,
    shared_prefix: bool = False,
) -> Iterator[Result]:
    """Yields one result for each prompt length and number of clients.

    requests: how many are sent for each result; by default two per client, but at least four.
    Raises GenerationFailed if the server does not answer at all.
    """
    seed = secrets.token_hex(8)
    for words in asyncio.run(words_for(target, prompt_tokens)):
        for count in clients:
            total = requests or max(4, 2 * count)
            load = Workload(
                count, total, words, max_tokens, shared_prefix, f"{seed} {words} {count}"
            )
            asyncio.run(warm_up(target, load))
            yield asyncio.run(run(target, load))


def target_of(url: str, key: str | None, model: str | None, api: Api) -> Target:
    """The server at `url` with the model to measure, by default the first that it lists.

    Raises ServerError if no server answers or it lists no models.
    """
    with client_of(url, key) as client:
        served = [model] if model else served_models(client)
    if not served:
        raise BadRequest("The server lists no models. Choose one with --model.")
    return Target(url, served[0], key, api)


async def run(target: Target, load: Workload) -> Result:
    exchanges = [Exchange(target, prompt, load.max_tokens) for prompt in load.prompts()]
    waiting = iter(exchanges)

    async def client() -> None:
        for exchange in waiting:
            await exchange.run()

    began = perf_counter()
    async with asyncio.TaskGroup() as clients:
        for _ in range(load.clients):
            clients.create_task(client())
    return _result(load, perf_counter() - began, exchanges)


def _result(load: Workload, seconds: float, exchanges: Iterable[Exchange]) -> Result:
    answers, errors = [], []
    for exchange in exchanges:
        try:
            answers.append(exchange.answer())
        except GenerationFailed as error:
            errors.append(error.message)
    return Result(load, seconds, tuple(answers), tuple(errors))


async def warm_up(target: Target, load: Workload) -> None:
    """Sends one short request for each client of `load`, all at once, then one that puts the shared
    prefix into the server's prompt cache if the prompts have one."""
    words, seed = min(load.words, 16), f"{load.seed} warm-up"
    await run(target, Workload(load.clients, load.clients, words, max_tokens=4, seed=seed))
    if load.shared_prefix:
        await Exchange(target, load.prompt(-1), max_tokens=4).run()


async def words_for(target: Target, tokens: Sequence[int]) -> list[int]:
    """For each number of prompt tokens, the number of words that make a prompt of that length,
    with what the server's chat template adds.

    Two probes measure the tokens per word. A server that reports no usage gets one word per token.
    Raises GenerationFailed if the server does not answer.
    """
    few, many = 16, 256

    async def counted(words: int) -> int | None:
        probe = Exchange(target, Workload(1, 1, words, max_tokens=8).prompt(0), max_tokens=8)
        await probe.run()
        return probe.answer().prompt_tokens

    of_few, of_many = await counted(few), await counted(many)
    if of_few is None or of_many is None or of_many <= of_few:
        return list(tokens)
    per_word = (of_many - of_few) / (many - few)
    return [max(1, round(few + (count - of_few) / per_word)) for count in tokens]


def numbers(flag: str, value: str) -> list[int]:
    """Parses a flag's comma-separated list of positive integers.

    Raises SettingsError, which names the flag, for any other value.
    """
    try:
        found = [int(part) for part in value.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise SettingsError(f"{flag} should be a list like 1,4,16, not {value!r}.")
    return found
