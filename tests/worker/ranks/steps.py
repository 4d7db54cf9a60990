"""Reports of steps."""

from mlx_server.engine.messages import StepOutput, Token


def a_step(id: int, tokens: int = 2) -> StepOutput:
    return StepOutput("m", [Token(row, id + row) for row in range(tokens)], 0, 0, 0)
