"""`mlx-server init`."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
import yaml

from mlx_server.cli.root import command_app
from mlx_server.cli.startup import with_local_models
from mlx_server.config.models_yaml import DEFAULT_FILE, load_settings
from mlx_server.errors import SettingsError, public_message

RECORDED = Path(__file__).parents[1] / "sources" / "recorded.yaml"
SAMPLE = ["-m", "mlx_server.mcp.sample"]
HEAD = "# What is served: `mlx-server doctor` checks it, `mlx-server models --suggest` has more.\n"

app = command_app()


@app.command()
def init(
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write this file instead of ./models.yaml.")
    ] = None,
) -> None:
    """Write a first models.yaml, which can be served without a network.

    It has the demo model, recorded answers, a sample of an MCP server, and the models that the
    Hugging Face cache and LM Studio hold already.
    """
    path = config or DEFAULT_FILE
    if path.exists():
        raise SettingsError(f"{path} is there already, and stays as it is.")
    local = with_local_models(replace(load_settings(None), models={})).models
    models: dict[str, dict[str, object]] = {
        "smollm2-135m": {
            "source": "demo:smollm2",
            "preload": True,
            "defaults": {"max_tokens": 1024},
        },
        "recorded": {"source": f"replay:{RECORDED}", "family": "qwen3"},
        **{id: {"source": model.source} for id, model in local.items()},
    }
    connectors = {"release-notes": {"command": sys.executable, "args": SAMPLE}}
    content = {"models": models, "connectors": connectors}
    text = HEAD + yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=1000)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise SettingsError(f"{path} can't be written: {public_message(error)}") from None
    print(f"{path} has {', '.join(models)}. To serve them: mlx-server serve")
