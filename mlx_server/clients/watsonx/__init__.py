"""`ModelInference` as a replacement of `ibm_watsonx_ai.foundation_models.ModelInference`.

To migrate a program, or to go back, only its import has to change: all other names of
`ibm_watsonx_ai` and its `foundation_models` can be imported from here too, unchanged.
"""

import importlib
from typing import Any

from mlx_server.clients.watsonx.model_inference import ModelInference

__all__ = ["ModelInference"]


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    for module in ("ibm_watsonx_ai", "ibm_watsonx_ai.foundation_models"):
        try:
            found = importlib.import_module(module)
        except ModuleNotFoundError as error:
            raise ImportError(
                f"{name} comes from IBM's package. Install it with "
                "`pip install 'mlx-local-server[watsonx]'`."
            ) from error
        if hasattr(found, name):
            return getattr(found, name)
    raise AttributeError(f"neither {__name__!r} nor IBM's package has {name!r}")
