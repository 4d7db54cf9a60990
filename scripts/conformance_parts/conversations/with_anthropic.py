"""Conversations of Anthropic's own SDK: with messages sent back, and with its tool runner."""

from collections.abc import Callable, Iterable
from typing import Any

from anthropic import Anthropic, BadRequestError, beta_tool
from conversations.weather import (
    DESCRIPTION,
    LONG,
    NAME,
    QUESTIONS,
    SCHEMA,
    TOO_LONG,
    Weather,
    check,
    check_cached,
    refusal,
)

PACKAGES = ("anthropic",)

TOKENS = 1000
TOOL = {"name": NAME, "description": DESCRIPTION, "input_schema": SCHEMA}


def talking(*, stream: bool, **options: Any) -> Callable[[str], None]:
    def talk(model: str) -> None:
        weather = Weather()
        client = Anthropic()
        answers: list[str] = []
        said: list[Any] = []
        for question in QUESTIONS:
            said.append({"role": "user", "content": question})
            while True:
                asked = {"model": model, "max_tokens": TOKENS, "messages": said, "tools": [TOOL]}
                message = answer(client, {**asked, **options}, stream=stream)
                said.append({"role": "assistant", "content": message.content})
                if message.stop_reason != "tool_use":
                    break
                said.append({"role": "user", "content": results(message, weather)})
            assert message.stop_reason == "end_turn"
            answers.append(last_text(message))
        check(weather.asked, answers)

    return talk


def answer(client: Anthropic, asked: dict[str, Any], *, stream: bool) -> Any:
    if not stream:
        return client.messages.create(**asked)
    with client.messages.stream(**asked) as events:
        return events.get_final_message()


def results(message: Any, weather: Weather) -> list[dict[str, Any]]:
    calls = [block for block in message.content if block.type == "tool_use"]
    return [
        {"type": "tool_result", "tool_use_id": call.id, "content": weather(**call.input)}
        for call in calls
    ]


def last_text(message: Any) -> str:
    return str([block.text for block in message.content if block.type == "text"][-1])


def by_the_runner(*, stream: bool) -> Callable[[str], None]:
    def talk(model: str) -> None:
        weather = Weather()

        @beta_tool(name=NAME, description=DESCRIPTION)
        def tool(city: str) -> str:
            return weather(city)

        answers: list[str] = []
        said: list[Any] = []
        for question in QUESTIONS:
            said.append({"role": "user", "content": question})
            runner: Any = Anthropic().beta.messages.tool_runner(
                model=model, max_tokens=TOKENS, tools=[tool], messages=list(said), stream=stream
            )
            message: Any = None
            for each in runner:
                message = each.get_final_message() if stream else each
                said.append({"role": "assistant", "content": message.content})
                if response := runner.generate_tool_call_response():
                    said.append(response)
            answers.append(last_text(message))
        check(weather.asked, answers)

    return talk


def say(model: str, *said: Any) -> Any:
    return Anthropic().messages.create(model=model, max_tokens=5, messages=list(said))


def aborted(model: str) -> None:
    asked: Any = {"role": "user", "content": LONG}
    with Anthropic().messages.stream(model=model, max_tokens=TOKENS, messages=[asked]) as stream:
        next(iter(stream.text_stream))
    assert say(model, asked).content


def repeated(model: str) -> None:
    asked = {"role": "user", "content": LONG}
    first = say(model, asked)
    answered = {"role": "assistant", "content": first.content}
    then = say(model, asked, answered, {"role": "user", "content": "And then?"})
    usage = first.usage
    check_cached(
        then.usage.cache_read_input_tokens, usage.input_tokens + usage.cache_read_input_tokens
    )


def overflow(model: str) -> None:
    error = refusal(BadRequestError, say, model, {"role": "user", "content": TOO_LONG})
    assert "prompt is too long" in str(error), error


def conversations() -> Iterable[tuple[str, Callable[[str], None]]]:
    omitted = {"thinking": {"type": "adaptive", "display": "omitted"}}
    cached = {"cache_control": {"type": "ephemeral"}}
    yield "anthropic messages", talking(stream=False)
    yield "anthropic messages, streamed", talking(stream=True)
    yield "anthropic adaptive thinking", talking(stream=True, thinking={"type": "adaptive"})
    yield "anthropic omitted thinking", talking(stream=True, **omitted)
    yield "anthropic cache control", talking(stream=True, **cached)
    yield "anthropic tool runner", by_the_runner(stream=False)
    yield "anthropic tool runner, streamed", by_the_runner(stream=True)


ONCE = {
    "an abort, and on": aborted,
    "a second turn, with the first one cached": repeated,
    "an overflow": overflow,
}
