"""`ChatMLX`: LangChain's chat model for this server, and for any server of OpenAI's API."""

try:
    import langchain_core  # noqa: F401
except ModuleNotFoundError as error:
    raise ImportError(
        "ChatMLX needs LangChain. Install it with `pip install 'mlx-local-server[langchain]'`."
    ) from error

from mlx_server.clients.langchain.chat import ChatMLX

__all__ = ["ChatMLX"]
