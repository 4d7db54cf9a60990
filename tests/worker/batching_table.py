"""Which architectures batch, found out as the engine does, as a table in Markdown."""

from importlib.metadata import version

import mlx.core as mx

from mlx_server.worker.kv_caches import why_alone
from mlx_server.worker.weights import model_classes
from tests.worker.kinds import CONFIGS, SIZES


def reasons() -> dict[str, str]:
    """By architecture; empty where rows share a batch."""
    return {name.partition("-")[0]: _reason({**SIZES, **c}) for name, c in CONFIGS.items()}


def _reason(config: dict[str, object]) -> str:
    model_class, arguments = model_classes(config)
    mx.random.seed(7)
    return why_alone(model_class(arguments.from_dict(config)))


def markdown(causes: dict[str, str]) -> str:
    alone = [f"| `{name}` | {why} |" for name, why in sorted(causes.items()) if why]
    together = len(causes) - len(alone)
    return "\n".join(
        [
            f"With mlx-lm {version('mlx-lm')}, {together} other architectures batch.",
            "",
            "| One row at a time | Why |",
            "|---|---|",
            *alone,
        ]
    )


if __name__ == "__main__":
    print(markdown(reasons()))
