"""An agent of pydantic-ai that looks at parts in 30 turns: it calls a tool in each turn, asks a
sub-agent in one, and goes on from a summary after another."""

import asyncio
import sys

from pydantic_ai import Agent
from pydantic_ai.messages import ModelMessage
from pydantic_ai.models.openai import OpenAIChatModel

TURNS, SUMMARY = 30, 20
SUM_UP = "Sum up what was found in a few words."
RULES = "Look at what you are asked about before you answer. Name the part that you speak of. " * 30


def asked(turn: int) -> str:
    return f"Task {turn}: look at part {turn}, and say what is in it."


def answer(turn: int) -> str:
    return f"Part {turn} is as it should be."


def agent_of(model: OpenAIChatModel) -> Agent[None, str]:
    agent: Agent[None, str] = Agent(model, instructions=RULES)
    counter: Agent[None, str] = Agent(model, instructions="Count, and say nothing else.")

    @agent.tool_plain
    def look(part: int) -> str:
        """Reads one part.

        Args:
            part: Its number.
        """
        return "".join(f"line {line} of part {part}\n" for line in range(10 * (1 + part % 4)))

    @agent.tool_plain
    async def delegate(task: str) -> str:
        """Has another agent do a task.

        Args:
            task: What it is to do.
        """
        return (await counter.run(task)).output

    return agent


async def talk(model: OpenAIChatModel) -> None:
    agent = agent_of(model)
    history: list[ModelMessage] = []
    for turn in range(TURNS):
        result = await agent.run(asked(turn), message_history=history)
        assert result.output == answer(turn), result.output
        history = result.all_messages()
        if turn == SUMMARY:
            summary = await agent.run(SUM_UP, message_history=history)
            history = summary.new_messages()


if __name__ == "__main__":
    asyncio.run(talk(OpenAIChatModel(sys.argv[1])))
