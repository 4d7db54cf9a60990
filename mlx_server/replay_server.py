"""`python -m mlx_server.replay_server PORT`: a server that plays what tests give it.

It serves every model family as a replay model, on loopback, and ends with its standard input.
"""

import gc
import os
import signal
import sys
from collections.abc import Callable
from threading import Thread
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlx_server.engine.client import EngineClient
    from mlx_server.engine.engine_process import EngineProcess


def main() -> None:
    Thread(target=_end_with_input, daemon=True).start()
    gc.disable()  # nothing that is imported is garbage; to look for it takes an eighth of the start
    from mlx_server.engine.engine_process import EngineProcess

    early = EngineProcess()  # it imports MLX while the app is imported here
    from mlx_server.api.replay import install_given
    from mlx_server.app import create_app, run_app
    from mlx_server.config.settings import ModelSettings, ServerSettings, Settings
    from mlx_server.families import FAMILIES
    from mlx_server.prompts.harmony.vocabulary import encoding
    from mlx_server.sources.given_answers import GivenAnswers

    key = os.environ.pop("MLX_REPLAY_KEY")
    models = {
        family.name: ModelSettings(source="replay:given", family=family.name) for family in FAMILIES
    }
    server = ServerSettings(
        port=int(sys.argv[1]),
        drain_seconds=0,
        allow_private_urls=True,  # an app's test may have an MCP server on this machine
    )
    settings = Settings(server=server, models=models)
    given = GivenAnswers()
    app = create_app(settings, recordings=dict.fromkeys(models, given))
    app.state.pool.make_engine = _engines(early)
    install_given(app, given, key)
    gc.freeze()
    gc.enable()
    # while the engine's process starts; without the vocabulary the first answer of gpt-oss waits
    Thread(target=encoding, daemon=True).start()
    run_app(settings, lambda: app)


def _engines(early: "EngineProcess") -> "Callable[..., EngineClient]":
    """Makes the clients of engines, whose first one gets the process that runs already."""
    from mlx_server.engine.client import EngineClient

    processes = [early]

    def make(**how: Any) -> EngineClient:
        return EngineClient(**how, early=processes.pop() if processes else None)

    return make


def _end_with_input() -> None:
    sys.stdin.buffer.read()
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
