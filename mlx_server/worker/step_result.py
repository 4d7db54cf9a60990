"""What a step of a batch has to report."""

from dataclasses import dataclass, field

from mlx_server.engine.messages import (
    Prefilled,
    PrefillProgress,
    RowFailed,
    RowLeftGrammar,
    Token,
)


@dataclass
class StepResult:
    """The results of one step of a batch."""

    tokens: list[Token] = field(default_factory=list)
    prefilled: list[Prefilled] = field(default_factory=list)
    progress: list[PrefillProgress] = field(default_factory=list)
    failed: list[RowFailed | RowLeftGrammar] = field(default_factory=list)
    """Rows that have left the batch."""
