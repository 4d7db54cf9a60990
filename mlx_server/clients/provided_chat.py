"""LangChain's chat model for a provider of any backend. It is a module of its own since `providers`
works without LangChain, and `ChatMLX` without providers."""

from typing import Any, Self

from langchain_core.messages import AIMessage
from langchain_core.outputs import ChatResult
from pydantic import PrivateAttr

from mlx_server.clients.exchange import Exchange, Wire
from mlx_server.clients.langchain import ChatMLX, thoughts_of
from mlx_server.clients.providers import ProviderConfig, endpoint_of, provider_exchange


class ProvidedChat(ChatMLX):
    """A chat model that answers as `LLMProvider` does. With `parsing_format: think_tags` its
    messages begin with the thoughts in tags, for agents that parse them."""

    _config: ProviderConfig = PrivateAttr()

    @classmethod
    def of(cls, config: ProviderConfig) -> Self:
        own = config.provider == "mlx_server"
        chat = cls(
            model=config.model_name,
            base_url=config.url,
            sends_thoughts=own,
            # an answer of another server is complete before it can be checked
            disable_streaming=not own or config.parsing_format == "think_tags",
        )
        chat._config, chat._endpoint = config, endpoint_of(config)
        return chat

    def _exchange(self, body: Wire) -> Exchange:
        return provider_exchange(self._config, body)

    def _result(self, answer: Wire) -> ChatResult:
        result = super()._result(answer)
        if self._config.parsing_format == "think_tags":
            for generation in result.generations:
                message: Any = generation.message
                message.content = self._tagged(message)
        return result

    def _tagged(self, message: AIMessage) -> str:
        tag, thoughts = self._config.generation_config.think_tag, thoughts_of(message)
        text = str(message.text)
        return f"<{tag}>\n{thoughts}\n</{tag}>\n\n{text}" if thoughts else text
